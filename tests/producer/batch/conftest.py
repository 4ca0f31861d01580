"""Fixtures of the batches' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.batch.setup import Bench


@pytest.fixture
def bench(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Batches on an empty server."""
    bench = Bench(url, tmp_path, monkeypatch)
    yield bench
    bench.queue.close()
    bench.rq.close()
