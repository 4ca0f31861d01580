"""docs/redis.md: its ACL lines are the least rights with which everything works."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions

from broker import batches, calls
from broker.completions import Completions
from broker.connection import connect, wait_until_ready
from broker.dead_letters import dead_list
from broker.epoch import Epoch
from broker.keys import Keys
from broker.queue import Queue
from broker.script import SHARED, load
from broker.watch import follow
from producer.bulk.stale import cancel_stale
from producer.client import Client
from protocol import Fingerprint
from tests.broker.steps import Worker, finish_call, job, tokens
from tests.producer.program import Done, Program
from tests.servers import KINDS, RealServer, require
from tests.worker.harness import Workers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "redis.md"
LUA = ROOT / "broker" / "lua"

PLAIN = {
    "worker": {"ping", "info", "exists", "eval", "evalsha", "lrange", "hdel", "subscribe"},
    "producer": {
        *("ping", "info", "exists", "eval", "evalsha", "lrange", "subscribe"),
        *("xread", "del", "scan", "hget", "hsetnx", "hgetall", "zrange", "zrem", "set", "time"),
    },
    "watcher": {"ping", "info", "exists", "eval", "evalsha", "lrange", "subscribe"},
}
"""Commands that the role sends itself, beside its scripts'."""
SCRIPTS = {
    "worker": {"register", "heartbeat", "lease", "renew", "publish", "finish", "release"},
    "producer": {path.stem for path in LUA.glob("*.lua")}
    - {*SHARED, "register", "heartbeat", "lease", "renew", "publish", "finish", "release"},
    "watcher": {"look"},
}


BATCH = {"folder": "", "output": "", "error_file": "", "input": "", "window": "1m", "retention_s": 1}


def rules() -> dict[str, list[str]]:
    """The page's rules by the name of their user."""
    lines = re.findall(r"^ACL SETUSER (\w+) on >PASSWORD (.*)$", PAGE.read_text(), re.MULTILINE)
    return {name: rule.split() for name, rule in lines}


def commands(script: str) -> set[str]:
    """What a script with the shared parts in front may run."""
    source = re.sub(r"--.*", "", load(script).source)
    found = re.findall(r"redis\.p?call\('(\w+)'(?:, *'(CREATE|DELCONSUMER)')?", source)
    return {command.lower() + (f"|{sub.lower()}" if sub else "") for command, sub in found}


@pytest.mark.parametrize("role", PLAIN)
def test_a_rule_names_what_the_role_runs_and_no_more(role: str) -> None:
    needed = PLAIN[role].union(*(commands(script) for script in SCRIPTS[role]))
    assert [part for part in rules()[role] if not part.startswith("+")] == [
        *("resetkeys", "~ms:*", "resetchannels", "&ms:*", "-@all")
    ]
    assert [part for part in rules()[role] if part.startswith("+")] == [f"+{name}" for name in sorted(needed)]


@pytest.fixture(params=list(KINDS))
def guarded(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server with the page's users, and nobody else."""
    with require(KINDS[request.param])(aof=False, tcp=True) as server:
        client: Any = connect(server.url)
        for name, rule in rules().items():
            client.execute_command("ACL", "SETUSER", name, "on", ">secret", *rule)
        client.close()
        yield server


def as_user(server: RealServer, name: str) -> str:
    return server.tcp_url.replace("redis://", f"redis://{name}:secret@")


def test_each_role_does_its_part_with_its_rule(guarded: RealServer, tmp_path: Path) -> None:
    keys = Keys()
    queues = {}
    for role in PLAIN:
        wait_until_ready(as_user(guarded, role))
        queues[role] = Queue(connect(as_user(guarded, role)), keys)
    produce, work, watch = queues["producer"], queues["worker"], queues["watcher"]

    produce.run_all([calls.submit(keys, job(name, run="run")) for name in ("a", "b", "c")])
    worker = Worker(work)
    assert work.run(calls.register(keys, worker.name, Fingerprint(name="m"))) is None
    work.run(calls.heartbeat(keys, worker.name, {}))
    first, second = worker.lease(2)
    assert work.run(calls.renew(keys, worker.name, 60_000, [(first.id, 1), (second.id, 1)])) == ["held"] * 2
    assert work.run(calls.publish(keys, first.worker, first.id, 1, 1, tokens(first, 1, "a"))).outcome == "ok"
    assert work.run(finish_call(keys, first, 1, "a")) == "ok"
    assert work.run(calls.release(keys, worker.name, [calls.Handback(second.id, 1)])) == 1
    client: Any = work.client
    assert len(client.lrange(keys.log(first.id), 0, -1)) == 2
    client.hdel(keys.workers, worker.name)
    with client.pubsub() as channel:
        channel.subscribe(keys.control)
        assert channel.get_message(timeout=5.0)["type"] == "subscribe"

    assert [event.seq for event in follow(watch, first.id)] == [1, 2]
    with Client(as_user(guarded, "watcher")) as watcher:
        assert watcher.job(first.id).result(timeout=5.0).state == "succeeded"

    completions = Completions(produce, "run")
    (ended,) = completions.read(0.1)
    completions.forget([ended])
    assert not Epoch(produce).has_changed()
    source = tmp_path / "rows"
    source.write_text("")
    assert cancel_stale(produce, "run", source) == 0
    for call in (
        calls.cancel(keys, "b"),
        calls.cancel(keys, "c"),
        calls.status(keys),
        calls.pause(keys, False),
    ):
        produce.run(call)
    assert produce.run(dead_list(keys, 10)) == []
    completions.end()
    assert produce.run(batches.submit(keys, "b", "me", 60, BATCH))
    assert batches.show(produce, "b") == batches.show_all(produce)[0]
    assert batches.may_sweep(produce)
    assert batches.server_time(produce) > 0
    batches.forget(produce, "b")
    assert batches.show_all(produce) == []
    for queue in queues.values():
        queue.close()


@pytest.mark.long
def test_worker_client_bulk_run_and_batch_work_with_the_rules(
    guarded: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs themselves, as these users. The server's own log of refusals has what anybody would swallow."""
    url = as_user(guarded, "producer")
    run = Program(url, monkeypatch, capsys)
    monkeypatch.setenv("MILLSTREAM_RQ_URL", as_user(guarded, "rq"))
    monkeypatch.setenv("MILLSTREAM_BATCH_DIR", str(tmp_path / "batches"))
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "row {number}"}}\n' for number in range(20)))
    workers = Workers(as_user(guarded, "worker"), tmp_path)
    with Client(url) as client, Client(as_user(guarded, "watcher")) as watcher, closing(workers):
        worker = workers.start("--lease", "1").ready()
        use(client, watcher)
        worker.model_process().kill()
        assert client.submit("again").result(timeout=20.0).text == "again"
        steps: list[tuple[object, ...]] = [
            ("generate", source, "-o", tmp_path / "out.jsonl"),
            ("submit", "a b c", "--stream"),
            ("status",),
            ("queue", "limits"),
            ("queue", "pause"),
            ("queue", "resume"),
            ("queue", "weight", "t", "2"),
            ("queue", "clear", "--running", "--yes"),
            ("dead", "list"),
            ("dead", "purge", "--all"),
            ("batch", "submit", source),
            ("batch-worker", "--burst"),
            ("batch", "list"),
        ]
        said = {step[:2]: succeed(run(*step)) for step in steps}
        batch = said["batch", "submit"].strip()
        for step in [("status", batch), ("fetch", batch, "-o", tmp_path / "fetched.jsonl")]:
            assert "completed" in succeed(run("batch", *step)) or step[0] == "fetch"
        assert (tmp_path / "fetched.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    with redis.Redis.from_url(guarded.url, decode_responses=True) as admin:
        refusals = [(one["username"], one["object"]) for one in admin.acl_log()]
    assert [one for one in refusals if one[1] != "client|setinfo"] == []


def use(client: Client, watcher: Client) -> None:
    """What the library does: every kind of end, seen by both."""
    done, late, cancelled = (
        client.submit("a b c"),
        client.submit("late", delay_s=0.2),
        client.submit("x " * 1000),
    )
    assert "".join(watcher.job(done.id).text_stream()) == "a b c"
    assert late.result(timeout=20.0).state == "succeeded"
    next(cancelled.text_stream())
    cancelled.cancel()
    assert watcher.job(cancelled.id).result(timeout=20.0).state == "cancelled"
    assert client.submit("x " * 1000, deadline_in_s=0.3).result(timeout=20.0).state == "expired"
    many = client.submit_many([job(f"m{number}", prompt=f"p{number}") for number in range(5)])
    assert [one.result(timeout=20.0).text for one in many] == [f"p{number}" for number in range(5)]


def succeed(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("worker", ("FLUSHALL",)),
        ("worker", ("GET", "somebody:else")),
        ("producer", ("KEYS", "*")),
        ("producer", ("CONFIG", "GET", "*")),
        (
            "watcher",
            ("XREADGROUP", "GROUP", "workers", "w", "STREAMS", "ms:{default}:jobs:normal:default", ">"),
        ),
        ("watcher", ("SUBSCRIBE", "elsewhere")),
    ],
)
def test_a_role_may_do_nothing_else(guarded: RealServer, role: str, command: tuple[str, ...]) -> None:
    run: Callable[..., Any] = connect(as_user(guarded, role)).execute_command
    with pytest.raises(redis.exceptions.NoPermissionError):
        run(*command)
