"""The page about models, made from what the tests verify.

python -m tests.models_page > docs/models.md
"""

from __future__ import annotations

from tests.architectures import ARRANGEMENTS, VERIFIED, WINDOW
from tests.refused_architectures import REFUSED

PAGE = """# Models

Made by `python -m tests.models_page > docs/models.md` from the tables that the tests run.

## Loading

```bash
millstream worker --model HuggingFaceTB/SmolLM2-135M-Instruct   # a hub id
millstream worker --model ./my-model                            # a folder with config.json, weights and tokenizer
millstream worker --model ./my-model.Q4_K_M.gguf                # a GGUF file, unpacked once into the cache
```

| flag | keyword | what |
| --- | --- | --- |
| `--dtype` | `dtype` | `auto`, `float32`, `bfloat16`, `float16`: of weights and KV |
| `--revision` | `revision` | branch, tag or commit of a hub id; local files have none to choose |
| `--trust-remote-code` | `trust_remote_code` | run code that comes with the model; else such a model is refused |

A name is looked up in the file system first, then in the local cache of the hub, then on the hub; private and
gated models need `HF_TOKEN`. A model whose files lack some of its tensors is refused, be they a folder's or a
GGUF file. A GGUF file in parts (`big-00001-of-00003.gguf`) is refused too: put the parts together first, with
llama.cpp's `llama-gguf-split --merge big-00001-of-00003.gguf big.gguf`.

**Quantized checkpoints** are loaded as their `quantization_config` says, by transformers: the method must be
one that it knows, its package must be installed, and some need a GPU; what is missing is named. Where
transformers unpacks the weights because the device cannot compute with them, the model's fingerprint says so
(`fp8 dequantized`), so that such a worker does not serve a queue beside one that computes in fp8. A GGUF file
is unpacked to float32 weights, exactly what the file holds.

**The fingerprint** (name, revision, dtype, quantization) is what all workers of a queue must agree on. The
revision is the commit of a hub id, or a key of the content of local files.

## What is verified

For each architecture a tiny random model (fp32, weights drawn wide and not tied) gives, token for token, what
transformers' own `generate` gives for each prompt alone, greedily and with its eager attention, when the
engine computes

{arrangements}

Features in the table are switched on in the tiny model, with windows of {window} tokens and prompts longer
than that.

| model_type | class | what is special | {names} |
| --- | --- | --- |{rules}
{verified}

The architecture decides, not the name: a model of any of these types, of any size, takes the same path.
Others that use transformers' attention interface usually work too: when a model is loaded it is run on a few
tokens, and it is refused unless every layer calls the interface, its masks are causal or a sliding window,
and nothing but attention mixes the tokens of a batch.

## What is refused

| model_type | class | why |
| --- | --- | --- |
{refused}

A model with `dynamic` or `longrope` rotation serves sequences up to its original length only: beyond it the
rotation of one sequence would depend on the longest one in the batch.
"""


def page() -> str:
    """The page's text."""
    return PAGE.format(
        window=WINDOW,
        arrangements="\n".join(f"- **{name}**: {what};" for name, what in ARRANGEMENTS.items())[:-1] + ".",
        names=" | ".join(ARRANGEMENTS),
        rules=" --- |" * len(ARRANGEMENTS),
        verified="\n".join(
            f"| {one.model_type} | {one.class_name} | {one.special or 'plain'} |"
            + " yes |" * len(ARRANGEMENTS)
            for one in VERIFIED
        ),
        refused="\n".join(f"| {one.model_type} | {one.class_name} | {one.reason} |" for one in REFUSED),
    )


if __name__ == "__main__":
    print(page(), end="")
