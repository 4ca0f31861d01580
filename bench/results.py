"""The figures of a benchmark as a JSON file, and tables as Markdown: what `bench.report` puts into the docs."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")


class NotMeasured(Exception):
    """Why there are no figures, in a line."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """The flag that `save` is given."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def save(file: Path | None, figures: dict[str, Any]) -> None:
    """Write figures, with what they were measured on."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


def machine() -> str:
    """The processor, how many of them, and what they have for matrix products."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(re.findall(r"\w+", text))
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in flags]
    return ", ".join([f"{os.cpu_count()} CPUs", name[1] if name else "unknown processor", *units])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
