"""A server that has lost its data grants a job again to the worker that still runs it, even as the same attempt.

What the model process still says of the first lease is not the second one's, and each job's text is whole.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, logged, nothing_left, result, watch, words
from tests.worker.harness import until as until_there
from tests.worker.inside import InsideModel, enqueue, inside, make_worker, model_of, running, until
from worker.parent import Worker


async def in_a_step(worker: Worker) -> None:
    """Wait until the engine is in the middle of a step, whose news comes when it ends."""
    model = model_of(worker)
    seen = model.engine.stats().output_tokens
    await until(lambda: model.engine.stats().output_tokens > seen, "a step has ended")
    await asyncio.sleep(InsideModel.step_s / 4)


@pytest.mark.parametrize(
    ("heard_first", "stream"),
    [
        ("that it is lost", True),
        ("the new lease", False),
        pytest.param("that it is lost", False, marks=pytest.mark.long),
        pytest.param("the new lease", True, marks=pytest.mark.long),
    ],
)
def test_the_second_life_of_a_job_has_nothing_of_the_first(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, stream: bool, heard_first: str
) -> None:
    monkeypatch.setattr(InsideModel, "step_s", 0.04)

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            for name in ("j", "k"):
                enqueue(queue, name, words(8), stream=stream)
            await until(lambda: worker._ledger.running == 2, "they run")
            await in_a_step(worker)
            queue.client.flushall()
            for name in ("j", "k"):
                enqueue(queue, name, words(8), stream=stream)
            if heard_first == "that it is lost":
                await worker._ledger.renew(30_000)
            worker._ledger.room_made.set()
            for name in ("j", "k"):
                await until(lambda: queue.run(calls.look(queue.keys, name)).result is not None, name)  # noqa: B023
            await until(lambda: not worker._ledger, "nothing is held")
            assert model_of(worker).engine.stats().running == 0

    inside(monkeypatch, story)
    for name in ("j", "k"):
        stored = result(queue, name)
        assert (stored.state, stored.text, stored.choices[0].token_ids) == (
            "succeeded",
            words(8),
            list(range(8)),
        )
        assert not logged(queue, name) or watch(queue, name)[0] == words(8)
    nothing_left(queue)


def test_a_gap_of_the_first_life_does_not_hand_back_the_second(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to what was told of the first comes when the second is held."""
    monkeypatch.setattr(InsideModel, "step_s", 0.02)

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "j", words(30))
            await until(lambda: logged(queue, "j") >= 2, "it runs")
            run_all, telling, may_tell = worker._link.queue.run_all, asyncio.Event(), asyncio.Event()

            async def slow(spoken: Any) -> Any:
                telling.set()
                await may_tell.wait()
                return await run_all(spoken)

            monkeypatch.setattr(worker._link.queue, "run_all", slow)
            await telling.wait()
            queue.client.flushall()
            enqueue(queue, "j", words(30))
            worker._ledger.room_made.set()
            (first,) = worker._ledger._held
            await until(lambda: list(worker._ledger._held) not in ([], [first]), "held anew")
            may_tell.set()
            await until(lambda: queue.run(calls.look(queue.keys, "j")).result is not None, "ended")

    inside(monkeypatch, story)
    assert (result(queue, "j").text, result(queue, "j").attempt) == (words(30), 1)
    assert watch(queue, "j")[0] == words(30)


@pytest.mark.long
def test_a_bulk_run_whose_server_loses_everything_has_each_row_once_and_whole(
    queue: Queue, workers: Workers, tmp_path: Path
) -> None:
    """What was lost is submitted again under its id while the worker still runs it."""
    worker = workers.start(model="dry-run:words?delay=30ms&slots=16").ready()
    prompts = [f"row {number} {words(5 + number % 20)}" for number in range(200)]
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "millstream", "generate", str(source), "-o", str(output)]
    run = subprocess.Popen([*command, "--redis-url", workers.url, "--window", "40"])
    client: Any = queue.client
    for lost in (1, 2):
        until_there(lambda: sum(map(client.xlen, client.scan_iter(queue.keys.done("*")))) > 0, "it goes on")
        client.flushall()
        until_there(lambda lost=lost: worker.log.count("lease lost") >= lost, "it has noticed")  # type: ignore[misc]
    assert run.wait(60) == 0
    assert [json.loads(line)["completion"] for line in output.read_text().splitlines()] == prompts
    assert (tmp_path / "out.errors.jsonl").read_text() == ""
