"""What the queue costs: the same work through a broker and a worker, and through the engine alone.

    python -m bench.queue_overhead [--rows 32] [--threads 1 2] [--rounds 2]

    alone       engine, in one process                                  load, warm, | rows |
    the queue   client -- embedded broker -- worker -- model process    load, warm, | submit all ... last result |

With one model thread on two cores a core is left for the queue; with two it has to share. Rounds have prompts of
their own, so that no prefix cache knows them; the faster round counts on either side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import children, results, workload
from bench.children import Model, Place
from bench.engines import ENGINES
from bench.workers import QUIET, ready_worker
from bench.workload import Row, Task
from broker.embedded import EmbeddedBroker
from millstream import Client
from protocol import Job, SamplingParams


def main() -> int:
    """Measure and print the table."""
    args = _options()
    model = children.model_of(workload.model_or_default(args.model), args.dtype)
    warm, rounds = _rounds(model, args.rows, args.rounds)
    figures: dict[str, Any] = {
        "model": model.path.stem,
        "dtype": model.dtype,
        "rows": args.rows,
        "output_tokens": sum(row.max_tokens for row in rounds[0]),
        "threads": {
            str(threads): {
                "alone": min(alone(model, warm, rounds, threads)),
                "queue": min(through_the_queue(model, warm, rounds, threads)),
            }
            for threads in args.threads
        },
    }
    results.save(args.json, figures)
    print(tables(figures)["queue_overhead"])
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of gsm8k-128 (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", default="auto", help="default: what the machine computes fast")
    results.add_option(parser)
    return parser.parse_args()


def _rounds(model: Model, rows: int, count: int) -> tuple[list[Row], list[list[Row]]]:
    """What is warmed up with, and the rows of each round."""
    tokenizer = model.tokenizer()
    asked = workload.load(tokenizer, rows)
    salts = [tokenizer.encode(str(number), add_special_tokens=False) for number in range(count + 1)]
    warm = [Row(row.prompt_ids, 4).salted(salts[-1]) for row in asked[:2]]
    return warm, [[row.salted(salt) for row in asked] for salt in salts[:-1]]


def alone(model: Model, warm: list[Row], rounds: list[list[Row]], threads: int) -> list[float]:
    """Seconds of each round, by the engine alone."""
    tasks = [Task(str(number), len(rows), rows) for number, rows in enumerate(rounds)]
    figures = children.run("millstream", model, warm, tasks, Place(environment=_environment(threads)))
    return [task["seconds"] for task in figures["tasks"].values()]


def through_the_queue(model: Model, warm: list[Row], rounds: list[list[Row]], threads: int) -> list[float]:
    """Seconds of each round, from the first job submitted to the last result."""
    flags = ["--dtype", model.dtype, *QUIET]
    # The very weights that the engine alone reads: those of a quantized file as it is take other and slower products.
    weights = model.weights(ENGINES["millstream"].weights)
    with (
        _broker() as url,
        ready_worker(url, str(weights), flags, _environment(threads)),
        Client(url) as client,
    ):
        _answer(client, "warm", warm)
        return [_answer(client, f"round-{number}", rows) for number, rows in enumerate(rounds)]


def _answer(client: Client, name: str, rows: list[Row]) -> float:
    """Queue rows and wait for all results; the seconds that took."""
    jobs = [
        Job(
            id=f"{name}-{number}",
            prompt=row.prompt_ids,
            params=SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True),
            stream=False,  # as `generate` submits
        )
        for number, row in enumerate(rows)
    ]
    began = time.monotonic()
    handles = client.submit_many(jobs)
    answers = [handle.result(check=True) for handle in handles]
    seconds = time.monotonic() - began
    given = [len(answer.choices[0].token_ids) for answer in answers]
    if given != [row.max_tokens for row in rows]:
        raise SystemExit(f"{name}: {sum(row.max_tokens for row in rows)} tokens asked for, {sum(given)} came")
    return seconds


@contextmanager
def _broker() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as state, EmbeddedBroker(Path(state)) as broker:
        yield broker.url


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A row a number of model threads."""
    tokens = figures["output_tokens"]
    rows = [
        [
            threads,
            f"{tokens / one['alone']:,.1f}",
            f"{tokens / one['queue']:,.1f}",
            f"{one['queue'] / one['alone'] - 1:+.1%}",
        ]
        for threads, one in figures["threads"].items()
    ]
    head = ["model threads", "engine alone, tok/s", "through the queue, tok/s", "time"]
    about = f"{figures['machine']}; " if "machine" in figures else ""
    about += f"{figures['model']}, {figures['dtype']}, {figures['rows']} rows of `gsm8k-128`."
    return {"queue_overhead": f"{about}\n\n{results.table(head, rows)}"}


if __name__ == "__main__":
    sys.exit(main())
