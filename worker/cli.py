"""The verb `worker` and its flags. What is slow to import is imported when it runs."""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

ENGINE = "Engine"
QUEUE = "Queue and leases"
LONGEST_LEASE_S = 86_400
"""A day: the server adds a lease to its clock, and an infinite one has no end to add."""


def worker(
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            envvar="MILLSTREAM_MODEL",
            help="Hub id, folder, .gguf file, dry-run:echo or dry-run:words.",
        ),
    ],
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server of the queue. [default: REDIS_URL, else MILLSTREAM_REDIS_URL, else the embedded broker]",
        ),
    ] = None,
    redis_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Seconds to wait at the start for a Redis that is still coming up."
        ),
    ] = 30.0,
    queue: Annotated[
        str,
        typer.Option(
            metavar="NAME", envvar="MILLSTREAM_QUEUE", help="Name of the queue.", rich_help_panel=QUEUE
        ),
    ] = "default",
    burst: Annotated[
        bool, typer.Option("--burst", help="Stop once the queue is empty.", rich_help_panel=QUEUE)
    ] = False,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=LONGEST_LEASE_S,
            help="Seconds until a dead worker's jobs are taken over.",
            rich_help_panel=QUEUE,
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds to finish running jobs after SIGTERM.",
            rich_help_panel=QUEUE,
        ),
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="Seconds without a step after which the model process is replaced."
        ),
    ] = 600.0,
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name jobs and results use for the model.", rich_help_panel=ENGINE),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="Branch, tag or commit of a hub id.", rich_help_panel=ENGINE),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=ENGINE
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="auto | float32 | bfloat16 | float16", rich_help_panel=ENGINE)
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="auto | cpu | cuda | cuda:N", rich_help_panel=ENGINE)
    ] = "auto",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sequences that run at once (slots). [default: 128]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens one step computes at most. [default: 512]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=1,
            help="Milliseconds a step should take at most. [default: no bound]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Longest sequence, prompt and output. [default: the model's]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens a KV block holds; on a GPU 16, with FlashAttention 2 multiples of 256. [default: 8]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    num_kv_blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="KV blocks. [default: by free memory]", rich_help_panel=ENGINE),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory for the KV cache, as 4GiB or 500MB. [default: a share of what is free]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="auto | float32 | bfloat16 | float16 | int8 | fp8 [default: the model's]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="none | int8: linear layers in int8, on a CPU; answers change [default: none]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Who gets a free slot: first-fit | best-fit | priority [default: first-fit]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--eager",
            help="Compile the layers, with a C++ compiler; --eager also records no CUDA graphs. [default: no]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    leash_fd: Annotated[int | None, typer.Option(hidden=True, help="Stop when this pipe closes.")] = None,
    log_level: Annotated[
        str,
        typer.Option(metavar="LEVEL", envvar="MILLSTREAM_LOG_LEVEL", help="debug | info | warning | error"),
    ] = "info",
) -> None:
    """Run the model and answer a queue's jobs until told to stop."""
    level = parse_level(log_level)
    from engine.limits import Given, check, check_context
    from engine.options import check_words
    from worker.parent import WorkerSettings
    from worker.serve import serve

    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    given: dict[str, Any] = {
        "served_model_name": served_model_name,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
        "dtype": dtype,
        "device": device,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_step_ms": max_step_ms,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "kv_memory": parse_bytes(kv_memory) if kv_memory is not None else None,
        "kv_dtype": kv_dtype,
        "quantization": quantization,
        "admission": admission,
        "compile": compile,
    }
    limits = Given(**{field.name: given[field.name] for field in fields(Given)})
    check_words(given)
    check(limits)
    check_context(limits)
    settings = WorkerSettings(
        model=_local(model),
        options={name: value for name, value in given.items() if value is not None},
        lease_s=lease,
        grace_s=grace,
        step_timeout_s=step_timeout,
        burst=burst,
    )
    serve(redis_url, redis_timeout, queue, settings, leash_fd)


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
    except (ValueError, OverflowError):  # no number, or an infinite one
        size = 0
    if unit is None or size <= 0:
        raise typer.BadParameter(
            f"{text!r} is no amount of memory: write it as 4GiB, 500MB or a number of bytes"
        )
    return size


LEVELS = ("debug", "info", "warning", "error")


def parse_level(name: str) -> str:
    """One of these levels, written in any case, as `logging` writes it.

    Raises:
        typer.BadParameter: it is none of them.
    """
    if name.lower() not in LEVELS:
        raise typer.BadParameter(f"--log-level: give {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, not {name!r}")
    return name.upper()
