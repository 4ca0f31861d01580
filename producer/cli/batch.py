"""`millstream batch` and `millstream batch-worker`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from producer.cli import exits, options, rows
from producer.cli.flags import Given, Panelled, spread
from producer.cli.options import one_of
from producer.cli.rendering import FLAGS as RENDERING
from producer.cli.sampling import FLAGS as SAMPLING
from producer.printing import printable

if TYPE_CHECKING:
    from broker.batches import Batch
    from broker.queue import Queue
    from producer.batch.chain import Chain
    from producer.reach import Server

group = typer.Typer(help="Bulk runs that go on without you. `millstream batch-worker` works on them.")

LOG_LEVELS = ("debug", "info", "warning", "error")

BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.", callback=options.utf8)]
RqUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="MILLSTREAM_RQ_URL",
        help="Server of RQ's jobs, where it is not that of the queue: RQ does not serve a Redis Cluster.",
    ),
]


@group.command(cls=Panelled)
@spread(rendering=RENDERING, sampling=SAMPLING)
def submit(
    rendering: Given,
    sampling: Given,
    sources: rows.Sources,
    output_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(rows.OUTPUT_FORMATS),
            help="How output and errors are written; openai: as by OpenAI's Batch API.",
        ),
    ] = "jsonl",
    row_order: rows.RowOrderName = "input",
    input_format: rows.InputFormat = None,
    prompt_column: rows.PromptColumn = None,
    prompt_template: rows.PromptTemplate = None,
    system: rows.System = None,
    chat: rows.Chat = False,
    id_column: rows.IdColumn = None,
    bad_ids: rows.BadIdsName = "refuse",
    completion_window: Annotated[
        str,
        typer.Option(metavar="TIME", help="After this long it ends with what is done: 90s, 30m, 24h, 7d."),
    ] = "24h",
    retention: Annotated[
        str, typer.Option(metavar="TIME", help="How long its files are kept after its end.")
    ] = "30d",
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="POST the batch here, as JSON, once it has ended.")
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="MILLSTREAM_BATCH_DIR",
            help="Where its files are kept; batch workers must see the same folder. [default: in your state folder]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="M", help="Refuse to be answered by a model of another name."),
    ] = None,
    window: rows.Window = 2000,
    plan: rows.Plan = True,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Have rows answered while you are away; print the batch's id."""
    format = one_of("--format", output_format, rows.OUTPUT_FORMATS)
    import os

    from producer.batch import submitting
    from producer.batch.folder import default_dir
    from producer.bulk.inputs import find_inputs

    asked = submitting.BatchRequest(
        inputs=find_inputs(sources, one_of("--input-format", input_format, rows.FORMATS)),
        format=format,
        row_order=one_of("--order", row_order, rows.ROW_ORDERS),
        defaults=sampling,
        rendering=rendering,
        wording=rows.wording(prompt_column, prompt_template, system, chat),
        id_column=id_column,
        bad_ids=one_of("--bad-ids", bad_ids, rows.BAD_IDS),
        model=model,
        window=window,
        plan=plan,
        completion_window=completion_window,
        retention=retention,
        webhook=webhook,
    )
    with _batches(redis_url, queue) as (held, server):
        chain = _chain(held, server, rq_url)
        batch_id = submitting.submit(asked, held, chain, dir or default_dir(os.environ))
        _show_submitted(held, batch_id, as_json)
        _note_if_alone(chain, queue)


@group.command(cls=Panelled)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the batch.")],
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Go on with a batch that the server has lost, as its folder tells."""
    from producer.batch import submitting

    with _batches(redis_url, queue) as (held, server):
        chain = _chain(held, server, rq_url)
        batch_id = submitting.resume(folder, held, chain)
        _show_submitted(held, batch_id, as_json)
        _note_if_alone(chain, queue)


@group.command("list", cls=Panelled)
def list_(
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the batches of a queue, a line each, the newest first."""
    import os

    from broker import batches
    from producer.batch.folder import default_dir, folders_of
    from producer.cli.screen import note

    with _batches(redis_url, queue) as (held, server):
        found = batches.show_all(held)
        _wake(held, server, rq_url, found)
    for batch in found:
        _show(batch, as_json)
    if not found:
        note("no batches")
    known = {batch.id for batch in found}
    lost = [path for path in folders_of(default_dir(os.environ), queue) if path.name not in known]
    if lost:
        note(
            f"{len(lost):,} in {lost[0].parent} are not known to this server, such as {lost[0].name}: "
            f"`millstream batch resume {lost[0]}` goes on with it"
        )


@group.command(cls=Panelled)
def status(
    batch_id: BatchId,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show where a batch stands. With --json: OpenAI's object. Exit code 1: it has failed, or is not known."""
    with _batches(redis_url, queue) as (held, server):
        batch = _found(held, batch_id)
        _wake(held, server, rq_url, [batch])
    _show(batch, as_json)
    if not as_json:
        _explain(batch)
    if batch.status == "failed":
        raise typer.Exit(exits.FAILED)


@group.command(cls=Panelled)
def fetch(
    batch_id: BatchId,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help=rows.OUTPUT_HELP)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
) -> None:
    """Copy the answers of a batch that has ended, and its errors.

    Exit code 5: not yet; 1: it has failed; 3: some rows have errors; 4: the input ended early.
    """
    from producer.batch import fetching
    from producer.cli.screen import note, note_torn

    with _batches(redis_url, queue) as (held, server):
        batch = _found(held, batch_id)
        _wake(held, server, rq_url, [batch])
    if not batch.has_ended:
        note(f"{batch_id} is {batch.status}: {_counts(batch)}")
        raise typer.Exit(exits.NOT_YET)
    if batch.status == "failed":
        _explain(batch)
        raise typer.Exit(exits.FAILED)
    places = fetching.fetch(batch, output, overwrite=overwrite)
    print(f"{printable(batch.status)}: {_counts(batch)}", file=sys.stderr)
    print(f"answers: {places.output}", file=sys.stderr)
    if batch.failed:
        print(f"errors:  {places.errors}", file=sys.stderr)
    note_torn(batch.torn)
    raise typer.Exit(exits.INPUT_INCOMPLETE if batch.torn else exits.ROW_ERRORS if batch.failed else exits.OK)


@group.command(cls=Panelled)
def cancel(
    batch_id: BatchId,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Stop a batch; what is answered is kept. Exit code 1: it is ending or has ended, or is not known."""
    from broker import batches
    from producer.cli.screen import note

    with _batches(redis_url, queue) as (held, server):
        status = held.run(batches.cancel(held.keys, batch_id))
        batch = _found(held, batch_id)
        _wake(held, server, rq_url, [batch])
    _show(batch, as_json)
    if status not in ("cancelling", "cancelled"):
        note(f"{batch_id} is {status}: too late to cancel it")
        raise typer.Exit(exits.FAILED)


def batch_worker(
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    rq_url: RqUrl = None,
    burst: Annotated[bool, typer.Option("--burst", help="Stop once there is nothing to do.")] = False,
    log_level: Annotated[
        str,
        typer.Option(metavar="LEVEL", envvar="MILLSTREAM_LOG_LEVEL", help="debug | info | warning | error"),
    ] = "info",
) -> None:
    """Work on the batches of a queue until told to stop. It has no model; several may run."""
    import logging

    level = one_of("--log-level", log_level.lower(), LOG_LEVELS).upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    from producer.batch.worker import serve

    serve(queue, redis_url, rq_url, burst=burst)


@contextmanager
def _batches(redis_url: str | None, name: str) -> Iterator[tuple[Queue, Server]]:
    """The queue whose batches are meant."""
    from broker.connection import connect, wait_until_ready
    from broker.keys import keys_of
    from broker.queue import Queue
    from producer.reach import OUTAGE_S, Server, faults_in_one_line

    keys = keys_of(name)
    with Server(redis_url) as server:
        wait_until_ready(server.url, 0.0, keys)
        queue = Queue(connect(server.url, keys, OUTAGE_S), keys)
        try:
            with faults_in_one_line(server.url):
                yield queue, server
        finally:
            queue.close()


def _chain(queue: Queue, server: Server, rq_url: str | None) -> Chain:
    """Where the slices of its batches stand in line."""
    from producer.batch.chain import Chain, rq_client

    name = queue.keys.queue
    return Chain(rq_client(rq_url or server.url, name), name)


def _found(queue: Queue, batch_id: str) -> Batch:
    import os

    from broker import batches
    from producer.batch.folder import default_dir, folders_of
    from protocol import MillstreamError

    batch = batches.show(queue, batch_id)
    if batch is not None:
        return batch
    name = queue.keys.queue
    for path in folders_of(default_dir(os.environ), name):
        if path.name == batch_id:
            raise MillstreamError(
                f"batch {batch_id}: the server does not know it, but its folder is there. If the server has lost "
                f"its data, `millstream batch resume {path}` goes on with it"
            )
    raise MillstreamError(f"batch {batch_id}: queue {name} has none of that id, or its retention is over")


def _wake(queue: Queue, server: Server, rq_url: str | None, found: Iterable[Batch]) -> None:
    """Where some of these batches wait for whoever works on them: say so if nobody does, and have all batches looked
    at if it is time.
    """
    import redis

    from broker import batches
    from producer.refusal import Refused

    now = time.time()
    if not any(batch.waits_at(now) for batch in found):
        return
    with suppress(Refused, redis.RedisError):  # whoever asks how a batch stands need not reach RQ's server
        chain = _chain(queue, server, rq_url)
        _note_if_alone(chain, queue.keys.queue)
        if batches.may_sweep(queue):
            chain.put_look()


def _note_if_alone(chain: Chain, queue: str) -> None:
    """Say so if nobody works on the batches of a queue."""
    import redis

    from producer.cli.screen import note

    with suppress(redis.RedisError):
        if not chain.is_worked_on():
            command = "millstream batch-worker" + ("" if queue == "default" else f" --queue {queue}")
            note(f"no batch worker works on queue {queue} yet: start `{command}`")


def _show(batch: Batch, as_json: bool) -> None:
    if as_json:
        from producer.batch.api_object import api_object

        print(json.dumps(api_object(batch)))
    else:
        print(f"{printable(batch.id)}  {printable(batch.status)}  {_counts(batch)}")


def _show_submitted(queue: Queue, batch_id: str, as_json: bool) -> None:
    if as_json:
        _show(_found(queue, batch_id), as_json)
    else:
        print(batch_id)


def _counts(batch: Batch) -> str:
    return f"{batch.completed:,} completed and {batch.failed:,} failed of {batch.total:,}"


def _explain(batch: Batch) -> None:
    from producer.cli.screen import note, note_torn

    for error in batch.errors:
        note(error["message"])
    if batch.note:
        note(batch.note)
    note_torn(batch.torn)
