"""Names: every key in one place, on one shard, and every script with its contract in front."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest

from broker import batches, calls, clearing, dead_letters
from broker.keys import Keys
from broker.loading import leave, note_loading
from broker.queue import Queue
from broker.script import SHARED, load
from tests.broker.steps import MODEL, Worker, end, job, key_names, put, say

LUA = resources.files("broker") / "lua"
SCRIPTS = sorted(entry.name for entry in LUA.iterdir() if entry.name.endswith(".lua"))


def names_of(keys: Keys) -> list[str]:
    plain = [
        keys.meta,
        keys.workers,
        keys.leases,
        keys.delayed,
        keys.deadlines,
        keys.weights,
        keys.control,
        keys.dead,
    ]
    one_id = [
        keys.job("a"),
        keys.log("a"),
        keys.tokens("a"),
        keys.result("a"),
        keys.done("a"),
        keys.lease("a"),
    ]
    return [*plain, *one_id, keys.jobs("low", "a"), keys.tenants("low")]


def test_all_names_of_a_queue_differ_and_share_its_hash_tag() -> None:
    keys = Keys("night", prefix="x")
    assert keys.base == "x:{night}:"
    assert all(name.startswith(keys.base) for name in names_of(keys))
    assert len(set(names_of(keys))) == len(names_of(keys))
    assert not set(names_of(keys)) & set(names_of(Keys("day", prefix="x")))


def test_the_scripts_make_no_other_keys(queue: Queue) -> None:
    queue.run(calls.register(queue.keys, "w1", MODEL))
    queue.run(calls.heartbeat(queue.keys, "w1", {}))
    put(queue, "a", "b", tenant="t", priority="low", run="r")
    worker = Worker(queue)
    first, second = worker.lease(2)
    say(queue, first, 1, "hi")
    end(queue, first, 1, "hi", state="dead", dead_reason="crashed")
    put(queue, "c", "d")
    end(queue, worker.lease_one())
    keys = queue.keys
    known = {
        *(keys.meta, keys.workers, keys.leases, keys.dead, keys.lease("w1"), keys.done("r"), keys.log("a")),
        *(keys.result("c"), keys.jobs("low", "t"), keys.jobs("normal", "default"), keys.tenants("normal")),
        *(keys.tenants("low"), *map(keys.job, "abcd"), keys.log("c")),
    }
    assert key_names(queue) == known
    assert second.id == "b"


def test_two_queues_on_one_server_do_not_meet(queue: Queue) -> None:
    other = Queue(queue.client, Keys("other"))
    put(queue, "a", prompt="mine")
    put(other, "a", prompt="yours")
    assert b"yours" in Worker(other).lease_one().payload
    assert queue.run(calls.status(queue.keys)).waiting == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_opens_with_its_contract(name: str) -> None:
    """Every ARGV a script reads is named, in order, in the comment it opens with."""
    source = (LUA / name).read_text()
    head = re.match(r"(--.*\n)+", source)
    assert head, "the first line is no comment"
    if name.removesuffix(".lua") in SHARED:
        assert set(re.findall(r"ARGV\[(\d+)\]", source)) <= {"1"}
        return
    assert "-- Reply: " in head[0]
    args = re.search(r"-- ARGV: (.+(?:\n--  .*)*)", head[0])
    assert args
    fixed, _, repeated = args[1].replace("\n--", " ").partition(", then ")
    named = [arg.strip() for arg in re.sub(r"\([^()]*\)", "", fixed).split(",")]
    indices = {int(index) for index in re.findall(r"ARGV\[(\d+)\]", source)}
    loops = [int(first) for first in re.findall(r"for i = (\d+), #ARGV", source)]
    assert named[0] == "base"
    if loops:
        # What follows the fixed ones, either as "then a, b for each" or as "events...".
        assert repeated or named[-1] == "events..."
        assert loops == [len(named) + 1 if repeated else len(named)]
    assert max(indices, default=1) <= len(named)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_builds_every_key_from_the_base(name: str) -> None:
    """The key of each command is a name built from the base, or a variable that holds one."""
    source = (LUA / name).read_text()
    built = {
        "meta",
        "leases",
        "delayed",
        "deadlines",
        "weights",
        "dead",
        "log",
        "job",
        "stream",
        "batch",
        "memo",
        "channel",
        "workers",
        "loading",
        "tenants",
        "times",
        "unpack(jobs",
        "unpack(rest",
        "unpack(results",
        "unpack(theirs",
    }
    for key in re.findall(r"redis\.p?call\('(?!TIME|SCAN|XREADGROUP|XGROUP)[A-Z]+', ([^,)]+)", source):
        assert re.match(r"(base|job_key\(|stream_key\(|tenants) ?", key) or key in built, key
    for added in re.findall(r"(?:jobs|rest|results|theirs)\[#\w+ \+ 1\] = (.+)", source):
        assert re.match(r"base \.\.|job_key\(", added), added
    for variable in re.findall(
        r"local (batch|memo|channel|stream|log|job|workers|tenants|leases|delayed|deadlines|weights|dead) = (.+)",
        source,
    ):
        assert re.match(r"base \.\.|job_key\(|stream_key\(", variable[1]), variable


def test_calls_declare_their_key_and_carry_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts take the server's clock alone: the arguments are the same whatever the client's clock says."""
    keys = Keys()
    held = [("a", 1)]

    def commands() -> list[tuple[Any, ...]]:
        return [
            call.by_sha()
            for call in (
                calls.submit(keys, job("a")),
                calls.lease(keys, "w", 1, 2, 1000),
                calls.renew(keys, "w", 1000, held),
                calls.publish(keys, "w", "a", 1, 1, [b"{}"]),
                calls.finish(keys, "w", "a", 1, "succeeded", b"{}", 1, [b"{}"]),
                calls.release(keys, "w", [calls.Handback("a", 1, True)]),
                calls.cancel(keys, "a"),
                clearing.clear(keys, clearing.What(), "leases", "0"),
                calls.look(keys, "a"),
                calls.register(keys, "w", MODEL),
                calls.heartbeat(keys, "w", {}),
                note_loading(keys, "w", "m"),
                leave(keys, "w"),
                calls.status(keys),
                calls.forget(keys, "r", [("a", "1-1")]),
                calls.pause(keys, True),
                calls.limits(keys, 1, 2),
                calls.weights(keys, "t", 2.0),
                dead_letters.dead_list(keys, 1),
                dead_letters.dead_show(keys, "a"),
                dead_letters.dead_requeue(keys, "1-1", job("a", delay_s=1.0, deadline_in_s=2.0)),
                dead_letters.dead_purge(keys, ["a"]),
                batches.submit(keys, "b", "me", 60, {"folder": "f"}),
                batches.note(keys, "b", 1, (2, 3)),
                batches.advance(keys, "b", 1, "w", "*", "failed"),
                batches.cancel(keys, "b"),
            )
        ]

    before = commands()
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    assert commands() == before
    assert all(command[2:5] == (1, keys.meta, keys.base) for command in before)
    assert {command[1] for command in before} == {
        load(script).sha for script in (name.removesuffix(".lua") for name in SCRIPTS) if script not in SHARED
    }
