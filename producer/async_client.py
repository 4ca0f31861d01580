"""The client library for asyncio; arguments and errors are those of `producer.client`.

async with AsyncClient() as client:
    job = await client.submit("Why is the sky blue?", max_tokens=64)
    async for text in job.text_stream():
        print(text, end="")
    print((await job.result()).usage)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, Self

import redis

from broker import calls
from broker.calls import Cancelled, Limits, Look, Status
from broker.clearing import Cleared, clearing
from broker.connection import connect_async, wait_until_ready_async
from broker.keys import keys_of
from broker.pools import shut_async
from broker.queue import AsyncQueue, T
from broker.script import Call
from broker.watch import AnyEvent, follow_async
from producer.dead import AsyncDeadLetters
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
from producer.wait import wait_for_result_async
from protocol import ClientClosed, Job, Priority, Result, SamplingParams, State, TokenEvent
from protocol.job import DEFAULT_MAX_RETRIES, DEFAULT_RESULT_TTL_S


class AsyncJobHandle:
    """`JobHandle`, for asyncio."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"AsyncJobHandle({self.id!r})"

    async def stream(self) -> AsyncGenerator[AnyEvent, None]:
        """The job's events from the first to the terminal one."""
        with faults_in_one_line(self._client.url):
            async with aclosing(follow_async(self._client.queue, self.id)) as events:
                async for event in events:
                    yield event

    async def text_stream(self) -> AsyncGenerator[str, None]:
        """The text of the first choice, piece by piece."""
        async with aclosing(self.stream()) as events:
            async for event in events:
                if isinstance(event, TokenEvent) and event.choice == 0 and event.text:
                    yield event.text

    async def result(self, timeout: float | None = None, *, check: bool = False) -> Result:
        """How the job ended, once it has."""
        with faults_in_one_line(self._client.url):
            result = await wait_for_result_async(self._client.queue, self.id, timeout)
        return unless_failed(result) if check else result

    async def cancel(self) -> tuple[Cancelled, State | None]:
        """Cancel it."""
        return await self._client.run(calls.cancel(self._client.queue.keys, self.id))

    async def status(self) -> Look:
        """Where it stands."""
        return await self._client.run(calls.look(self._client.queue.keys, self.id))


class AsyncClient:
    """`Client`, for asyncio; it reaches for the server in `async with`, so nothing blocks before."""

    def __init__(
        self, redis_url: str | None = None, queue: str = "default", *, patience_s: float = 0.0
    ) -> None:
        self._redis_url = redis_url
        self._keys = keys_of(queue)
        self._patience_s = patience_s
        self._server: Server | None = None
        self._queue: AsyncQueue | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """Where the server listens.

        Raises:
            RuntimeError: the client is not open yet.
            ClientClosed: it was.
        """
        return self._opened()[0].url

    @property
    def queue(self) -> AsyncQueue:
        """The queue's connections. Raises as `url`."""
        return self._opened()[1]

    def _opened(self) -> tuple[Server, AsyncQueue]:
        if self._is_closed:
            raise ClientClosed("this client is closed")
        if self._server is None or self._queue is None:
            raise RuntimeError(
                "this AsyncClient is not open: use it inside `async with AsyncClient() as client:`"
            )
        return self._server, self._queue

    async def __aenter__(self) -> Self:
        server = await asyncio.to_thread(Server, self._redis_url)
        try:
            await wait_until_ready_async(server.url, self._patience_s, self._keys)
        except BaseException:
            await asyncio.to_thread(server.close)
            raise
        self._server = server
        self._is_closed = False
        self._queue = AsyncQueue(connect_async(server.url, self._keys, OUTAGE_S), self._keys)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, and give back the embedded broker if it was used; nothing if it is not open. Other
        tasks' open calls, and later ones, raise `ClientClosed`; `async with` opens it anew.
        """
        server, queue, self._server, self._queue = self._server, self._queue, None, None
        if queue is not None:
            self._is_closed = True
            await shut_async(queue.client)
        if server is not None:
            await asyncio.to_thread(server.close)

    async def submit(
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
    ) -> AsyncJobHandle:
        """Queue a job and return at once."""
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
        await self._submit([job], wait_s)
        return AsyncJobHandle(self, job.id)

    async def submit_many(self, jobs: Iterable[Job], wait_s: float | None = None) -> list[AsyncJobHandle]:
        """Queue jobs in order, hundreds in one round trip; after an error submit all again."""
        handles: list[AsyncJobHandle] = []
        for batch in in_pipelines(jobs):
            await self._submit(batch, wait_s)
            handles += [AsyncJobHandle(self, job.id) for job in batch]
        return handles

    def job(self, job_id: str) -> AsyncJobHandle:
        """A handle on a job that somebody has submitted. Asks nobody."""
        return AsyncJobHandle(self, check_id(job_id))

    async def status(self) -> Status:
        """The queue and its workers at a glance."""
        return await self.run(calls.status(self.queue.keys))

    @property
    def dead(self) -> AsyncDeadLetters:
        """The queue's dead letters."""
        return AsyncDeadLetters(self)

    async def pause(self) -> None:
        """Let no more jobs start; those that run go on."""
        await self.run(calls.pause(self.queue.keys, True))

    async def resume(self) -> None:
        """Let jobs start again."""
        await self.run(calls.pause(self.queue.keys, False))

    async def clear(
        self, *, priority: Priority | None = None, tenant: str | None = None, running: bool = False
    ) -> Cleared:
        """Cancel the jobs that wait, and those that run if asked; how many there were."""
        steps = clearing(self.queue.keys, jobs_asked_for(priority, tenant, running))
        reply: Any = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as through:
                cleared: Cleared = through.value
                return cleared
            reply = await self.run(call)

    async def limits(self, max_entries: int | None = None, max_bytes: int | None = None) -> Limits:
        """Set how much the queue holds, or ask."""
        return await self.run(limits_call(self.queue.keys, max_entries, max_bytes))

    async def weights(self) -> dict[str, float]:
        """The weights of the tenants that have one other than 1."""
        return await self.run(calls.weights(self.queue.keys))

    async def set_weight(self, tenant: str, weight: float) -> None:
        """Give a tenant a share of the picks."""
        await self.run(weight_call(self.queue.keys, tenant, weight))

    async def run(self, call: Call[T]) -> T:
        """Run one call of `broker.calls`."""
        with faults_in_one_line(self.url):
            return await self.queue.run(call)

    async def _submit(self, jobs: list[Job], wait_s: float | None) -> None:
        pauses = waits(wait_s)
        while True:
            with faults_in_one_line(self.url):
                try:
                    parts = await self.queue.run_all(calls.submit_parts(self.queue.keys, jobs))
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
            await asyncio.sleep(pause_s)
