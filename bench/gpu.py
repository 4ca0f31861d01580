"""The engine on a GPU, within five minutes: right tokens, nano-vllm's workload, and a Llama 8B beside transformers.

    python -m bench.gpu [--part tokens ...] [--cpu-rehearsal]

Each part runs in a process of its own under a bound of its own, so one that fails or hangs hides no other. Without a
GPU it says so and measures nothing; `--cpu-rehearsal` runs the same parts there, tiny, to show that the script works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

BOUNDS = {"tokens": 75, "nano-vllm": 75, "llama-8b": 60, "llama-8b-transformers": 75}
"""Seconds of each part."""
ON_CPU = 4
"""Times as long for a rehearsal, which is of the script and not of its speed: imports alone may take a minute."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print a table of each. Exit code 1 if any failed."""
    options = _options(arguments)
    if options.inside:
        return _inside(options.inside, options.cpu_rehearsal)
    import torch

    if not options.cpu_rehearsal and not torch.cuda.is_available():
        print("not run: no GPU")
        return 0
    failed = False
    for name in options.part or list(BOUNDS):
        found = _in_own_process(name, options.cpu_rehearsal)
        if isinstance(found, str):
            print(f"{name}: FAILED: {found}", flush=True)
            failed = True
        else:
            _print(name, found)
    return int(failed)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(BOUNDS), help="default: all")
    parser.add_argument(
        "--cpu-rehearsal", action="store_true", help="tiny sizes on a CPU; no figure means anything"
    )
    parser.add_argument("--inside", choices=list(BOUNDS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _inside(name: str, on_cpu: bool) -> int:
    """Run a part here; its rows go to stdout as JSON, one a line."""
    from bench.gpu_models import full_scale, rehearsal
    from bench.gpu_parts import PARTS

    for row in PARTS[name](rehearsal() if on_cpu else full_scale()):
        print(json.dumps(row), flush=True)
    return 0


def _in_own_process(name: str, on_cpu: bool) -> list[dict[str, Any]] | str:
    """The part's rows, or why there are none."""
    command = [sys.executable, "-m", "bench.gpu", "--inside", name, *(["--cpu-rehearsal"] if on_cpu else [])]
    bound_s = BOUNDS[name] * (ON_CPU if on_cpu else 1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=bound_s)
    except subprocess.TimeoutExpired:
        return f"not done after {bound_s} s"
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return said[-1] if said else f"exit status {done.returncode}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
