"""The books of the chaos run can find each kind of fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.chaos_books import Account, Fault, Pause, Stream, Times, judge, longest_pause
from bench.chaos_jobs import Expected, Plan, dry_run_plans, model_plans
from bench.chaos_referee import Referee, leaked
from broker.keys import Keys
from broker.watch import AnyEvent
from protocol import Choice, Job, JobError, Result, TerminalEvent, TokenEvent, TokenLogprob, Usage
from tests.servers import ValkeyServer

USAGE = Usage(prompt_tokens=1, completion_tokens=3)
WHOLE = Choice(text="a b c", token_ids=[0, 1, 2], finish_reason="stop")


def events() -> list[AnyEvent]:
    """What a watcher of `account` should see: three tokens by two attempts, and the end."""
    pieces = [(1, "a", 0), (1, " b", 1), (2, " c", 2)]
    said: list[AnyEvent] = [
        TokenEvent(id="j", seq=seq, attempt=attempt, text=text, token_ids=[token])
        for seq, (attempt, text, token) in enumerate(pieces, 1)
    ]
    said[-1] = said[-1].model_copy(update={"finish_reason": "stop"})
    return [*said, TerminalEvent(type="done", id="j", seq=4, attempt=2)]


def account(seen: list[AnyEvent] | None = None, **changes: Any) -> Account:
    """A job of which everything is right, or of which one thing was changed."""
    fields: dict[str, Any] = {
        "plan": Plan(Job(id="j", prompt="a b c")),
        "expected": Expected("succeeded", None, [WHOLE], USAGE, [[1.0, 1e-4, 1.0]]),
        "state": "succeeded",
        "result": Result(id="j", state="succeeded", choices=[WHOLE], usage=USAGE, attempt=2),
        "ends": ["succeeded"],
        "streams": [Stream("j", "live", events() if seen is None else seen, is_whole=True)],
        "times": Times(sent=100.0, accepted=101.0),
    }
    return Account(**(fields | changes))


def kinds(judged: Account) -> set[str]:
    return {fault.kind for fault in judge(judged)}


def ended(**changes: Any) -> Result:
    return Result(id="j", state="succeeded", choices=[WHOLE], usage=USAGE, attempt=2).model_copy(
        update=changes
    )


def choice(**changes: Any) -> Choice:
    return WHOLE.model_copy(update=changes)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert judge(account()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"result": None, "state": "running"},
        {"result": None, "state": None, "ends": []},
        {"ends": []},
        {"streams": [Stream("j", "live", complaint="job j: not found")]},
    ],
)
def test_a_lost_job_is_found(changes: dict[str, Any]) -> None:
    assert kinds(account(**changes)) == {"lost"}


def test_what_is_doubled_is_found() -> None:
    said = events()
    assert kinds(account(ends=["succeeded", "succeeded"])) == {"doubled"}
    assert "doubled" in kinds(account([*said[:2], said[1], *said[2:]])), "an event that came twice"
    again = said[2].model_copy(update={"seq": 4})
    late = said[3].model_copy(update={"seq": 5})
    assert "doubled" in kinds(account([*said[:3], again, late])), "a token written twice"
    assert "doubled" in kinds(account([*said, late])), "an event after the end"


def test_a_torn_stream_is_found() -> None:
    said = events()
    assert kinds(account([*said[:1], *said[2:]])) == {"torn"}, "a gap"
    assert kinds(account(said[:3])) == {"torn"}, "no end"
    other = said[1].model_copy(update={"text": " B"})
    assert kinds(account([said[0], other, *said[2:]])) == {"torn"}, "another text than the result's"
    short = said[2].model_copy(update={"text": "", "token_ids": []})
    assert kinds(account([*said[:2], short, said[3]])) == {"torn"}, "less than the result"
    zombie = said[2].model_copy(update={"attempt": 0})
    assert kinds(account([*said[:2], zombie, said[3]])) == {"torn"}, "of an attempt that was over"
    assert kinds(account([*said[:3], said[3].model_copy(update={"type": "error"})])) == {"torn"}
    hanging = Stream("j", "live", said[:3], complaint="its watcher still waits, though the job has ended")
    assert kinds(account(streams=[hanging])) == {"torn"}


@pytest.mark.parametrize(("stream", "found"), [(True, {"torn"}), (False, set())])
def test_only_a_job_that_nobody_streams_may_have_no_log(stream: bool, found: set[str]) -> None:
    plan = Plan(Job(id="j", prompt="a b c", stream=stream))
    assert kinds(account(plan=plan, streams=[Stream("j", "log", is_whole=True)])) == found
    assert kinds(account(plan=plan, streams=[Stream("j", "log", events()[:2], is_whole=True)])) == {"torn"}


def test_who_left_has_seen_the_beginning() -> None:
    said = events()
    left = Stream("j", "leaves", said[:2])
    assert judge(account(streams=[left])) == []
    left.events[1] = said[1].model_copy(update={"token_ids": [7]})
    assert kinds(account(streams=[left])) == {"torn"}


@pytest.mark.parametrize(
    "result",
    [
        ended(choices=[choice(token_ids=[0, 1, 3])]),
        ended(choices=[choice(text="a b")]),
        ended(choices=[choice(token_ids=[0, 1])]),
        ended(choices=[choice(finish_reason="length")]),
        ended(choices=[]),
        ended(choices=[WHOLE, choice(index=1)]),
        ended(usage=Usage(prompt_tokens=1, completion_tokens=4)),
        ended(state="failed", error=JobError(code="engine_error", message="no")),
        ended(state="cancelled", error=JobError(code="cancelled", message="nobody asked for it")),
    ],
)
def test_a_changed_result_is_found(result: Result) -> None:
    judged = account(result=result, state=result.state, ends=[result.state], streams=[])
    assert kinds(judged) == {"changed"}


def test_a_difference_that_starts_at_a_near_tie_is_counted_apart() -> None:
    result = ended(choices=[choice(token_ids=[0, 9, 9], text="a x y")])
    assert kinds(account(result=result, streams=[])) == {"near tie"}


def test_log_probabilities_are_compared() -> None:
    told: list[TokenLogprob] = [
        {"token_id": token, "token": "", "logprob": -1.0, "rank": 1, "top_logprobs": []}
        for token in (0, 1, 2)
    ]
    expected = Expected("succeeded", None, [choice(logprobs=told)], USAGE, [[]])
    off: list[Any] = [{**one, "logprob": -1.1} for one in told]
    for said, found in [(told, set()), (off, {"changed"}), (told[:2], {"changed"}), (None, {"changed"})]:
        result = ended(choices=[choice(logprobs=said)])
        assert kinds(account(expected=expected, result=result, streams=[])) == found


def test_who_may_end_otherwise_says_the_beginning() -> None:
    cancelled = Plan(Job(id="j", prompt="a b c"), cancel_after_s=1.0)
    due = Plan(Job(id="j", prompt="a b c", deadline_in_s=1.0))
    part = choice(text="a", token_ids=[0], finish_reason="cancelled")
    for plan, state in [(cancelled, "cancelled"), (due, "expired")]:
        over = JobError(code=state, message="over")
        result = ended(state=state, choices=[part], error=over, finished_at=102.0)
        right: dict[str, Any] = {
            "plan": plan,
            "result": result,
            "state": state,
            "ends": [state],
            "streams": [],
            "times": kept_of(plan, 100.5),
        }
        assert judge(account(**right)) == []
        wrong = result.model_copy(update={"choices": [part.model_copy(update={"token_ids": [1]})]})
        assert kinds(account(**(right | {"result": wrong}))) == {"changed"}


def test_a_job_may_fail_for_the_device_only_where_it_is_not_to_be_tried_again() -> None:
    result = ended(state="failed", choices=[], error=JobError(code="device_error", message="flaky"))
    fields: dict[str, Any] = {"result": result, "state": "failed", "ends": ["failed"], "streams": []}
    assert kinds(account(**fields)) == {"changed"}
    once = Plan(Job(id="j", prompt="a b c", max_retries=0))
    assert judge(account(**fields, plan=once)) == []


@pytest.mark.parametrize(
    ("plan", "times", "answer", "is_right"),
    [
        ({}, {"started_at": 100.0}, None, True),
        ({}, {"started_at": 99.9}, None, False),
        ({"delay_s": 2.0}, {"started_at": 102.5}, None, True),
        ({"delay_s": 2.0}, {"started_at": 102.4}, None, False),
        ({"deadline_in_s": 2.0}, {"started_at": 102.4}, None, True),
        ({"deadline_in_s": 2.0}, {"started_at": 102.6}, None, False),
        ({"deadline_in_s": 2.0}, {"state": "expired", "finished_at": 102.5}, None, True),
        ({"deadline_in_s": 2.0}, {"state": "expired", "finished_at": 102.4}, None, False),
        ({}, {}, "cancelling", True),
        ({}, {}, "cancelled", False),
        ({}, {"state": "cancelled"}, "cancelled", True),
    ],
)
def test_a_job_keeps_to_its_times_and_to_its_cancel(
    plan: dict[str, Any], times: dict[str, Any], answer: str | None, is_right: bool
) -> None:
    result = ended(**times)
    judged_plan = Plan(Job(id="j", prompt="a b c", **plan), cancel_after_s=1.0)
    judged = account(
        plan=judged_plan,
        result=result,
        state=result.state,
        ends=[result.state],
        streams=[],
        times=kept_of(judged_plan, 100.5),
        cancel_answer=answer,
    )
    assert kinds(judged) == (set() if is_right else {"changed"})


def kept_of(plan: Plan, taken: float) -> Times:
    """What the server keeps of a job that it took half-way between sending and acceptance."""
    delay_s, deadline_s = plan.job.delay_s, plan.job.deadline_in_s
    return Times(
        taken - 0.5,
        taken + 0.5,
        None if delay_s is None else taken + delay_s,
        None if deadline_s is None else taken + deadline_s,
    )


@pytest.mark.parametrize("name", ["not_before", "deadline"])
@pytest.mark.parametrize(("kept", "is_right"), [(2.0, True), (1.4, False), (2.6, False), (None, False)])
def test_the_times_that_a_job_asked_for_are_those_that_the_server_keeps(
    name: str, kept: float | None, is_right: bool
) -> None:
    asked = {"not_before": "delay_s", "deadline": "deadline_in_s"}[name]
    times = replace(kept_of(Plan(Job(id="j", prompt="a")), 100.5), **{name: kept and 100.5 + kept})
    judged = account(plan=Plan(Job(id="j", prompt="a b c", **{asked: 2.0})), times=times)
    assert kinds(judged) == (set() if is_right else {"changed"})
    unasked = account(times=times)
    assert kinds(unasked) == (set() if kept is None else {"changed"})


def test_a_leaked_key_is_found() -> None:
    keys = Keys("q")
    kept = [keys.meta, keys.workers, keys.lease("a-worker"), keys.loading]
    assert leaked(keys, kept) == []
    for name in (keys.job("j"), keys.log("j"), keys.result("j"), keys.jobs("high", "acme"), keys.leases):
        (fault,) = leaked(keys, [*kept, name])
        assert (fault.kind, fault.what) == ("leaked", f"the key {name}")


def test_a_key_of_an_ended_job_that_would_stay_is_found() -> None:
    """Before the jobs are collected, which would delete it."""

    async def look(url: str) -> list[Fault]:
        referee = Referee(url, Keys("q"))
        for number in range(100):
            referee.entries[f"j{number}"] = "1-1"
            await referee.client.set(referee.keys.job(f"j{number}"), "", ex=100)
        for name in (referee.keys.log("j33"), referee.keys.result("j99")):
            await referee.client.set(name, "")
        found = await referee.lasting()
        await referee.close()
        return found

    with ValkeyServer(aof=False) as server:
        server.may_leak = True
        found = asyncio.run(look(server.url))
    assert [(one.kind, one.job_id) for one in found] == [("leaked", "j33"), ("leaked", "j99")]


def test_the_longest_pause_is_that_of_a_live_watcher() -> None:
    live = Stream("a", "live", events()[:3], [1.0, 1.5, 4.0])
    slow = Stream("b", "slow", events()[:2], [0.0, 9.0])
    assert longest_pause([live, slow]) == Pause(2.5, "a", 2, 1.5)
    assert longest_pause([slow]) is None


@pytest.mark.parametrize("draw", [dry_run_plans, model_plans])
def test_a_seed_makes_the_same_jobs(draw: Callable[[int, int], list[Plan]]) -> None:
    plans = draw(5, 300)
    assert plans == draw(5, 300)
    assert plans != draw(6, 300)
    assert len({plan.id for plan in plans}) == len(plans)
    assert 30 < sum(plan.watch is not None for plan in plans) < 90
