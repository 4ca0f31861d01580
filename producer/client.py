"""The client library for blocking callers.

with Client() as client:
    job = client.submit("Why is the sky blue?", max_tokens=64)
    for text in job.text_stream():
        print(text, end="")
    print(job.result().usage)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import redis

from broker import calls
from broker.calls import Cancelled, Limits, Look, Status
from broker.clearing import Cleared, clear_all
from broker.connection import connect, wait_until_ready
from broker.keys import keys_of
from broker.pools import shut
from broker.queue import Queue, T
from broker.script import Call
from broker.watch import AnyEvent, follow
from producer.dead import DeadLetters
from producer.reach import OUTAGE_S, Server, faults_in_one_line
from producer.request import (
    Messages,
    Prompt,
    build_job,
    check_id,
    in_pipelines,
    jobs_asked_for,
    limits_call,
    memory_full,
    not_taken,
    queue_full,
    unless_failed,
    waits,
    weight_call,
)
from producer.wait import wait_for_result
from protocol import Job, Priority, Result, SamplingParams, State, TokenEvent
from protocol.job import DEFAULT_MAX_RETRIES, DEFAULT_RESULT_TTL_S


class JobHandle:
    """One job on its queue, whoever submitted it."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def stream(self) -> Iterator[AnyEvent]:
        """The job's events from the first to the terminal one, as they come; also after it has ended.

        Raises:
            JobNotFound: no such job, or its result has expired.
            BrokerUnreachable: the server is gone.
        """
        with faults_in_one_line(self._client.url):
            yield from follow(self._client.queue, self.id)

    def text_stream(self) -> Iterator[str]:
        """The text of the first choice, piece by piece. Raises as `stream`."""
        for event in self.stream():
            if isinstance(event, TokenEvent) and event.choice == 0 and event.text:
                yield event.text

    def result(self, timeout: float | None = None, *, check: bool = False) -> Result:
        """How the job ended, once it has.

        Args:
            timeout: seconds to wait; 0 looks once, None waits for ever.
            check: raise where the job did not succeed.

        Raises:
            JobNotFound: no such job, or its result has expired; at once.
            TimeoutError: it had not ended by then.
            JobFailed: with `check`, it failed, was cancelled, or expired.
            BrokerUnreachable: the server is gone.
        """
        with faults_in_one_line(self._client.url):
            result = wait_for_result(self._client.queue, self.id, timeout)
        return unless_failed(result) if check else result

    def cancel(self) -> tuple[Cancelled, State | None]:
        """Cancel it: `("cancelled", None)`, `("cancelling", None)`, `("ended", state)` or `("unknown", None)`."""
        return self._client.run(calls.cancel(self._client.queue.keys, self.id))

    def status(self) -> Look:
        """Where it stands; `state` None: no such job, or its result has expired."""
        return self._client.run(calls.look(self._client.queue.keys, self.id))


class Client:
    """A queue, as a producer uses it. Threads may share one."""

    def __init__(
        self, redis_url: str | None = None, queue: str = "default", *, patience_s: float = 0.0
    ) -> None:
        """
        Args:
            redis_url: beats `REDIS_URL`, which beats `MILLSTREAM_REDIS_URL`; the embedded broker without any.
            queue: its name.
            patience_s: how long to wait for a server that does not answer yet, in seconds.

        Raises:
            BrokerUnreachable: no server answers; one line says why.
            RequestError: no queue can have that name.
        """
        keys = keys_of(queue)
        self._server = Server(redis_url)
        self.url = self._server.url
        try:
            wait_until_ready(self.url, patience_s, keys)
        except BaseException:
            self._server.close()
            raise
        self.queue = Queue(connect(self.url, keys, OUTAGE_S), keys)

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        id: str | None = None,
        params: SamplingParams | None = None,
        priority: Priority = "normal",
        tenant: str = "default",
        model: str | None = None,
        stream: bool = True,
        result_ttl_s: float | None = DEFAULT_RESULT_TTL_S,
        not_before: float | None = None,
        delay_s: float | None = None,
        deadline: float | None = None,
        deadline_in_s: float | None = None,
        max_retries: int = DEFAULT_MAX_RETRIES,
        wait_s: float | None = None,
        **sampling: Any,
    ) -> JobHandle:
        """Queue a job and return at once.

        Args:
            prompt: text, or token ids of the model's tokenizer; a list of either is that many prompts, each with
                choices of its own.
            messages: a chat, as dicts of `role` and `content`; instead of `prompt`.
            tools: functions the model may call, in OpenAI's shape, for the chat's template.
            chat_template: a Jinja template instead of the model's own.
            chat_template_kwargs: more variables for the template.
            add_generation_prompt: whether the template opens the assistant's turn; None: yes, unless the next.
            continue_final_message: the answer goes on with the last message.
            add_special_tokens: whether the tokenizer adds what it adds to a text, such as a BOS.
            split_special_tokens: read special tokens in the text as plain text.
            id: names the job; the same id with the same job again is the same job. Default: a random one.
            params: sampling parameters; or give single ones by name (`max_tokens=64, temperature=0`):
                `SamplingParams` lists them, `docs/sampling.md` compares them.
            priority: before which others it runs.
            tenant: on whose account; tenants share a queue fairly.
            model: refuse to be answered by a model of another name.
            stream: False where nobody will watch token by token.
            result_ttl_s: how long the result is kept, in seconds; 0 or None: until it is deleted.
            not_before: when it may start, in seconds since the epoch by the server's clock.
            delay_s: the same, in seconds from now.
            deadline: when it is no longer wanted, as `not_before`: it never starts after it, and is stopped at it.
            deadline_in_s: the same, in seconds from now.
            max_retries: how often it is tried again after an error that can pass.
            wait_s: how long to wait for room in a full queue, in seconds; None does not.

        Raises:
            RequestError: an argument is out of its range, the job has more than 4 MiB, or its answer may have more
                than 256 MiB.
            JobConflict: the id belongs to another job.
            QueueFull: the queue is full.
            BrokerUnreachable: the server is gone.
        """
        job = build_job(
            prompt,
            messages,
            params,
            sampling,
            id,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
            priority=priority,
            tenant=tenant,
            model=model,
            stream=stream,
            result_ttl_s=result_ttl_s,
            not_before=not_before,
            delay_s=delay_s,
            deadline=deadline,
            deadline_in_s=deadline_in_s,
            max_retries=max_retries,
        )
        self._submit([job], wait_s)
        return JobHandle(self, job.id)

    def submit_many(self, jobs: Iterable[Job], wait_s: float | None = None) -> list[JobHandle]:
        """Queue jobs in order, hundreds in one round trip.

        After an error an unknown number of them is queued: submit all again, the ids keep them from running twice.

        Raises:
            As `submit`.
        """
        handles: list[JobHandle] = []
        for batch in in_pipelines(jobs):
            self._submit(batch, wait_s)
            handles += [JobHandle(self, job.id) for job in batch]
        return handles

    def job(self, job_id: str) -> JobHandle:
        """A handle on a job that somebody has submitted. Asks nobody."""
        return JobHandle(self, check_id(job_id))

    def status(self) -> Status:
        """The queue and its workers at a glance."""
        return self.run(calls.status(self.queue.keys))

    @property
    def dead(self) -> DeadLetters:
        """The queue's dead letters."""
        return DeadLetters(self)

    def pause(self) -> None:
        """Let no more jobs start; those that run go on."""
        self.run(calls.pause(self.queue.keys, True))

    def resume(self) -> None:
        """Let jobs start again."""
        self.run(calls.pause(self.queue.keys, False))

    def clear(
        self, *, priority: Priority | None = None, tenant: str | None = None, running: bool = False
    ) -> Cleared:
        """Cancel the jobs that wait; how many there were. They end as `cancelled`: who waits for one is told.

        Args:
            priority: only those of this priority.
            tenant: only those of this tenant.
            running: also those that run: their workers stop them within a step.

        Raises:
            RequestError: no job can have that priority or tenant.
            BrokerUnreachable: the server is gone; some are cancelled, and the same call goes on with the others.
        """
        return clear_all(self.run, self.queue.keys, jobs_asked_for(priority, tenant, running))

    def limits(self, max_entries: int | None = None, max_bytes: int | None = None) -> Limits:
        """Set how much the queue holds, waiting and running, or ask.

        Args:
            max_entries: jobs; None leaves the bound as it is, 0 sets it to the default.
            max_bytes: bytes of their payloads; likewise.

        Raises:
            RequestError: a bound is below 0.
            BrokerUnreachable: the server is gone.
        """
        return self.run(limits_call(self.queue.keys, max_entries, max_bytes))

    def weights(self) -> dict[str, float]:
        """The weights of the tenants that have one other than 1."""
        return self.run(calls.weights(self.queue.keys))

    def set_weight(self, tenant: str, weight: float) -> None:
        """Give a tenant a share of the picks; beside one of weight 1 it has `weight` times as many.

        Raises:
            RequestError: no tenant can have that name or that weight.
            BrokerUnreachable: the server is gone.
        """
        self.run(weight_call(self.queue.keys, tenant, weight))

    def run(self, call: Call[T]) -> T:
        """Run one call of `broker.calls`.

        Raises:
            BrokerUnreachable: the server is gone.
        """
        with faults_in_one_line(self.url):
            return self.queue.run(call)

    def close(self) -> None:
        """Close the connections, and give back the embedded broker if it was used. Calls that are open in other
        threads, and later ones, raise `ClientClosed`.
        """
        shut(self.queue.client)
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, jobs: list[Job], wait_s: float | None) -> None:
        pauses = waits(wait_s)
        while True:
            with faults_in_one_line(self.url):
                try:
                    parts = self.queue.run_all(calls.submit_parts(self.queue.keys, jobs))
                except redis.OutOfMemoryError as error:
                    full = memory_full(self.queue.keys.queue, error)
                else:
                    jobs, answer = not_taken(jobs, [*chain.from_iterable(parts)])
                    if answer is None:
                        return
                    full = queue_full(self.queue.keys.queue, answer)
            pause_s = next(pauses, None)
            if pause_s is None:
                raise full
            time.sleep(pause_s)
