"""Which server is used, and what is said when it cannot be."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
import redis.exceptions

from bench.ports import free_port
from broker import connection
from broker.address import redact, resolve_url
from broker.connection import connect, connect_async, unreachable
from protocol import BrokerUnreachable
from tests.servers import KINDS, RealServer, ValkeyServer, require

Wait = Callable[[str, float], None]


def _wait_async(url: str, patience_s: float) -> None:
    asyncio.run(connection.wait_until_ready_async(url, patience_s))


@pytest.fixture(params=["sync", "async"])
def wait(request: pytest.FixtureRequest) -> Wait:
    return connection.wait_until_ready if request.param == "sync" else _wait_async


def refusal(wait: Wait, url: str, patience_s: float = 0.0) -> str:
    with pytest.raises(BrokerUnreachable) as caught:
        wait(url, patience_s)
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    return message


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """A loopback port that gives every caller this answer, or none at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller, suppress(ConnectionError):
                    while caller.recv(4096):
                        if answer is not None:
                            caller.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def closed_port() -> str:
    return f"redis://127.0.0.1:{free_port()}"


def test_the_flag_beats_redis_url_beats_ours() -> None:
    both = {"REDIS_URL": "redis://r", "MILLSTREAM_REDIS_URL": "redis://m"}
    assert resolve_url("redis://f", both) == "redis://f"
    assert resolve_url(None, both) == "redis://r"
    assert resolve_url(None, {"MILLSTREAM_REDIS_URL": "redis://m"}) == "redis://m"
    assert resolve_url(None, {"REDIS_URL": "", "MILLSTREAM_REDIS_URL": "redis://m"}) == "redis://m"
    assert resolve_url(None, {}) is None


class Silent:
    """A port that takes connections and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self.taken.append(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._listener, *self.taken):
            one.close()


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_new_connection_is_not_pinged(kind: str, fresh_server: RealServer) -> None:
    """redis-py would, and connect again within that while the server loads its data, ever deeper."""

    async def ask() -> None:
        async with connect_async(fresh_server.url) as client:
            await client.echo("x")

    with redis.Redis.from_url(fresh_server.url, health_check_interval=0) as observer:
        observer.config_resetstat()
        if kind == "sync":
            with connect(fresh_server.url) as client:
                client.echo("x")
        else:
            asyncio.run(ask())
        done: Any = observer.info("commandstats")
    assert done["cmdstat_echo"]["calls"] == 1
    assert "cmdstat_ping" not in done


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_server_that_says_nothing_is_asked_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 0.2)
    server = Silent()

    async def ask() -> None:
        async with connection.connect_async(server.url) as client:
            await client.ping()

    call = connect(server.url).ping if kind == "sync" else lambda: asyncio.run(ask())
    with closing(server), pytest.raises(redis.TimeoutError):
        call()
    assert len(server.taken) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://user:secret@h", "redis://user:***@h"),
        ("redis://:secret@h", "redis://:***@h"),
        ("redis://secret@h", "redis://***@h"),
        ("redis://u:sec:ret@secret@h", "redis://u:***@h"),
        ("redis://u:/secret#secret?@h", "redis://u:***@h"),
        ("user:secret@h", "user:***@h"),
        ("unix:///s?db=1&password=secret", "unix:///s?db=1&password=***"),
        ("rediss://h?ssl_password=secret&db=1", "rediss://h?ssl_password=***&db=1"),
        (
            "redis://h?pasword=secret&PASSWORD=secret&ssl_ca_certs=a",
            "redis://h?pasword=***&PASSWORD=***&ssl_ca_certs=a",
        ),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_a_real_server_is_ready(server: RealServer, wait: Wait) -> None:
    wait(server.url, 0.0)
    with connect(server.url) as client:
        client.set("k", b"\xff")
        assert client.get("k") == b"\xff"


async def _set_and_get(url: str, patience_s: float = 0.0) -> object:
    async with connect_async(url, patience_s=patience_s) as client:
        await client.set("k", b"\xff")
        return await client.get("k")


def test_bytes_go_and_come_in_asyncio_too(server: RealServer) -> None:
    assert asyncio.run(_set_and_get(server.url)) == b"\xff"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "must begin with redis://"),
        ("localhost:6379", "must begin with redis://"),
        ("redis://h:port", "host or port"),
        ("redis://h:99999", "host or port"),
        ("redis://h/one", "number of a database"),
        ("redis://:se#secret@h", "cannot be read|%23"),
        ("redis://h#1", "%23"),
        ("unix://", "names no socket"),
        ("redis://h?socket_timeout=soon", "socket_timeout"),
        ("redis://h?colour=red", "no option 'colour'"),
        ("redis://h?decode_responses=true", "decode_responses"),
    ],
)
def test_a_url_that_is_none_is_refused_at_once(wait: Wait, url: str, why: str) -> None:
    with pytest.raises(BrokerUnreachable, match=why):
        connect(url)
    with pytest.raises(BrokerUnreachable, match=why):
        connect_async(url)
    began = time.monotonic()
    refusal(wait, url, patience_s=60.0)
    assert time.monotonic() - began < 5.0


def test_a_refused_connection_says_where_and_what_to_do(wait: Wait) -> None:
    url = closed_port()
    assert refusal(wait, url) == (
        f"Cannot use the Redis at {url}: nobody listens there. Start the server, or correct the URL."
    )


def test_a_socket_that_is_not_there(wait: Wait) -> None:
    assert "nobody listens there" in refusal(wait, "unix:///nowhere/at/all.sock")


def test_a_name_that_does_not_resolve(wait: Wait) -> None:
    assert "host name does not resolve" in refusal(wait, "redis://:secret@nobody.invalid:6379")


def test_something_that_is_no_redis(wait: Wait) -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        assert "not a Redis server" in refusal(wait, url)


def test_plain_text_behind_rediss(wait: Wait) -> None:
    with listener(b"-ERR unknown command\r\n") as url:
        assert "TLS failed" in refusal(wait, url.replace("redis://", "rediss://"))


def test_silence_is_a_timeout(wait: Wait) -> None:
    with listener(None) as url:
        assert "did not answer in time" in refusal(wait, f"{url}?socket_timeout=0.1")


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("credentials", ["", "nobody:secret@", ":secret@"])
def test_a_wrong_password_is_tried_once(wait: Wait, kind: type[RealServer], credentials: str) -> None:
    with require(kind)("--requirepass", "right", aof=False, tcp=True) as server:
        url = server.tcp_url.replace("redis://", f"redis://{credentials}")
        began = time.monotonic()
        assert "user name or password" in refusal(wait, url, patience_s=60.0)
        assert time.monotonic() - began < 5.0
        wait(server.tcp_url.replace("redis://", "redis://:right@"), 0.0)


def test_patience_waits_for_a_server_that_comes(
    wait: Wait, fresh_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_server.stop()
    refused = threading.Event()
    next_wait = connection._Waits.next

    def note(waits: connection._Waits, error: Exception) -> float:
        refused.set()
        return next_wait(waits, error)

    monkeypatch.setattr(connection._Waits, "next", note)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, fresh_server.url, 20.0)
        assert refused.wait(20.0)
        fresh_server.launch()
        waiting.result()


def test_patience_ends(wait: Wait) -> None:
    began = time.monotonic()
    refusal(wait, closed_port(), patience_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5.0


def test_a_server_that_loads_is_waited_for(wait: Wait, fresh_server: RealServer) -> None:
    """A second of loading: 1,000 keys, each held up for a millisecond by the server's own setting for tests."""
    with connect(fresh_server.url) as client:
        client.mset({f"key:{number}": "x" * 100 for number in range(1000)})
        client.bgrewriteaof()
        while client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.01)
    fresh_server.kill()
    fresh_server.options += ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]
    fresh_server.launch()
    wait_for_socket(fresh_server)
    assert "still loading" in refusal(wait, fresh_server.url)
    wait(fresh_server.url, 20.0)


def wait_for_socket(server: RealServer) -> None:
    deadline = time.monotonic() + 20.0
    while not server.socket_path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("redis_version:6.2.14\r\nredis_mode:standalone", "version 6.2.14.*7.0 or later"),
        ("redis_mode:standalone", "version unknown"),
        ("redis_version:7.2.4\r\nredis_mode:sentinel", "sentinel mode"),
    ],
)
def test_an_unfit_server_is_refused(info: str, said: str) -> None:
    fields = dict(line.split(":") for line in info.split("\r\n"))
    with pytest.raises(BrokerUnreachable, match=said):
        connection._check_server("redis://h", fields)


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_cluster_is_refused(wait: Wait, kind: type[RealServer]) -> None:
    bus = str(free_port())
    with require(kind)("--cluster-enabled", "yes", "--cluster-port", bus, aof=False, tcp=True) as server:
        assert "cluster mode. Say so in the URL, as in redis+cluster://" in refusal(wait, server.url, 60.0)


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_user_who_may_not_read_info_is_let_in(wait: Wait, kind: type[RealServer]) -> None:
    with require(kind)(
        "--user", "u", "on", ">p", "~*", "+ping", "+client", "+hello", aof=False, tcp=True
    ) as server:
        wait(server.tcp_url.replace("redis://", "redis://u:p@"), 0.0)


def test_a_call_rides_out_an_absent_server() -> None:
    """With `patience_s`; without, it fails within redis-py's few retries."""
    with ValkeyServer() as server, ThreadPoolExecutor() as pool:
        server.kill()
        with pytest.raises(redis.ConnectionError):
            connect(server.url).set("k", "v")
        waiting = [
            pool.submit(lambda: connect(server.url, patience_s=20.0).set("k", b"\xff")),
            pool.submit(lambda: asyncio.run(_set_and_get(server.url, 20.0))),
        ]
        with pytest.raises(TimeoutError):
            waiting[0].result(1.0)
        assert not waiting[1].done()
        server.start()
        assert [one.result() for one in waiting] == [True, b"\xff"]


def test_patience_with_calls_is_not_for_a_wrong_password() -> None:
    with ValkeyServer("--requirepass", "right", aof=False, tcp=True) as server:
        url = server.tcp_url.replace("redis://", "redis://:wrong@")
        began = time.monotonic()
        with pytest.raises(redis.AuthenticationError):
            connect(url, patience_s=60.0).ping()
        with pytest.raises(redis.ConnectionError):
            asyncio.run(_set_and_get(url, 60.0))
        assert time.monotonic() - began < 10.0


def test_one_client_has_hundreds_of_watchers(server: RealServer) -> None:
    with connect(server.url) as client, ExitStack() as stack:
        channels = [stack.enter_context(client.pubsub()) for _ in range(300)]
        for channel in channels:
            channel.subscribe("tokens")
        assert client.publish("tokens", "hello") == 300


async def _subscribe_many(url: str, count: int) -> Any:
    async with connect_async(url) as client, AsyncExitStack() as stack:
        for _ in range(count):
            channel = await stack.enter_async_context(client.pubsub())
            await channel.subscribe("tokens")
        return await client.publish("tokens", "hello")


def test_one_asyncio_client_has_hundreds_of_watchers(server: RealServer) -> None:
    assert asyncio.run(_subscribe_many(server.url, 300)) == 300


def test_an_error_in_the_middle_of_work_is_one_line() -> None:
    error = redis.exceptions.OutOfMemoryError("OOM command not allowed")
    said = str(unreachable("redis://u:secret@h", error))
    assert "OOM command not allowed" in said
    assert "secret" not in said
