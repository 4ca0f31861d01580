"""From a payload to a request that the engine can add.

    reader thread    Run, mostly         -> one thread       -> prepare -> inbox     in order
                     Run, may take long  -> several threads  -> prepare -> inbox     as it comes
                     Drop                -------------------------------> inbox     what comes of it later is lost

A grammar may take 5 s to be refused, and so may a template that came with a job; 4 MiB of text are tokenized in as
long. Read one after the other, 16 such rows held back every job and every cancel behind them for 80 s.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pydantic

from engine.interface import EngineCore, Request, Written
from protocol import ErrorCode, Job, RequestError, describe_validation
from protocol.plain import read_plain
from worker.frames import Drop, Run
from worker.volume import check_volume

log = logging.getLogger("millstream.model")

T = TypeVar("T")

LONG_PAYLOAD = 1 << 16
"""Bytes; from here on tokenizing is counted in tens of milliseconds."""
THREADS = 4
"""They mostly wait: grammars are tried one at a time in a process of their own."""


@dataclass(slots=True)
class Accepted:
    """A job ready to be added."""

    request: Request
    stream: bool


@dataclass(frozen=True, slots=True)
class Unfit:
    """A job that cannot run here."""

    key: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Arrived:
    """A suspect has come, and waits until the parent has been told so."""

    key: str
    told: threading.Event = field(default_factory=threading.Event)


Inbox = queue.SimpleQueue[Accepted | Unfit | Drop | Arrived]


class Preparation:
    """Prepares jobs for one engine. `run` and `drop` belong to one thread and never wait for anything slow."""

    def __init__(self, engine: EngineCore, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._in_order: queue.SimpleQueue[tuple[Run, Job]] = queue.SimpleQueue()
        self._beside = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare-long")
        self._wanted: set[str] = set()
        """Keys of jobs that are with one of them and have not been dropped."""
        self._lock = threading.Lock()
        threading.Thread(target=self._one_after_the_other, name="prepare", daemon=True).start()

    def run(self, run: Run) -> None:
        """Prepare a job; what comes of it lands in the inbox."""
        if run.alone:
            self._want(run)
            arrived = Arrived(run.key)
            self._inbox.put(arrived)
            self._beside.submit(self._once_told, arrived, run)
            return
        job = decode(run)
        if isinstance(job, Unfit):
            self._inbox.put(job)
            return
        self._want(run)
        if may_take_long(run, job):
            self._beside.submit(self._in_its_time, run, job)
        else:
            self._in_order.put((run, job))

    def drop(self, drop: Drop) -> None:
        """Forget a job, wherever it is."""
        with self._lock:
            self._wanted.discard(drop.key)
            self._inbox.put(drop)

    def _want(self, run: Run) -> None:
        with self._lock:
            self._wanted.add(run.key)

    def _once_told(self, arrived: Arrived, run: Run) -> None:
        """A suspect is not touched before the parent knows that it is here."""
        arrived.told.wait()
        job = decode(run)
        if isinstance(job, Unfit):
            self._give(run.key, job)
        else:
            self._in_its_time(run, job)

    def _one_after_the_other(self) -> None:
        """A plain queue: an executor's future a job costs as much as preparing it for a small model."""
        while True:
            self._in_its_time(*self._in_order.get())

    def _in_its_time(self, run: Run, job: Job) -> None:
        if run.key not in self._wanted:
            return  # dropped while it waited
        self._give(run.key, prepare(self._engine, run, job))

    def _give(self, key: str, prepared: Accepted | Unfit) -> None:
        with self._lock:
            if key in self._wanted:
                self._wanted.remove(key)
                self._inbox.put(prepared)


def may_take_long(run: Run, job: Job) -> bool:
    """Whether jobs behind it should not wait for its preparation."""
    params = job.params
    compiles = params.response_format is not None or job.chat_template is not None
    return compiles or bool(params.bad_words) or len(run.payload) > LONG_PAYLOAD


def decode(run: Run) -> Job | Unfit:
    """The job of a payload."""
    return _guarded(run.key, lambda: read_plain(run.payload) or Job.decode(run.payload))


def prepare(engine: EngineCore, run: Run, job: Job) -> Accepted | Unfit:
    """Render, tokenize and compile one job; in the engine it goes by the pipe's key."""

    def accepted() -> Accepted:
        request = engine.prepare(job)
        check_volume(request)
        request.id = run.key
        request.written = written(run, request)
        return Accepted(request, job.stream)

    return _guarded(run.key, accepted)


def _guarded(key: str, act: Callable[[], T]) -> T | Unfit:
    """What comes of it, or why the job alone fails."""
    try:
        return act()
    except pydantic.ValidationError as error:
        return Unfit(key, RequestError(ErrorCode.INVALID_REQUEST, describe_validation(error)))
    except RequestError as error:
        return Unfit(key, error)
    except BaseException as error:  # whatever a template, a tokenizer or a library in Rust comes up with
        log.exception("job %s could not be prepared", key)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Unfit(key, RequestError(ErrorCode.ENGINE_ERROR, message))


def written(run: Run, request: Request) -> tuple[Written, ...]:
    """What earlier attempts logged, one a choice; nothing where they got nowhere."""
    if not run.written:
        return ()
    untouched = [Written()] * (request.num_choices - len(run.written))
    return (*(Written(tuple(token_ids), ended) for token_ids, ended in run.written), *untouched)
