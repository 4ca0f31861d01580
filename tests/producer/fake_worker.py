"""A worker without a model: it leases jobs and ends them through `broker.calls`, on a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from broker import calls
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from engine.requests import check_model
from protocol import (
    Choice,
    Fingerprint,
    Job,
    JobError,
    RequestError,
    Result,
    TokenLogprob,
    Usage,
    encode_terminal,
    encode_token,
)

Answer = Callable[[Job], str]
LEASE_MS = 5000


class Failure(Exception):
    """Raised by an answer: the job fails with this message."""


def echo(job: Job) -> str:
    """The prompt, or what the user said last."""
    if job.messages is not None:
        return job.messages[-1].text
    first = job.prompts[0]
    return first if isinstance(first, str) else " ".join(map(str, first))


class FakeWorker:
    """Answers the jobs of a queue, one after the other; `answered` lists their ids in order."""

    def __init__(
        self,
        url: str,
        queue: str = "default",
        answer: Answer = echo,
        *,
        name: str = "fake",
        model: str = "m",
    ) -> None:
        self.answered: list[str] = []
        self._queue = Queue(connect(url), Keys(queue))
        self._answer = answer
        self._name = name
        self._model = model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> Self:
        keys = self._queue.keys
        assert self._queue.run(calls.register(keys, self._name, Fingerprint(name=self._model))) is None
        self._queue.run(calls.heartbeat(keys, self._name, {"model": self._model, "running": 1, "pid": 7}))
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | TracebackType | BaseException | None) -> None:
        self._stop.set()
        self._thread.join()
        self._queue.close()

    def _run(self) -> None:
        number = 0
        with self._queue.client.pubsub() as control:
            control.subscribe(self._queue.keys.control)
            while not self._stop.is_set():
                number += 1
                leases = self._queue.run(
                    calls.lease(self._queue.keys, self._name, number, 20, LEASE_MS)
                ).leases
                for lease in leases:
                    self._end(lease)
                if not leases:
                    control.get_message(timeout=0.05)

    def _end(self, lease: calls.Lease) -> None:
        job = Job.decode(lease.payload)
        try:
            check_model(job, self._model)
            text = self._answer(job)
        except RequestError as error:
            self._fail(job, lease, error.message, error.code)
        except Failure as failure:
            self._fail(job, lease, str(failure))
        else:
            self._succeed(job, lease, text)
        self.answered.append(job.id)

    def _succeed(self, job: Job, lease: calls.Lease, text: str) -> None:
        """The answer as choice 0, and the same with its number after it as every other one, a word at a time."""
        choices = [
            _choice(job, text if number == 0 else f"{text} {number}", number)
            for number in range(job.num_choices)
        ]
        events: list[bytes] = []
        for word in range(max(len(choice.token_ids) for choice in choices)):
            for choice in choices:
                if word < len(choice.token_ids):
                    events.append(_event(choice, word, job.id, len(events) + 1, lease.attempt))
        done = encode_terminal(job.id, len(events) + 1, lease.attempt, "done")
        result = Result(
            id=job.id,
            state="succeeded",
            choices=choices,
            usage=Usage(
                prompt_tokens=len(text.split(" ")),
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
            ),
            model=self._model,
            seed=job.seed,
            attempt=lease.attempt,
            worker=self._name,
            finished_at=time.time(),
        )
        self._queue.run(
            calls.finish(
                self._queue.keys,
                self._name,
                job.id,
                lease.attempt,
                "succeeded",
                result.encode(),
                1,
                [*events, done],
            )
        )

    def _fail(self, job: Job, lease: calls.Lease, message: str, code: str = "engine_error") -> None:
        error = encode_terminal(job.id, 1, lease.attempt, "error", code, message)
        result = Result(
            id=job.id,
            state="failed",
            error=JobError(code=code, message=message),
            attempt=lease.attempt,
            model=self._model,
        )
        fence = (self._queue.keys, self._name, job.id, lease.attempt)
        self._queue.run(calls.finish(*fence, "failed", result.encode(), 1, [error]))


def _choice(job: Job, text: str, number: int) -> Choice:
    pieces = _pieces(text)
    stop = job.params.stop[0] if job.params.stop else None
    told = [
        TokenLogprob(token_id=place, token=piece, logprob=-0.5, rank=1, top_logprobs=[])
        for place, piece in enumerate(pieces, 1)
    ]
    return Choice(
        index=number,
        text=text,
        token_ids=list(range(1, len(pieces) + 1)),
        finish_reason="length" if len(pieces) == job.params.token_limit else "stop",
        stop_reason=stop,
        logprobs=None if job.params.num_logprobs is None else told,
    )


def _event(choice: Choice, word: int, job_id: str, seq: int, attempt: int) -> bytes:
    last = word == len(choice.token_ids) - 1
    return encode_token(
        job_id,
        seq,
        attempt,
        choice.index,
        _pieces(choice.text)[word],
        [choice.token_ids[word]],
        choice.finish_reason if last else None,
        choice.stop_reason if last else None,
    )


def _pieces(text: str) -> list[str]:
    words = text.split(" ")
    return [word + " " for word in words[:-1]] + [words[-1]]
