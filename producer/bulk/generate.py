"""`millstream generate`: everything around the loop, from the first refusal to the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import redis

from broker import calls
from broker.connection import connect, unreachable, wait_until_ready
from broker.faults import passes
from broker.keys import Keys, keys_of
from broker.queue import Queue
from producer.bulk.begin import begin
from producer.bulk.ids import OnBadIds, Unusable, bad_ids, refuse_bad_ids
from producer.bulk.inputs import Inputs
from producer.bulk.intake import Ask, ask, before_asking, to_do
from producer.bulk.interrupt import Interrupt
from producer.bulk.lines import BadRow
from producer.bulk.manifest import FileState, Finished, Manifest, OutputFormat, RowOrder
from producer.bulk.output import Published, Totals, publish
from producer.bulk.own_worker import OwnWorker, answering
from producer.bulk.parquet_output import check_parquet, is_parquet
from producer.bulk.places import Places, check, locked
from producer.bulk.plan import planned
from producer.bulk.progress import Counts, Display, display
from producer.bulk.requests import Requests
from producer.bulk.run import Outlook, Run, Served
from producer.bulk.spool import Spool
from producer.bulk.stale import cancel_stale, drop_superseded
from producer.bulk.window import Window
from producer.bulk.wording import Wording, named_columns
from producer.reach import Server, faults_in_one_line
from producer.refusal import Refused
from producer.request import check_defaults

RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """What the command asked for."""

    inputs: Inputs
    output: Path
    format: OutputFormat | None
    """How the output is written; None: by its name."""
    row_order: RowOrder
    defaults: Mapping[str, Any]
    """Sampling parameters for rows that set none."""
    rendering: Mapping[str, Any]
    """How the text of rows that do not say it becomes tokens."""
    wording: Wording
    """How columns become a question."""
    id_column: str | None
    """Holds the rows' own names; None: `custom_id`, in a batch file."""
    bad_ids: OnBadIds
    """Whether rows without a name of their own stop the run or become errors."""
    model: str | None
    worker_flags: Sequence[str]
    """For a worker of the run's own."""
    queue: str | None
    """None: the queue `default`, or one of the run's own where it brings its own worker."""
    redis_url: str | None
    window: int
    """Most rows on the queue at once."""
    plan: bool
    """Whether rows are asked in a better order than that of the input."""
    patience_s: float
    """How long a server may be away."""
    resume: bool
    overwrite: bool
    redo_changed: bool
    """Whether rows that the command asks differently now are asked again."""
    quiet: bool


@dataclass(frozen=True, slots=True)
class Report:
    """How it went."""

    places: Places
    run: str
    counts: Counts
    totals: Totals
    seconds: float
    torn: Sequence[str]
    """What of the input was missing, in words."""


@dataclass(frozen=True, slots=True)
class DoneBefore:
    """The same run was complete."""

    torn: Sequence[str]
    failed: int
    """Rows in the error file."""


def generate(order: Order, interrupt: Interrupt) -> Report | DoneBefore:
    """Answer every row of the input.

    Raises:
        KeyboardInterrupt: it was told to stop; the same call goes on from there.
        Refused, RequestError: nothing was begun.
        MillstreamError: it had to stop; the same call goes on from there.
    """
    began = time.monotonic()
    order.wording.check()
    asked = _new_manifest(order)
    places = check(order.inputs, order.output)
    if asked.format == "parquet":
        check_parquet(places.output, order.inputs, asked.order)
    with locked(places), _fetched(places, interrupt) as places:
        with interrupt.at_once():
            places.inputs.check_columns(named_columns(order.wording, order.id_column))
            unusable = _check_ids(places.inputs, order)
        manifest = begin(
            places,
            asked,
            resume=order.resume,
            overwrite=order.overwrite,
            redo_changed=order.redo_changed,
        )
        if isinstance(manifest, Finished):
            return DoneBefore(manifest.torn, manifest.failed)
        with interrupt.at_once():
            source = places.inputs.state()
            counts = Counts(places.inputs.count())
        with Spool(places.spool) as spool:
            resumed = manifest.run != asked.run
            _answer(order, places, manifest, spool, counts, interrupt, unusable, resumed=resumed)
            done = publish(spool, places, manifest)
        _end(places, manifest, source, done)
    return Report(places, manifest.run, counts, done.totals, time.monotonic() - began, places.inputs.torn)


@contextmanager
def _fetched(places: Places, interrupt: Interrupt) -> Iterator[Places]:
    """The places with inputs that can be read as often as one likes: of standard input and of URLs there are copies,
    as long as this lasts.

    Raises:
        Refused: one cannot be read.
    """
    try:
        with interrupt.at_once():
            inputs = places.inputs.fetched(places.folder)
        yield replace(places, inputs=inputs)
    finally:
        places.inputs.drop_copies(places.folder)


def _end(places: Places, manifest: Manifest, source: FileState, done: Published) -> None:
    """Note that the run is complete, and delete what only one that goes on needs."""
    manifest.finished = Finished(
        source=source,
        output=done.output,
        errors=done.errors,
        torn=places.inputs.torn,
        failed=sum(done.totals.failed.values()),
    )
    manifest.save(places.manifest)
    if manifest.format == "jsonl":  # its rows can be read back, to go on when the input grows
        places.spool.unlink()
    places.worker_log.unlink(missing_ok=True)


def faults(inputs: Inputs, requests: Requests, id_column: str | None) -> Iterator[Ask | BadRow]:
    """For each row its job, or what is wrong with it; asks nobody.

    Raises:
        Refused: an input cannot be read.
    """
    unusable = Unusable(bad_ids(inputs, id_column))
    for line in inputs.rows():
        yield unusable.fault(line) or ask(line, requests)


def _answer(
    order: Order,
    places: Places,
    manifest: Manifest,
    spool: Spool,
    counts: Counts,
    interrupt: Interrupt,
    unusable: Unusable,
    *,
    resumed: bool,
) -> None:
    """Bring every row of the input into the spool."""
    with ExitStack() as stack:
        screen = display(counts.total, quiet=order.quiet)
        stack.callback(screen.close)
        server = stack.enter_context(Server(order.redis_url))
        own_model = order.model if order.queue is None and server.embedded else None
        own_queue = None if own_model is None else manifest.run
        queue = stack.enter_context(_reached(order, server, own_queue, interrupt))
        with faults_in_one_line(server.url):
            _clear_earlier(queue, manifest, places, screen, resumed=resumed, own_queues=own_queue is not None)
        window = Window(queue, manifest.run, order.window)
        stack.callback(window.close)
        model = order.model if own_model is None else None
        requests = Requests(
            manifest.run, order.defaults, model, order.rendering, order.wording, known_as=order.model
        )
        rows = to_do(places.inputs, spool, requests, counts, unusable)
        worker = None
        if own_model is not None:
            worker = OwnWorker(own_model, order.worker_flags, manifest.run, server.url, places.worker_log)
            stack.callback(worker.stop)
            rows = before_asking(partial(_start, worker, own_model, screen), rows)
        run = Run(
            planned(rows) if order.plan else rows,
            window,
            spool,
            counts,
            screen,
            Served(manifest, places),
            Outlook(queue, screen, own_worker=worker is not None),
        )
        with faults_in_one_line(server.url):
            _work(run, worker, server, queue.keys, order.patience_s, screen, interrupt)


@contextmanager
def _reached(order: Order, server: Server, own_queue: str | None, interrupt: Interrupt) -> Iterator[Queue]:
    """The queue whose workers answer.

    Args:
        own_queue: that of a worker which the run brings; None: others bring theirs.

    Raises:
        Refused: the workers would have to be started otherwise, or serve another model.
        BrokerUnreachable: the server is not there.
    """
    name = own_queue or order.queue or "default"
    if order.worker_flags and own_queue is None:
        raise Refused(
            "--worker-flags are for a worker of the run's own (--model, and neither --queue nor a Redis): "
            f"start the workers of queue {name} with them"
        )
    keys = keys_of(name)
    with interrupt.at_once():
        wait_until_ready(server.url, order.patience_s, keys)
    with closing(Queue(connect(server.url, keys), keys)) as queue:
        if order.model is not None and own_queue is None:
            with faults_in_one_line(server.url):
                _check_served(queue, order.model)
        yield queue


def _clear_earlier(
    queue: Queue, manifest: Manifest, places: Places, screen: Display, *, resumed: bool, own_queues: bool
) -> None:
    """Cancel jobs that nobody waits for: of rows that were edited since, and of runs whose place this one took.

    Raises:
        redis.RedisError: the server could not be reached; the next run does it.
    """
    if resumed and (cancelled := cancel_stale(queue, manifest.run, places.inputs)):
        screen.note(f"{cancelled:,} jobs of rows that were changed since were cancelled")
    if manifest.superseded:
        drop_superseded(queue, manifest, own_queues=own_queues)
        manifest.superseded = []
        manifest.save(places.manifest)


def _start(worker: OwnWorker, model: str, screen: Display) -> None:
    screen.note(f"starting a worker with {model}")
    worker.start()


def _check_served(queue: Queue, model: str) -> None:
    """Refuse a model that the queue's workers do not have: each row would fail for it.

    Raises:
        Refused: living workers serve another one.
        BrokerUnreachable: the server cannot be asked.
    """
    status = queue.run(calls.status(queue.keys))
    served = status.fingerprint
    if served is not None and served.name != model and any(beat.alive for beat in status.workers):
        raise Refused(
            f"queue {queue.keys.queue} is served by {served.name}, not {model}: drop --model, or name a queue whose "
            "worker has it"
        )


def _work(
    run: Run,
    worker: OwnWorker | None,
    server: Server,
    keys: Keys,
    patience_s: float,
    screen: Display,
    interrupt: Interrupt,
) -> None:
    """Step to the end, over outages of the server that are shorter than `patience_s`."""
    down_since: float | None = None
    while True:
        interrupt.check()
        try:
            if not run.step():
                return
            down_since = None
        except redis.RedisError as error:
            if not passes(error):
                raise
            if down_since is None:
                down_since = time.monotonic()
                screen.note(f"{unreachable(server.url, error)} Trying for {patience_s:g} s")
            left_s = patience_s - (time.monotonic() - down_since)
            if left_s <= 0:
                raise
            server.revive()
            with interrupt.at_once():
                wait_until_ready(server.url, left_s, keys)
                time.sleep(min(RETRY_S, left_s))
        if worker is not None and worker.check(answered=run.answered):
            screen.note("the worker ended, and was started again")


def _check_ids(inputs: Inputs, order: Order) -> Unusable:
    """The rows whose names make them errors.

    Raises:
        Refused: there are some, and they stop the run.
    """
    if order.bad_ids == "rows":
        return Unusable(bad_ids(inputs, order.id_column))
    refuse_bad_ids(inputs, order.id_column)
    return Unusable()


def _new_manifest(order: Order) -> Manifest:
    """A run's manifest.

    Raises:
        RequestError: no row could be asked with these defaults.
    """
    check_defaults(order.defaults, order.rendering)
    return Manifest.new(
        order.model,
        order.defaults,
        order.rendering,
        order.wording,
        id_column=order.id_column,
        format=order.format or ("parquet" if is_parquet(order.output) else "jsonl"),
        order=order.row_order,
        worker=answering(order.worker_flags),
    )
