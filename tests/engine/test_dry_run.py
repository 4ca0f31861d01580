"""Engines without a model."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bulk import generate
from engine.dry_run import OPTIONS, DryRunEngine, is_dry_run, open_dry_run
from engine.interface import Delta, EngineCore
from protocol import ErrorCode, Job, Message, ModelUnavailable, RequestError, SamplingParams


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


@pytest.mark.parametrize("done", range(5))
def test_a_resumed_request_goes_on_after_what_is_logged(done: int) -> None:
    engine = open_dry_run("dry-run:words")
    request = engine.prepare(Job(id="j", prompt="to be or not"))
    engine.add(replace(request, output_token_ids=tuple(range(done))))
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    assert (
        "".join(delta.text for delta in deltas) == ["to be or not", " be or not", " or not", " not", ""][done]
    )
    assert deltas[-1].finish_reason == "stop"


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
        ({"prompt": "a b c d"}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt": "a", "model": "other"}, ErrorCode.MODEL_NOT_FOUND),
    ]:
        with pytest.raises(RequestError) as refused:
            engine.prepare(Job.model_validate({"id": "j", **fields}))
        assert refused.value.code == code
    assert engine.prepare(Job(id="j", prompt="a b c", model="dry-run:echo")).max_tokens == 1


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
