"""The process that tries what a job brings: whose fault it is when no answer comes, and what it may take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from engine import trial as trial_module
from engine.trial import MEMORY_BYTES, Trial, TrialFailed

PROGRAM = "tests.engine.trial_program"
SECONDS = 5.0


def say(trial: Trial, text: str) -> object:
    return trial.ask({"say": text}, SECONDS)


@pytest.mark.parametrize(
    "bad",
    [{"signal": signal.SIGSEGV}, {"signal": signal.SIGABRT}, {"exit": 0}, {"for": "ever"}],
    ids=["stack", "memory", "end", "time"],
)
def test_a_question_that_ends_the_process_is_at_fault(bad: dict[str, object]) -> None:
    trial = Trial(PROGRAM)
    assert trial.ask(bad, 0.1) is None
    assert say(trial, "next") == "next"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda one: one.name)
def test_a_process_that_somebody_ends_or_stops_is_not_the_questions_fault(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(PROGRAM)
    assert say(trial, "first") == "first"
    with monkeypatch.context() as patched:
        patched.setattr(trial_module, "SILENT_SECONDS", 0.1)
        with pytest.raises(TrialFailed, match="no answer"):
            trial.ask({"signal": number}, SECONDS)
    assert say(trial, "next") == "next"


def test_ctrl_c_is_the_parents() -> None:
    trial = Trial(PROGRAM)
    assert trial.ask({"signal": signal.SIGINT}, 0.1) is None, "it went on, and took its time"


def test_a_process_that_is_not_ready_gets_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else "ready" would be the first answer, and every later one that of the question before."""
    trial = Trial(PROGRAM)
    with monkeypatch.context() as patched:
        patched.setattr(trial_module, "SILENT_SECONDS", 0.1)
        patched.setenv("TRIAL_NEVER_READY", "1")
        with pytest.raises(TrialFailed, match="did not start: it said nothing"):
            say(trial, "first")
    assert [say(trial, text) for text in ("second", "third")] == ["second", "third"]


def test_a_process_that_cannot_start_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrialFailed, match="did not start: exit code 1"):
        say(Trial("tests.engine.no_such_program"), "first")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(TrialFailed, match=r"cannot be started: .*No such file"):
        say(Trial(PROGRAM), "first")


def test_memory_counts_from_the_first_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries reserve address space when they are loaded, OpenBLAS the more the more cores there are."""
    monkeypatch.setenv("TRIAL_RESERVED", str(2 * MEMORY_BYTES))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")
    trial = Trial(PROGRAM)
    assert trial.ask({"take": MEMORY_BYTES // 2}, SECONDS) == "taken"
    assert trial.ask({"take": MEMORY_BYTES}, SECONDS) == "no memory"
    assert [trial.ask({"variable": name}, SECONDS) for name in trial_module._ONE_THREAD] == ["1", "1"]


def test_a_lower_limit_of_the_system_holds() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from engine.trial import Trial; trial = Trial(sys.argv[1])\n"
        "print(trial.ask({'say': 'hi'}, 5), trial.ask({'take': 1 << 30}, 5))"
    )
    done = subprocess.run([sys.executable, "-c", code, PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "hi no memory\n"


def test_a_process_without_a_parent_ends_by_itself() -> None:
    """Nobody reads its answer or kills it, and its question has no end."""
    process = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        process.stdin.write(json.dumps([0.1, {"for": "ever"}]).encode() + b"\n")
        process.stdin.close()
        assert process.wait(60) == -signal.SIGPROF
