"""Engines without a model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bulk import generate
from engine.dry_run import OPTIONS, DryRunEngine, is_dry_run, open_dry_run
from engine.interface import Delta, EngineCore, Written
from protocol import ErrorCode, Job, Message, ModelUnavailable, RequestError, SamplingParams, TextPart


def run(engine: DryRunEngine, *jobs: Job) -> dict[str, list[Delta]]:
    for job in jobs:
        engine.add(engine.prepare(job))
    deltas: dict[str, list[Delta]] = {job.id: [] for job in jobs}
    while engine.has_work():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas


def words(prompt: str, **params: int) -> list[Delta]:
    return run(open_dry_run("dry-run:words"), Job(id="j", prompt=prompt, params=SamplingParams(**params)))[
        "j"
    ]


def test_echo_answers_with_the_prompt_in_one_token() -> None:
    engine: EngineCore = open_dry_run("dry-run:echo")
    (result,) = generate(engine, [" two  words\n"])
    assert (result.text, result.choices[0].token_ids, result.choices[0].finish_reason) == (
        " two  words\n",
        [0],
        "stop",
    )
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 1)
    assert engine.fingerprint.name == "dry-run:echo"


def test_a_chat_is_answered_with_its_last_user_message() -> None:
    turns = [("system", "s"), ("user", "first"), ("assistant", "a"), ("user", "last"), ("assistant", "b")]
    chat = Job(id="j", messages=[Message(role=role, content=content) for role, content in turns])
    assert run(open_dry_run("dry-run:echo"), chat)["j"][0].text == "last"


@pytest.mark.parametrize(
    "content", [[TextPart(type="text", text="a "), TextPart(type="text", text="b")], "a b"]
)
def test_the_parts_of_a_message_are_joined(content: str | list[TextPart]) -> None:
    chat = Job(id="j", messages=[Message(role="user", content=content)])
    assert run(open_dry_run("dry-run:echo"), chat)["j"][0].text == "a b"


def test_a_chat_in_which_no_user_speaks_is_answered_with_its_last_turn() -> None:
    calls = [{"id": "1", "function": {"name": "f"}}]
    turns = [
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="found", tool_call_id="1"),
    ]
    assert run(open_dry_run("dry-run:echo"), Job(id="j", messages=turns))["j"][0].text == "found"


def test_token_ids_are_answered_as_numbers() -> None:
    (result,) = generate(open_dry_run("dry-run:words"), [[5, 6, 7]])
    assert (result.text, result.choices[0].token_ids) == ("5 6 7", [0, 1, 2])


@given(st.text(min_size=1))
def test_words_joined_are_the_prompt(prompt: str) -> None:
    deltas = words(prompt)
    assert "".join(delta.text for delta in deltas) == prompt
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(len(deltas)))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_words_come_one_a_step() -> None:
    assert [delta.text for delta in words(" to be  or\tnot \n")] == [" to", " be", "  or", "\tnot \n"]


@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (3, "length"), (4, "stop"), (5, "stop")])
def test_max_tokens_cuts_the_words(max_tokens: int, reason: str) -> None:
    deltas = words("to be or not", max_tokens=max_tokens)
    assert (len(deltas), deltas[-1].finish_reason) == (min(max_tokens, 4), reason)


def by_choice(deltas: list[Delta]) -> dict[int, tuple[str, list[int], list[str | None]]]:
    """Text, ids and the finish reasons of each choice."""
    texts: dict[int, str] = defaultdict(str)
    ids: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, list[str | None]] = defaultdict(list)
    for delta in deltas:
        texts[delta.choice] += delta.text
        ids[delta.choice] += delta.token_ids
        reasons[delta.choice].append(delta.finish_reason)
    return {choice: (texts[choice], ids[choice], reasons[choice]) for choice in sorted(texts)}


def test_every_choice_answers_its_own_prompt() -> None:
    job = Job(id="j", prompt=["a b", "c", "d e f g"], params=SamplingParams(n=2, max_completion_tokens=3))
    deltas = run(open_dry_run("dry-run:words"), job)["j"]
    assert by_choice(deltas) == {
        0: ("a b", [0, 1], [None, "stop"]),
        1: ("a b", [0, 1], [None, "stop"]),
        2: ("c", [0], ["stop"]),
        3: ("c", [0], ["stop"]),
        4: ("d e f", [0, 1, 2], [None, None, "length"]),
        5: ("d e f", [0, 1, 2], [None, None, "length"]),
    }
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_prompts_count_once_each_and_choices_all() -> None:
    engine = open_dry_run("dry-run:words")
    run(engine, Job(id="j", prompt=["a b", "c"], params=SamplingParams(n=3)))
    assert (engine.stats().prompt_tokens, engine.stats().output_tokens) == (3, 9)


def resumed(*written: Written) -> list[Delta]:
    """What is left to say of two choices of four words each."""
    engine = open_dry_run("dry-run:words")
    request = engine.prepare(Job(id="j", prompt="to be or not", params=SamplingParams(n=len(written))))
    engine.add(replace(request, written=written))
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return deltas


@pytest.mark.parametrize("done", range(5))
def test_a_resumed_request_goes_on_after_what_is_logged(done: int) -> None:
    deltas = resumed(Written(tuple(range(done))))
    rest = ["to be or not", " be or not", " or not", " not", ""][done]
    assert "".join(delta.text for delta in deltas) == rest
    assert deltas[-1].finish_reason == "stop"


def test_a_resumed_request_leaves_ended_choices_alone() -> None:
    deltas = resumed(Written((0, 1, 2, 3), ended=True), Written(), Written((0, 1)))
    assert by_choice(deltas) == {
        1: ("to be or not", [0, 1, 2, 3], [None, None, None, "stop"]),
        2: (" or not", [2, 3], [None, "stop"]),
    }


def test_a_resumed_request_whose_choices_have_all_ended_only_ends() -> None:
    ended = Written((0, 1, 2, 3), ended=True)
    assert resumed(ended, ended) == [Delta("j", [], "", last=True)]


def test_slots_bound_what_runs_and_priorities_go_first() -> None:
    engine = open_dry_run("dry-run:words?slots=2")
    assert engine.max_num_seqs == 2
    for name, priority in [("a", "normal"), ("b", "low"), ("c", "normal"), ("d", "high")]:
        engine.add(engine.prepare(Job.model_validate({"id": name, "prompt": "x y", "priority": priority})))
    assert [delta.request_id for delta in engine.step()] == ["d", "a"]
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)
    assert [delta.request_id for delta in [*engine.step(), *engine.step()]] == ["d", "a", "c", "b"]


def test_a_step_takes_the_delay() -> None:
    engine = open_dry_run("dry-run:words?delay=30ms")
    engine.add(engine.prepare(Job(id="j", prompt="x y")))
    before = time.monotonic()
    engine.step()
    assert time.monotonic() - before >= 0.03
    engine.abort("j")
    assert engine.step() == []


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("1s", 1.0), ("0.25", 0.25), ("0", 0.0)])
def test_delays_are_read(text: str, seconds: float) -> None:
    assert open_dry_run(f"dry-run:echo?delay={text}")._options.delay == pytest.approx(seconds)


def test_what_fails_is_chosen_by_the_job_and_not_by_what_the_engine_calls_it() -> None:
    engine = open_dry_run("dry-run:echo?fail=0.5")
    for number in range(40):
        request = engine.prepare(Job(id=f"j{number}", prompt="x"))
        outcomes = set()
        for attempt in range(1, 4):
            engine.add(replace(request, id=f"{attempt}:{request.id}"))
            (delta,) = engine.step()
            outcomes.add(delta.error is not None)
        assert len(outcomes) == 1


def test_the_share_that_fails_is_chosen_by_the_id() -> None:
    jobs = [Job(id=f"j{i}", prompt="x") for i in range(2000)]
    failed = [
        {
            result.id
            for result in generate(open_dry_run("dry-run:echo?fail=0.1"), jobs)
            if result.state == "failed"
        }
        for _ in range(2)
    ]
    assert failed[0] == failed[1]
    assert 140 <= len(failed[0]) <= 260
    (error,) = [delta.error for delta in run(open_dry_run("dry-run:words?fail=1"), jobs[0])["j0"]]
    assert error is not None
    assert error.code == ErrorCode.ENGINE_ERROR


def test_a_prompt_that_crashes_kills_the_process_and_only_when_it_runs() -> None:
    code = """
from engine.dry_run import open_dry_run
from protocol import Job
engine = open_dry_run("dry-run:echo?crash=BOOM&slots=1")
for job in (Job(id="good", prompt="x"), Job(id="bad", prompt="a BOOM b")):
    engine.add(engine.prepare(job))
print(engine.step()[0].request_id, flush=True)
engine.step()
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (137, "good\n")


@pytest.mark.parametrize(
    "model",
    ["dry-run:sing", "dry-run:", "dry-run:echo?speed=9"]
    + [
        f"dry-run:echo?{bad}"
        for bad in ("delay=soon", "delay=-1", "delay=inf", "fail=2", "slots=0", "max_len=x")
    ],
)
def test_what_is_not_understood_is_answered_with_what_there_is(model: str) -> None:
    with pytest.raises(ModelUnavailable) as refused:
        open_dry_run(model)
    known = OPTIONS if "echo" in model else ("dry-run:echo", "dry-run:words")
    assert all(name in str(refused.value) for name in known)


def test_prompts_are_checked_as_a_model_would() -> None:
    engine = open_dry_run("dry-run:echo?max_len=4")
    for fields, code in [
        ({"prompt": ""}, ErrorCode.INVALID_REQUEST),
        ({"prompt": ["a", ""]}, ErrorCode.INVALID_REQUEST),
        ({"prompt": "a b c d"}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt": ["a", "a b c d"]}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt": "a", "model": "other"}, ErrorCode.MODEL_NOT_FOUND),
    ]:
        with pytest.raises(RequestError) as refused:
            engine.prepare(Job.model_validate({"id": "j", **fields}))
        assert refused.value.code == code
    assert engine.prepare(Job(id="j", prompt="a b c", model="dry-run:echo")).max_tokens == (1,)


def test_requests_go_once_and_leave_when_aborted() -> None:
    engine = open_dry_run("dry-run:words?slots=1")
    running, waiting = (engine.prepare(Job(id=name, prompt="x y z")) for name in ("running", "waiting"))
    engine.add(running)
    engine.add(waiting)
    engine.step()
    for request in (running, waiting):
        with pytest.raises(RequestError, match="already here"):
            engine.add(request)
    assert [engine.abort("running"), engine.abort("waiting"), engine.abort("waiting")] == [True, True, False]
    assert not engine.has_work()


def test_only_dry_runs_are_dry_runs() -> None:
    assert is_dry_run("dry-run:echo")
    assert not is_dry_run("some/model")
