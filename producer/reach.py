"""Where a producer's queue is: on the server of a URL, or on the embedded broker, held while it is open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import redis

from broker.address import resolve_url
from broker.connection import unreachable
from broker.embedded import EmbeddedBroker

OUTAGE_S = 10.0
"""For how long each call of a client rides out a server that restarts, or that another takes the place of."""


class Server:
    """The server a producer uses. `embedded`: nobody configured one, so it is the embedded broker's."""

    def __init__(self, redis_url: str | None) -> None:
        """
        Args:
            redis_url: beats `REDIS_URL`, which beats `MILLSTREAM_REDIS_URL`; the embedded broker without any.

        Raises:
            BrokerUnreachable: the embedded broker cannot be started.
        """
        given = resolve_url(redis_url, os.environ)
        self._broker = None if given else EmbeddedBroker()
        self._given = given

    @property
    def url(self) -> str:
        """Where it listens."""
        if self._broker is not None:
            return self._broker.url
        assert self._given is not None
        return self._given

    @property
    def embedded(self) -> bool:
        """Whether it is the embedded broker's server."""
        return self._broker is not None

    def revive(self) -> None:
        """Start the embedded broker's server again if it has ended; a server of the user's own is left alone."""
        if self._broker is not None:
            ended, self._broker = self._broker, EmbeddedBroker()
            ended.close()

    def close(self) -> None:
        """Give the embedded broker back; its last user stops it."""
        if self._broker is not None:
            self._broker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def faults_in_one_line(url: str) -> Iterator[None]:
    """Turn what redis-py raises into a `BrokerUnreachable` that names the server and says what to do."""
    try:
        yield
    except redis.RedisError as error:
        raise unreachable(url, error) from None
