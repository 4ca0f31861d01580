"""The worker's small parts, without processes."""

from __future__ import annotations

import asyncio
import io
import os
import threading

import msgspec
import pytest
import redis.exceptions
import typer

from broker.calls import Lease
from engine.dry_run import DryRunEngine, Options
from protocol import (
    Job,
    Result,
    TerminalEvent,
    TokenEvent,
    TokenLogprob,
    decode_event,
)
from tests.worker.harness import words
from worker.child import READ_AT_ONCE, Teller, flat, to_piece
from worker.cli import parse_bytes
from worker.frames import (
    HEAD_BYTES,
    Begun,
    Drop,
    Failed,
    Load,
    Piece,
    Ready,
    Run,
    Step,
    ToModel,
    decode_from_model,
    decode_to_model,
    encode,
    length_of,
    read,
)
from worker.held import CHECKPOINT_TOKENS, Held
from worker.link import Link
from worker.model_process import READ_AHEAD, _read_frame, _reader


def told(token_id: int) -> TokenLogprob:
    return {"token_id": token_id, "token": "t", "logprob": -0.5, "rank": 1, "top_logprobs": []}


def body_of(said: list[ToModel] | Ready | Failed | Step) -> bytes:
    """A frame as its reader gets it."""
    raw = encode(said)
    assert length_of(raw[:HEAD_BYTES]) == len(raw) - HEAD_BYTES
    return raw[HEAD_BYTES:]


AWKWARD = 'line\nend "quotes" \u2028 \0 \U0001f389'


def test_frames_to_the_model_come_back() -> None:
    said = [Load("m", {"a": 1}), Run("1:j", b"\xff\n{", [([1, 2], True), ([], False)]), Drop("1:j")]
    assert decode_to_model(body_of(said)) == said
    assert [decode_to_model(body_of([one])) for one in said] == [[one] for one in said]


PIECES = [
    Piece("1:a", 0, [1, 2], AWKWARD),
    Piece("1:a", 1, [3], "x", True, "stop", 7),
    Piece("1:a", 2, [], "", True),
    Piece("1:a", 0, [4], "y", logprobs=[told(4)], prompt_logprobs=[None, told(9)]),
    Piece("1:a", 0, [5], "kept", error_code="e", error_message="m"),
    Piece("c", error_code="e"),
]


def test_frames_from_the_model_come_back() -> None:
    step = Step([Begun("1:a", 3, 2, 2**64 - 1, True)], PIECES, 1, 2, 3)
    assert decode_from_model(body_of(step)) == step
    counted = msgspec.structs.replace(step, counters={"steps": 7, "forward": 0.25})
    assert decode_from_model(body_of(counted)) == counted
    refused = Failed("give max_num_seqs 8", by_options=True)
    assert decode_from_model(body_of(refused)) == refused
    assert decode_from_model(body_of(Ready({"name": "m"}, 4, 0.5))) == Ready({"name": "m"}, 4, 0.5)
    assert decode_from_model(body_of(Failed("no"))) == Failed("no")


def test_frames_are_read_one_after_the_other_until_one_is_torn() -> None:
    frames: list[list[ToModel]] = [[Drop("1:a")], [Run("1:b", b"x" * 3 * READ_AT_ONCE, []), Drop("1:c")], []]
    raw = b"".join(map(encode, frames))
    source = io.BytesIO(raw)
    assert [decode_to_model(read(source) or b"") for _ in frames] == frames
    assert read(source) is None
    for torn in (raw[: HEAD_BYTES - 1], encode(frames[1])[:-1]):
        assert read(io.BytesIO(torn)) is None


def test_counters_go_along_once_a_second_and_with_the_last_step() -> None:
    engine = DryRunEngine("words", Options())
    engine.add(engine.prepare(Job(id="1:j", prompt=words(20))))
    sink = io.BytesIO()
    teller = Teller(engine, sink)
    while engine.has_work():
        teller.tell([], [to_piece(delta) for delta in engine.step()])
    sink.seek(0)
    steps = [decode_from_model(body) for body in iter(lambda: read(sink), None)]
    assert all(isinstance(step, Step) for step in steps)
    counters = [step.counters for step in steps if isinstance(step, Step)]
    assert len(counters) >= 20
    assert counters[0] == flat(engine.stats()) | counters[0]
    assert repr(counters[-1]) == repr(flat(engine.stats())), "a whole number stays one"
    assert counters.count(None) == len(counters) - 2
    assert {"schedule", "forward", "sample", "output"} <= set(counters[-1] or ())


@pytest.mark.parametrize("length", [10, READ_AHEAD, READ_AHEAD + 1, 5 * READ_AHEAD + 3])
def test_a_frame_may_have_any_length(length: int) -> None:
    bodies = [b"before", b"x" * length, b"", b"after"]
    raw = b"".join(len(body).to_bytes(HEAD_BYTES, "little") + body for body in bodies)

    async def heard() -> list[bytes]:
        read_fd, write_fd = os.pipe()
        sink = os.fdopen(write_fd, "wb")
        writer = threading.Thread(target=lambda: (sink.write(raw + raw[: HEAD_BYTES + 3]), sink.close()))
        writer.start()
        reader = await _reader(read_fd)
        found = [await _read_frame(reader) for _ in bodies]
        with pytest.raises(asyncio.IncompleteReadError):  # the last frame is torn
            await _read_frame(reader)
        writer.join()
        return found

    assert asyncio.run(heard()) == bodies


def lease(logged: int = 0, attempt: int = 1) -> Lease:
    return Lease("j", attempt, 0, logged, 1_000, 2_000, b"{}")


def held_with(*pieces: Piece, num_choices: int = 1, stream: bool = True) -> Held:
    held = Held(lease(), 1)
    held.begin(Begun(held.key, 3, num_choices, 5, stream))
    for piece in pieces:
        held.add(piece)
    return held


def tokens_of(events: list[bytes]) -> list[TokenEvent]:
    return [event for event in map(decode_event, events) if isinstance(event, TokenEvent)]


def test_events_are_numbered_on_from_the_log() -> None:
    first = held_with(Piece("", 0, [1], "he"))
    assert first.due()
    seq, events = first.take_events()
    assert seq == 1
    assert not first.due()
    second = Held(lease(logged=1, attempt=2), 2)
    second.go_on_after(events)
    assert second.written == [([1], False)]
    second.add(Piece(second.key, 0, [2], "y", True, "stop"))
    seq, more = second.take_end("done")
    assert seq == 2
    assert [decode_event(raw).seq for raw in more] == [2, 3]
    assert {decode_event(raw).attempt for raw in more} == {2}
    result = Result.decode(second.result("succeeded", "m", "w"))
    assert (result.text, result.choices[0].token_ids) == ("hey", [1, 2])


def test_an_unstreamed_job_is_due_in_larger_pieces() -> None:
    held = held_with(stream=False)
    for number in range(CHECKPOINT_TOKENS - 1):
        held.add(Piece(held.key, 0, [number], "x"))
        assert not held.due()
    held.add(Piece(held.key, 0, [9], "x"))
    assert held.due()
    _, events = held.take_events()
    (token,) = tokens_of(events)
    assert token.text == "x" * CHECKPOINT_TOKENS
    assert len(token.token_ids) == CHECKPOINT_TOKENS


def test_text_that_is_held_back_stays_for_later() -> None:
    """A token may bring no text: its id is logged all the same."""
    held = held_with(Piece("", 0, [5], ""))
    assert held.due()
    (token,) = tokens_of(held.take_events()[1])
    assert (token.text, token.token_ids) == ("", [5])


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_a_choice_is_logged_even_without_a_token(stream: bool) -> None:
    held = held_with(Piece("", 1, [5], "x"), num_choices=2, stream=stream)
    held.take_events()
    held.add(Piece("", 1, [], "", finish_reason="stop", stop_reason="END"))
    assert held.due() == stream
    assert not held.complete
    assert held.open_choices == 1
    _, events = held.take_events()
    (token,) = tokens_of(events)
    assert (token.choice, token.finish_reason, token.stop_reason) == (1, "stop", "END")
    assert not held.unlogged


def test_a_resumed_job_knows_everything_that_was_logged() -> None:
    first = held_with(
        Piece("", 0, [1], "a", logprobs=[told(1)], prompt_logprobs=[None, told(9)]),
        Piece("", 2, [2], "b", finish_reason="stop", stop_reason=7, logprobs=[told(2)]),
        Piece("", 0, [3], "c", logprobs=[told(3)]),
        num_choices=3,
        stream=False,
    )
    first_seq, events = first.take_events()
    assert (first_seq, len(events)) == (1, 2)
    second = Held(lease(logged=2, attempt=2), 2)
    second.go_on_after(events)
    second.begin(Begun(second.key, 3, 3, 5, False))
    assert second.written == [([1, 3], False), ([], False), ([2], True)]
    assert second.open_choices == 2
    results = [Result.decode(held.result("cancelled", "m", "w")).choices for held in (first, second)]
    assert results[0] == results[1]
    zero, one, two = results[1]
    assert (zero.text, zero.finish_reason, zero.logprobs) == ("ac", "cancelled", [told(1), told(3)])
    assert (one.text, one.token_ids, one.finish_reason) == ("", [], "cancelled")
    assert (two.finish_reason, two.stop_reason, two.logprobs) == ("stop", 7, [told(2)])
    assert [choice.prompt_logprobs for choice in results[1]] == [[None, told(9)], None, None]


def test_what_was_made_up_to_an_error_is_kept() -> None:
    held = held_with(Piece("", 0, [1], "a"), num_choices=2)
    held.add(Piece("", 0, [2], "b", last=True, error_code="engine_error", error_message="why"))
    assert held.error is not None
    assert not held.complete
    result = Result.decode(held.result("failed", "m", "w", held.error))
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [
        ("ab", "error"),
        ("", "error"),
    ]
    _, events = held.take_end("error", held.error)
    (token,) = tokens_of(events)
    assert (token.text, token.token_ids) == ("ab", [1, 2])
    end = decode_event(events[-1])
    assert isinstance(end, TerminalEvent)
    assert (end.type, end.code, end.message) == ("error", "engine_error", "why")


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
    queue = FlakyQueue(redis.exceptions.ConnectionError("gone"), redis.exceptions.ConnectionError("gone"))
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


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("77", 77)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "4XB", "GiB", "inf", "nan", "1e400GB"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)
