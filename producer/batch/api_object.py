"""A batch as OpenAI's Batch API has it: https://platform.openai.com/docs/api-reference/batch/object."""

from __future__ import annotations

from typing import Any

from broker.batches import TIMES, Batch


def api_object(batch: Batch) -> dict[str, Any]:
    """The fields of OpenAI's object, files named by their paths; and beside them `note` and `input_incomplete`."""
    has_files = batch.has_ended and batch.status != "failed"
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output if has_files else None,
        "error_file_id": batch.error_file if has_files and batch.failed else None,
        **{name: batch.times.get(name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": None,
        "input_incomplete": batch.torn,
        "note": batch.note or None,
    }
