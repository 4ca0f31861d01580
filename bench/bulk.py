"""How many rows a second `millstream generate` takes from file to file, whose time they take, and how much memory.

    python -m bench.bulk                                  100,000 rows, two workers
    python -m bench.bulk --rows 10000 --rows 1000000      more or fewer; a million take five minutes or more
    python -m bench.bulk --workers 0                      a worker of the run's own; its time counts as the command's

Rows have some 60 bytes, the model is the dry run that gives a prompt back, the server an embedded one with its
append-only file. Rows a second are those of the whole command, from its start to the output in its place. The share
of the cores is that of all processes together, in that time. Memory is what the command holds at most beyond a
run of one row, and what the server says that it used at most, with its longest stream.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import results
from bench.workers import QUIET, started_worker
from broker import calls
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from broker.keys import keys_of
from broker.queue import Queue

MODEL = "dry-run:echo"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PEAK_EVERY_S = 0.02
SERVER_EVERY_S = 0.5
PATIENCE_S = 60.0
"""Longest wait for the workers to say that they live."""
READERS = ("command", "worker", "model process", "server")


def main() -> int:
    """Measure and print the table."""
    args = _options()
    figures: dict[str, Any] = {"workers": args.workers, "window": args.window, "runs": []}
    for rows in args.rows or [100_000]:
        print(f"{rows:,} rows ...", file=sys.stderr, flush=True)
        figures["runs"].append(measure(rows, args.workers, args.window))
    results.save(args.json, figures)
    print(tables(figures)["bulk"])
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, action="append", help="rows of a run; may be given again")
    parser.add_argument(
        "--workers", type=int, default=2, help="workers beside the run (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, help="rows on the queue at once (default: the command's)")
    results.add_option(parser)
    return parser.parse_args()


def measure(rows: int, workers: int, window: int | None = None) -> dict[str, Any]:
    """The figures of one run, on a server and workers of its own.

    Raises:
        RuntimeError: the run failed, or lost a row.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(EmbeddedBroker(folder / "state"))
        started = [stack.enter_context(started_worker(broker.url, MODEL, QUIET)).pid for _ in range(workers)]
        environ = {**os.environ, "MILLSTREAM_STATE": str(folder / "state"), "REDIS_URL": ""}
        options = ["--model", MODEL]
        if workers:
            environ, options = {**os.environ, "REDIS_URL": broker.url}, []
            _wait_for(broker.url, workers)
        if window is not None:
            options += ["--window", str(window)]
        least = Run(folder / "one", 1, options, environ, broker.url, started).measured()
        figures = Run(folder / "all", rows, options, environ, broker.url, started).measured()
    return {**figures, "growth": figures["peak"] - least["peak"]}


def _wait_for(url: str, workers: int) -> None:
    queue = Queue(connect(url), keys_of("default"))
    deadline = time.monotonic() + PATIENCE_S
    while len(queue.run(calls.status(queue.keys)).workers) < workers:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{workers} workers did not come within {PATIENCE_S:g} s")
        time.sleep(0.05)
    queue.close()


class Run:
    """One run of the command, watched from outside."""

    def __init__(
        self,
        folder: Path,
        rows: int,
        options: Sequence[str],
        environ: dict[str, str],
        url: str,
        workers: Sequence[int],
    ) -> None:
        self._folder = folder
        self._rows = rows
        self._options = options
        self._environ = environ
        self._url = url
        self._workers = workers
        self._peak = self._used = self._longest = 0

    def measured(self) -> dict[str, Any]:
        """Rows a second, CPU time a row in microseconds, bytes at most."""
        self._folder.mkdir()
        source, output = self._folder / "in.jsonl", self._folder / "out.jsonl"
        with source.open("w") as file:
            file.writelines(map(_line, range(self._rows)))
        command = [sys.executable, "-m", "millstream", "generate", str(source), "-o", str(output), "--json"]
        before = self._spent()
        began = time.monotonic()
        process = subprocess.Popen([*command, *self._options], env=self._environ, stdout=subprocess.DEVNULL)
        with self._watched(process.pid):
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        after = self._spent()
        if process.returncode:
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
        check(output, self._rows)
        cpu = {who: after[who] - before[who] for who in after} | {"command": usage.ru_utime + usage.ru_stime}
        return {
            "rows": self._rows,
            "seconds": seconds,
            "rows_per_s": self._rows / seconds,
            "us": {who: 1e6 * spent / self._rows for who, spent in cpu.items()},
            "cores": sum(cpu.values()) / seconds / (os.cpu_count() or 1),
            "peak": self._peak,
            "server": self._used,
            "longest_stream": self._longest,
        }

    def _spent(self) -> dict[str, float]:
        """Seconds of CPU time so far, by process."""
        models = [child for pid in self._workers for child in _children(pid)]
        with connect(self._url) as client:
            info: Any = client.info("server")
        return {
            "worker": sum(map(cpu_s, self._workers)),
            "model process": sum(map(cpu_s, models)),
            "server": cpu_s(info["process_id"]),
        }

    @contextmanager
    def _watched(self, pid: int) -> Iterator[None]:
        over = threading.Event()
        threads = [
            threading.Thread(target=self._watch_peak, args=(pid, over)),
            threading.Thread(target=self._watch_server, args=(over,)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _watch_peak(self, pid: int, over: threading.Event) -> None:
        while not over.wait(PEAK_EVERY_S):
            self._peak = max(self._peak, peak_bytes(pid))

    def _watch_server(self, over: threading.Event) -> None:
        with connect(self._url) as client:
            while not over.wait(SERVER_EVERY_S):
                info: Any = client.info("memory")
                self._used = max(self._used, info["used_memory"])
                for stream in client.scan_iter(count=10_000, _type="stream"):
                    length: Any = client.xlen(stream)
                    self._longest = max(self._longest, length)


def check(output: Path, rows: int) -> None:
    """See that every row is in the output, with its own answer.

    Raises:
        RuntimeError: one is not.
    """
    found = 0
    with output.open("rb") as file:
        for raw in file:
            row = json.loads(raw)
            if row["completion"] != row["prompt"] or row["id"] != found:
                raise RuntimeError(f"row {found:,} of the output is another one's: {raw.decode()}")
            found += 1
    if found != rows:
        raise RuntimeError(f"{found:,} of {rows:,} rows are in the output")


def _line(number: int) -> str:
    return json.dumps({"id": number, "prompt": f"row {number:,} of a file of many short ones"}) + "\n"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended, as proc(5) numbers the fields."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK_S


def peak_bytes(pid: int) -> int:
    """Most memory that a process had resident; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A row a run."""
    head = ["rows", "rows/s", *(f"{who}, us a row" for who in READERS), "share of the cores"]
    head += ["growth of the command, MB", "server, MB", "longest stream"]
    rows = [
        [
            f"{run['rows']:,}",
            f"{run['rows_per_s']:,.0f}",
            *(f"{run['us'][who]:.0f}" for who in READERS),
            f"{run['cores']:.0%}",
            *(f"{run[what] / 1e6:.0f}" for what in ("growth", "server")),
            f"{run['longest_stream']:,}",
        ]
        for run in figures["runs"]
    ]
    about = f"{figures['machine']}; " if "machine" in figures else ""
    workers = figures["workers"]
    about += (
        f"{workers} workers beside the run."
        if workers
        else "a worker of the run's own, in the command's time."
    )
    return {"bulk": f"{about}\n\n{results.table(head, rows)}"}


if __name__ == "__main__":
    sys.exit(main())
