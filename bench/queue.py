"""How many jobs a second go through a queue, and how long one takes: ours, beside other queues for Python.

    python -m bench.queue                                          ours alone
    python -m bench.queue --python arq=VENV/bin/python             and arq, from an environment of its own
    python -m bench.queue --jobs 5000 --rate 100 --seconds 3       a quick look

Everybody has a fresh embedded server with its append-only file on, one worker, a prompt of 200 bytes to give back.

    submit    jobs a second that one client queues, in batches
    drain     all of them wait, the worker comes: jobs a second, from the first that is begun to where the last is
              run; ours to where the client has the last result (finish, completion, result read and decoded)
    steady    --rate jobs a second for a while, one by one: milliseconds from submit to where the worker has run the
              job, and, ours alone, to where the client has the result

Peers' workers note when they run a job. Ours say in each result when it was made of the model process's answer, by
the server's clock in whole milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench import results
from bench.queue_job import PROMPT
from bench.queue_peers import MODULES, submit_paced
from bench.results import NotMeasured
from bench.workers import QUIET, started_worker
from broker.completions import Completion, Completions
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from broker.keys import keys_of
from broker.queue import Queue
from millstream import Client
from protocol import Job, Result

ROOT = Path(__file__).parents[1]
OURS = "millstream"
RUN = "bench"
SILENCE_S = 60.0
"""After this long without a job's end there is no measurement."""
PATIENCE_S = 120.0
"""Longest life of a peer's process."""


def main() -> int:
    """Measure and print the table. Exit code 1 if a queue that was asked for could not be measured."""
    args = _options()
    pythons = _pythons(args.python)
    figures: dict[str, Any] = {
        "jobs": args.jobs,
        "peer_jobs": args.peer_jobs,
        "rate": args.rate,
        "queues": {},
    }
    failed = False
    for name in (OURS, *pythons):
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            if name == OURS:
                found = measure_ours(args.jobs, args.rate, args.seconds)
            else:
                found = measure_peer(name, pythons[name], args.peer_jobs, args.rate, args.seconds)
        except NotMeasured as why:
            failed, found = True, {"why": str(why)}
        figures["queues"][name] = found
    results.save(args.json, figures)
    print(tables(figures)["queue"])
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs to drain (default: %(default)s)")
    parser.add_argument(
        "--peer-jobs", type=int, default=2000, help="jobs for a peer to drain (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=200, help="jobs a second while steady")
    parser.add_argument("--seconds", type=float, default=5, help="how long that lasts")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PEER=INTERPRETER",
        help=f"where a peer is installed: {', '.join(MODULES)}",
    )
    results.add_option(parser)
    return parser.parse_args()


def _pythons(pairs: list[str]) -> dict[str, str]:
    """Interpreters by peer.

    Raises:
        SystemExit: no pair, or no peer.
    """
    pythons = {}
    for pair in pairs:
        name, given, path = pair.partition("=")
        if not given or name not in MODULES:
            raise SystemExit(f"--python {pair}: write PEER=INTERPRETER, with one of {', '.join(MODULES)}")
        # Not resolved: a virtual environment's interpreter is a link, and it is the link that makes the difference.
        pythons[name] = str(Path(path).absolute()) if "/" in path else path
    return pythons


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as state, EmbeddedBroker(Path(state)) as broker:
        yield broker.url


# Ours


def measure_ours(jobs: int, rate: float, seconds: float) -> dict[str, Any]:
    """The figures of a queue and a worker of ours.

    Raises:
        NotMeasured: the worker ended, or a job did not.
    """
    with _server() as url, Client(url) as client:
        began = time.monotonic()
        client.submit_many(_job(number) for number in range(jobs))
        submitted = time.monotonic() - began
        with started_worker(url, "dry-run:echo", QUIET) as process:
            collector = Collector(url, process)
            started: list[float] = []
            collector.take(jobs, lambda result: started.append(_started(result)))
            drained = time.time() - min(started)
            waits = asyncio.run(_steady(client, collector, rate, int(rate * seconds)))
            collector.close()
    return {
        "submit": jobs / submitted,
        "drain": jobs / drained,
        **summary([wait.to_answer for wait in waits]),
        "result": summary([wait.to_result for wait in waits]),
        "versions": OURS,
    }


def _job(number: int) -> Job:
    return Job(id=f"{RUN}.{number}", prompt=PROMPT, run=RUN, stream=False)


def _decoded(one: Completion) -> Result:
    """The result, decoded once, as a user would; each look at `one.result` decodes anew."""
    result = one.result
    if result.text != PROMPT:
        raise NotMeasured(f"job {one.id} came back without its answer")
    return result


def _started(result: Result) -> float:
    """When the job was leased, seconds since the epoch."""
    return _known(result.started_at, f"job {result.id} came back without the time of its start")


def _finished(result: Result) -> float:
    """When the worker had its answer, seconds since the epoch."""
    return _known(result.finished_at, f"job {result.id} came back without the time of its end")


def _known(at: float | None, why: str) -> float:
    if at is None:
        raise NotMeasured(why)
    return at


class Wait(NamedTuple):
    """How long one job took from submit on, seconds."""

    to_answer: float
    to_result: float


class Collector:
    """Reads the ends of the run's jobs, as a bulk run does."""

    def __init__(self, url: str, worker: subprocess.Popen[bytes]) -> None:
        self._queue = Queue(connect(url), keys_of("default"))
        self._completions = Completions(self._queue, RUN)
        self._worker = worker

    def take(self, count: int, note: Callable[[Result], None]) -> None:
        """Hand that many results to `note`.

        Raises:
            NotMeasured: the worker ended, no job does any more, or one has another answer than its prompt.
        """
        taken, heard = 0, time.monotonic()
        while taken < count:
            found = self._completions.read(1.0)
            for one in found:
                note(_decoded(one))
            taken += len(found)
            if found:
                heard = time.monotonic()
            elif self._worker.poll() is not None or time.monotonic() - heard > SILENCE_S:
                raise NotMeasured(f"only {taken} of {count} jobs came back")

    def close(self) -> None:
        """Close its connection."""
        self._queue.close()


async def _steady(client: Client, collector: Collector, rate: float, count: int) -> list[Wait]:
    """How long jobs take that come one by one."""
    sent: dict[str, float] = {}
    waits: list[Wait] = []

    def note(result: Result) -> None:
        began = sent[result.id]
        waits.append(Wait(_finished(result) - began, time.time() - began))

    collecting = asyncio.create_task(asyncio.to_thread(collector.take, count, note))

    async def submit(_: int) -> None:
        job = Job(id=f"{RUN}.steady.{len(sent)}", prompt=PROMPT, run=RUN, stream=False)
        sent[job.id] = time.time()
        client.submit_many([job])

    await submit_paced(submit, count, rate)
    await collecting
    return waits


# Peers


def measure_peer(name: str, python: str, jobs: int, rate: float, seconds: float) -> dict[str, Any]:
    """The figures of a peer.

    Raises:
        NotMeasured: it is not installed there, or failed.
    """
    steady = int(rate * seconds)
    with _server() as url:
        submitted = _submit(python, name, url, jobs, 0)
        with _working(python, name, url, jobs) as told:
            _began(told)
            drained = _heard(told)
    with _server() as url, _working(python, name, url, steady + 1) as told:
        _submit(python, name, url, 1, 0)
        _began(told)  # ready, and warm
        _submit(python, name, url, steady, rate)
        waits = _heard(told)["waits"][1:]
    return {
        "submit": jobs / submitted["seconds"],
        "drain": jobs / drained["seconds"],
        **summary(waits),
        "versions": submitted["versions"],
    }


def _submit(python: str, name: str, url: str, count: int, rate: float) -> dict[str, Any]:
    with _process(python, name, url, "submit", str(count), str(rate)) as told:
        return _heard(told)


@contextmanager
def _working(python: str, name: str, url: str, count: int) -> Iterator[IO[bytes]]:
    with _process(python, name, url, "work", str(count)) as told:
        yield told


@contextmanager
def _process(python: str, *args: str) -> Iterator[IO[bytes]]:
    """What a peer's process says; it is ended with the block, and after `PATIENCE_S` in any case."""
    try:
        process = subprocess.Popen(
            [python, "-m", "bench.queue_peers", *args], cwd=ROOT, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise NotMeasured(f"cannot start {python}: {error.strerror}") from None
    assert process.stdout is not None
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    watchdog.start()
    try:
        yield process.stdout
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _began(told: IO[bytes]) -> None:
    line = told.readline()
    if line != b"began\n":
        raise NotMeasured(f"its worker ran no job{': ' if line else ''}{line.decode().strip()}")


def _heard(told: IO[bytes]) -> dict[str, Any]:
    line = told.readline()
    if not line:
        raise NotMeasured("its process ended without figures")
    figures: dict[str, Any] = json.loads(line)
    return figures


# Figures


def summary(waits: list[float]) -> dict[str, float]:
    """Milliseconds: median and 99th percentile, by nearest rank."""
    ordered = sorted(1000 * wait for wait in waits)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A row a queue."""
    rows = []
    for name, one in figures["queues"].items():
        if "why" in one:
            rows.append([name, *6 * ["-"], one["why"]])
            continue
        speeds = [f"{one[what]:,.0f}" for what in ("submit", "drain")]
        rows.append([name, *speeds, *_times(one), *_times(one.get("result")), one["versions"]])
    head = ["queue", "submitted, jobs/s", "drained, jobs/s", "submit to run, median, ms", "p99, ms"]
    head += ["to result, median, ms", "p99, ms", "what"]
    about = f"{figures['machine']}; " if "machine" in figures else ""
    about += f"{figures['jobs']:,} jobs of ours, {figures['peer_jobs']:,} of each peer; "
    about += f"{figures['rate']:g} a second where times are measured."
    return {"queue": f"{about}\n\n{results.table(head, rows)}"}


def _times(found: dict[str, float] | None) -> list[str]:
    return ["-", "-"] if found is None else [f"{found['p50']:.1f}", f"{found['p99']:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
