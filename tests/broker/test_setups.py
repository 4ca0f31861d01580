"""Servers that are not one alone: a primary behind sentinels, a cluster; and one behind TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import address, calls
from broker.channel import Channel, Message
from broker.connection import connect, connect_async, wait_until_ready, wait_until_ready_async
from broker.finding import LEFT_AT, FindPrimary
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from broker.script import Script, sharded
from broker.watch import follow, follow_async
from protocol import BrokerUnreachable
from tests.broker.steps import Worker, finish_call, job, tokens
from tests.broker.test_redis_page import LUA, rules
from tests.servers import KINDS, DebianRedisServer, RealServer, ValkeyServer, require
from tests.setups import SERVICE, Certificates, Sentinel, cluster, home, pair, swap, until

BOTH = ["valkey", pytest.param("redis", marks=pytest.mark.long)]


def whole_way(queue: Queue, name: str) -> None:
    """Submit, lease, publish, end, watch: every kind of call."""
    assert queue.run(calls.submit(queue.keys, job(name))).outcome == "queued"
    lease = Worker(queue, f"worker-{name}").lease_one()
    assert (
        queue.run(
            calls.publish(queue.keys, lease.worker, name, lease.attempt, 1, tokens(lease, 1, "a"))
        ).outcome
        == "ok"
    )
    assert queue.run_all([finish_call(queue.keys, lease, 1, "a")]) == ["ok"]
    assert [event.seq for event in follow(queue, name)] == [1, 2]


async def watched(url: str, keys: Keys, job_id: str) -> list[int]:
    queue = AsyncQueue(connect_async(url, keys), keys)
    try:
        return [event.seq async for event in follow_async(queue, job_id)]
    finally:
        await queue.close()


# -- URLs --------------------------------------------------------------------------------------------------------


def test_a_url_of_sentinels() -> None:
    found = address.parse(
        "rediss+sentinel://u:p%40w@one,[::1]:7/my%2Fmain/3?sentinel_password=s&socket_timeout=2"
    )
    assert (found.setup, found.transport, found.service) == ("sentinel", "tls", "my/main")
    assert found.hosts == (("one", 26379), ("::1", 7))
    assert found.options == {"username": "u", "password": "p@w", "db": 3, "socket_timeout": 2.0}
    assert found.sentinel_options == {"password": "s"}


def test_a_url_of_a_cluster() -> None:
    found = address.parse("redis+cluster://:pw@one,two:7001")
    assert (found.setup, found.transport, found.hosts) == ("cluster", "tcp", (("one", 6379), ("two", 7001)))
    assert found.options == {"password": "pw"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://h", "name of the sentinels' service"),
        ("redis+sentinel://h/main/one", "number of a database"),
        ("redis+sentinel://:secret@h:port/main", "host or port"),
        ("redis+sentinel://u:secret/secret@h/main", "host or port"),
        ("redis+sentinel://h,,i/main", "host or port"),
        ("redis+sentinel://h/main?colour=red", "no option 'colour'"),
        ("redis+cluster://h/1", "database 0 alone"),
        ("redis+cluster://h/0/1", "number of a database"),
        ("redis+cluster://u:secret@/", "host or port"),
        ("redis+magic://h", "must begin with redis://"),
        ("redis://h?find=x", "find is not yours"),
    ],
)
def test_a_url_that_is_none_says_what_is_missing_and_how_it_looks(url: str, why: str) -> None:
    with pytest.raises(BrokerUnreachable, match=why) as caught:
        connect(url)
    assert "Example: redis" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://u:secret@h1,h2/main?sentinel_password=secret",
        "rediss+cluster://:secret@h1:1,h2:2?ssl_password=secret",
    ],
)
def test_their_passwords_are_never_shown(url: str) -> None:
    assert "secret" not in address.redact(url)
    assert "h1" in address.redact(url)


def test_sentinels_have_a_user_of_their_own() -> None:
    with_own = address.parse("redis+sentinel://u:p@h/main/2?sentinel_username=s&sentinel_password=q")
    without = address.parse("redis+sentinel://u:p@h/main/2")
    options = [connect_options(one) for one in (with_own, without)]
    assert options == [{"username": "s", "password": "q"}, {}]


def connect_options(given: address.Address) -> dict[str, Any]:
    from broker.finding import finder

    find: Any = finder(given, "key")
    assert isinstance(find, FindPrimary)
    return {name: value for name, value in find._options.items() if name in ("username", "password", "db")}


# -- sentinels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_primary_is_found_by_any_sentinel_that_answers(kind: type[RealServer]) -> None:
    with require(kind)(aof=False, tcp=True) as server, Sentinel(kind, server) as sentinel:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/{SERVICE}"
        wait_until_ready(url)
        asyncio.run(wait_until_ready_async(url))
        queue = Queue(connect(url), Keys())
        whole_way(queue, "j")
        assert asyncio.run(watched(url, Keys(), "j")) == [1, 2]
        queue.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS.values())
def test_the_primary_is_found_again_after_a_failover(kind: type[RealServer]) -> None:
    with pair(require(kind)) as (primary, replica), Sentinel(kind, primary) as sentinel:
        queue = Queue(
            connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}", patience_s=20.0), Keys()
        )
        whole_way(queue, "before")
        until(sentinel.has_fit_replica, "somebody to promote")
        assert queue.client.wait(1, 5000) == 1
        primary.kill()
        whole_way(queue, "after")
        assert queue.run(calls.look(queue.keys, "before")).state == "succeeded"
        with redis.Redis.from_url(replica.url) as client:
            assert client.exists(Keys().result("after"))
        queue.close()


@pytest.mark.parametrize(
    ("hosts", "service", "why"),
    [
        ("127.0.0.1:{port}", "other", "the sentinels know no service 'other'"),
        ("127.0.0.1:1", SERVICE, "nobody listens there"),
    ],
)
def test_sentinels_that_cannot_help(hosts: str, service: str, why: str) -> None:
    with ValkeyServer(aof=False, tcp=True) as server, Sentinel(ValkeyServer, server) as sentinel:
        url = f"redis+sentinel://{hosts.format(port=sentinel.port)}/{service}"
        with pytest.raises(BrokerUnreachable, match=why):
            wait_until_ready(url)
        with pytest.raises(BrokerUnreachable, match=why):
            asyncio.run(wait_until_ready_async(url))


def kind_of(message: Message | None) -> str | None:
    return None if message is None else message["type"]


# -- a cluster ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BOTH)
def nodes(request: pytest.FixtureRequest) -> Iterator[list[RealServer]]:
    with cluster(require(KINDS[request.param]), 3) as running:
        yield running


def test_each_queue_is_found_on_its_node_from_any_other(nodes: list[RealServer]) -> None:
    homes = set()
    for name in ("default", "a", "b"):
        keys = Keys(name)
        homes.add(home(nodes, keys))
        url = f"redis+cluster://127.0.0.1:{nodes[(home(nodes, keys) + 1) % 3].port}"
        wait_until_ready(url, 0.0, keys)
        asyncio.run(wait_until_ready_async(url, 0.0, keys))
        queue = Queue(connect(url, keys), keys)
        whole_way(queue, "j")
        assert asyncio.run(watched(url, keys, "j")) == [1, 2]
        with closing(Channel(queue.client, keys.tokens("k"))) as channel:
            channel.subscribe()
            assert kind_of(channel.get(5.0)) == "ssubscribe"
            whole_way(queue, "k")
            assert channel.get(5.0)["data"] == queue.client.lindex(keys.log("k"), 0)
        queue.close()
        with redis.Redis.from_url(nodes[home(nodes, keys)].url) as client:
            assert client.exists(keys.result("j"))
    assert homes == {0, 1, 2}


def test_a_slot_that_has_moved_is_followed(nodes: list[RealServer]) -> None:
    """The queue is empty when its slot goes to another node; open connections stay open to the old one."""
    keys = Keys("moved")
    source = home(nodes, keys)
    target = (source + 1) % 3
    queue = Queue(connect(f"redis+cluster://127.0.0.1:{nodes[source].port}", keys), keys)
    assert queue.run(calls.status(keys)).waiting == 0
    slot = redis.cluster.key_slot(keys.meta.encode())
    channel = Channel(queue.client, keys.tokens("j"))
    channel.subscribe()
    assert kind_of(channel.get(5.0)) == "ssubscribe"
    with redis.Redis.from_url(nodes[target].url) as new, redis.Redis.from_url(nodes[source].url) as old:
        clients: list[Any] = [new, old]
        name = clients[0].execute_command("CLUSTER", "MYID")
        for client in clients:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)
    assert [kind_of(channel.get(5.0)) for _ in range(2)] == ["sunsubscribe", "ssubscribe"]
    whole_way(queue, "j")
    assert channel.get(5.0)["data"] == queue.client.lindex(keys.log("j"), 0)
    with redis.Redis.from_url(nodes[target].url) as client:
        assert client.exists(keys.result("j"))
    channel.close()
    queue.close()


@pytest.mark.parametrize("path", sorted(LUA.glob("*.lua")), ids=lambda path: path.stem)
def test_a_script_on_a_cluster_publishes_to_its_shard_alone(path: Path) -> None:
    script = Script(path.stem, path.read_text(), "")
    assert sharded(script).source.count("'SPUBLISH'") == script.source.count("PUBLISH")


def test_users_with_the_least_rights_on_a_cluster(nodes: list[RealServer]) -> None:
    """The page's lines for a worker and a producer, with the sharded commands."""
    names = {name for role in ("worker", "producer") for name in rules()[role] if name.startswith("+")}
    names = names - {"+publish", "+subscribe"} | {"+spublish", "+ssubscribe"}
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            execute: Any = client.execute_command
            execute(
                "ACL",
                "SETUSER",
                "u",
                "on",
                ">p",
                "resetkeys",
                "~ms:*",
                "resetchannels",
                "&ms:*",
                "-@all",
                *names,
            )
    keys = Keys("guarded")
    url = f"redis+cluster://u:p@127.0.0.1:{nodes[(home(nodes, keys) + 1) % 3].port}"
    wait_until_ready(url, 0.0, keys)
    queue = Queue(connect(url, keys), keys)
    whole_way(queue, "j")
    queue.close()


# -- a primary that becomes a replica ----------------------------------------------------------------------------


def both(url: str) -> list[Callable[[], Any]]:
    """A write by a client of each kind, on a connection that stays open in between."""
    client = connect(url)
    loop = asyncio.new_event_loop()
    client_async = connect_async(url)
    return [
        lambda: client.set("k", "v"),
        lambda: loop.run_until_complete(client_async.set("k", "v")),
    ]


def test_a_connection_to_a_primary_that_is_none_any_more_is_dropped() -> None:
    """Behind one address (a proxy, a host name) the next try may meet the right server; E09 is the whole story."""
    with pair(ValkeyServer) as (primary, replica):
        writes = both(primary.tcp_url)
        for write in writes:
            assert write()
        swap(primary, replica)
        with redis.Redis.from_url(primary.url) as client:
            before = client.info("stats")["total_connections_received"]
            for write in writes:
                with pytest.raises(redis.ConnectionError, match="read only replica") as caught:
                    write()
                assert isinstance(caught.value.__cause__, LEFT_AT)
            assert client.info("stats")["total_connections_received"] >= before + 2


# -- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(certificates: Certificates) -> Iterator[tuple[RealServer, str]]:
    """Debian's Redis speaks TLS, the embedded Valkey does not. It wants a certificate of its clients."""
    server = require(DebianRedisServer)(*certificates.server_options(), aof=False, tcp=True)
    server.options += ["--tls-port", str(server.port), "--port", "0"]
    with server:
        yield server, server.tcp_url.replace("redis://", "rediss://")


def test_tls_with_a_certificate_on_both_sides(
    certificates: Certificates, tls_server: tuple[RealServer, str]
) -> None:
    path = certificates.path
    url = f"{tls_server[1]}?ssl_ca_certs={path('ca.crt')}"
    with pytest.raises(BrokerUnreachable):
        wait_until_ready(url)
    url += f"&ssl_certfile={path('client.crt')}&ssl_keyfile={path('client.key')}"
    wait_until_ready(url)
    asyncio.run(wait_until_ready_async(url))
    queue = Queue(connect(url), Keys())
    whole_way(queue, "j")
    assert asyncio.run(watched(url, Keys(), "j")) == [1, 2]
    queue.close()


def test_a_certificate_nobody_vouches_for_is_refused(tls_server: tuple[RealServer, str]) -> None:
    for wait in (wait_until_ready, lambda url: asyncio.run(wait_until_ready_async(url))):
        began = time.monotonic()
        with pytest.raises(BrokerUnreachable, match="TLS failed"):
            wait(tls_server[1])
        assert time.monotonic() - began < 5.0
