"""From a payload to a request that the engine can add.

    reader thread    Run, nothing slow in it   -> prepare -> inbox
                     Run that compiles         -> pool    -> prepare -> inbox
                     Drop                      ------------------------> inbox, and what the pool makes of it is lost

A grammar may take 5 s to be refused, and so may a template that came with a job. Read one after the other, 64 such
rows held back every job and every cancel behind them for as long as all of them took.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import pydantic

from engine.interface import EngineCore, Request, Written
from protocol import ErrorCode, Job, RequestError, describe_validation
from worker.frames import Drop, Run
from worker.volume import check_volume

log = logging.getLogger("millstream.model")

T = TypeVar("T")

THREADS = 4
"""They mostly wait: grammars are tried one at a time in a process of their own."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job ready to be added."""

    request: Request
    stream: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A job that cannot run here."""

    key: str
    error: RequestError


Inbox = queue.SimpleQueue[Accepted | Refused | Drop]


class Preparation:
    """Prepares jobs for one engine. `run` and `drop` belong to one thread and never wait for anything slow."""

    def __init__(self, engine: EngineCore, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._in_pool: set[str] = set()
        self._lock = threading.Lock()

    def run(self, run: Run) -> None:
        """Prepare a job; what comes of it lands in the inbox."""
        job = decode(run)
        if isinstance(job, Refused):
            self._inbox.put(job)
        elif job.params.response_format is None and job.chat_template is None:
            self._inbox.put(prepare(self._engine, run, job))
        else:
            with self._lock:
                self._in_pool.add(run.key)
            self._pool.submit(self._in_its_time, run, job)

    def drop(self, drop: Drop) -> None:
        """Forget a job, wherever it is."""
        with self._lock:
            self._in_pool.discard(drop.key)
            self._inbox.put(drop)

    def _in_its_time(self, run: Run, job: Job) -> None:
        if run.key not in self._in_pool:
            return  # dropped while it waited
        prepared = prepare(self._engine, run, job)
        with self._lock:
            if run.key in self._in_pool:
                self._in_pool.remove(run.key)
                self._inbox.put(prepared)


def decode(run: Run) -> Job | Refused:
    """The job of a payload."""
    return _guarded(run.key, lambda: Job.decode(run.payload))


def prepare(engine: EngineCore, run: Run, job: Job) -> Accepted | Refused:
    """Render, tokenize and compile one job; in the engine it goes by the pipe's key."""

    def accepted() -> Accepted:
        request = engine.prepare(job)
        check_volume(request)
        return Accepted(replace(request, id=run.key, written=written(run, request)), job.stream)

    return _guarded(run.key, accepted)


def _guarded(key: str, act: Callable[[], T]) -> T | Refused:
    """What comes of it, or why the job alone fails."""
    try:
        return act()
    except pydantic.ValidationError as error:
        return Refused(key, RequestError(ErrorCode.INVALID_REQUEST, describe_validation(error)))
    except RequestError as error:
        return Refused(key, error)
    except BaseException as error:  # whatever a template, a tokenizer or a library in Rust comes up with
        log.exception("job %s could not be prepared", key)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Refused(key, RequestError(ErrorCode.ENGINE_ERROR, message))


def written(run: Run, request: Request) -> tuple[Written, ...]:
    """What earlier attempts logged, one a choice; nothing where they got nowhere."""
    if not run.written:
        return ()
    untouched = [Written()] * (request.num_choices - len(run.written))
    return (*(Written(tuple(token_ids), ended) for token_ids, ended in run.written), *untouched)
