"""The chaos run: that its books can find each kind of fault, that its disturbances disturb, and short runs of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import chaos
from bench.chaos_books import Account, Fault, Pause, Stream, Times, judge, longest_pause
from bench.chaos_jobs import Expected, Plan, dry_run_plans, model_plans
from bench.chaos_proxy import Proxy
from bench.chaos_referee import Referee, leaked
from bench.chaos_report import Outcome, histories, tables
from broker.keys import Keys
from broker.watch import AnyEvent
from protocol import Choice, Job, JobError, Result, TerminalEvent, TokenEvent, TokenLogprob, Usage
from tests.models import save_tiny, tiny_config
from tests.servers import ValkeyServer

SETTING = chaos.Setting(seed=0, server="valkey", fsync="always", minutes=2)
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
    kept = [keys.meta, keys.workers, keys.lease("a-worker")]
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


# -- the line --------------------------------------------------------------------------------------------------


def on_a_bad_line(talk: Callable[[Proxy], Awaitable[None]]) -> None:
    """Run with a proxy before a server that says everything twice."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line + line)
        writer.close()

    async def run() -> None:
        async with asyncio.timeout(20):
            listener = await asyncio.start_server(answer, "127.0.0.1", 0)
            proxy = Proxy(listener.sockets[0].getsockname()[1])
            await proxy.start()
            try:
                await talk(proxy)
            finally:
                await proxy.close()
                listener.close()

    asyncio.run(run())


async def connected(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(b"hello\n")
    assert await reader.readexactly(12) == b"hello\nhello\n"
    return reader, writer


def test_a_line_loses_replies_cuts_and_stalls() -> None:
    async def talk(proxy: Proxy) -> None:
        reader, writer = await connected(proxy)
        losing = asyncio.create_task(proxy.lose_replies(random.Random(0), 1, 10.0))
        await asyncio.sleep(0)
        writer.write(b"what?\n")
        assert await reader.read() in (b"", b"what?\n"), "half of it at most, and then nothing more"
        assert await losing == 1
        reader, writer = await connected(proxy)
        stalled = asyncio.create_task(proxy.stall(0.1))
        await asyncio.sleep(0)
        writer.write(b"later\n")
        assert await reader.readexactly(12) == b"later\nlater\n"
        assert stalled.done()
        assert await stalled
        assert proxy.cut() == 1
        assert await reader.read() == b""
        assert await proxy.lose_replies(random.Random(0), 4, 0.0) == 0, "nobody is there"

    on_a_bad_line(talk)


# -- runs ------------------------------------------------------------------------------------------------------


def in_short(part: chaos.Part, folder: Path, seed: int = 0, **changes: Any) -> Outcome:
    """Run a part with less patience."""
    times = {"lease_s": 1.0, "grace_s": 0.3, "step_timeout_s": 1.5}
    return asyncio.run(chaos.run(replace(part, **(times | changes)), replace(SETTING, seed=seed), folder))


def assert_good(outcome: Outcome) -> None:
    assert outcome.is_good, f"{tables(outcome)}\n{histories(outcome)}"


def test_the_shortest_run(tmp_path: Path) -> None:
    """Workers and server die, and the books are whole. What takes time, such as poison, is left to longer runs."""
    part = chaos.dry_run_part(30, seed=8)  # nobody comes late or cancels late
    kinds = ("SIGKILL to a worker", "SIGKILL to the server", "SCRIPT FLUSH")
    plans = [plan for plan in part.plans if not plan.is_poison]
    # This seed keeps the server away for 0.3 s.
    outcome = in_short(part, tmp_path, seed=6, plans=plans, kinds=kinds, workers=2, gap_s=0.2, decks=1)
    assert [fault for fault in outcome.faults if fault.kind != "near tie"] == [], histories(outcome)
    assert len(outcome.accounts) == len(plans)
    assert outcome.schedule.counts == dict.fromkeys(kinds, 1)
    assert outcome.people.cancelled.keys() == {plan.id for plan in plans if plan.cancel_after_s is not None}
    assert {stream.job_id for stream in outcome.people.streams} == {plan.id for plan in plans if plan.watch}


@pytest.mark.long
def test_a_short_run(tmp_path: Path) -> None:
    part = chaos.dry_run_part(60, seed=2)
    model = part.model.replace(
        "delay=20ms&slots=8", "delay=20ms&slots=4"
    )  # so that the jobs outlast the schedule
    outcome = in_short(part, tmp_path, model=model, workers=2, gap_s=0.2, decks=1)
    assert_good(outcome)
    assert "| 60 |" in tables(outcome)
    assert_it_could_have_failed(outcome)


def assert_it_could_have_failed(outcome: Outcome) -> None:
    assert replace(outcome, faults=[Fault("near tie", "j00001", "")]).is_good
    torn = replace(outcome, faults=[Fault("torn", "j00001", "a gap")])
    assert not torn.is_good
    assert "torn: j00001: a gap\n\nj00001: accepted at" in histories(torn)
    assert "job j00001 attempt 1: leased" in histories(torn), "what a worker's log says of it"
    assert not replace(outcome, jobs=61).is_good
    outcome.schedule.happened.clear()
    assert not outcome.is_good
    assert "Never happened: SIGKILL to a worker, " in tables(outcome)


@pytest.mark.long
def test_a_longer_run(tmp_path: Path) -> None:
    part = chaos.dry_run_part(500, seed=2)
    assert_good(in_short(part, tmp_path, gap_s=0.6, decks=2))


@pytest.mark.long
def test_a_run_with_a_model(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = save_tiny(LlamaForCausalLM, tmp_path / "tiny", tiny_config())
    part = chaos.model_part(model, 40, seed=5)  # one whose jobs are of every kind
    assert_good(in_short(part, tmp_path, gap_s=1.2, decks=1))
