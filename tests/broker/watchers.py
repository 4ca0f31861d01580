"""One who follows a job, sync or asyncio, stepped by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from broker import calls
from broker.connection import connect, connect_async
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from broker.watch import follow, follow_async
from protocol import TokenEvent
from tests.broker.steps import Worker, put

KEYS = Keys()
WORDS = [f"word{n} " for n in range(20)]
TEXT = "".join(WORDS)


class Watcher:
    """One follower, stepped by hand; of either kind."""

    def __init__(self, url: str, kind: str, job_id: str) -> None:
        self.events: list[Any] = []
        self._loop = asyncio.new_event_loop() if kind == "asyncio" else None
        if self._loop is None:
            self.queue: Any = Queue(connect(url), KEYS)
            self._stream: Any = follow(self.queue, job_id)
        else:
            self.queue = AsyncQueue(connect_async(url), KEYS)
            self._stream = follow_async(self.queue, job_id)

    def take(self, count: int) -> list[Any]:
        """The next events; fewer at the end."""
        for _ in range(count):
            try:
                if self._loop is None:
                    self.events.append(next(self._stream))
                else:
                    self.events.append(self._loop.run_until_complete(anext(self._stream)))
            except (StopIteration, StopAsyncIteration):
                break
        return self.events

    def rest(self) -> list[Any]:
        """Everything up to the end."""
        return self.take(1_000_000)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TokenEvent))

    def assert_whole(self, text: str = TEXT, kind: str = "done") -> None:
        assert self.text == text
        assert [event.seq for event in self.events] == list(range(1, len(self.events) + 1))
        assert [event.type for event in self.events if event.type != "token"] == [kind]
        assert self.events[-1].type == kind

    def leave(self) -> None:
        """Stop following."""
        if self._loop is None:
            self._stream.close()
        else:
            self._loop.run_until_complete(self._stream.aclose())

    def close(self) -> None:
        self.leave()
        if self._loop is None:
            self.queue.close()
        else:
            self._loop.run_until_complete(self.queue.close())
            self._loop.close()


Watch = Callable[[str], Watcher]


@contextmanager
def watchers(url: str, kind: str) -> Iterator[Watch]:
    """Starts watchers of that kind, and ends them."""
    begun: list[Watcher] = []

    def start(job_id: str) -> Watcher:
        begun.append(Watcher(url, kind, job_id))
        return begun[-1]

    yield start
    for watcher in begun:
        watcher.close()


def started(queue: Queue) -> calls.Lease:
    """A job that runs."""
    put(queue, "a")
    return Worker(queue).lease_one()


def cut_subscriptions(queue: Queue) -> int:
    """Cut off whoever is subscribed to anything; how many were."""
    client: Any = queue.client
    killed: int = client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    return killed
