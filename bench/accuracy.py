"""What an option costs in accuracy: the model is led through the reference answers, in float32 and with the option.

    python -m bench.accuracy [--rows 4] [--option int8-weights ...]

Every token of an answer is predicted from the question and the answer before it, in one pass of our own engine's
runner. Per option, over all answer tokens:

    agreement    share whose likeliest token is float32's
    KL           mean of sum p log(p / q), p float32's distribution, q the option's, in nats
    perplexity   exp of the mean of -log q(the answer's token)

float32's logits are held meanwhile: about 20 MB a row for a vocabulary of 49,152.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench import results
from bench.workload import QUESTIONS, model_or_default
from engine.interface import Chunk, Runner
from engine.loading import load_runner
from engine.weights import resolve_dtype

OPTIONS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8-weights": {"quantization": "int8"},
    "bfloat16-kv": {"kv_dtype": "bfloat16"},
    "float16-kv": {"kv_dtype": "float16"},
    "int8-kv": {"kv_dtype": "int8"},
    "fp8-kv": {"kv_dtype": "fp8"},
    "int8-weights-and-kv": {"quantization": "int8", "kv_dtype": "int8"},
}
HEAD = ["option", "agreement", "KL, nats", "perplexity"]


@dataclass(frozen=True, slots=True)
class Row:
    """A question, as the model's chat template puts it, and its reference answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(slots=True)
class Sums:
    """Over answer tokens."""

    tokens: int = 0
    agreed: int = 0
    divergence: float = 0.0
    surprise: float = 0.0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, answer_ids: Sequence[int]) -> None:
        """Take in one row: log-probabilities `[tokens, vocabulary]` of float32, logits with the option."""
        found = F.log_softmax(logits, dim=-1)
        self.tokens += len(answer_ids)
        self.agreed += int((found.argmax(-1) == reference.argmax(-1)).sum())
        self.divergence += float(F.kl_div(found, reference, log_target=True, reduction="sum"))
        self.surprise -= float(found.gather(-1, torch.tensor(answer_ids)[:, None]).sum())

    def to_dict(self) -> dict[str, float]:
        """The three figures, and over how many tokens."""
        return {
            "tokens": self.tokens,
            "agreement": self.agreed / self.tokens,
            "kl": self.divergence / self.tokens,
            "perplexity": float(torch.tensor(self.surprise / self.tokens).exp()),
        }


def main() -> int:
    """Measure and print the table."""
    args = _arguments()
    model = model_or_default(args.model)
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {"model": model.name, "rows": args.rows, "options": {}}
    for name, found in measure(str(model), args.rows, args.option or usual_options()):
        print(", ".join(_cells(name, found)), file=sys.stderr, flush=True)
        figures["options"][name] = found
    results.save(args.json, figures)
    print(tables(figures)["accuracy"])
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4, choices=range(1, 129), metavar="1..128")
    parser.add_argument(
        "--option", action="append", choices=list(OPTIONS), help="default: all, bfloat16 where the CPU has it"
    )
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    results.add_option(parser)
    return parser.parse_args()


def usual_options() -> list[str]:
    """All but bfloat16 where it is emulated, and many times slower than float32."""
    emulated = resolve_dtype("auto", torch.device("cpu")) != torch.bfloat16
    return [name for name in OPTIONS if name != "bfloat16" or not emulated]


def measure(model: str, rows: int, options: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """The figures of float32 and then of each option, by name."""
    loaded = load_runner(model, **_runner_options())
    work = load_rows(loaded.weights.tokenizer, rows)
    reference = [F.log_softmax(_answer_logits(loaded.runner, row), dim=-1) for row in work]
    own = Sums()
    for row, logits in zip(work, reference, strict=True):
        own.add(logits, logits, row.answer_ids)
    yield "float32", own.to_dict()
    for name in options:
        option = OPTIONS[name]
        # Where only the KV store is another, the weights are the same.
        source = loaded.weights if option.keys() == {"kv_dtype"} else model
        yield name, _compare(load_runner(source, **_runner_options(**option)).runner, work, reference)


def _compare(runner: Runner, work: Sequence[Row], reference: Sequence[torch.Tensor]) -> dict[str, float]:
    sums = Sums()
    for row, expected in zip(work, reference, strict=True):
        sums.add(expected, _answer_logits(runner, row), row.answer_ids)
    return sums.to_dict()


def load_rows(tokenizer: Any, rows: int) -> list[Row]:
    """The first `rows` rows of `gsm8k-128`."""
    return list(_rows(tokenizer, QUESTIONS.read_text().splitlines()[:rows]))


def _rows(tokenizer: Any, lines: Sequence[str]) -> Iterator[Row]:
    for record in map(json.loads, lines):
        chat = [{"role": "user", "content": record["question"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt, answer = (
            tokenizer.encode(part, add_special_tokens=False) for part in (text, record["answer"])
        )
        yield Row(prompt, answer)


def _answer_logits(runner: Runner, row: Row) -> torch.Tensor:
    """`[answer tokens, vocabulary]`: what the model makes of the place of each."""
    tokens = row.prompt_ids + row.answer_ids[:-1]
    blocks = range(-(-len(tokens) // runner.block_size))
    return runner.forward([Chunk(tokens, 0, blocks, num_logits=len(row.answer_ids))])


def _runner_options(**option: str) -> dict[str, Any]:
    return {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "max_num_seqs": 1, **option}


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A row an option."""
    options = figures["options"]
    about = f"{options['float32']['tokens']:,} answer tokens of {figures['rows']} rows, {figures['model']}"
    return {"accuracy": f"{results.table(HEAD, [_cells(*one) for one in options.items()])}\n\n{about}"}


def _cells(name: str, found: Mapping[str, float]) -> list[str]:
    return [
        name,
        f"{found['agreement']:.1%}",
        f"{found['kl']:z.4f}",
        f"{found['perplexity']:.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
