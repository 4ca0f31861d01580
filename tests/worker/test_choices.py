"""Jobs with several choices, through a real worker."""

from __future__ import annotations

from collections import defaultdict

import pytest

from broker import calls
from broker.queue import Queue
from protocol import TokenEvent
from tests.worker.harness import (
    Workers,
    ended,
    nothing_left,
    result,
    submit,
    until,
    watch,
    words,
)


def texts_of(events: list[object]) -> dict[int, str]:
    """The joined text of each choice."""
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        if isinstance(event, TokenEvent):
            texts[event.choice] += event.text
    return dict(texts)


def ends_of(events: list[object]) -> list[int]:
    """Choices in the order of their ends."""
    return [event.choice for event in events if isinstance(event, TokenEvent) and event.finish_reason]


def test_three_choices_are_streamed_and_the_job_ends_once(queue: Queue, workers: Workers) -> None:
    workers.start(model="dry-run:words?delay=10ms")
    submit(queue, "j", words(6), n=3)
    _, events = watch(queue, "j")
    assert texts_of(events) == dict.fromkeys(range(3), words(6))
    assert ends_of(events) == [0, 1, 2]
    assert [event.type for event in events if event.type != "token"] == ["done"]
    assert [event.choice for event in events if isinstance(event, TokenEvent)] == [0, 1, 2] * 6
    stored = result(queue, "j")
    assert [(one.index, one.text, one.finish_reason) for one in stored.choices] == [
        (choice, words(6), "stop") for choice in range(3)
    ]
    assert stored.usage is not None
    assert (stored.usage.prompt_tokens, stored.usage.completion_tokens) == (6, 18)
    nothing_left(queue)


@pytest.mark.parametrize(
    ("victim", "stream"),
    [
        ("model process", True),
        pytest.param("model process", False, marks=pytest.mark.long),
        pytest.param("worker", True, marks=pytest.mark.long),
        pytest.param("worker", False, marks=pytest.mark.long),
    ],
)
def test_a_kill_after_one_choice_has_ended(queue: Queue, workers: Workers, victim: str, stream: bool) -> None:
    """What has ended stays ended, and is not said again."""
    model = f"dry-run:words?delay={20 if stream else 5}ms"
    worker = workers.start("--lease", "1", model=model).ready()
    prompts = [words(4), words(40 if stream else 200)]
    submit(queue, "j", prompts, n=2, stream=stream)
    log = queue.keys.log("j")
    until(lambda: any(b"finish_reason" in event for event in queue.client.lrange(log, 0, -1)), "an end")
    if victim == "worker":
        worker.kill()
        workers.start("--lease", "1", model=model)
    else:
        worker.model_process().kill()
    _, events = watch(queue, "j")
    texts = {0: prompts[0], 1: prompts[0], 2: prompts[1], 3: prompts[1]}
    assert texts_of(events) == texts
    assert ends_of(events) == [0, 1, 2, 3]
    stored = result(queue, "j")
    assert stored.attempt == 2
    assert {one.index: one.text for one in stored.choices} == texts
    assert [one.token_ids for one in stored.choices] == [list(range(len(t.split()))) for t in texts.values()]
    assert {one.finish_reason for one in stored.choices} == {"stop"}
    nothing_left(queue)


def test_a_cancelled_job_has_all_its_choices(queue: Queue, workers: Workers) -> None:
    workers.start(model="dry-run:words?delay=30ms")
    submit(queue, "j", [words(2), words(300)], n=2)
    until(lambda: queue.client.llen(queue.keys.log("j")) >= 10, "the short ones have ended")
    queue.run(calls.cancel(queue.keys, "j"))
    stored = ended(queue, "j")
    assert [one.index for one in stored.choices] == [0, 1, 2, 3]
    assert [one.finish_reason for one in stored.choices] == ["stop", "stop", "cancelled", "cancelled"]
    assert [one.text for one in stored.choices[:2]] == [words(2)] * 2
    assert all(words(300).startswith(one.text) and one.text for one in stored.choices[2:])


def test_jobs_that_cannot_run_fail_once_and_alone(queue: Queue, workers: Workers) -> None:
    """Refused before they run, or failing while they do: one attempt each, and the others' text is whole."""
    submit(queue, "empty", [words(2), ""])
    submit(queue, "long", words(60))
    names = [f"j{number}" for number in range(20)]
    for name in names:
        submit(queue, name, words(10), n=2)
    worker = workers.start("--lease", "1", model="dry-run:words?delay=5ms&fail=0.4&max_len=60&slots=16")
    codes = {"empty": "invalid_request", "long": "context_length_exceeded"}
    results = {name: ended(queue, name) for name in [*codes, *names]}
    failed = {name for name, one in results.items() if one.state == "failed"}
    assert 3 < len(failed) < 20
    for name, one in results.items():
        assert one.attempt == 1
        if name in failed:
            assert one.error is not None
            assert one.error.code == codes.get(name, "engine_error")
        else:
            assert [choice.text for choice in one.choices] == [words(10)] * 2
    assert "Traceback" not in worker.log
    nothing_left(queue)
