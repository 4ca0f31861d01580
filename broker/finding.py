"""Connections that find the server they belong to, and leave it once it is no longer the one.

    server     the address of the URL
    sentinel   whom the sentinels call the primary          asked at every connect
    cluster    the primary that holds the queue's slot      asked at every connect

One queue lives on one server in every set-up (its keys share a hash tag), so one kind of client serves all of them;
redis-py's own client for clusters routes each command by its key, which nothing here needs. A server that says
READONLY, MOVED or CLUSTERDOWN is not the one any more: its connection is dropped, though it may be in good health,
and the caller's next try finds the right one. Without that a client behind a proxy or a moved host name would talk
to the old primary for ever.
"""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import hiredis
import redis
import redis.asyncio
import redis.asyncio.connection as aio
import redis.connection as sync
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError
from redis.retry import Retry

from broker.address import Address, Transport
from protocol.errors import ClientClosed

Place = tuple[str, int]
"""(host, port)"""

PIECE_BYTES = 1 << 16
"""Of a message on its way to the server."""
LEFT_AT = (ReadOnlyError, MovedError, ClusterDownError)
"""What a server says that is not, or not any more, the one to talk to."""


class Find(ABC):
    """Asks one host after the other; the last that answered comes first."""

    unknown = "none of them knows"
    """What to say when all have answered, and in vain."""

    def __init__(self, hosts: tuple[Place, ...], transport: Transport, options: dict[str, Any]) -> None:
        self._hosts = hosts
        self._first = hosts[0]
        self._connection = sync.SSLConnection if transport == "tls" else sync.Connection
        self._options = {**options, "retry": Retry(NoBackoff(), 0)}

    def __call__(self) -> Place:
        """Where the server is now.

        Raises:
            redis.ConnectionError: nobody knows.
        """
        fault: Exception | None = None
        for host, port in dict.fromkeys((self._first, *self._hosts)):
            pool = redis.ConnectionPool(self._connection, host=host, port=port, **self._options)
            with redis.Redis.from_pool(pool) as client:
                try:
                    place = self._ask(client, (host, port))
                except (redis.ConnectionError, redis.TimeoutError, ClusterDownError) as error:
                    fault = error
                    continue
            if place is not None:
                self._first = self._next(place, (host, port))
                return place
        # A ConnectionError whatever it was: redis-py tries such a one again.
        raise redis.ConnectionError(str(fault) if fault else self.unknown) from fault

    @abstractmethod
    def _ask(self, client: redis.Redis, asked: Place) -> Place | None:
        """What one of the hosts says. None: it does not know."""

    @abstractmethod
    def _next(self, place: Place, asked: Place) -> Place:
        """Whom to ask first the next time."""


class FindPrimary(Find):
    """The primary of a service, from its sentinels.

    Source: https://redis.io/docs/latest/develop/reference/sentinel-clients/
    """

    def __init__(self, service: str, *args: Any) -> None:
        super().__init__(*args)
        self._service = service
        self.unknown = f"the sentinels know no service '{service}'"

    def _ask(self, client: redis.Redis, asked: Place) -> Place | None:  # noqa: ARG002
        execute: Callable[..., Any] = client.execute_command
        reply = execute("SENTINEL GET-MASTER-ADDR-BY-NAME", self._service)
        if reply is None:
            return None
        host, port = reply
        return (host.decode() if isinstance(host, bytes) else host), int(port)

    def _next(self, place: Place, asked: Place) -> Place:  # noqa: ARG002
        return asked


class FindSlot(Find):
    """The primary of a cluster that holds a key's slot: any node answers for the key, or names the one that does.

    Source: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#moved-redirection
    """

    def __init__(self, key: str, *args: Any) -> None:
        super().__init__(*args)
        self._key = key

    def _ask(self, client: redis.Redis, asked: Place) -> Place | None:
        try:
            client.exists(self._key)
        except MovedError as moved:
            return moved.host or asked[0], moved.port
        return asked

    def _next(self, place: Place, asked: Place) -> Place:  # noqa: ARG002
        return place


def finder(address: Address, key: str) -> Find | None:
    """How to find the server for a key. None: the URL says where it is."""
    if address.setup == "server":
        return None
    if address.setup == "cluster":
        return FindSlot(key, address.hosts, address.transport, address.options)
    own = {**address.options, **address.sentinel_options}
    for name in {"username", "password"} - address.sentinel_options.keys():
        own.pop(name, None)  # the server's are not the sentinels'
    own.pop("db", None)
    return FindPrimary(address.service, address.hosts, address.transport, own)


def is_sharded(client: redis.Redis | redis.asyncio.Redis) -> bool:
    """Whether the client's server is a node of a cluster."""
    return isinstance(client.connection_pool.connection_kwargs.get("find"), FindSlot)


class _Packer(sync.HiredisRespSerializer):
    """Packs our scripts' calls in C alone: redis-py looks at each of their thousand arguments before it does."""

    def pack(self, *args: Any) -> list[bytes]:
        """One command as it is sent."""
        if args[0] in ("EVALSHA", "EVAL"):
            return [hiredis.pack_command(args)]
        packed: list[bytes] = super().pack(*args)
        return packed


class Gate:
    """Whether a client may still connect; all its connections know."""

    closed = False

    def check(self) -> None:
        """Raises ClientClosed behind a closed one."""
        if self.closed:
            raise ClientClosed("this client is closed")


class _Finding:
    """What a blocking connection does beside redis-py's own: find the server, and leave it.

    A new connection is not pinged: redis-py does so within connecting, and where a server answers that it is loading,
    it connects again within that, ever deeper, until Python's limit (in some four seconds).
    """

    health_check_interval: Any
    next_health_check: Any
    _sock: Any

    def __init__(self, *, find: Find | None = None, gate: Gate | None = None, **options: Any) -> None:
        self._find = find
        self._gate = gate or Gate()
        super().__init__(command_packer=_Packer(), **options)  # type: ignore[call-arg]

    def connect_check_health(self, *args: Any, **options: Any) -> Any:
        """As redis-py's own; also for a connection that stands, whenever one is taken from the pool."""
        self._gate.check()
        return super().connect_check_health(*args, **options)  # type: ignore[misc]

    def cut(self) -> None:
        """End it under whoever reads from it or writes to it: to them the server has closed it."""
        if (open_socket := self._sock) is not None:
            with suppress(OSError):
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    def _connect(self) -> Any:
        if self._find is not None:
            self.host, self.port = self._find()
        self.next_health_check = time.monotonic() + self.health_check_interval
        return super()._connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except LEFT_AT as error:
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError(str(error)) from error


class _Parser(aio.DefaultParser):  # type: ignore[valid-type, misc]  # a variable, says redis-py
    """Time runs from the last piece of a reply that came: redis-py gives `socket_timeout` to the whole of it."""

    def on_connect(self, connection: Any) -> None:
        """As redis-py's own."""
        self._connection = connection
        super().on_connect(connection)

    async def read_from_socket(self) -> bool:
        """As redis-py's own."""
        await super().read_from_socket()
        self._connection.update_current_socket_timeout(-1)  # its own word for `socket_timeout`, from now on
        return True


class _FindingAsync:
    """As `_Finding`, for asyncio; the asking is rare, and done by a thread.

    A message of any size may take its time on a slow way, as with blocking connections: what counts as lost is one
    that does not move for `socket_timeout`.
    """

    health_check_interval: Any
    next_health_check: Any
    is_connected: bool
    _writer: Any

    def __init__(self, *, find: Find | None = None, gate: Gate | None = None, **options: Any) -> None:
        self._find = find
        self._gate = gate or Gate()
        self._packer = _Packer()
        super().__init__(parser_class=_Parser, **options)  # type: ignore[call-arg]

    async def connect_check_health(self, *args: Any, **options: Any) -> Any:
        """As for blocking connections."""
        self._gate.check()
        return await super().connect_check_health(*args, **options)  # type: ignore[misc]

    def cut(self) -> None:
        """As for blocking connections."""
        if self._writer is not None:
            self._writer.close()

    async def _connect(self) -> Any:
        if self._find is not None:
            self.host, self.port = await asyncio.to_thread(self._find)
        self.next_health_check = asyncio.get_running_loop().time() + self.health_check_interval
        return await super()._connect()  # type: ignore[misc]

    def pack_command(self, *args: Any) -> list[bytes]:
        """In C, as redis-py does for blocking connections alone."""
        return self._packer.pack(*args)

    async def send_packed_command(
        self, command: str | bytes | Iterable[bytes], check_health: bool = True
    ) -> None:
        """In pieces, each with a `socket_timeout` of its own."""
        whole = command.encode() if isinstance(command, str) else command
        whole = whole if isinstance(whole, bytes) else b"".join(whole)
        send: Any = super().send_packed_command  # type: ignore[misc]
        await send(whole[:PIECE_BYTES], check_health)
        for at in range(PIECE_BYTES, len(whole), PIECE_BYTES):
            if not self.is_connected:  # the rest would be sent on a new one
                raise redis.ConnectionError("the connection was closed in the middle of a message")
            await send([memoryview(whole)[at : at + PIECE_BYTES]], False)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except LEFT_AT as error:
            await self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError(str(error)) from error


class _Tcp(_Finding, sync.Connection): ...


class _Tls(_Finding, sync.SSLConnection): ...


class _Unix(_Finding, sync.UnixDomainSocketConnection): ...


class _TcpAsync(_FindingAsync, aio.Connection): ...


class _TlsAsync(_FindingAsync, aio.SSLConnection): ...


class _UnixAsync(_FindingAsync, aio.UnixDomainSocketConnection): ...


CONNECTIONS: dict[Transport, type[sync.AbstractConnection]] = {"tcp": _Tcp, "tls": _Tls, "unix": _Unix}
ASYNC_CONNECTIONS: dict[Transport, type[aio.AbstractConnection]] = {
    "tcp": _TcpAsync,
    "tls": _TlsAsync,
    "unix": _UnixAsync,
}
