"""Numbers that no job can have: refused before anything is sent, with the field and what it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis

from millstream import Client
from protocol import RequestError
from protocol.job import LATEST_S, LONGEST_S
from tests.producer.program import Program

DURATIONS = ("delay_s", "deadline_in_s", "result_ttl_s")
MOMENTS = ("not_before", "deadline")
NO_NUMBERS = (math.nan, math.inf, -math.inf)
WHOLE = {"max_retries": 100, "n": 128, "seed": 2**64 - 1, "logprobs": 20, "prompt_logprobs": 20}
"""Fields that take whole numbers, and the largest each takes."""


def is_refused(client: Client, said: str, **fields: Any) -> None:
    with pytest.raises(RequestError) as refused:
        client.submit("p", **fields)
    (name,) = fields
    assert name in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_time_is_beyond_what_the_server_holds(url: str) -> None:
    with Client(url) as client:
        for fields, most in ((DURATIONS, LONGEST_S), (MOMENTS, LATEST_S)):
            for name in fields:
                for value in (most + 1, 1e300, 2**63, 10**400):
                    is_refused(client, str(most) if value < 1e301 else "", **{name: value})
                for value in NO_NUMBERS:
                    is_refused(client, "finite", **{name: value})
                is_refused(client, "0", **{name: -1})
        assert list(client.queue.client.scan_iter()) == []


def test_the_last_times_are_held_to_the_end(url: str) -> None:
    with Client(url) as client:
        for name in DURATIONS:
            client.submit("p", id=name, **{name: LONGEST_S})
        for name in MOMENTS:
            client.submit("p", id=name, **{name: LATEST_S})
        assert client.status().delayed == 2
        assert client.clear().cancelled == 5
        assert client.job("deadline").result(timeout=0).state == "cancelled"
        assert 0 < client.queue.client.pttl(client.queue.keys.job("result_ttl_s")) <= LONGEST_S * 1000


@pytest.mark.parametrize("name", WHOLE)
def test_no_whole_number_is_too_large_or_none(url: str, name: str) -> None:
    with Client(url) as client:
        for value in (WHOLE[name] + 1, 2**64, 10**400, 1e300, *NO_NUMBERS, -(2**63)):
            is_refused(client, "", **{name: value})
        assert list(client.queue.client.scan_iter()) == []


def test_a_queue_holds_no_more_than_can_be_counted(url: str) -> None:
    with Client(url) as client:
        for value in (-1, 2**53 + 1, 2**63, math.nan, math.inf):
            most: Any = value
            with pytest.raises(
                RequestError, match=r"max_bytes is .*: give a number from 1 to 9,007,199,254,740,992"
            ):
                client.limits(max_bytes=most)
        assert client.limits(max_entries=2**53).max_entries == 2**53


@pytest.mark.parametrize("flag", ["--delay", "--deadline-in", "--not-before", "--deadline", "--wait"])
def test_flags_say_what_they_take(program: Program, url: str, flag: str) -> None:
    for value in ("1e300", "inf", "nan", "-1", "9223372036854775808"):
        done = program("submit", "p", f"{flag}={value}")
        assert (done.returncode, done.stdout) == (2, "")
        said = " ".join(done.stderr.split())
        assert flag in said
        assert "from 0 to" in said
    with redis.Redis.from_url(url) as client:
        assert list(client.scan_iter()) == []


BYTES = "\udcff"
"""What Python makes of the byte 0xFF on a command line: no UTF-8, and no server takes it."""


@pytest.mark.parametrize(
    "words",
    [
        ("watch", BYTES),
        ("result", BYTES),
        ("cancel", BYTES),
        ("dead", "show", BYTES),
        ("dead", "requeue", "a", BYTES),
        ("dead", "purge", "a", BYTES),
        ("dead", "list", "--after", BYTES),
        ("batch", "status", BYTES),
        ("batch", "cancel", BYTES),
        ("batch", "fetch", BYTES, "-o", "out.jsonl"),
        ("status", "--queue", BYTES),
        ("queue", "weight", BYTES, "2"),
        ("queue", "clear", "--yes", "--tenant", BYTES),
        ("submit", BYTES),
        ("submit", "--chat", BYTES),
        ("submit", "p", "--id", BYTES),
        ("submit", "p", "--tenant", BYTES),
        ("submit", "p", "--model", BYTES),
        ("submit", "p", "--stop", BYTES),
        ("submit", "p", "--choice", BYTES),
    ],
    ids=" ".join,
)
def test_bytes_that_are_no_text_are_refused_wherever_they_stand(
    program: Program, words: tuple[str, ...]
) -> None:
    refused = program(*words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "after", ["a-job", "1-", "-1", "1-2-3", "\u0661-0", "18446744073709551616-0", "*", "+"]
)
def test_a_list_of_dead_letters_goes_on_behind_a_letter_alone(url: str, after: str) -> None:
    with Client(url) as client:
        with pytest.raises(RequestError, match="give the id of a dead letter as the list shows it"):
            client.dead.list(after=after)
        assert client.dead.list(after="18446744073709551614") == client.dead.list(after="1-0") == []


@pytest.mark.parametrize("name", ["deadline", "deadline_in_s"])
@pytest.mark.parametrize("value", [0, 0.0, 1e-9, 0.0005])
def test_a_deadline_that_has_passed_is_one(url: str, name: str, value: float) -> None:
    fields: dict[str, Any] = {name: value}
    with Client(url) as client:
        job = client.submit("p", **fields)
        ended = job.result(timeout=10)
        assert (ended.state, ended.error and ended.error.code) == ("expired", "deadline_exceeded")


@pytest.mark.parametrize(
    "flags", [("--deadline-in", 0), ("--deadline", 0), ("--deadline", "1970-01-01T00:00Z")]
)
def test_a_flag_for_a_deadline_that_has_passed_is_one(program: Program, flags: tuple[object, ...]) -> None:
    assert program("submit", "p", "--id", "a", *flags).returncode == 0
    assert "expired" in program("result", "a", "--wait", 10).stderr


@pytest.mark.parametrize("name", [*DURATIONS, *MOMENTS])
def test_no_time_is_a_truth_or_a_text(url: str, name: str) -> None:
    with Client(url) as client:
        for value in (True, False, "5", b"5"):
            is_refused(client, "give a number", **{name: value})


def test_times_of_0_are_now_and_a_result_kept_0_s_is_kept(url: str) -> None:
    with Client(url) as client:
        client.submit("p", delay_s=0, not_before=None)
        client.submit("p", not_before=0)
        kept = client.submit("p", result_ttl_s=0, id="kept")
        assert (client.status().waiting, client.status().delayed) == (3, 0)
        client.clear()
        assert kept.result(timeout=0).state == "cancelled"
        assert client.queue.client.pttl(client.queue.keys.job("kept")) == -1


@pytest.mark.parametrize("wrong", ["x", 1.5, True, b"1", [1]])
def test_bounds_and_weights_are_numbers(url: str, wrong: Any) -> None:
    with Client(url) as client:
        for name in ("max_entries", "max_bytes"):
            with pytest.raises(RequestError, match=f"{name}: give a whole number"):
                client.limits(**{name: wrong})
        if wrong != 1.5:
            with pytest.raises(RequestError, match="weight: give a number"):
                client.set_weight("t", wrong)


@pytest.mark.parametrize("wrong", [None, 5, [5], ["x"], [None]])
def test_what_is_no_job_is_said(url: str, wrong: Any) -> None:
    with Client(url) as client, pytest.raises(RequestError, match="jobs: "):
        client.submit_many(wrong)
