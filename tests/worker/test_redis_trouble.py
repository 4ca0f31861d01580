"""One worker through every trouble of its Redis: it keeps its process, says each change of state once, goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import calls, script
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from broker.watch import follow
from producer.client import Client
from protocol import TokenEvent
from tests.proxy import Proxy
from tests.servers import KINDS, RealServer, require
from tests.setups import pair, swap
from tests.worker.harness import WorkerProcess, Workers, ended, logged, nothing_left, submit, until, words

BOTH = ["valkey", pytest.param("redis", marks=pytest.mark.long)]
TIMEOUT_S = 2.0
"""A server that is busy beside others is not away, one that is paused is."""
TEXT = words(25)
"""A second of a job's time."""


class Survivor:
    """A server, its queue, and the one worker that lives through everything."""

    def __init__(self, server: RealServer, proxy: Proxy, workers: Workers) -> None:
        self.server = server
        self.proxy = proxy
        self.queue = Queue(connect(server.url, patience_s=20.0), Keys())
        self.worker: WorkerProcess = workers.start("--lease", "20")
        self.pid = self.worker.process.pid
        self._read = 0

    @contextmanager
    def lines(self) -> Iterator[list[str]]:
        """What the worker says meanwhile, about Redis and of warnings, once the trouble is over."""
        self._read = len(self.worker.log)
        said: list[str] = []
        yield said
        assert self.worker.process.poll() is None, f"the worker ended:\n{self.worker.log}"
        assert self.worker.process.pid == self.pid
        said += [line for line in self.worker.log[self._read :].splitlines() if " INFO " not in line]

    def says(self, words: str) -> None:
        """Wait until the worker has said it, since `lines` began."""
        until(lambda: words in self.worker.log[self._read :], f"{words!r} in\n{self.worker.log}")

    def start_job(self, name: str) -> None:
        """Submit one, and wait until some of it is logged."""
        submit(self.queue, name, TEXT)
        until(lambda: logged(self.queue, name) > 2, f"{name} runs")

    def ends_whole(self, name: str) -> None:
        """The job's log has every event once, and its result is the undisturbed run's."""
        result = ended(self.queue, name)
        assert result.state == "succeeded", result
        assert result.choices[0].text == TEXT
        events = list(follow(self.queue, name))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == TEXT
        nothing_left(self.queue)


@pytest.fixture(scope="module", params=BOTH)
def survivor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    with ExitStack() as stack:
        server = stack.enter_context(require(KINDS[request.param])("--appendfsync", "always"))
        proxy = stack.enter_context(Proxy(server.socket_path))
        workers = Workers(f"{proxy.url}?socket_timeout={TIMEOUT_S}", tmp_path_factory.mktemp("worker"))
        stack.callback(workers.close)
        survivor = Survivor(server, proxy, workers)
        stack.callback(survivor.queue.close)
        survivor.worker.ready()
        yield survivor


def troubles(said: list[str]) -> list[str]:
    """What the worker said of an outage: each state once, then that it is over, and nothing beside it."""
    *away, back = said
    assert "redis is back after" in back
    assert all("redis is away, waiting for it: " in line for line in away), said
    return [line.partition("waiting for it: ")[2].partition(" (")[0] for line in away]


def fill(survivor: Survivor) -> None:
    """`noeviction`: writes fail while reads and acknowledgements work. Nothing is acknowledged that is not stored."""
    client: Any = survivor.queue.client
    client.config_set("maxmemory", 1)
    survivor.says("redis is away")
    held = logged(survivor.queue, "full")
    look = survivor.queue.run(calls.look(survivor.queue.keys, "full"))
    assert (look.state, look.result) == ("running", None)
    assert client.xlen(survivor.queue.keys.jobs("normal", "default")) == 1
    with pytest.raises(redis.OutOfMemoryError):
        submit(survivor.queue, "refused", "x")
    assert logged(survivor.queue, "full") == held


def empty(survivor: Survivor) -> None:
    survivor.queue.client.config_set("maxmemory", 0)


Step = Callable[[Survivor], None]


@pytest.mark.parametrize(
    ("job", "begins", "ends", "said_once"),
    [
        pytest.param(
            "restart",
            lambda survivor: survivor.server.kill(),
            lambda survivor: survivor.server.start(),
            "no connection",
            id="a restart on its append-only file",
        ),
        pytest.param(
            "silence",
            lambda survivor: survivor.server.pause(),
            lambda survivor: survivor.server.resume(),
            "it does not answer in time",
            id="silence, on connections that stay",
            marks=pytest.mark.long,
        ),
        pytest.param("full", fill, empty, "its memory is full", id="full memory"),
    ],
)
def test_a_trouble_is_said_once_and_the_job_goes_on(
    survivor: Survivor, job: str, begins: Step, ends: Step, said_once: str
) -> None:
    survivor.start_job(job)
    with survivor.lines() as said:
        begins(survivor)
        survivor.says("redis is away")
        ends(survivor)
        survivor.says("redis is back")
        survivor.ends_whole(job)
    assert troubles(said) == [said_once]


@pytest.mark.long
def test_a_restart_that_takes_its_time(survivor: Survivor) -> None:
    """LOADING: five seconds, by the server's own setting for tests; redis-py's own retries outlast one."""
    client: Any = survivor.queue.client
    client.mset({f"key:{number}": "x" * 100 for number in range(5000)})
    client.bgrewriteaof()
    until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "the file is written")
    options = ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]
    survivor.start_job("loading")
    survivor.server.options += options
    with survivor.lines() as said:
        survivor.server.kill()
        survivor.server.launch()
        survivor.says("redis is back")
        survivor.ends_whole("loading")
    del survivor.server.options[-len(options) :]
    client.delete(*(f"key:{number}" for number in range(5000)))
    assert troubles(said)[-1] == "it loads its data"
    assert len(said) <= 3, said


def test_scripts_and_groups_that_are_gone(survivor: Survivor) -> None:
    """NOSCRIPT and NOGROUP are mended without a word."""
    client: Any = survivor.queue.client
    survivor.start_job("running")
    with survivor.lines() as said:
        client.xgroup_destroy(survivor.queue.keys.jobs("normal", "default"), "workers")
        client.script_flush()
        submit(survivor.queue, "waiting", words(2))
        client.script_flush()
        assert ended(survivor.queue, "waiting").state == "succeeded"
        client.script_flush()
        survivor.ends_whole("running")
    assert said == []


def test_entries_that_are_no_jobs(survivor: Survivor, keys_broken_by_hand: None) -> None:  # noqa: ARG001
    """Each goes to the dead letters once, with its reason, and the job behind them runs."""
    client: Any = survivor.queue.client
    keys = survivor.queue.keys
    client.delete(keys.dead)
    client.set(keys.job("no-hash"), "a string")
    stream = keys.jobs("normal", "default")
    with survivor.lines() as said:
        client.xgroup_create(stream, "workers", "0", mkstream=True)
        client.zadd(keys.tenants("normal"), {"default": 1})
        for fields in ({"colour": "red"}, {"id": b"\xff\x00"}, {"id": "nobody"}, {"id": "no-hash"}):
            client.xadd(stream, fields)
        submit(survivor.queue, "behind", words(2))
        assert ended(survivor.queue, "behind").state == "succeeded"
    reasons = [fields[b"reason"] for _, fields in client.xrange(keys.dead)]
    assert reasons == [b"not_a_job", b"lost_payload", b"lost_payload", b"lost_payload"]
    assert said == []
    client.delete(keys.dead, keys.job("no-hash"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["lease", "publish", "finish"])
def test_a_reply_lost_in_the_middle_of_work(survivor: Survivor, name: str) -> None:
    """The script has run, and the connection ends before its reply; redis-py repeats it."""
    lost = survivor.proxy.lost
    with survivor.lines() as said:
        survivor.proxy.lose_reply_to(script.load(name).sha.encode())
        submit(survivor.queue, f"lost-{name}", TEXT)
        survivor.ends_whole(f"lost-{name}")
    assert survivor.proxy.lost == lost + 1
    assert said == []


def test_E01_everything_is_flushed_while_the_worker_waits(survivor: Survivor) -> None:
    """Streams, groups and the worker's own entries are gone; what is submitted next runs at once."""
    with survivor.lines() as said:
        survivor.queue.client.flushall()
        for name in ("j1", "j2"):
            began = time.monotonic()
            submit(survivor.queue, name, words(2))
            assert ended(survivor.queue, name).state == "succeeded"
            assert time.monotonic() - began < 20.0
    # It may come to say that it lives just then. Of a job before, to whose end the reply was lost, it may hear only
    # now, and then finds nothing of it.
    known = ("has forgotten this worker: registering again", "job lost-finish attempt 1: lease lost")
    assert [line for line in said if not any(words in line for words in known)] == []
    assert len(said) <= 2


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_E01_flushed_before_the_first_read(kind: str, tmp_path: Path) -> None:
    with require(KINDS[kind])() as server:
        workers = Workers(server.url, tmp_path)
        queue = Queue(connect(server.url), Keys())
        workers.start().ready().kill()
        worker = workers.start()
        until(lambda: "loading" in worker.log, "the worker is about to read")
        queue.client.flushall()
        submit(queue, "j3", words(2))
        assert ended(queue, "j3").state == "succeeded"
        assert [line for line in worker.log.splitlines() if " INFO " not in line] == []
        workers.close()
        queue.close()


# -- E09 ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_E09_the_primary_becomes_a_replica(kind: str, tmp_path: Path) -> None:
    """Worker and producer sit behind one address; their connections stay open to the server that takes no writes."""
    with pair(require(KINDS[kind])) as (primary, replica), Proxy(primary.socket_path) as proxy:
        workers = Workers(proxy.url, tmp_path)
        worker = workers.start("--lease", "5").ready()
        with Client(proxy.url) as client, Client(replica.url) as after:
            jobs = [client.submit(words(30), id=f"j{number}") for number in range(3)]
            until(lambda: all(logged(client.queue, job.id) > 2 for job in jobs), "three in flight")
            swap(primary, replica)
            until(lambda: "it is a replica now" in worker.log, "the worker is refused")
            switched = time.monotonic()
            proxy.lead_to(replica.socket_path)
            jobs += [client.submit(words(3), id=f"j{number}") for number in range(3, 10)]
            results = [job.result(timeout=60.0) for job in jobs]
            assert time.monotonic() - switched < 30.0
            assert [result.choices[0].text for result in results] == [words(30)] * 3 + [words(3)] * 7
            assert after.status().waiting == after.status().running == 0
            assert [after.job(job.id).status().state for job in jobs] == ["succeeded"] * 10
        said = [line for line in worker.log.splitlines() if "redis is" in line]
        assert worker.process.poll() is None
        assert "replica" in said[0]
        assert len(said) == 2, said
        workers.close()
