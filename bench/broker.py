"""How many jobs the queue itself can move: no model, no worker process, an embedded Valkey on the same machine.

    python -m bench.broker [--jobs 20000]

Each row is one client in one process. `batch` calls go in one round trip, as the worker sends them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from broker import calls
from broker.calls import Lease
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from broker.keys import Keys
from broker.queue import Queue
from broker.script import Call
from protocol import Choice, Job, Result, encode_terminal, encode_token

KEYS = Keys("bench")
BATCH = 64
TOKENS = 8
"""Token events of a job, published one at a time as a step of the engine does."""


@dataclass
class Row:
    """One measurement."""

    what: str
    count: int
    seconds: float = 0.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs a row (default: %(default)s)")
    jobs: int = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        queue = Queue(connect(broker.url), KEYS)
        rows = [*measure(queue, jobs)]
        queue.close()
    table = Table("what", "count", "per second", title="broker: embedded Valkey, one client")
    for row in rows:
        table.add_row(row.what, f"{row.count:,}", f"{row.count / row.seconds:,.0f}")
    Console().print(table)


def measure(queue: Queue, jobs: int) -> Iterator[Row]:
    """The way of a job, piece by piece."""
    one_by_one = max(1, jobs // 10)
    singles = [calls.submit(KEYS, Job(id=f"s{n}", prompt="x" * 200)) for n in range(one_by_one)]
    with timed("submit, one at a time", one_by_one) as row:
        for call in singles:
            queue.run(call)
    yield row
    batched = [calls.submit(KEYS, Job(id=f"b{n}", prompt="x" * 200)) for n in range(jobs)]
    with timed(f"submit, batch {BATCH}", jobs) as row:
        for start in range(0, jobs, BATCH):
            queue.run_all(batched[start : start + BATCH])
    yield row
    held: list[Lease] = []
    with timed(f"lease, {BATCH} at once", one_by_one + jobs) as row:
        number = 1
        while leases := queue.run(calls.lease(KEYS, "bench", number, BATCH, 600_000)).leases:
            held += leases
            number += 1
    yield row
    with timed(f"publish a token, batch {BATCH}", BATCH * TOKENS * (len(held) // BATCH // TOKENS)) as row:
        for start in range(0, row.count // TOKENS, BATCH):
            for seq in range(1, TOKENS + 1):
                queue.run_all([publish(lease, seq) for lease in held[start : start + BATCH]])
    yield row
    logged = {lease.id: TOKENS for lease in held[: row.count // TOKENS]}
    ends = [finish(lease, logged.get(lease.id, 0)) for lease in held]
    with timed(f"finish, batch {BATCH}", len(ends)) as row:
        for start in range(0, len(ends), BATCH):
            assert set(queue.run_all(ends[start : start + BATCH])) == {"ok"}
    yield row


@contextmanager
def timed(what: str, count: int) -> Iterator[Row]:
    """A row whose seconds are those of the block."""
    row = Row(what, count)
    began = time.perf_counter()
    yield row
    row.seconds = time.perf_counter() - began


def publish(lease: Lease, seq: int) -> Call[calls.Published]:
    """The next token of a job."""
    event = encode_token(lease.id, seq, lease.attempt, 0, " word", [1000 + seq])
    return calls.publish(KEYS, lease.worker, lease.id, lease.attempt, seq, [event])


def finish(lease: Lease, logged: int) -> Call[calls.Finished]:
    """The end of a job with a short text."""
    choice = Choice(text=" word" * TOKENS, token_ids=list(range(TOKENS)), finish_reason="stop")
    result = Result(id=lease.id, state="succeeded", choices=[choice], attempt=lease.attempt).encode()
    end = encode_terminal(lease.id, logged + 1, lease.attempt, "done")
    return calls.finish(KEYS, lease.worker, lease.id, lease.attempt, "succeeded", result, logged + 1, [end])


if __name__ == "__main__":
    main()
