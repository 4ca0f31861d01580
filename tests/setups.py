"""Set-ups of more than one server, or of one with TLS, made of the servers of `tests.servers`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.cluster import key_slot

from bench.ports import free_port
from broker.keys import Keys
from tests.servers import RealServer

SLOTS = 16384
SERVICE = "main"


def until(condition: Any, what: str, deadline_s: float = 30.0) -> None:
    """Wait until other processes have made a condition true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.005)


# -- a primary and its replica, and a sentinel beside them ---------------------------------------------------------


@contextmanager
def pair(kind: type[RealServer]) -> Iterator[tuple[RealServer, RealServer]]:
    """A primary and a replica that has caught up, both with a port."""
    with ExitStack() as stack:
        primary = stack.enter_context(kind("--repl-diskless-sync-delay", "0", aof=False, tcp=True))
        of = ("--replicaof", f"127.0.0.1 {primary.port}", "--repl-diskless-sync-delay", "0")
        replica = stack.enter_context(kind(*of, aof=False, tcp=True))
        wait_for_replica(replica)
        yield primary, replica


def wait_for_replica(replica: RealServer) -> None:
    """Until it has caught up. Its primary calls it online a moment earlier (seen on Valkey 9.1)."""
    with redis.Redis.from_url(replica.url) as client:
        ask: Any = client.info
        until(lambda: ask("replication")["master_link_status"] == "up", "a replica")


def swap(primary: RealServer, replica: RealServer) -> None:
    """Make the replica the primary and the primary its replica, as a failover in good order does."""
    with redis.Redis.from_url(primary.url) as old, redis.Redis.from_url(replica.url) as new:
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", str(replica.port))


class Sentinel:
    """One sentinel, enough to decide alone."""

    def __init__(self, kind: type[RealServer], primary: RealServer, *lines: str) -> None:
        self._server = kind(aof=False, tcp=True)
        config = self._server.folder / "sentinel.conf"
        config.write_text(
            "\n".join(
                [
                    f"port {self._server.port}",
                    "bind 127.0.0.1",
                    f"unixsocket {self._server.socket_path}",
                    f"dir {self._server.folder}",
                    f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1",
                    f"sentinel down-after-milliseconds {SERVICE} 500",
                    f"sentinel failover-timeout {SERVICE} 3000",
                    *lines,
                ]
            )
        )
        self._server.command_line = [str(config), "--sentinel"]

    @property
    def port(self) -> int:
        return self._server.port

    def has_fit_replica(self) -> bool:
        """Whether it has found a replica, and heard from it how it is."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            execute: Any = client.execute_command
            return any(int(one["info-refresh"]) > 0 for one in execute("SENTINEL REPLICAS", SERVICE))

    def __enter__(self) -> Sentinel:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


# -- a cluster -----------------------------------------------------------------------------------------------------


@contextmanager
def cluster(kind: type[RealServer], count: int) -> Iterator[list[RealServer]]:
    """A cluster of so many primaries, without replicas; slots in equal parts, in order."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(cluster_node(kind)) for _ in range(count)]
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        _join(nodes, clients)
        yield nodes


def cluster_node(kind: type[RealServer]) -> RealServer:
    """A node that knows no other yet."""
    bus = ("--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
    return kind("--cluster-enabled", "yes", *bus, "--repl-diskless-sync-delay", "0", aof=False, tcp=True)


def add_replica(nodes: Sequence[RealServer], number: int, replica: RealServer) -> None:
    """Make a new node the replica of one of a cluster's."""
    with redis.Redis.from_url(nodes[number].url) as primary, redis.Redis.from_url(replica.url) as client:
        owner: Any = primary.execute_command
        execute: Any = client.execute_command
        bus = replica.options[replica.options.index("--cluster-port") + 1]
        owner("CLUSTER", "MEET", "127.0.0.1", replica.port, bus)
        until(lambda: _is_whole(execute, len(nodes) + 1), "the new node knows the others")
        name = owner("CLUSTER", "MYID")
        until(lambda: execute("CLUSTER", "REPLICATE", name), "it follows")
    wait_for_replica(replica)


def _join(nodes: Sequence[RealServer], clients: Sequence[redis.Redis]) -> None:
    bounds = [SLOTS * number // len(nodes) for number in range(len(nodes) + 1)]
    for number, client in enumerate(clients):
        execute: Any = client.execute_command
        execute("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        bus = node.options[node.options.index("--cluster-port") + 1]
        execute = clients[0].execute_command
        execute("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    for client in clients:
        execute = client.execute_command
        until(lambda: _is_whole(execute, len(nodes)), "cluster state")  # noqa: B023  called at once


def _is_whole(execute: Any, count: int) -> bool:
    info = execute("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and f"cluster_known_nodes:{count}\r".encode() in info


def home(nodes: Sequence[RealServer], keys: Keys) -> int:
    """The number of the node that holds a queue."""
    return key_slot(keys.meta.encode()) * len(nodes) // SLOTS


# -- TLS -----------------------------------------------------------------------------------------------------------


class Certificates:
    """An authority, and what it has signed for a server on 127.0.0.1 and for a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run(*_NEW_KEY, "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
        self._sign("server", "subjectAltName=IP:127.0.0.1")
        self._sign("client", "extendedKeyUsage=clientAuth")

    def server_options(self) -> list[str]:
        """The server's command line, for its TLS port beside the plain one."""
        return [
            *("--tls-cert-file", self.path("server.crt"), "--tls-key-file", self.path("server.key")),
            *("--tls-ca-cert-file", self.path("ca.crt")),
        ]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def _sign(self, name: str, extension: str) -> None:
        self._run(*_NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (self.folder / "extension").write_text(extension)
        by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extension")
        self._run("x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}.crt")

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


_NEW_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
