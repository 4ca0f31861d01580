"""Batches in a test: a folder, a queue, and slices that run in the test's own process."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import rq
from rq.serializers import JSONSerializer

from broker import batches
from broker.batches import Batch
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from producer.batch import slices, submitting
from producer.batch.api_object import api_object
from producer.batch.chain import Chain, rq_client, rq_queue_name
from producer.batch.folder import Folder
from producer.batch.slices import Slice
from producer.batch.sweeping import sweep
from producer.bulk.inputs import find_inputs
from producer.bulk.wording import Wording

ROWS = [{"custom_id": f"row-{number}", "prompt": f"prompt {number}"} for number in range(60)]


may_sweep = batches.may_sweep


class DeafWorker(rq.SimpleWorker):  # type: ignore[misc]  # rq is not checked
    """RQ's worker, not listening for commands: to end that takes a second."""

    def subscribe(self) -> None:
        """Nothing."""

    def unsubscribe(self) -> None:
        """Nothing."""


class Death(BaseException):
    """Stands for the end of a process."""


class Bench:
    """A queue's batches, and RQ's worker for them."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REDIS_URL", url)
        monkeypatch.setenv("MILLSTREAM_BATCH_DIR", str(folder / "batches"))
        monkeypatch.setattr(slices, "SHORTEST_S", 0.05)
        monkeypatch.setattr(batches, "may_sweep", lambda _: False)  # tests say when
        slices.told_to_leave.clear()
        self.url = url
        self.folder = folder
        self.keys = Keys()
        self.queue = Queue(connect(url), self.keys)
        self.rq = rq_client(url, "default")
        self.chain = Chain(self.rq, "default")

    def submit(self, *sources: Path, **changes: Any) -> str:
        """Submit a batch as a plain command line would."""
        plain: dict[str, Any] = {
            "inputs": find_inputs(list(map(str, sources))),
            "format": "jsonl",
            "row_order": "input",
            "defaults": {},
            "rendering": {},
            "wording": Wording(),
            "id_column": None,
            "bad_ids": "refuse",
            "model": None,
            "window": 20,
            "plan": True,
            "completion_window": "24h",
            "retention": "30d",
            "webhook": None,
        }
        asked = submitting.BatchRequest(**{**plain, **changes})
        return submitting.submit(asked, self.queue, self.chain, self.folder / "batches")

    def go(self, batch_id: str, most: int = 1000) -> int:
        """Run slices without RQ until the batch has ended; how many. One that dies is run again."""
        for count in range(most):
            if self.show(batch_id).has_ended:
                return count
            with suppress(Death):
                Slice(self.queue, self.chain, batch_id, self.show(batch_id).slice).work()
        return most

    def slice(self) -> None:
        """Run the slice that is next in line."""
        self._work(max_jobs=1)

    def work(self) -> None:
        """Run slices until none is in line."""
        self._work()

    def _work(self, **limits: Any) -> None:
        line = rq.Queue(rq_queue_name("default"), connection=self.rq, serializer=JSONSerializer)
        worker = DeafWorker([line], connection=self.rq, serializer=JSONSerializer)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        worker.work(burst=True, logging_level="WARNING", **limits)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def sweep(self) -> None:
        """Look at all batches once."""
        sweep(self.queue, self.chain)

    def show(self, batch_id: str) -> Batch:
        """The batch."""
        batch = batches.show(self.queue, batch_id)
        assert batch is not None
        return batch

    def status(self, batch_id: str) -> str:
        """Its status, once it is looked whether its counts can be."""
        shown = api_object(self.show(batch_id))
        counts = shown["request_counts"]
        assert counts["completed"] + counts["failed"] <= counts["total"]
        status: str = shown["status"]
        if status in ("completed", "expired", "cancelled"):
            assert counts["completed"] + counts["failed"] == counts["total"]
        assert shown[f"{status}_at" if status != "validating" else "created_at"]
        return status

    def files(self, batch_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Its answers and its errors."""
        batch = self.show(batch_id)
        answers, errors = (
            [json.loads(line) for line in Path(path).read_text().splitlines()]
            for path in (batch.output, batch.error_file)
        )
        return answers, errors

    def path(self, batch_id: str) -> Folder:
        """Its folder."""
        return Folder(Path(self.show(batch_id).folder))
