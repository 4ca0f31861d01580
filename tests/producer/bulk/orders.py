"""Inputs, outputs and orders of bulk runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from producer.bulk.generate import Order, generate
from producer.bulk.inputs import find_inputs
from producer.bulk.interrupt import Interrupt
from producer.bulk.wording import Wording


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A JSONL file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def order(source: Path, output: Path, url: str, **changes: Any) -> Order:
    """An order as a plain command line would make it."""
    plain = Order(
        inputs=find_inputs([str(source)]),
        output=output,
        format=None,
        row_order="input",
        defaults={},
        rendering={},
        wording=Wording(),
        id_column=None,
        bad_ids="refuse",
        model=None,
        worker_flags=(),
        queue=None,
        redis_url=url,
        window=2000,
        plan=True,
        patience_s=20.0,
        resume=False,
        overwrite=False,
        redo_changed=False,
        quiet=True,
    )
    return dataclasses.replace(plain, **changes)


def run(source: Path, output: Path, url: str) -> None:
    """A run with a window that is smaller than its input; in this process, or in one of its own."""
    generate(order(source, output, url, window=50), Interrupt())
