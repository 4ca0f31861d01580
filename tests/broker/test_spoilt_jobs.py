"""Jobs whose keys somebody changed by hand: every script lives with them, the other jobs go on, and nothing is left.

put good ones --> bring `a` to a place --> spoil it --> call a script, twice --> time passes, a worker ends the rest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker import calls, clearing, dead_letters
from broker.calls import Handback
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from broker.script import Call
from protocol import TERMINAL_STATES, ErrorCode, Job
from tests.broker.steps import (
    LONG_MS,
    MODEL,
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    end,
    finish_call,
    job,
    key_names,
    put,
    say,
    tokens,
)
from tests.broker.steps import dead_letters as letters_of
from tests.conftest import shared_server
from tests.leaks import assert_nothing_leaked
from tests.servers import RealServer

KEYS = Keys()
JOB = KEYS.job("a")
Step = Callable[[Queue], object]


@pytest.fixture
def valkey(_session_servers: dict[str, RealServer]) -> Iterator[Queue]:
    """A queue on the server that comes along, empty; cases of one test empty it themselves."""
    opened = Queue(connect(shared_server("valkey", _session_servers).url), KEYS)
    opened.client.flushall()
    yield opened
    opened.client.flushall()
    opened.close()


# -- where the job is ------------------------------------------------------------------------------------------


def submitted(queue: Queue, **times: Any) -> None:
    put(queue, "a", deadline_in_s=3600.0, run="r", **times)


def leased(queue: Queue) -> None:
    submitted(queue)
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "x", "y")


def released(queue: Queue, retry_in_ms: int = 0) -> None:
    leased(queue)
    queue.run(calls.release(KEYS, "w1", [Handback("a", 1, retry_in_ms=retry_in_ms)]))


def dead(queue: Queue) -> None:
    leased(queue)
    lease = calls.Lease("a", 1, 0, 2, 0, 0, b"", worker="w1")
    assert end(queue, lease, 2, "xy", state="dead", dead_reason="why") == "ok"


PLACES: dict[str, Step] = {
    "in line": submitted,
    "for its time": lambda queue: submitted(queue, delay_s=1800.0),
    "running": leased,
    "handed back": released,
    "tried again": lambda queue: released(queue, 60_000),
    "dead": dead,
}

# -- how it is spoilt ------------------------------------------------------------------------------------------

FIELDS = (
    *(
        "state",
        "about",
        "entry",
        "bytes",
        "attempt",
        "crashes",
        "retries",
        "not_before",
        "deadline",
        "started",
    ),
    *("worker", "cancel", "payload", "digest", "letter", "requeued", "history"),
)
VALUES = (b"", b"-1", b"9" * 20, b"nobody,default,,1000,3")
LOOKS_RIGHT = ("entry is b''",)
"""What no script can tell from a job that has no entry yet."""
TYPES: dict[str, Callable[[Any, str], object]] = {
    "string": lambda server, key: server.set(key, "x"),
    "list": lambda server, key: server.rpush(key, "x"),
    "nothing": lambda server, key: server.delete(key),
}


def in_place(key: str, kind: str) -> Step:
    def put_there(queue: Queue) -> None:
        queue.client.delete(key)
        TYPES[kind](queue.client, key)

    return put_there


def field_is(name: str, value: bytes) -> Step:
    return lambda queue: queue.client.hset(JOB, name, value)


def payload_says(payload: bytes) -> Step:
    """Only the payload can say what the field `about` did."""
    return lambda queue: queue.client.hset(JOB, mapping={"about": b"nonsense", "payload": payload})


NOT_TEXTS = {
    "null": b"null",
    "a list": b"[1]",
    "an object": b'{"x":{}}',
    "a number": b"1e400",
    "nested": b"[" * 2000,
}
NAMES = (b"run", b"priority", b"tenant", b"result_ttl_s")
PAYLOADS = {
    what: b'{"id":"a",' + b",".join(b'"%s":%s' % (name, value) for name in NAMES) + b"}"
    for what, value in NOT_TEXTS.items()
}

FAULTS: dict[str, Step] = {
    **{f"{name} is nonsense": field_is(name, b"nonsense") for name in FIELDS},
    "no hash": in_place(JOB, "nothing"),
    "a string for a hash": in_place(JOB, "string"),
    "a string for a log": in_place(KEYS.log("a"), "string"),
    "a log of nonsense": in_place(KEYS.log("a"), "list"),
    "a list for a result": in_place(KEYS.result("a"), "list"),
    "a string for a run's stream": in_place(KEYS.done("r"), "string"),
    **{f"a payload of {what}": payload_says(payload) for what, payload in PAYLOADS.items()},
    "a retention in the wrong writing": field_is("about", b"normal,default,r,007,3"),
}
MORE_FAULTS: dict[str, Step] = {
    **{f"no {name}": lambda queue, name=name: queue.client.hdel(JOB, name) for name in FIELDS},
    **{f"{name} is {value[:9]!r}": field_is(name, value) for name in FIELDS for value in VALUES},
    "about without retries": field_is("about", b"normal,default,,1"),
    "bytes in the wrong writing": field_is("bytes", b"1e300"),
    "nothing but a field": lambda queue: (in_place(JOB, "nothing")(queue), field_is("x", b"y")(queue)),
}
for looks_right in LOOKS_RIGHT:
    del MORE_FAULTS[looks_right]
QUICK = ("state is nonsense", "about is nonsense", "entry is nonsense", "bytes is nonsense", "no hash")
QUICK += ("a string for a hash", "a string for a log", "a string for a run's stream", "a payload of null")
QUICK += ("a payload of a list", "a retention in the wrong writing")

# -- what is called --------------------------------------------------------------------------------------------

LEASE = calls.Lease("a", 1, 0, 2, 0, 0, b"", worker="w1")
SCRIPTS: dict[str, tuple[str, Callable[[Queue], Call[Any]]]] = {
    "lease": ("in line", lambda _: calls.lease(KEYS, "w7", 1, 1, LONG_MS)),
    "heartbeat": ("for its time", lambda _: calls.heartbeat(KEYS, "w7", {})),
    "renew": ("running", lambda _: calls.renew(KEYS, "w1", LONG_MS, [("a", 1)])),
    "publish": ("running", lambda _: calls.publish(KEYS, "w1", "a", 1, 3, tokens(LEASE, 3, "z"))),
    "finish": ("running", lambda _: finish_call(KEYS, LEASE, 2, "xy")),
    "release": ("running", lambda _: calls.release(KEYS, "w1", [Handback("a", 1, True)])),
    "release to be tried again": (
        "running",
        lambda _: calls.release(KEYS, "w1", [Handback("a", 1, retry_in_ms=60_000)]),
    ),
    "cancel": ("handed back", lambda _: calls.cancel(KEYS, "a")),
    "clear": ("handed back", lambda _: clearing.clear(KEYS, clearing.What(running=True), "leases", "0")),
    "look": ("tried again", lambda _: calls.look(KEYS, "a")),
    "submit": ("in line", lambda _: calls.submit(KEYS, job("a", run="r"))),
    "forget": ("dead", lambda _: calls.forget(KEYS, "r", [("a", "")])),
    "dead_requeue": ("dead", lambda queue: dead_letters.dead_requeue(KEYS, a_letter(queue), job("a"))),
    "dead_show": ("dead", lambda _: dead_letters.dead_show(KEYS, "a")),
    "dead_list": ("dead", lambda _: dead_letters.dead_list(KEYS, 5)),
    "dead_purge": ("dead", lambda _: dead_letters.dead_purge(KEYS, ["a"])),
    "register": ("in line", lambda _: calls.register(KEYS, "w7", MODEL)),
    "status": ("in line", lambda _: calls.status(KEYS)),
}
"""A place where the job is as a rule when the script meets it, and the call."""


def a_letter(queue: Queue) -> str:
    raw: Any = queue.client.xrevrange(KEYS.dead, count=1)
    return str(raw[0][0].decode()) if raw else "1-1"


# -- what must hold --------------------------------------------------------------------------------------------


def time_passes(queue: Queue) -> None:
    """Whatever somebody waits for: it is over."""
    server: Any = queue.client
    with server.pipeline(transaction=False) as pipe:
        for times in (KEYS.leases, KEYS.delayed, KEYS.deadlines):
            pipe.zrange(times, 0, -1)
        for times, names in zip((KEYS.leases, KEYS.delayed, KEYS.deadlines), pipe.execute(), strict=True):
            if names:
                server.zadd(times, dict.fromkeys(names, 1))


def end_all(queue: Queue) -> list[str]:
    """A worker ends what there is; how the good ones and `a` ended."""
    worker = Worker(queue, "w9")
    for _ in range(4):
        time_passes(queue)
        queue.run(calls.heartbeat(KEYS, "w9", {}))
        for lease in worker.lease(5):
            assert end(queue, lease, lease.logged) == "ok"
    return [str(queue.run(calls.look(KEYS, name)).state) for name in ("good", "soon", "a")]


def made_and_spoilt(queue: Queue, place: str, spoil: Step, call: Callable[[Queue], Call[Any]]) -> Call[Any]:
    """A call that is made while job a stands at a place, beside two good ones, and before it is spoilt."""
    queue.client.flushall()
    PLACES[place](queue)
    put(queue, "good")
    put(queue, "soon", delay_s=1800.0)
    made = call(queue)
    spoil(queue)
    return made


def drive(queue: Queue, place: str, spoil: Step, call: Callable[[Queue], Call[Any]]) -> None:
    made = made_and_spoilt(queue, place, spoil, call)
    queue.run(made)
    queue.run(made)
    *good, spoilt = end_all(queue)
    assert good == ["succeeded"] * 2
    assert spoilt in {"None", *TERMINAL_STATES}
    letters = [letter for letter in letters_of(queue) if letter["reason"] in (b"spoilt_job", b"lost_payload")]
    assert len(letters) <= 1
    assert counts(queue) == (0, 0)
    if place == "dead" or queue.client.type(KEYS.result("a")) == b"list":
        queue.client.delete(
            KEYS.log("a"), KEYS.result("a")
        )  # what a hand puts there is the hand's to take away
    assert_nothing_leaked(queue.client)
    work = ("jobs:", "tenants:", "leases", "delayed", "deadlines")
    assert not [name for name in key_names(queue) if name.removeprefix(KEYS.base).startswith(work)]


def drive_all(queue: Queue, places: list[str], faults: dict[str, Step], call: Any) -> None:
    wrong = []
    for place in places:
        for fault, spoil in faults.items():
            try:
                drive(queue, place, spoil, call)
            except Exception as error:
                wrong.append((place, fault, f"{type(error).__name__}: {error}"[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_whoever_waits_for_a_spoilt_job_is_told_and_it_can_have_another_life(valkey: Queue) -> None:
    """What its field `about` said stands in its payload as well: priority, tenant, bulk run, retention."""
    put(valkey, "a", run="r", priority="low", tenant="t", result_ttl_s=60.0)
    field_is("about", b"nonsense")(valkey)
    assert Worker(valkey).lease(5) == []
    result = assert_ended_once(valkey, "a", "dead")
    assert result.error is not None
    assert result.error.code == ErrorCode.SPOILT_JOB
    assert result.error.message == "somebody changed it by hand: its field about cannot be read"
    assert valkey.client.xlen(KEYS.done("r")) == 1
    assert 0 < valkey.client.pttl(KEYS.job("a")) <= 60_000
    letter = valkey.run(dead_letters.dead_show(KEYS, "a"))
    assert letter is not None
    assert letter.reason == "spoilt_job"
    valkey.run(dead_letters.dead_requeue(KEYS, letter.letter, Job.decode(letter.raw or b"")))
    assert end(valkey, Worker(valkey, "w2").lease_one()) == "ok"
    assert assert_ended_once(valkey, "a").attempt == 1
    assert_drained(valkey)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_spoilt_job_stops_nobody(valkey: Queue, script: str) -> None:
    place, call = SCRIPTS[script]
    drive_all(valkey, [place], {fault: FAULTS[fault] for fault in QUICK}, call)


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [name for name in SCRIPTS if name not in ("status", "register", "dead_list")]
)
def test_a_spoilt_job_stops_nobody_wherever_it_is(valkey: Queue, script: str) -> None:
    place, call = SCRIPTS[script]
    drive_all(valkey, [place], {**FAULTS, **MORE_FAULTS}, call)
    if script in ("lease", "heartbeat", "look", "cancel"):
        drive_all(valkey, [*PLACES], FAULTS, call)


# -- what stands in a place of the queue's own -----------------------------------------------------------------

OWN = (KEYS.jobs("normal", "default"), KEYS.tenants("normal"), KEYS.leases, KEYS.delayed, KEYS.deadlines)
OWN += (KEYS.workers, KEYS.loading, KEYS.weights, KEYS.dead, KEYS.lease("w7"), KEYS.lease("w9"))
NO_NUMBERS = ("entries", "bytes", "max_entries", "max_bytes", "picks", "vt:normal", "sweep", "forgotten")


def no_number(name: str, value: bytes) -> Step:
    return lambda queue: queue.client.hset(KEYS.meta, name, value)


STRANGE: dict[str, Step] = {
    **{f"a {kind} in {key}": in_place(key, kind) for key in OWN for kind in ("string", "list")},
    **{
        f"{name} is {value!r}": no_number(name, value)
        for name in NO_NUMBERS
        for value in (b"x", b"nan", b"inf")
    },
    "a string in meta": in_place(KEYS.meta, "string"),
    **{
        f"a weight of {value!r}": lambda queue, value=value: queue.client.hset(KEYS.weights, "default", value)
        for value in (b"x", b"nan", b"inf", b"-1")
    },
}


OFTEN = {"submit", "lease", "renew", "finish", "heartbeat", "cancel"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in SCRIPTS],
)
def test_what_is_of_another_type_in_the_queues_own_place_stops_nobody(queue: Queue, script: str) -> None:
    """The jobs go on, whatever the counts were; what could not be used is gone."""
    place, call = SCRIPTS[script]
    wrong = []
    for fault, spoil in STRANGE.items():
        made = made_and_spoilt(queue, place, spoil, call)
        try:
            queue.run(made)
            queue.run(made)
            put(queue, "later")
            queue.run(calls.heartbeat(KEYS, "w9", {}))
            ends = end_all(queue)
            assert ends[0] == "succeeded", ends
            assert str(queue.run(calls.look(KEYS, "later")).state) == "succeeded"
            queue.run(calls.status(KEYS))
            queue.run(calls.limits(KEYS))
        except Exception as error:
            wrong.append((fault, f"{type(error).__name__}: {error}"[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_weight_that_is_none_counts_as_one(queue: Queue) -> None:
    put(queue, *(f"a{n}" for n in range(5)), tenant="a")
    put(queue, *(f"b{n}" for n in range(5)), tenant="b")
    for value in ("inf", "nan", "x"):
        queue.client.hset(KEYS.weights, "a", value)
        assert {lease.id[0] for lease in Worker(queue, value).lease(2)} == {"a", "b"}
