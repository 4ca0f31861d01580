"""The worker's small parts, without processes."""

from __future__ import annotations

import asyncio

import pytest
import redis.exceptions
import typer

from broker.calls import Lease
from protocol import Result, TokenEvent, decode_event
from worker import rate as rate_module
from worker.cli import parse_bytes
from worker.frames import (
    Begun,
    Drop,
    Failed,
    Load,
    Piece,
    Ready,
    Run,
    Step,
    decode_from_model,
    decode_to_model,
    encode,
    encode_step,
)
from worker.held import CHECKPOINT_TOKENS, Held
from worker.link import Link
from worker.rate import Rate

AWKWARD = 'line\nend "quotes" \u2028 \0 \U0001f389'


@pytest.mark.parametrize("frame", [Load("m", {"a": 1}), Run("1:j", AWKWARD, [1, 2]), Drop("1:j")])
def test_frames_to_the_model_come_back(frame: Load | Run | Drop) -> None:
    line = encode(frame)
    assert line.count(b"\n") == 1
    assert decode_to_model(line) == frame


def test_frames_from_the_model_come_back() -> None:
    step = Step(
        [Begun("1:a", 3, 2**63, True)],
        [Piece("1:a", 0, [1, 2], AWKWARD), Piece("2:b", 1, [3], "x", "stop", 7), Piece("c", error_code="e")],
        1,
        2,
        3,
    )
    line = encode_step(step)
    assert line.count(b"\n") == 1
    assert decode_from_model(line) == step
    assert decode_from_model(encode(Ready({"name": "m"}, 4, 0.5))) == Ready({"name": "m"}, 4, 0.5)
    assert decode_from_model(encode(Failed("no"))) == Failed("no")


def lease(logged: int = 0, attempt: int = 1) -> Lease:
    return Lease("j", attempt, 0, logged, 1_000, 2_000, b"{}")


def test_events_are_numbered_on_from_the_log() -> None:
    first = Held(lease())
    first.add(Piece(first.key, 0, [1], "he"))
    assert first.due()
    seq, events = first.take_events()
    assert seq == 1
    assert not first.due()
    second = Held(lease(logged=1, attempt=2), events)
    assert second.token_ids == [1]
    second.add(Piece(second.key, 0, [2], "y", "stop"))
    seq, more = second.take_end("done")
    assert seq == 2
    assert [decode_event(raw).seq for raw in more] == [2, 3]
    assert {decode_event(raw).attempt for raw in more} == {2}
    result = Result.decode(second.result("succeeded", "m", "w").encode())
    assert (result.text, result.choices[0].token_ids) == ("hey", [1, 2])


def test_an_unstreamed_job_is_due_in_larger_pieces() -> None:
    held = Held(lease())
    held.stream = False
    for number in range(CHECKPOINT_TOKENS - 1):
        held.add(Piece(held.key, 0, [number], "x"))
        assert not held.due()
    held.add(Piece(held.key, 0, [9], "x"))
    assert held.due()
    _, (event,) = held.take_events()
    token = decode_event(event)
    assert isinstance(token, TokenEvent)
    assert token.text == "x" * CHECKPOINT_TOKENS
    assert len(token.token_ids) == CHECKPOINT_TOKENS


def test_text_that_is_held_back_stays_for_later() -> None:
    """A token may bring no text: its id is logged all the same."""
    held = Held(lease())
    held.add(Piece(held.key, 0, [5], ""))
    assert held.due()
    _, (event,) = held.take_events()
    token = decode_event(event)
    assert isinstance(token, TokenEvent)
    assert (token.text, token.token_ids) == ("", [5])


class FlakyQueue:
    """Answers after a number of failures."""

    def __init__(self, *errors: Exception) -> None:
        self.keys = None
        self.errors = list(errors)

    async def run(self, _: object) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_the_link_waits_for_what_passes_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = FlakyQueue(redis.exceptions.ConnectionError("gone"), redis.exceptions.TimeoutError("slow"))
    link = Link(queue)  # type: ignore[arg-type]
    assert asyncio.run(link.run("call")) == "answer"  # type: ignore[arg-type]
    assert caplog.records[0].message.startswith("redis is away")
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "said",
    [
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write. script: on @user_script:136.",
        "BUSY Redis is busy running a script",
    ],
)
def test_the_link_waits_for_a_server_that_cannot_write_now(said: str) -> None:
    link = Link(FlakyQueue(redis.exceptions.ResponseError(said)))  # type: ignore[arg-type]
    assert asyncio.run(link.run("call")) == "answer"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.NoPermissionError("no"),
        redis.exceptions.ResponseError("WRONGTYPE Operation against a key"),
        redis.exceptions.ResponseError("BUSYGROUP Consumer Group name already exists"),
    ],
)
def test_the_link_does_not_wait_for_what_will_not_pass(error: redis.exceptions.ResponseError) -> None:
    link = Link(FlakyQueue(error))  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        asyncio.run(link.run("call"))  # type: ignore[arg-type]


def test_the_rate_is_over_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(rate_module.time, "monotonic", lambda: now)
    rate = Rate()
    assert rate.per_second() == 0
    for second in range(40):
        now = float(second)
        rate.note(second * 10)
    assert rate.per_second() == pytest.approx(10)
    now = 100.0
    assert rate.per_second() == 0


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("77", 77)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "4XB", "GiB", "inf", "nan", "1e400GB"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)
