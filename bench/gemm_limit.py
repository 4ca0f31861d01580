"""How fast a model could answer if it did nothing but its matrix products.

    python -m bench.gemm_limit [--model M] [--dtype auto]

The linear layers of the model, with random weights laid out as the engine lays them out, are timed for batches of 1
to 512 rows. `bench.offline` makes two limits of these rates:

    same steps         the products of the steps that the engine ran, as large as they were
    perfect schedule   every equal prefix computed once, at the best rate; then all rows decode together:

                       rows  aaaaaaaaaaaa
                             bbbbbb            sizes 3 3 3 2 2 2 1 1 ...
                             ccc

Experts of a mixture that are no `nn.Linear` are not counted; such a model's limit is too high.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import results
from bench.workload import Row, distinct_tokens, model_or_default

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 6


@dataclass(frozen=True, slots=True)
class Products:
    """Seconds that one pass takes through all layers' products, and through the head's, by rows."""

    sizes: Sequence[int]
    layers: Sequence[float]
    head: Sequence[float]

    def step(self, tokens: int, logits: int) -> float:
        """A step that computes so many tokens and so many rows of logits: straight lines between what was timed."""
        return self._at(self.layers, tokens) + self._at(self.head, logits)

    def steps(self, sizes: Iterable[Sequence[int]]) -> float:
        """Steps of `(tokens, rows of logits)`."""
        return sum(self.step(tokens, logits) for tokens, logits in sizes)

    def perfect(self, rows: Sequence[Row]) -> float:
        """All rows, perfectly scheduled; see the top of this file."""
        per_token = min(seconds / size for seconds, size in zip(self.layers, self.sizes, strict=True))
        prompts = per_token * distinct_tokens(row.prompt_ids for row in rows)
        # A row's first token comes of its prompt.
        going = [
            sum(row.max_tokens > made for row in rows)
            for made in range(1, max((row.max_tokens for row in rows), default=0))
        ]
        return prompts + self._at(self.head, len(rows)) + self.steps(zip(going, going, strict=True))

    def _at(self, seconds: Sequence[float], rows: int) -> float:
        if rows == 0:
            return 0.0
        if rows > self.sizes[-1]:
            return seconds[-1] * rows / self.sizes[-1]
        return float(np.interp(rows, self.sizes, seconds))


def measure(folder: Path, dtype: str, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Products:
    """Time the products of the model in a folder; of several times the least, since others only add to it."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.kv_store import free_memory
    from engine.packed_linear import pack_linears
    from engine.panel_linear import linear_kind

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    kind = getattr(torch, dtype)

    def seconds(shapes: list[tuple[int, int]]) -> list[float]:
        # Numbers as a bfloat16 checkpoint has them, so that the engine's layers are the same kind.
        net = nn.ModuleList(nn.Linear(into, out, bias=False, dtype=torch.bfloat16) for into, out in shapes)
        net = net.eval().to(kind)

        def run(rows: int) -> None:
            inputs = {into: torch.ones(rows, into, dtype=kind) for into, _ in shapes}
            for (into, _), linear in zip(shapes, net, strict=True):
                linear(inputs[into])

        pack_linears(net, lambda: run(1), linear_kind(net, free_memory(torch.device("cpu"))))
        return [_least(lambda rows=rows: run(rows), repeats) for rows in sizes]

    with torch.inference_mode():
        return Products(
            list(sizes),
            seconds([(one.in_features, one.out_features) for one in layers]),
            seconds([(head.in_features, head.out_features)]),
        )


def _least(call: Any, repeats: int) -> float:
    call()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def table(products: Products) -> str:
    """Milliseconds by rows."""
    rows = [
        [name, *(f"{1000 * one:.1f}" for one in seconds)]
        for name, seconds in (("layers, ms", products.layers), ("`lm_head`, ms", products.head))
    ]
    return results.table(["rows", *map(str, products.sizes)], rows)


def main() -> int:
    """Print the table."""
    from bench.children import model_of

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", default="auto")
    results.add_option(parser)
    args = parser.parse_args()
    model = model_of(model_or_default(args.model), args.dtype)
    products = measure(model.folder, model.dtype)
    results.save(args.json, {"dtype": model.dtype, **asdict(products)})
    print(table(products))
    return 0


if __name__ == "__main__":
    sys.exit(main())
