"""The verb `worker`: its flags, its signals, its exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.connection import connect_async, redact, resolve_url, wait_until_ready_async
from broker.embedded import EmbeddedBroker
from broker.keys import Keys
from broker.queue import AsyncQueue
from protocol import MillstreamError
from worker.model_process import ModelCrashed
from worker.parent import Worker, WorkerSettings

log = logging.getLogger("millstream.worker")

REDIS_PATIENCE_S = 30.0
"""How long a worker waits at its start for a Redis that is still coming up."""

ENGINE = "Engine"
QUEUE = "Queue and leases"


def worker(
    model: Annotated[
        str,
        typer.Option(
            envvar="MILLSTREAM_MODEL", help="Hub id, folder, .gguf file, dry-run:echo or dry-run:words."
        ),
    ],
    redis_url: Annotated[
        str | None, typer.Option(help="Default: REDIS_URL, MILLSTREAM_REDIS_URL, else the embedded broker.")
    ] = None,
    queue: Annotated[str, typer.Option(envvar="MILLSTREAM_QUEUE", rich_help_panel=QUEUE)] = "default",
    burst: Annotated[
        bool, typer.Option("--burst", help="Stop once it is empty.", rich_help_panel=QUEUE)
    ] = False,
    lease: Annotated[
        float,
        typer.Option(min=1, help="Seconds until a dead worker's jobs are taken over.", rich_help_panel=QUEUE),
    ] = 30.0,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds to finish running jobs after SIGTERM.", rich_help_panel=QUEUE),
    ] = 30.0,
    step_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a step after which the model process is replaced.")
    ] = 600.0,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name jobs and results use for the model.", rich_help_panel=ENGINE)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto | float32 | bfloat16 | float16", rich_help_panel=ENGINE)
    ] = "auto",
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once (slots).", rich_help_panel=ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens one step computes at most.", rich_help_panel=ENGINE)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence, prompt and output.", rich_help_panel=ENGINE)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens a KV block holds.", rich_help_panel=ENGINE)
    ] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; default: by free memory.", rich_help_panel=ENGINE)
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, as 4GiB or 500MB.", rich_help_panel=ENGINE)
    ] = None,
    slot_policy: Annotated[
        str | None, typer.Option(help="first-fit | best-fit | priority", rich_help_panel=ENGINE)
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile: start at once.", rich_help_panel=ENGINE)
    ] = False,
    leash_fd: Annotated[int | None, typer.Option(hidden=True, help="Stop when this pipe closes.")] = None,
    log_level: Annotated[str, typer.Option(envvar="MILLSTREAM_LOG_LEVEL")] = "info",
) -> None:
    """Run the model and answer a queue's jobs until told to stop."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    given: dict[str, Any] = {
        "served_model_name": served_model_name,
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "kv_memory": parse_bytes(kv_memory) if kv_memory is not None else None,
        "slot_policy": slot_policy,
        "compile": False if eager else None,
    }
    settings = WorkerSettings(
        model=_local(model),
        options={name: value for name, value in given.items() if value is not None},
        lease_s=lease,
        grace_s=grace,
        step_timeout_s=step_timeout,
        burst=burst,
    )
    with ExitStack() as stack:
        url = resolve_url(redis_url, os.environ)
        if url is None:
            url = stack.enter_context(EmbeddedBroker()).url
        asyncio.run(_serve(url, Keys(queue), settings, leash_fd))


async def _serve(url: str, keys: Keys, settings: WorkerSettings, leash_fd: int | None) -> None:
    await wait_until_ready_async(url, REDIS_PATIENCE_S)
    log.info("queue %s on %s", keys.queue, redact(url))
    queue = AsyncQueue(connect_async(url), keys)
    serving = Worker(queue, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.stop)
    if leash_fd is not None:
        loop.add_reader(leash_fd, _let_go, loop, leash_fd, serving)
    try:
        await serving.run()
    except ModelCrashed as error:
        raise MillstreamError(
            f"the model process keeps dying while it loads {settings.model}: {error}"
        ) from None
    finally:
        await queue.close()


def _let_go(loop: asyncio.AbstractEventLoop, leash_fd: int, serving: Worker) -> None:
    if not os.read(leash_fd, 1024):
        loop.remove_reader(leash_fd)
        serving.stop_now()


def _local(model: str) -> str:
    """A path the model process reads from wherever it is started."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """`4GiB`, `500MB` or a plain number as bytes.

    Raises:
        typer.BadParameter: it is none of these.
    """
    number = text.strip().lower().removesuffix("b")
    digits = number.rstrip("kmgi")
    unit = UNITS.get(number[len(digits) :])
    try:
        size = int(float(digits) * (unit or 0))
    except ValueError:
        size = 0
    if unit is None or size <= 0:
        raise typer.BadParameter(
            f"{text!r} is no amount of memory: write it as 4GiB, 500MB or a number of bytes"
        )
    return size
