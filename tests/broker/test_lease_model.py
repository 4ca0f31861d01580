"""No interleaving of two workers on one job loses it, doubles it or tears its stream; see `lease_model`.

The checks can fail: a script with a line taken out is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from protocol import Job
from tests.broker.lease_model import Fault, Model
from tests.servers import RealServer, ValkeyServer

DEPTH = 5
"""Steps from the empty queue: submitted, leased, lapsed, leased by the other, and a word of the zombie's."""
LONG_DEPTHS = {"plain": 8, "deadline": 7, "delayed": 8, "crashes, retries and other ends": 6}
"""As far as some seconds go."""


@pytest.fixture(scope="module")
def valkey() -> Iterator[RealServer]:
    with ValkeyServer(aof=False) as running:
        running.may_leak = True  # by scripts that are wrong
        yield running


@pytest.fixture
def client(valkey: RealServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


def job(**fields: Any) -> Job:
    return Job(id="a", prompt="p", run="r", **fields)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "plain": ({}, {}, {"succeeded", "cancelled"}),
    "deadline": ({"deadline_in_s": 3600}, {}, {"succeeded", "cancelled", "expired"}),
    "delayed": ({"delay_s": 3600}, {}, {"succeeded", "cancelled"}),
    "crashes, retries and other ends": (
        {"deadline_in_s": 3600},
        {"states_of_finish": ("failed", "dead"), "releases": ((True, 0), (False, 3_600_000))},
        {"failed", "dead", "cancelled", "expired"},
    ),
}
"""Fields of the job, what the model does beyond the plain, and the ends that must be among those reached."""


def search(client: redis.Redis, setting: str, depth: int) -> Model:
    fields, more, ends = SETTINGS[setting]
    model = Model(client, job(**fields), **more)
    model.search(depth)
    assert model.ends == ends
    return model


@pytest.mark.parametrize("setting", ["plain", "deadline", "delayed"])
def test_every_interleaving(client: redis.Redis, setting: str) -> None:
    assert search(client, setting, DEPTH).nodes > 50


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_longer_interleaving(client: redis.Redis, setting: str) -> None:
    assert search(client, setting, LONG_DEPTHS[setting]).nodes > 500


# -- scripts that are wrong ----------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str, str, str]] = {
    "a zombie may publish": (
        "publish",
        "f[1] ~= 'running' or f[2] ~= attempt or f[3] ~= worker",
        "f[1] ~= 'running'",
        "a zombie's words were taken",
    ),
    "a living owner is robbed": (
        "lease",
        "'-inf', now, 'BYSCORE'",
        "'-inf', '+inf', 'BYSCORE'",
        "granted though somebody has it",
    ),
    "the attempt stands still": (
        "lease",
        "known.attempt + 1, known.started",
        "known.attempt, known.started",
        "be ended any more",
    ),
    "a repeated event is logged twice": (
        "publish",
        "if first <= logged then",
        "if false then",
        "dropped or doubled",
    ),
    "a repeated finish is refused": (
        "finish",
        "if f[1] == one.state then return 'ok' end",
        "",
        "a repeated one refused",
    ),
    "a repeated lease is forgotten": ("lease", "if last and", "if false and", "not what is still held"),
    "a repeated lease may have lapsed": (
        "lease",
        "note_leases()\n  return {again",
        "return {again",
        "granted again, and the lease has lapsed",
    ),
    "the counts are kept": (
        "finish",
        "redis.call('HINCRBY', meta, 'entries', -#ids)",
        "",
        "counts are wrong",
    ),
    "the log has no expiry": ("finish", "if one.has_log then", "if false then", "log:a"),
    "the lease outlives the job": (
        "finish",
        "{leases, delayed, deadlines}) do\n    if",
        "{delayed, deadlines}) do\n    if",
        "leases",
    ),
    "the run is not told": (
        "finish",
        "if about.run ~= '' then",
        "if false then",
        "an end without one",
    ),
    "the entry stays": (
        "finish",
        "drop_entries(about.priority, about.tenant, entries)",
        "",
        "jobs:normal:default",
    ),
}
"""Which script, what is taken out of it, what stands there instead, and how it is found out."""
FAULTS_FOUND_LATE: dict[str, tuple[str, str, str, str]] = {
    "a zombie may finish": (
        "finish",
        "if f[2] ~= one.attempt or f[3] ~= worker then return 'lost' end",
        "",
        "a zombie's end was taken",
    ),
    "a zombie may renew": (
        "renew",
        "f[2] == ARGV[i + 1] and f[3] == worker",
        "true",
        "a zombie's renewal was taken",
    ),
    "a zombie may hand back": (
        "release",
        "f[2] == ARGV[i + 1] and f[3] == worker",
        "true",
        "a zombie handed a lease back",
    ),
    "a lease is not renewed": (
        "renew",
        "redis.call('ZADD', leases, now + lease_ms, id)",
        "",
        "the lease has lapsed",
    ),
    "a job handed back is not found": (
        "release",
        "redis.call('ZADD', leases, 0, id)",
        "",
        "not granted as the next attempt",
    ),
    "a marked job is leased again": (
        "lease",
        "not (known.cancel and cancel_unowned",
        "not (false and cancel_unowned",
        "granted though it was cancelled",
    ),
}


def find_out(client: redis.Redis, script: str, right: str, wrong: str, how: str) -> None:
    """Search with a script that is wrong."""

    def edit(name: str, source: str) -> str:
        if name != script:
            return source
        assert right in source, f"{script}.lua has no {right!r} any more"
        return source.replace(right, wrong)

    with pytest.raises(Fault, match=how):
        Model(client, job(), edit=edit).search(DEPTH)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_script_is_found_out(client: redis.Redis, fault: str) -> None:
    find_out(client, *FAULTS[fault])


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS_FOUND_LATE)
def test_a_wrong_script_is_found_out_in_the_end(client: redis.Redis, fault: str) -> None:
    find_out(client, *FAULTS_FOUND_LATE[fault])
