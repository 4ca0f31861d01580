"""Dead letters and the queue as a whole, in Python and as verbs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from broker import calls
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from millstream import AsyncClient, Client
from protocol import JobNotFound, QueueFull, RequestError, WrongState
from tests.broker.steps import Worker, end, put
from tests.producer.program import Program

KEYS = Keys()


def die(url: str, *ids: str) -> None:
    queue = Queue(connect(url), KEYS)
    put(queue, *ids)
    for lease in Worker(queue, f"w-{ids[0]}").lease(len(ids)):
        end(queue, lease, state="dead", dead_reason="crashed_worker")
    queue.close()


def foreign(client: Client) -> None:
    """A stream gets an entry that is no job and one without a payload; a worker clears them away."""
    server: Any = client.queue.client
    for fields in ({"x": "y"}, {"id": "lost"}):
        server.xadd(KEYS.jobs("normal", "default"), fields)
    server.zadd(KEYS.tenants("normal"), {"default": 1})
    assert Worker(client.queue, "w-foreign").lease(5) == []


def test_a_client_lists_shows_requeues_and_purges(url: str) -> None:
    die(url, "a", "b", "c")
    with Client(url) as client:
        assert [letter.job_id for letter in client.dead.list()] == ["a", "b", "c"]
        assert len(client.dead.list(2)) == 2
        assert client.dead.show("b").reason == "crashed_worker"
        assert client.dead.requeue("b") == "b"
        assert client.job("b").status().state == "queued"
        assert client.dead.purge("a", "b") == 1
        assert client.dead.purge_all() == 1
        assert client.dead.list() == []
        assert client.status().waiting == 1


def test_what_cannot_be_requeued_says_why(url: str) -> None:
    die(url, "a")
    with Client(url) as client:
        foreign(client)
        by_reason = {letter.reason: letter.letter for letter in client.dead.list()}
        with pytest.raises(WrongState, match="is not a job"):
            client.dead.requeue(by_reason["not_a_job"])
        with pytest.raises(WrongState, match="the payload of job lost is lost; submit the job again"):
            client.dead.requeue(by_reason["lost_payload"])
        with pytest.raises(JobNotFound, match="no dead letter nobody"):
            client.dead.requeue("nobody")
        client.limits(max_entries=1)
        client.submit("p", id="other")
        with pytest.raises(QueueFull):
            client.dead.requeue("a")
        client.limits(max_entries=0)
        assert client.dead.requeue("a") == "a"
        with pytest.raises(JobNotFound, match="was requeued or purged"):
            client.dead.requeue("a")


def test_a_letter_of_a_job_with_another_life_says_so(url: str) -> None:
    die(url, "a")
    with Client(url) as client:
        letter = client.dead.list()[0].letter
        client.queue.client.delete(KEYS.job("a"), KEYS.log("a"), KEYS.result("a"))
        client.submit("another", id="a")
        with pytest.raises(WrongState, match="job a is queued: only a dead job can be requeued"):
            client.dead.requeue(letter)


def test_the_asyncio_client_does_the_same(url: str) -> None:
    die(url, "a", "b")

    async def run() -> None:
        async with AsyncClient(url) as client:
            assert [letter.job_id for letter in await client.dead.list()] == ["a", "b"]
            assert (await client.dead.show("a")).job_id == "a"
            assert await client.dead.requeue("a") == "a"
            assert await client.dead.purge("nobody") == 0
            assert await client.dead.purge_all() == 1
            await client.pause()
            assert (await client.status()).paused
            await client.resume()
            assert (await client.limits(max_entries=5)).max_entries == 5
            await client.set_weight("t", 2)
            assert await client.weights() == {"t": 2.0}

    asyncio.run(run())


def test_pause_limits_and_weights(url: str) -> None:
    with Client(url) as client:
        client.pause()
        assert client.status().paused
        client.resume()
        assert not client.status().paused
        assert client.limits(max_entries=1, max_bytes=10_000).max_bytes == 10_000
        client.submit("p")
        with pytest.raises(QueueFull, match="1 of 1 jobs"):
            client.submit("p")
        client.set_weight("t", 2.5)
        assert client.weights() == {"t": 2.5}


@pytest.mark.parametrize(
    ("tenant", "weight"), [("t", 0), ("t", -1), ("t", 1e9), ("t", float("nan")), ("a:b", 1), ("", 1)]
)
def test_a_weight_that_no_tenant_can_have_is_refused(url: str, tenant: str, weight: float) -> None:
    with Client(url) as client:
        with pytest.raises(RequestError):
            client.set_weight(tenant, weight)
        with pytest.raises(RequestError, match="max_entries is -1"):
            client.limits(max_entries=-1)
        assert client.weights() == {}


def test_the_verbs_of_dead_letters(program: Program, url: str) -> None:
    assert program("dead", "list").stderr == "millstream: no dead letters\n"
    die(url, "a", "b")
    listed = [json.loads(line) for line in program("dead", "list", "--json").stdout.splitlines()]
    assert [(row["id"], row["reason"], row["attempt"]) for row in listed] == [
        ("a", "crashed_worker", 1),
        ("b", "crashed_worker", 1),
    ]
    lines = program("dead", "list").stdout.splitlines()
    assert lines[0].startswith(listed[0]["letter"])
    assert "  a  crashed_worker, attempt 1, " in lines[0]
    page = program("dead", "list", "--count", 1)
    assert f"go on with --after {listed[0]['letter']}" in page.stderr
    shown = json.loads(program("dead", "show", "a", "--json").stdout)
    assert json.loads(shown["raw"])["id"] == "a"
    assert shown["history"] == []
    requeued = program("dead", "requeue", "a", "nobody")
    assert (requeued.returncode, requeued.stdout) == (1, "a\n")
    assert "no dead letter nobody" in requeued.stderr
    assert json.loads(program("status", "--json").stdout)["waiting"] == 1
    assert program("dead", "purge", "b", "b").stdout == "1 purged\n"
    assert program("dead", "purge", "b").returncode == 0
    assert program("dead", "show", "b").returncode == 1
    assert program("dead", "purge").returncode == 2
    assert program("dead", "requeue", "b", "--all").returncode == 2


def test_requeue_all_takes_every_job_and_leaves_what_is_none(program: Program, url: str) -> None:
    die(url, *(f"j{n}" for n in range(105)))
    with Client(url) as client:
        foreign(client)
    done = program("dead", "requeue", "--all")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 105)
    assert len(done.stderr.splitlines()) == 2
    status = json.loads(program("status", "--json").stdout)
    assert (status["waiting"], status["dead"]) == (105, 2)
    assert program("dead", "purge", "--all", "--json").stdout == '{"purged": 2}\n'


def test_a_letters_history_is_shown(program: Program, url: str) -> None:
    die(url, "a")
    program("dead", "requeue", "a")
    queue = Queue(connect(url), KEYS)
    end(queue, Worker(queue, "w2").lease_one(), state="dead", dead_reason="crashed_worker")
    queue.close()
    shown = program("dead", "show", "a").stdout.splitlines()
    assert shown[1].startswith("  before: ")
    assert shown[1].endswith("crashed_worker, attempt 1")


def test_the_verbs_of_a_queue(program: Program) -> None:
    assert program("queue", "pause").stdout == "queue default: paused\n"
    assert "; paused" in program("status").stdout
    assert program("queue", "resume", "--json").stdout == '{"queue": "default", "paused": false}\n'
    program("queue", "limits", "--max-entries", 7)
    shown = json.loads(program("queue", "limits", "--json").stdout)
    assert (shown["max_entries"], shown["max_bytes"]) == (7, calls.DEFAULT_MAX_BYTES)
    assert program("queue", "limits", "--max-entries", 0).stdout.startswith("0 of 100,000 jobs")
    assert program("queue", "weight").stdout == "every tenant has weight 1\n"
    assert program("queue", "weight", "t", "2.5").stdout == "t  2.5\n"
    assert program("queue", "weight", "other").stdout == "other  1\n"
    assert json.loads(program("queue", "weight", "--json").stdout)["weights"] == {"t": 2.5}
    refused = program("queue", "weight", "t", "0")
    assert (refused.returncode, refused.stderr) == (
        2,
        "millstream: weight 0: give 0.001 to 1000; 1 is what every tenant has\n",
    )


def test_submit_takes_times_and_retries(program: Program, url: str) -> None:
    times = ("--not-before", "2100-01-31T08:00+01:00", "--deadline", "2100-01-31T09:00Z")
    made = program("submit", "x", "--id", "a", *times, "--max-retries", 7)
    assert made.returncode == 0
    queue = Queue(connect(url), KEYS)
    held: Any = queue.client.hgetall(KEYS.job("a"))
    queue.close()
    assert (held[b"not_before"], held[b"deadline"]) == (b"4105062000000", b"4105069200000")
    assert held[b"about"].split(b",")[-1] == b"7"
    assert program("submit", "x", "--delay", 3600, "--deadline-in", 7200).returncode == 0
    assert "2 waiting (2 for their time)" in program("status").stdout


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--not-before", "soon"), "is not a time"),
        (("--not-before", "2100-01-31T08:00"), "no time zone"),
        (("--deadline", "-5"), "-5"),
        (("--delay", "1", "--not-before", "4105062000"), "give one of not_before and delay_s"),
        (("--delay", "9", "--deadline-in", "3"), "it may start only after its deadline"),
        (("--max-retries", "101"), "less than or equal to 100"),
    ],
)
def test_times_that_cannot_be_are_refused(program: Program, flags: tuple[str, ...], why: str) -> None:
    refused = program("submit", "x", *flags)
    assert refused.returncode == 2
    assert why in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


ESCAPES = b"\x1b]0;yours\x07\x1b[31m\x9b2J\r\n"


@pytest.mark.parametrize("reason", [b"lost_payload", b"not_a_job", b"crashed_worker", ESCAPES])
def test_no_letter_commands_the_terminal(program: Program, url: str, reason: bytes) -> None:
    """A letter is what anybody wrote on the server; every verb shows it."""
    with Client(url) as client:
        server: Any = client.queue.client
        history = json.dumps({"letter": ESCAPES.decode("latin-1"), "reason": "x", "attempt": 1})
        letter = server.xadd(
            KEYS.dead, {"id": b"a" + ESCAPES, "reason": reason, "raw": ESCAPES, "history": history}
        ).decode()
    for verb in (("list",), ("show", letter), ("requeue", letter), ("requeue", "--all"), ("purge", letter)):
        done = program("dead", *verb)
        assert not {"\x1b", "\x07", "\x9b", "\r"} & set(done.stdout + done.stderr), (verb, done)


def test_a_letter_without_a_payload_holds_no_job(program: Program, url: str) -> None:
    with Client(url) as client:
        server: Any = client.queue.client
        letter = server.xadd(KEYS.dead, {"id": "a", "reason": "crashed_worker"}).decode()
    done = program("dead", "requeue", letter)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"dead letter {letter}: it holds no job" in done.stderr


def test_requeue_all_of_nothing_says_so(program: Program) -> None:
    done = program("dead", "requeue", "--all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "millstream: 0 requeued\n")
