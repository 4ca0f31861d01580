"""Several choices and log-probabilities, as rows, as text and as events."""

from __future__ import annotations

import json
from pathlib import Path

from millstream import Client
from protocol import TokenEvent
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

LOGPROB = {"token_id": 1, "token": "a", "logprob": -0.5, "rank": 1, "top_logprobs": []}


def test_rows_hold_all_choices_where_one_is_not_all(program: Program, url: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "seed": 1},
        {"prompt": "b", "seed": 1, "n": 3},
        {"prompt": ["a", "b"], "seed": 1},
        {"prompt": "a", "seed": 1, "logprobs": 0},
        {"prompt": "a", "seed": 1, "stop": "z"},
        {
            "prompt": "a",
            "seed": 1,
            "completions": "of an earlier run",
            "stop_reason": "!",
            "completion": "old",
        },
    ]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with FakeWorker(url):
        assert program("generate", source, "-o", output).returncode == 0
    one, three, prompts, told, stopped, replaced = read_rows(output)
    plain = {
        "completion": "a",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "seed": 1,
    }
    assert one == {"prompt": "a", **plain}
    assert list(one) == [
        "prompt",
        "seed",
        "completion",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
    ]
    assert replaced == one
    assert stopped == {**one, "stop": "z", "stop_reason": "z"}
    assert told["completions"] == [{"index": 0, "text": "a", "finish_reason": "stop", "logprobs": [LOGPROB]}]
    assert (told["logprobs"], told["completion"]) == (0, "a")
    assert (three["completion"], three["completion_tokens"], three["prompt_tokens"]) == ("b", 5, 1)
    assert three["completions"] == [
        {"index": 0, "text": "b", "finish_reason": "stop"},
        {"index": 1, "text": "b 1", "finish_reason": "stop"},
        {"index": 2, "text": "b 2", "finish_reason": "stop"},
    ]
    assert [choice["text"] for choice in prompts["completions"]] == ["a", "a 1"]
    assert program("generate", source, "-o", output).returncode == 0


def test_rows_with_choices_are_resumed(program: Program, url: str, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", [{"prompt": "b", "n": 2}]), tmp_path / "out.jsonl"
    with FakeWorker(url) as worker:
        assert program("generate", source, "-o", output).returncode == 0
        moved = tmp_path / "moved.jsonl"
        moved.write_bytes(output.read_bytes())
        assert program("generate", source, "-o", moved, "--resume").returncode == 0
        assert len(worker.answered) == 1
    assert moved.read_bytes() == output.read_bytes()


def test_text_of_several_choices_stands_under_numbers(program: Program, url: str) -> None:
    shown = "one two\n--- choice 1\none two 1\n--- choice 2\none two 2\n"
    with FakeWorker(url):
        streamed = program("submit", "one two", "--n", "3", "--id", "three", "--stream")
        assert (streamed.returncode, streamed.stdout) == (0, shown)
        assert program("watch", "three").stdout == shown
        assert program("result", "three").stdout == shown
        alone = program("submit", "one two", "--id", "one", "--stream")
        assert alone.stdout == program("result", "one").stdout == "one two\n"
        events = [json.loads(line) for line in program("watch", "three", "--json").stdout.splitlines()]
        result = json.loads(program("result", "three", "--json").stdout)
    assert [event.get("choice") for event in events] == [0, 1, 2, 0, 1, 2, 1, 2, None]
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]


def test_the_client_gives_every_choice(url: str) -> None:
    with Client(url) as client, FakeWorker(url):
        job = client.submit(["one", "two"], n=2, logprobs=2, seed=3)
        result = job.result(timeout=10, check=True)
        assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
        assert all(len(choice.logprobs or ()) == len(choice.token_ids) for choice in result.choices)
        assert result.seed == 3
        assert "".join(job.text_stream()) == result.text == result.choices[0].text
        texts = dict.fromkeys(range(4), "")
        for event in job.stream():
            if isinstance(event, TokenEvent):
                texts[event.choice] += event.text
        assert list(texts.values()) == [choice.text for choice in result.choices]
