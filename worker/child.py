"""The model process: holds the engine, speaks only to its parent, and ends when the parent's pipe closes.

    reader thread   parent's frames -> decode -> other threads: render, tokenize, compile -> inbox
    main thread     inbox -> engine.add / abort -> engine.step -> one frame to the parent

Run as `python -m worker.child READ_FD WRITE_FD`.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from typing import BinaryIO

from broker.failpoints import reached
from engine.dry_run import is_dry_run, open_dry_run
from engine.interface import Delta, DeviceLost, EngineCore, EngineStats, StepSeconds
from protocol import ModelUnavailable, OptionRefused, RequestError
from worker.figures import MARK_EVERY_S
from worker.frames import (
    Begun,
    Drop,
    Failed,
    Load,
    Lost,
    Piece,
    Ready,
    Run,
    Step,
    decode_to_model,
    encode,
    read,
)
from worker.garbage import collect_rarely
from worker.preparation import Arrived, Inbox, Preparation, Unfit

log = logging.getLogger("millstream.model")

READ_AT_ONCE = 1 << 16
"""Bytes: what a pipe holds. Python would read 8 KiB at a time, and another thread take over at every read."""


def open_engine(load: Load) -> EngineCore:
    """The engine for a model string.

    Raises:
        ModelUnavailable: no such model, it does not fit, or the worker extra is not installed.
        OptionRefused: the options contradict each other, the model or the memory.
    """
    if is_dry_run(load.model):
        return open_dry_run(load.model)
    try:
        from engine.loading import load_engine
    except ModuleNotFoundError as error:
        raise ModelUnavailable(
            f"model {load.model}: {error.name} is not installed; install millstream[worker]"
        ) from None
    try:
        return load_engine(load.model, **load.options)
    except OptionRefused:
        raise
    except ValueError as error:  # an option outside its range
        raise ModelUnavailable(f"model {load.model}: {error}") from None


def read_frames(source: BinaryIO, loading: Future[EngineCore], inbox: Inbox) -> None:
    """The reader thread. End of file means that the parent is gone: the process ends, whatever it computes.

    It reads from the start, while the model still loads, so that this holds then too.
    """
    preparation: Preparation | None = None
    with a_fault_ends_the_process():  # nobody else would ever notice that the parent is gone
        while (body := read(source)) is not None:
            preparation = preparation or Preparation(loading.result(), inbox)
            for said in decode_to_model(body):
                if isinstance(said, Run):
                    preparation.run(said)
                elif isinstance(said, Drop):
                    preparation.drop(said)
    os._exit(0)


@contextmanager
def a_fault_ends_the_process() -> Iterator[None]:
    """Whatever is raised is logged, and the process ends at once, which its parent counts as a crash.

    Python as it ends would wait for every thread that prepares a job: for minutes, in which the parent hears nothing
    and the jobs stand still.
    """
    try:
        yield
    except BaseException:
        try:
            log.exception("the model process ends")
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)


def run(engine: EngineCore, inbox: Inbox, sink: BinaryIO) -> None:
    """The engine's loop: take what came in, say so, step, tell. Never returns.

    Acceptances are told before the step: a job that kills the process in its first step must be known to have run. So
    are suspects, before they are prepared: one that was sent to a process that was dying already is not to blame.

    Raises:
        DeviceLost: the device fails again and again.
    """
    teller = Teller(engine, sink)
    while True:
        arrived, begun, refused = take_in(engine, inbox, wait=not engine.has_work())
        if arrived or begun or refused:
            teller.tell(begun, refused, arrived)
        if engine.has_work():
            deltas = engine.step()
            reached("stepped")
            teller.tell([], [to_piece(delta) for delta in deltas])


class Teller:
    """Writes frames to the parent; the engine's counters go along once a second, and with the last before idling."""

    def __init__(self, engine: EngineCore, sink: BinaryIO) -> None:
        self._engine = engine
        self._sink = sink
        self._counted = 0.0

    def tell(self, begun: list[Begun], pieces: list[Piece], arrived: Sequence[Arrived] = ()) -> None:
        """One frame; every step has one, so that a parent that hears none knows of a hang."""
        stats = self._engine.stats()
        now = time.monotonic()
        counters = None
        if now - self._counted >= MARK_EVERY_S or not self._engine.has_work():
            self._counted = now
            counters = flat(stats)
        keys = [one.key for one in arrived]
        step = Step(begun, pieces, stats.running, stats.waiting, stats.output_tokens, counters, keys)
        self._sink.write(encode(step))
        self._sink.flush()
        for one in arrived:
            one.told.set()


def flat(stats: EngineStats) -> dict[str, float]:
    """Counters as they travel, the seconds of a step's parts among them."""
    counters: dict[str, float] = {name: getattr(stats, name) for name in _COUNTERS}
    return counters | {name: getattr(stats.seconds, name) for name in _PARTS}


_COUNTERS = [field.name for field in fields(EngineStats) if field.name != "seconds"]
_PARTS = [field.name for field in fields(StepSeconds)]


def take_in(engine: EngineCore, inbox: Inbox, wait: bool) -> tuple[list[Arrived], list[Begun], list[Piece]]:
    """Apply everything in the inbox, waiting for a first item if there is nothing else to do."""
    arrived: list[Arrived] = []
    begun: list[Begun] = []
    refused: list[Piece] = []
    while wait or not inbox.empty():
        item = inbox.get()
        wait = False
        if isinstance(item, Drop):
            engine.abort(item.key)
        elif isinstance(item, Arrived):
            arrived.append(item)
        elif isinstance(item, Unfit):
            refused.append(error_piece(item.key, item.error))
        else:
            request = item.request
            try:
                engine.add(request)
            except RequestError as error:
                refused.append(error_piece(request.id, error))
            else:
                reached("started")
                begun.append(
                    Begun(
                        request.id,
                        request.num_prompt_tokens,
                        request.num_choices,
                        request.seed,
                        item.stream,
                    )
                )
    return arrived, begun, refused


def error_piece(key: str, error: RequestError) -> Piece:
    """The end of a job that failed."""
    return Piece(key, error_code=error.code, error_message=error.message)


def to_piece(delta: Delta) -> Piece:
    """A delta as it travels. What was made up to an error is kept, and the job's end is the choice's too."""
    error = delta.error
    return Piece(
        delta.request_id,
        delta.choice,
        delta.token_ids,
        delta.text,
        delta.last,
        delta.finish_reason if error is None else None,
        delta.stop_reason,
        delta.logprobs,
        delta.prompt_logprobs,
        error.code if error is not None else None,
        error.message if error is not None else None,
    )


def leave_signals_to_the_parent() -> None:
    """A service manager sends its SIGTERM to every process of a service. This one goes on, for the parent may want
    what it is at, and ends with its pipe. By a handler: what is ignored is ignored by a compiler it starts too.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def main() -> None:
    """Load the model named in the first frame, then run until the parent is gone."""
    leave_signals_to_the_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    source = os.fdopen(int(sys.argv[1]), "rb", READ_AT_ONCE)
    sink = os.fdopen(int(sys.argv[2]), "wb")
    with a_fault_ends_the_process():
        serve(source, sink)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """What `main` does, over the parent's pipes. Ends the process, unless the parent leaves before it says a word."""
    first = read(source)
    if first is None:
        return
    (load,) = decode_to_model(first)
    if not isinstance(load, Load):
        raise TypeError(f"the first word must be Load, not {type(load).__name__}")
    inbox: Inbox = queue.SimpleQueue()
    loading: Future[EngineCore] = Future()
    threading.Thread(target=read_frames, args=(source, loading, inbox), daemon=True).start()
    started = time.monotonic()
    try:
        engine = open_engine(load)
    except (ModelUnavailable, OptionRefused) as error:
        message = error.as_flags() if isinstance(error, OptionRefused) else str(error)
        sink.write(encode(Failed(message, isinstance(error, OptionRefused))))
        sink.close()
        os._exit(0)
    collect_rarely()
    loading.set_result(engine)
    sink.write(
        encode(Ready(engine.fingerprint.model_dump(), engine.max_num_seqs, time.monotonic() - started))
    )
    sink.flush()
    try:
        run(engine, inbox, sink)
    except DeviceLost as error:
        sink.write(encode(Lost(str(error))))
        sink.close()
        os._exit(1)


if __name__ == "__main__":
    main()
