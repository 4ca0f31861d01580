"""One channel of a queue, on any set-up.

On a cluster the scripts say SPUBLISH and a channel is subscribed to with SSUBSCRIBE: it lives on the node that holds
the queue, and the other nodes hear nothing of it. When the slot moves, the old node ends the subscription; it is made
again on the new one, and the caller, who hears of that, looks at what it may have missed.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from broker.finding import is_sharded

Message = dict[str, Any]
"""`type` is `message`, or the kind of a confirmation; `data` are the bytes that were published."""


class Channel:
    """For blocking callers."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        speaker: Any = client
        self._pubsub: Any = speaker.pubsub()
        self._subscribe = self._pubsub.ssubscribe if is_sharded(client) else self._pubsub.subscribe
        self._name = name

    def subscribe(self) -> None:
        """Ask for what is published from now on; the confirmation comes as a message."""
        self._subscribe(self._name)

    def get(self, timeout_s: float) -> Message | None:
        """The next message or confirmation; None after `timeout_s` seconds without."""
        message = _plain(self._pubsub.get_message(timeout=timeout_s))
        if message is not None and message["type"] == "sunsubscribe":
            self.subscribe()
        return message

    def close(self) -> None:
        """End the subscription and its connection."""
        self._pubsub.close()


class AsyncChannel:
    """As `Channel`, for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, name: str) -> None:
        speaker: Any = client
        self._pubsub: Any = speaker.pubsub()
        self._subscribe = self._pubsub.ssubscribe if is_sharded(client) else self._pubsub.subscribe
        self._name = name

    async def subscribe(self) -> None:
        """As `Channel.subscribe`."""
        await self._subscribe(self._name)

    async def get(self, timeout_s: float) -> Message | None:
        """As `Channel.get`."""
        message = _plain(await self._pubsub.get_message(timeout=timeout_s))
        if message is not None and message["type"] == "sunsubscribe":
            await self.subscribe()
        return message

    async def aclose(self) -> None:
        """As `Channel.close`."""
        await self._pubsub.aclose()


def _plain(message: Message | None) -> Message | None:
    """A sharded message looks like any other."""
    if message is not None and message["type"] == "smessage":
        message["type"] = "message"
    return message
