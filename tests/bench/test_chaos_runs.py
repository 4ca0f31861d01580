"""The chaos run: its line is bad where it is told to be, its workers are disturbed at work, and short runs of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import chaos
from bench.chaos_books import Fault
from bench.chaos_disturbances import stop_worker
from bench.chaos_proxy import Proxy
from bench.chaos_report import Outcome, histories, tables
from tests.models import save_tiny, tiny_config

SETTING = chaos.Setting(seed=0, server="valkey", fsync="always", minutes=8)


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


# -- workers ---------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    """One that is ready, and notes that it was stopped."""

    identity: str
    is_disturbed: bool = False
    is_ready: bool = True
    stopped: int = 0

    @property
    def name(self) -> str:
        return self.identity

    def send(self, _number: int) -> None:
        self.stopped += 1


class _Referee:
    """Somebody holds a job once he has been asked so often."""

    def __init__(self, holder: str, after: int) -> None:
        self._holder = holder
        self._left = after

    async def held(self) -> list[tuple[str, int]]:
        self._left -= 1
        return [(f"host{self._holder}abc", 0)] if self._left < 0 else []


def _stopped(holder: str, after: int, *, server_is_away: bool = False) -> str | None:
    """Which of two workers is stopped, of whom one comes to hold a job."""

    async def run() -> str | None:
        server = SimpleNamespace(disturbed=asyncio.Lock())
        if server_is_away:
            await server.disturbed.acquire()
        fleet = SimpleNamespace(workers=[_Worker("-1-"), _Worker("-2-")])
        field: Any = SimpleNamespace(server=server, fleet=fleet, referee=_Referee(holder, after), lease_s=0.0)
        async with asyncio.timeout(20):
            return await stop_worker(field, random.Random(0))

    return asyncio.run(run())


def test_it_is_a_worker_with_jobs_that_is_disturbed() -> None:
    """An idle one shows little: a short run once had no job that went through several hands."""
    assert [_stopped(holder, 0) for holder in ("-1-", "-2-")] == ["-1-", "-2-"]
    assert [_stopped(holder, 3) for holder in ("-1-", "-2-")] == ["-1-", "-2-"], "it is waited for"


def test_while_the_server_is_away_nobody_asks_who_has_jobs() -> None:
    stopped = {_stopped(holder, 0, server_is_away=True) for holder in ("-1-", "-2-")}
    assert len(stopped) == 1, "whom the seed says"


def test_jobs_last_until_every_kind_of_disturbance_has_taken_place() -> None:
    """However slow the machine is: a run once had none left when the last kind came."""
    part = chaos.dry_run_part(60, seed=0)
    spread_s = chaos.DECKS_SPREAD_OVER * len(part.kinds) * part.gap_s
    at = [chaos.due_jobs(60, share * spread_s, part, SETTING) for share in (0, 0.5, 1, 2, 4, 8)]
    assert at[:3] == [0, 27, 54]
    assert 54 <= at[3] < at[4] < at[5] < 60, "some kinds need jobs that run"
    assert [chaos.due_jobs(60, 60 * SETTING.minutes * share, part, SETTING) for share in (0.99, 1.01, 2)] == [
        59,
        60,
        60,
    ]
    stage: Any = SimpleNamespace(
        people=SimpleNamespace(open=1, accepted=dict.fromkeys(range(50))),
        schedule=SimpleNamespace(every_kind_done=asyncio.Event()),
        referee=SimpleNamespace(now=100.0 + 2 * spread_s),
    )
    assert chaos._room(part, SETTING, stage, 100.0) == at[3] - 50
    stage.schedule.every_kind_done.set()
    assert chaos._room(part, SETTING, stage, 100.0) == part.most_open - 1


# -- runs ------------------------------------------------------------------------------------------------------


def in_short(part: chaos.Part, folder: Path, seed: int = 0, **changes: Any) -> Outcome:
    """Run a part with less patience."""
    times = {"lease_s": 1.0, "grace_s": 0.3, "step_timeout_s": 1.5}
    return asyncio.run(chaos.run(replace(part, **(times | changes)), replace(SETTING, seed=seed), folder))


def assert_good(outcome: Outcome) -> None:
    wrong = [fault for fault in outcome.faults if fault.kind != "near tie"]
    said = f"never happened: {outcome.never_happened}; faults: {wrong}"  # first: a message may be cut
    assert outcome.is_good, f"{said}\n{tables(outcome)}\n{histories(outcome)}"


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
@pytest.mark.timeout(900)
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
@pytest.mark.timeout(900)
def test_a_longer_run(tmp_path: Path) -> None:
    part = chaos.dry_run_part(500, seed=2)
    assert_good(in_short(part, tmp_path, gap_s=0.6, decks=2))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_a_model(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = save_tiny(LlamaForCausalLM, tmp_path / "tiny", tiny_config())
    part = chaos.model_part(model, 40, seed=5)  # one whose jobs are of every kind
    assert_good(in_short(part, tmp_path, gap_s=1.2, decks=1))
