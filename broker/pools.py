"""A client's connections: few are kept when a peak is over, and none comes back once the client is closed."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from broker.finding import Gate

KEPT = 16
"""Idle connections of one client that stay open, and as many more as are in use: each of 300 watchers asks now and
then, and without a bound what that takes at its peak would stay on the server until the client is closed.
"""


class Pool(redis.ConnectionPool):
    """For blocking callers."""

    def release(self, connection: Any) -> None:
        """Take a connection back; close what is too many."""
        gate: Gate = self.connection_kwargs["gate"]
        if gate.closed:
            connection.disconnect()
        super().release(connection)
        with self._lock:
            idle: list[Any] = self._available_connections
            for one in _spare(connection, idle, len(self._in_use_connections)):
                one.disconnect()
                idle.remove(one)
                self._created_connections -= 1

    def shut(self) -> None:
        """Close every connection, and let none be made. Who waits for one in another thread gets `ClientClosed`."""
        self._checkpid()
        gate: Gate = self.connection_kwargs["gate"]
        gate.closed = True
        with self._lock:
            idle: list[Any] = self._available_connections
            used: list[Any] = [*self._in_use_connections]
            for connection in idle:
                connection.disconnect()
            for connection in used:
                connection.cut()


class AsyncPool(redis.asyncio.ConnectionPool):
    """As `Pool`, for asyncio."""

    async def release(self, connection: Any) -> None:
        """As `Pool.release`."""
        gate: Gate = self.connection_kwargs["gate"]
        if gate.closed:
            await connection.disconnect(nowait=True)
        await super().release(connection)
        idle: list[Any] = self._available_connections
        spare = _spare(connection, idle, len(self._in_use_connections))
        for one in spare:
            idle.remove(one)  # before anything is awaited: nobody else may take it
        for one in spare:
            await one.disconnect(nowait=True)

    async def shut(self) -> None:
        """As `Pool.shut`, for other tasks."""
        gate: Gate = self.connection_kwargs["gate"]
        gate.closed = True
        used: list[Any] = [*self._in_use_connections]
        idle: list[Any] = [*self._available_connections]
        for connection in used:
            connection.cut()
        for connection in idle:
            await connection.disconnect(nowait=True)


def _spare(returned: Any, idle: list[Any], in_use: int) -> list[Any]:
    """Which idle connections to close as one is taken back: that one if it is none any more, and what is too many."""
    spare = [returned] if returned in idle and not returned.is_connected else []
    spare += idle[: max(0, len(idle) - max(KEPT, in_use))]
    return list(dict.fromkeys(spare))


def shut(client: redis.Redis) -> None:
    """Close a client of ours for good, under the calls that are open."""
    pool = client.connection_pool
    assert isinstance(pool, Pool)
    pool.shut()


async def shut_async(client: redis.asyncio.Redis) -> None:
    """As `shut`, for asyncio."""
    pool = client.connection_pool
    assert isinstance(pool, AsyncPool)
    await pool.shut()
