"""What becomes of a job before the engine has it: faults are its own, and nobody waits for a slow one."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from engine.dry_run import DryRequest, DryRunEngine, Options
from protocol import ErrorCode, Job, SamplingParams
from worker.child import take_in
from worker.frames import Drop, Run
from worker.preparation import LONG_PAYLOAD, THREADS, Accepted, Arrived, Inbox, Preparation, Unfit

DEADLINE_S = 10.0


class PanicException(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class Gated(DryRunEngine):
    """An engine that compiles for as long as it is held up."""

    def __init__(self) -> None:
        super().__init__("words", Options())
        self.gate = threading.Event()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def prepare(self, job: Job) -> DryRequest:
        if not job.id.startswith("quick"):
            self.begun.put(job.id)
            assert self.gate.wait(DEADLINE_S)
        if job.prompt == "panic":
            raise PanicException("index out of\nbounds")
        return super().prepare(job)


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


def run(job_id: str, prompt: str = "a b", slow: bool = False) -> Run:
    format_ = {"type": "regex", "regex": "a"} if slow else None
    job = Job(id=job_id, prompt=prompt, params=SamplingParams.model_validate({"response_format": format_}))
    return Run(f"1:{job_id}", job.encode(), [])


def key(item: Accepted | Unfit | Drop | Arrived) -> str:
    return item.request.id if isinstance(item, Accepted) else item.key


def test_nothing_waits_for_jobs_that_take_long(engine: Gated, inbox: Inbox) -> None:
    preparation = Preparation(engine, inbox)
    slow = [f"s{number}" for number in range(3 * THREADS)]
    for job_id in slow:
        preparation.run(run(job_id, slow=True))
    preparation.run(run("quick"))
    preparation.drop(Drop("1:other"))
    assert {key(inbox.get(timeout=DEADLINE_S)) for _ in range(2)} == {"1:quick", "1:other"}
    engine.gate.set()
    arrived = {key(inbox.get(timeout=DEADLINE_S)) for _ in slow}
    assert arrived == {f"1:{job_id}" for job_id in slow}


@pytest.mark.parametrize(
    "job",
    [
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"},
        {"prompt": "a", "params": {"response_format": {"type": "json_object"}}},
        {"prompt": "a", "params": {"bad_words": ["a"]}},
        {"prompt": "a " * LONG_PAYLOAD},
    ],
)
def test_what_may_take_long_is_prepared_beside_the_others(
    job: dict[str, Any], engine: Gated, inbox: Inbox
) -> None:
    preparation = Preparation(engine, inbox)
    preparation.run(Run("1:long", Job.model_validate({"id": "long", **job}).encode(), []))
    assert engine.begun.get(timeout=DEADLINE_S) == "long"
    preparation.run(run("quick"))
    assert key(inbox.get(timeout=DEADLINE_S)) == "1:quick"
    engine.gate.set()
    assert key(inbox.get(timeout=DEADLINE_S)) == "1:long"


def test_the_others_stay_in_order_and_hold_back_no_cancel(engine: Gated, inbox: Inbox) -> None:
    preparation = Preparation(engine, inbox)
    for number in range(5):
        preparation.run(run(f"j{number}"))
    assert engine.begun.get(timeout=DEADLINE_S) == "j0"
    preparation.drop(Drop("1:j2"))
    assert key(inbox.get(timeout=DEADLINE_S)) == "1:j2"
    engine.gate.set()
    assert [key(inbox.get(timeout=DEADLINE_S)) for _ in range(4)] == [
        f"1:j{number}" for number in (0, 1, 3, 4)
    ]


def test_what_is_dropped_while_it_is_prepared_never_runs(engine: Gated, inbox: Inbox) -> None:
    """Neither one that a thread is at, nor one that waits for a thread."""
    preparation = Preparation(engine, inbox)
    jobs = [f"s{number}" for number in range(THREADS + 2)]
    for job_id in jobs:
        preparation.run(run(job_id, slow=True))
    begun = {engine.begun.get(timeout=DEADLINE_S) for _ in range(THREADS)}
    for job_id in jobs:
        preparation.drop(Drop(f"1:{job_id}"))
    preparation.run(run("after", slow=True))
    engine.gate.set()
    seen = [key(inbox.get(timeout=DEADLINE_S)) for _ in range(len(jobs) + 1)]
    assert seen == [*(f"1:{job_id}" for job_id in jobs), "1:after"]
    assert inbox.empty()
    assert begun == set(jobs[:THREADS])
    assert engine.begun.get(timeout=DEADLINE_S) == "after"
    assert engine.begun.empty()


def test_a_job_that_is_dropped_and_comes_again(engine: Gated, inbox: Inbox) -> None:
    """The next attempt goes by another key, so the first one's end is not taken for it."""
    preparation = Preparation(engine, inbox)
    preparation.run(run("j", slow=True))
    preparation.drop(Drop("1:j"))
    again = run("j", slow=True)
    again.key = "2:j"
    preparation.run(again)
    engine.gate.set()
    assert [key(inbox.get(timeout=DEADLINE_S)) for _ in range(2)] == ["1:j", "2:j"]
    inbox.put(Drop("none"))
    _, begun, refused = take_in(engine, inbox, wait=True)
    assert (begun, refused) == ([], [])
    assert inbox.empty()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_suspect_is_not_touched_before_its_arrival_is_told(
    engine: Gated, inbox: Inbox, is_dropped: bool
) -> None:
    """It may end the process, and is only to blame if the parent knows that it was here. The reader never waits."""
    preparation = Preparation(engine, inbox)
    suspect = run("j")
    suspect.alone = True
    preparation.run(suspect)
    preparation.run(run("quick"))
    arrived, after = (inbox.get(timeout=DEADLINE_S) for _ in range(2))
    assert isinstance(arrived, Arrived)
    assert (arrived.key, key(after)) == ("1:j", "1:quick")
    assert engine.begun.empty()
    engine.gate.set()
    if is_dropped:
        preparation.drop(Drop("1:j"))
        assert key(inbox.get(timeout=DEADLINE_S)) == "1:j"
    arrived.told.set()
    if is_dropped:
        preparation.run(run("quick-too"))
        assert key(inbox.get(timeout=DEADLINE_S)) == "1:quick-too"
        assert engine.begun.empty()
    else:
        assert engine.begun.get(timeout=DEADLINE_S) == "j"
        assert isinstance(inbox.get(timeout=DEADLINE_S), Accepted)


class Fragile(DryRunEngine):
    """An engine whose prepare meets something nobody has thought of."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("echo", Options())
        self._error = error

    def prepare(self, job: Job) -> DryRequest:  # noqa: ARG002
        raise self._error


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError(), PanicException("out of\nbounds")]
)
def test_whatever_a_job_does_to_its_preparation_it_fails_alone(
    error: BaseException, slow: bool, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    Preparation(Fragile(error), inbox).run(run("j", slow=slow))
    refused = inbox.get(timeout=DEADLINE_S)
    assert isinstance(refused, Unfit)
    assert (refused.key, refused.error.code) == ("1:j", ErrorCode.ENGINE_ERROR)
    assert refused.error.message == " ".join(f"{type(error).__name__}: {error}".split())
    assert "job 1:j" in caplog.text


def test_a_payload_that_is_no_job_is_refused(engine: Gated, inbox: Inbox) -> None:
    Preparation(engine, inbox).run(Run("1:j", '{"id":"j"}', []))
    refused = inbox.get(timeout=DEADLINE_S)
    assert isinstance(refused, Unfit)
    assert refused.error.code == ErrorCode.INVALID_REQUEST
