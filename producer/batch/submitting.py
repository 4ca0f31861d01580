"""A batch is submitted: its inputs are copied, it is registered, and its first slice is put in line."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker import batches
from broker.queue import Queue
from producer.batch.chain import Chain
from producer.batch.folder import BatchOrder, CopiedInput, Folder
from producer.batch.webhook import check_url
from producer.bulk.ids import OnBadIds
from producer.bulk.inputs import Inputs
from producer.bulk.manifest import Manifest, OutputFormat, RowOrder
from producer.bulk.parquet_output import check_parquet
from producer.bulk.wording import Wording, named_columns
from producer.refusal import Refused
from producer.request import check_defaults
from protocol import MillstreamError

_DURATION = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_D = 3650


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What the command asked for."""

    inputs: Inputs
    format: OutputFormat
    row_order: RowOrder
    defaults: Mapping[str, Any]
    rendering: Mapping[str, Any]
    wording: Wording
    id_column: str | None
    bad_ids: OnBadIds
    model: str | None
    window: int
    plan: bool
    completion_window: str
    retention: str
    webhook: str | None


def submit(asked: BatchRequest, queue: Queue, chain: Chain, dir: Path) -> str:
    """Submit a batch; its id.

    Raises:
        Refused, RequestError: it cannot be asked like this; nothing was begun.
        redis.RedisError: a server could not be reached.
        OSError: the folder cannot be written.
    """
    asked.wording.check()
    check_defaults(asked.defaults, asked.rendering)
    seconds_of("--completion-window", asked.completion_window)
    seconds_of("--retention", asked.retention)
    if asked.webhook is not None:
        check_url(asked.webhook)
    batch_id = f"batch_{secrets.token_hex(12)}"
    folder = Folder((dir / batch_id).absolute())
    if asked.format == "parquet":
        check_parquet(folder.path / "output.parquet", asked.inputs, asked.row_order)
    try:
        _fill(folder, batch_id, asked, queue.keys.queue)
    except BaseException:
        folder.delete()
        raise
    return _register(folder, queue, chain)


def resume(path: Path, queue: Queue, chain: Chain) -> str:
    """Go on with a batch whose folder is there, and which the server has lost; its id.

    Raises:
        Refused: it belongs to another queue, or the server knows it.
        redis.RedisError: a server could not be reached.
    """
    folder = Folder(path.absolute())
    name = folder.order().queue
    if name != queue.keys.queue:
        raise Refused(f"{path} is a batch of queue {name}: go on with it by --queue {name}")
    return _register(folder, queue, chain)


def _register(folder: Folder, queue: Queue, chain: Chain) -> str:
    order, places = folder.order(), folder.places()
    batch_id = folder.manifest().run
    fields: dict[str, str | int] = {
        "folder": str(folder.path),
        "output": str(places.output),
        "error_file": str(places.errors),
        "input": str(places.inputs),
        "window": order.completion_window,
        "retention_s": seconds_of("--retention", order.retention),
        "webhook": "" if order.webhook is None else "wanted",
    }
    window_s = seconds_of("--completion-window", order.completion_window)
    if not queue.run(batches.submit(queue.keys, batch_id, secrets.token_hex(8), window_s, fields)):
        raise Refused(f"the server knows {batch_id}: `millstream batch status {batch_id}`")
    chain.put(batch_id, 1)
    return batch_id


def seconds_of(option: str, text: str) -> int:
    """What `24h` means.

    Raises:
        Refused: it means nothing.
    """
    found = _DURATION.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise Refused(f"{option}: give a number with s, m, h or d, such as 24h, not {text!r}")
    seconds = int(found[1]) * _SECONDS[found[2]]
    if seconds > LONGEST_D * _SECONDS["d"]:
        raise Refused(f"{option}: give at most {LONGEST_D}d, not {text}")
    return seconds


def _copy(source: Path, copy: Path) -> None:
    try:
        shutil.copyfile(source, copy)
    except OSError as error:  # which names the source, also where it is the copy's disk that is full
        raise MillstreamError(f"cannot copy {source} to {copy}: {error.strerror}") from None


def _fill(folder: Folder, batch_id: str, asked: BatchRequest, queue: str) -> None:
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    folder.path.mkdir(mode=0o700)
    copies = []
    fetched = asked.inputs.fetched(folder.path)
    fetched.check_columns(named_columns(asked.wording, asked.id_column))
    for number, one in enumerate(fetched.inputs):
        assert one.path is not None
        copy = folder.path / f"input-{number}"
        if one.path != copy:
            _copy(one.path, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        copies.append(CopiedInput(name=one.name, format=one.format, file=copy.name))
    manifest = Manifest.new(
        asked.model,
        asked.defaults,
        asked.rendering,
        asked.wording,
        id_column=asked.id_column,
        format=asked.format,
        order=asked.row_order,
    ).model_copy(update={"run": batch_id})
    order = BatchOrder(
        inputs=copies,
        defaults=dict(asked.defaults),
        bad_ids=asked.bad_ids,
        window=asked.window,
        plan=asked.plan,
        queue=queue,
        completion_window=asked.completion_window,
        retention=asked.retention,
        webhook=asked.webhook,
    )
    folder.make(order, manifest)
