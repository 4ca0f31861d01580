"""Rows of an output file that no manifest tells about (`--resume`): which rows of the input they answer.

A row is known by its `custom_id` (or `id`), or, without one, by all of its columns. A row whose prompt is another one
now is not taken as done.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from producer.bulk.inputs import Inputs
from producer.bulk.lines import Line, Row, parse
from producer.bulk.parquet_output import is_parquet
from producer.bulk.records import ANSWER_COLUMNS, Record
from producer.refusal import Refused

_QUESTION = ("prompt", "messages", "body")

Places = defaultdict[bytes, deque[int]]
"""Where the rows with a key begin, in order."""


def answers(inputs: Inputs, output: Path) -> Iterator[Record]:
    """The rows of `output` as records of the rows of the inputs. A torn last line is left out.

    Raises:
        Refused: a row answers no row of the input, so that the new output would lose it.
    """
    if is_parquet(output):
        raise Refused(f"{output}: --resume reads JSON lines only: choose another output, or --overwrite")
    with output.open("rb") as file:
        places = _index(file, output)
        for line in inputs.rows():
            row = parse(line) if isinstance(line, Line) else line
            if isinstance(row, Row) and (found := places.get(_key(row.columns))):
                file.seek(found.popleft())
                payload = file.readline().strip()
                if _same_question(row.columns, json.loads(payload)):
                    yield Record(line.number, line.digest, True, payload)
    left = sum(map(len, places.values()))
    if left:
        raise Refused(
            f"{left:,} rows of {output} answer no row of {inputs}: choose another output, or --overwrite"
        )


def _index(file: BinaryIO, output: Path) -> Places:
    places: Places = defaultdict(deque)
    start = 0
    for number, raw in enumerate(file, 1):
        row = parse(Line(number, raw.strip()))
        if isinstance(row, Row) and isinstance(row.columns.get("completion"), str):
            places[_key(row.columns)].append(start)
        elif raw.endswith(b"\n") and raw.strip():
            raise Refused(
                f"line {number} of {output} is no row with a completion: choose another output, or --overwrite"
            )
        start += len(raw)
    return places


def _key(columns: dict[str, Any]) -> bytes:
    name = columns.get("custom_id", columns.get("id"))
    if name is None:
        name = {column: value for column, value in columns.items() if column not in ANSWER_COLUMNS}
    return hashlib.blake2b(json.dumps(name, sort_keys=True).encode(), digest_size=16).digest()


def _same_question(asked: dict[str, Any], answered: dict[str, Any]) -> bool:
    return all(asked.get(name) == answered[name] for name in _QUESTION if name in answered)
