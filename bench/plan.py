"""What a planned order of rows is worth: many topics, shuffled, and a KV pool that holds few of them.

    python -m bench.plan                                  SmolLM2-135M-Instruct, a run of 16 topics with 10 rows each
    python -m bench.plan --topics 0                       only what is counted, in seconds

A row is a chat: the long system prompt of its topic, which is two worked examples, and a question; eight tokens are
asked for. Both are done in the order of the file and in the planned one:

    counted    the scheduler without a model, see bench.pressure: 40 topics with 25 rows each, several pools; exact
    run        `millstream generate`, an embedded broker, one worker with a pool for a quarter of the topics; seconds
               are the command's, with the worker ready when it begins
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import children, results, workload
from bench.children import Model
from bench.pressure import simulate
from bench.workers import QUIET, ready_worker
from bench.workload import Row
from broker import calls
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from broker.keys import keys_of
from broker.queue import Queue
from engine.limits import BLOCK_SIZE
from producer.bulk.intake import Ask, ask
from producer.bulk.lines import Line
from producer.bulk.plan import planned
from producer.bulk.requests import Requests

COUNTED_TOPICS, COUNTED_QUESTIONS = 40, 25
HELD = (2, 4, 8, 16, 40)
"""Topics whose prefixes the pools have room for."""
SLOTS = 16
RUN_SLOTS = 8
MAX_TOKENS = 8
SAMPLING: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
PATIENCE_S = 60.0
"""Longest wait for the counters of a worker that has nothing to do any more."""
LOOK_EVERY_S = 0.1
FLAGS = {"file": "--no-plan", "planned": "--plan"}


def main() -> int:
    """Measure and print the tables."""
    args = _options()
    model = children.model_of(workload.model_or_default(args.model), args.dtype)
    tokenizer = model.tokenizer()
    figures: dict[str, Any] = {"model": model.path.stem, "dtype": model.dtype}
    figures["counted"] = count(Work.made(tokenizer, COUNTED_TOPICS, COUNTED_QUESTIONS), HELD)
    if args.topics:
        figures["run"] = measure(model, Work.made(tokenizer, args.topics, args.questions))
    results.save(args.json, figures)
    print("\n\n".join(tables(figures).values()))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topics", type=int, default=16, help="of the run; 0: no run (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=10, help="for each of them (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", default="auto", help="default: what the machine computes fast")
    results.add_option(parser)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of an input, as lines and as tokens."""

    lines: list[bytes]
    rows: list[Row]
    topics: int

    @classmethod
    def made(cls, tokenizer: Any, topics: int, questions: int) -> Work:
        """So many questions about each topic, shuffled."""
        chats = workload.courses(topics, questions)
        lines = [json.dumps({"messages": chat, **SAMPLING}).encode() for chat in chats]
        rows = [Row(workload.chat_ids(tokenizer, chat), MAX_TOKENS) for chat in chats]
        return cls(lines, rows, topics)

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(len(row.prompt_ids) for row in self.rows)

    @property
    def fewest(self) -> int:
        """Prompt tokens that must be computed."""
        return workload.distinct_tokens(row.prompt_ids for row in self.rows)

    def planned(self) -> list[Row]:
        """The rows in the order in which `generate` asks them."""
        requests = Requests("count", {}, None)
        asks = (ask(Line(number, line), requests) for number, line in enumerate(self.lines))
        taken = planned(one for one in asks if isinstance(one, Ask))
        return [self.rows[one.row.line] for one in taken if isinstance(one, Ask)]

    def blocks(self, held: int, slots: int) -> int:
        """KV blocks for the prefixes of `held` topics, and for what the rows in the slots have beside them."""
        a_topic = len(self.rows) // self.topics
        prefix = (self.tokens - self.fewest) // (a_topic - 1) // self.topics
        beside = self.tokens // len(self.rows) - prefix + MAX_TOKENS
        return held * -(-prefix // BLOCK_SIZE) + slots * (-(-beside // BLOCK_SIZE) + 1)


def count(work: Work, held: Sequence[int]) -> dict[str, Any]:
    """Prompt tokens computed and steps taken, by the scheduler alone; it knows as many rows as a worker leases."""
    orders = {"file": work.rows, "planned": work.planned()}
    pools = []
    for topics in held:
        blocks = work.blocks(topics, SLOTS)
        runs = {
            name: simulate(rows, blocks, "first-fit", slots=SLOTS, at_once=SLOTS * 5 // 4)
            for name, rows in orders.items()
        }
        one = {name: {"prefilled": run.prefilled, "steps": run.steps} for name, run in runs.items()}
        pools.append({"held": topics, "blocks": blocks, **one})
    return {"topics": work.topics, "rows": len(work.rows), "fewest": work.fewest, "pools": pools}


def measure(model: Model, work: Work) -> dict[str, Any]:
    """Seconds and computed prompt tokens of real runs, each with a worker of its own."""
    blocks = work.blocks(max(1, work.topics // 4), RUN_SLOTS)
    return {
        "topics": work.topics,
        "rows": len(work.rows),
        "fewest": work.fewest,
        "blocks": blocks,
        "orders": {name: run(model, work, blocks, flag) for name, flag in FLAGS.items()},
    }


def run(model: Model, work: Work, blocks: int, flag: str) -> dict[str, float]:
    """One run of the command.

    Raises:
        RuntimeError: a row of it failed.
    """
    flags = ["--dtype", model.dtype, "--num-kv-blocks", str(blocks), "--max-num-seqs", str(RUN_SLOTS)]
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedBroker(Path(name) / "state") as broker,
        ready_worker(broker.url, str(model.path), [*flags, *QUIET]),
    ):
        source, output = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        source.write_bytes(b"".join(line + b"\n" for line in work.lines))
        command = [sys.executable, "-m", "millstream", "generate", str(source), "-o", str(output), flag]
        done = subprocess.run(
            [*command, "--json", "--redis-url", broker.url], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the run ended with exit code {done.returncode}")
        report = json.loads(done.stdout)
        counters = _counters(broker.url, report["completion_tokens"])
    return {
        "seconds": report["seconds"],
        "computed": counters["prompt_tokens"],
        "cached": counters["cached_tokens"],
    }


def _counters(url: str, output_tokens: int) -> dict[str, int]:
    """What the worker has counted, once its heartbeat tells of so many output tokens.

    Raises:
        RuntimeError: it does not come to it.
    """
    keys = keys_of("default")
    queue = Queue(connect(url, keys), keys)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            for beat in queue.run(calls.status(keys)).workers:
                counters: dict[str, int] = beat.info.get("engine", {})
                if counters.get("output_tokens", 0) >= output_tokens:
                    return counters
            time.sleep(LOOK_EVERY_S)
    finally:
        queue.close()
    raise RuntimeError(f"the worker did not tell of {output_tokens} output tokens within {PATIENCE_S:g} s")


# Tables


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """By the name of each."""
    machine = f"{figures['machine']}; " if "machine" in figures else ""
    found = {"plan.counted": _counted(figures["counted"])}
    if "run" in figures:
        found["plan.run"] = f"{machine}{figures['model']}, {figures['dtype']}; {_run(figures['run'])}"
    return found


def _counted(found: dict[str, Any]) -> str:
    about = (
        f"{found['rows']:,} rows of {found['topics']} topics, shuffled; {SLOTS} slots; "
        f"{found['fewest']:,} prompt tokens if each prefix is computed once."
    )
    head = ["room for topics", "blocks", "order", "prompt tokens computed", "of the fewest", "steps"]
    rows = [
        [
            str(pool["held"]),
            f"{pool['blocks']:,}",
            order,
            f"{pool[order]['prefilled']:,}",
            f"{pool[order]['prefilled'] / found['fewest']:.2f}",
            f"{pool[order]['steps']:,}",
        ]
        for pool in found["pools"]
        for order in FLAGS
    ]
    return f"{about}\n\n{results.table(head, rows)}"


def _run(found: dict[str, Any]) -> str:
    about = (
        f"{found['rows']:,} rows of {found['topics']} topics, {found['blocks']:,} blocks, {RUN_SLOTS} slots; "
        f"{found['fewest']:,} prompt tokens if each prefix is computed once."
    )
    head = ["order", "seconds", "rows/s", "prompt tokens computed", "of the fewest", "taken over"]
    rows = [
        [
            order,
            f"{one['seconds']:.1f}",
            f"{found['rows'] / one['seconds']:.2f}",
            f"{one['computed']:,.0f}",
            f"{one['computed'] / found['fewest']:.2f}",
            f"{one['cached']:,.0f}",
        ]
        for order, one in found["orders"].items()
    ]
    return f"{about}\n\n{results.table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
