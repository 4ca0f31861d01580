"""Rows as a run reads them."""

from __future__ import annotations

import json

from producer.bulk.inputs import find_inputs
from producer.bulk.lines import BadRow, Line


def rows_of(*names: object) -> list[Line | BadRow]:
    """Every row of some inputs."""
    return list(find_inputs(map(str, names)).rows())


def columns_of(*names: object) -> list[dict[str, object]]:
    """The columns of every row that can be read."""
    return [json.loads(row.raw) for row in rows_of(*names) if isinstance(row, Line)]
