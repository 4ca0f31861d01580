"""Every sampling parameter reaches the job from everywhere it can be written, and a bad value never does."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from millstream import Client
from producer import ranges
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line
from producer.bulk.manifest import Manifest
from producer.bulk.requests import Requests
from producer.cli.sampling import FLAGS
from producer.request import build_job, over
from protocol import Job, RequestError, SamplingParams
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.parameters import BAD, GOOD
from tests.producer.program import Program
from tests.producer.queued import queued

CASES = [(name, value) for name, values in BAD.items() for value in values]


def asked(columns: dict[str, Any], defaults: dict[str, Any] | None = None) -> Job:
    """The job of a row."""
    found = ask(Line(1, json.dumps(columns).encode()), Requests("run", defaults or {}, None))
    assert not isinstance(found, BadRow), found.message
    return found.job


def is_json(value: Any) -> bool:
    """Whether a line of a file can hold the value."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def test_there_is_a_value_for_every_parameter() -> None:
    assert GOOD.keys() == BAD.keys() == SamplingParams.model_fields.keys()
    params, plain = SamplingParams(**GOOD), SamplingParams()
    for name in GOOD:
        assert getattr(params, name) != getattr(plain, name), name


def test_every_parameter_reaches_the_job(program: Program, url: str) -> None:
    expected = SamplingParams(**GOOD)
    with Client(url) as client:
        client.submit("x", id="named", **GOOD)
        client.submit("x", id="whole", params=expected)
        client.submit_many([Job(id="many", prompt="x", params=expected)])
    flagged = program("submit", "x", "--id", "flags", "--sampling", json.dumps(GOOD))
    assert flagged.returncode == 0, flagged.stderr
    for job_id in ("named", "whole", "many", "flags"):
        assert queued(url, job_id).params == expected, job_id
    assert asked({"prompt": "x", **GOOD}).params == expected
    assert asked({"url": "/v1/completions", "body": {"prompt": "x", **GOOD}}).params == expected
    assert asked({"prompt": "x"}, GOOD).params == expected
    manifest = Manifest.new(None, GOOD, {})
    assert Manifest.model_validate_json(manifest.model_dump_json()).differences(manifest) == []


def test_every_flag_sets_its_parameter(program: Program, url: str, tmp_path: Path) -> None:
    schema = tmp_path / "city.json"
    schema.write_text('{"type": "object"}')
    switches = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}
    values = {**GOOD, "logprobs": 3, "response_format": None}
    arguments: list[object] = []
    for flag in FLAGS[1]:
        if flag.parameter is None or flag.parameter == "response_format":
            continue
        value = values[flag.parameter]
        for one in value if isinstance(value, list) else [value]:
            arguments += [flag.option] if flag.parameter in switches else [flag.option, one]
    done = program("submit", "x", "--id", "all", *arguments)
    assert done.returncode == 0, done.stderr
    named = {flag.parameter for flag in FLAGS[1] if flag.parameter}
    assert queued(url, "all").params == SamplingParams(**{name: values[name] for name in named})
    without = {"max_completion_tokens", "allowed_token_ids", "logit_bias", "top_logprobs"}
    assert named | without == SamplingParams.model_fields.keys()

    formats: list[tuple[tuple[object, ...], dict[str, Any]]] = [
        (("--regex", "[0-9]+"), {"type": "regex", "regex": "[0-9]+"}),
        (("--choice", "yes", "--choice", "no"), {"type": "choice", "choice": ["yes", "no"]}),
        (
            ("--json-schema", schema),
            {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}},
        ),
        (("--response-format", '{"type": "json_object"}'), {"type": "json_object"}),
        (("--response-format", f"@{schema.with_name('format.json')}"), {"type": "regex", "regex": "a"}),
    ]
    schema.with_name("format.json").write_text('{"type": "regex", "regex": "a"}')
    for number, (flags, expected) in enumerate(formats):
        assert program("submit", "x", "--id", f"f{number}", *flags).returncode == 0
        assert queued(url, f"f{number}").params == SamplingParams(response_format=expected)


def test_a_flag_beats_sampling_and_that_the_environment(program: Program, url: str) -> None:
    both = ("--sampling", '{"max_completion_tokens": 5, "top_p": 0.5, "min_p": null}')
    environ = {"MILLSTREAM_MAX_TOKENS": "9", "MILLSTREAM_TEMPERATURE": "0.25"}
    program("submit", "x", "--id", "a", *both, **environ)
    assert queued(url, "a").params == SamplingParams(max_completion_tokens=5, top_p=0.5, temperature=0.25)
    program("submit", "x", "--id", "b", *both, "--max-tokens", "7", "--top-p", "0.75", "--temperature", "0")
    assert queued(url, "b").params == SamplingParams(max_tokens=7, top_p=0.75, temperature=0.0)


def test_what_says_the_same_under_another_name_is_beaten_too() -> None:
    assert over({"max_completion_tokens": 5, "n": 2}, {"max_tokens": 7}) == {"n": 2, "max_tokens": 7}
    assert over({"max_tokens": 5}, {"max_completion_tokens": 7}) == {"max_completion_tokens": 7}
    assert over({"logprobs": True, "top_logprobs": 5}, {"logprobs": 2}) == {"logprobs": 2}
    assert over({"logprobs": True}, {"top_logprobs": 2}) == {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_with_field_value_and_range(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(RequestError) as caught:
            build_job("x", None, None, {name: value}, None)
        said = str(caught.value)
        assert said.startswith(name), said
        assert "\n" not in said
        if name != "response_format" and said != "top_logprobs goes with logprobs: true":
            assert ": give " in said, said
            assert ", not " in said or "is not a token id" in said, said


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_p": 1.5}, "top_p: give a number from 0 to 1, not 1.5"),
        ({"max_tokens": "16"}, 'max_tokens: give a whole number, 1 or more, not "16"'),
        ({"temperature": math.nan}, "temperature: give a number, 0 or more, not NaN"),
        ({"stop": 5}, "stop: give a text or a list of texts that are not empty, not 5"),
        ({"stop": ["a", ""]}, 'stop.1: give a text that is not empty, not ""'),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids.1: give a whole number from 0 to 2147483647, not -1"),
        ({"logit_bias": {"5": 500}}, "logit_bias.5: give a number from -100 to 100, not 500"),
        (
            {"logit_bias": {"the": 1}},
            'logit_bias: give an object of token ids and numbers from -100 to 100; "the" is not a token id',
        ),
        ({"logprobs": 99}, "logprobs: give a whole number from 0 to 20, or true or false, not 99"),
        ({"max_token": 5}, "max_token: no such parameter; is max_tokens meant?"),
        (
            {"top_p": 2, "n": 0},
            "n: give a whole number from 1 to 128, not 0; top_p: give a number from 0 to 1, not 2",
        ),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens is 9, more than the 5 of max_tokens"),
        ({"seed": "x" * 100}, f'seed: give {ranges.allowed("seed")}, not "{"x" * 56}...'),
    ],
)
def test_what_is_said(sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_job("x", None, None, sampling, None)
    assert str(caught.value) == said


def test_the_client_queues_nothing_that_is_bad(url: str) -> None:
    with Client(url) as client:
        for name, value in CASES:
            with pytest.raises(RequestError, match=name):
                client.submit("x", **{name: value})
        assert client.status().waiting == 0


def test_bad_flags_are_exit_code_2_and_one_line(program: Program, url: str) -> None:
    numbers = [flag for flag in FLAGS[1] if flag.kind in (int, float)]
    arguments = [part for flag in numbers for part in (flag.option, BAD[str(flag.parameter)][0])]
    together = {name: values[0] for name, values in BAD.items() if name != "response_format"}
    for given, names in [
        (arguments, [str(flag.parameter) for flag in numbers]),
        (["--sampling", json.dumps(together)], list(together)),
    ]:
        done = program("submit", "x", *given)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        for name in names:
            assert f" {name}: give " in done.stderr or f" {name}.0: give " in done.stderr, (name, done.stderr)
    with Client(url) as client:
        assert client.status().waiting == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--regex", "a", "--choice", "b"), "give one of --regex and --choice"),
        (("--json-schema", "no-such-file"), "--json-schema no-such-file: No such file"),
        (("--response-format", "json"), "give JSON, or @FILE"),
        (("--sampling", "[1]"), "give an object"),
        (("--sampling", "@no-such-file"), "No such file"),
        (("--sampling", '{"max_token": 1}'), "is max_tokens meant?"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--tools", "no-such-file"), "--tools no-such-file"),
        (("--continue",), "--continue goes with --chat or --messages"),
        (
            ("--continue", "--chat-template-kwargs", "{}"),
            "--chat-template-kwargs and --continue go with --chat or --messages",
        ),
        (("--chat-template-kwargs", "[1]"), "--chat-template-kwargs: give an object"),
        (("--chat-template-kwargs", "5"), "--chat-template-kwargs: give an object"),
        (("--choice", ""), "--choice: give texts that are not empty"),
        (("--regex", ""), "--regex: give text that is not empty"),
        (("--priority", "urgent"), "--priority: give high, normal or low, not 'urgent'"),
        (("--tenant", "a b"), "tenant: give 1 to 100 letters, digits, '.', '_', '@' and '-', not 'a b'"),
        (
            ("--response-format", '{"type": "json_schema", "json_schema": {}}'),
            "response_format.json_schema.schema is missing",
        ),
        (("--sampling", '{"prompt": "y", "priority": 1}'), "prompt: no such parameter"),
        (("--id", "a b"), "job id 'a b': ids are"),
    ],
)
def test_a_flag_that_cannot_be_read_is_refused(
    program: Program, url: str, arguments: tuple[str, ...], words: str
) -> None:
    done = program("submit", "x", *arguments)
    assert (done.returncode, done.stdout, words in done.stderr) == (2, "", True), done.stderr
    assert "Traceback" not in done.stderr
    with Client(url) as client:
        assert client.status().waiting == 0


def test_bad_rows_are_errors_of_their_own(program: Program, url: str, tmp_path: Path) -> None:
    finite = [(name, value) for name, value in CASES if is_json(value)]
    bad = [{"custom_id": name, "prompt": "x", name: value} for name, value in finite]
    batch = [{"custom_id": name, "body": {"prompt": "x", name: value}} for name, value in finite]
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "first"}, *bad, *batch, {"prompt": "last"}])
    with FakeWorker(url) as worker:
        done = program("generate", source, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 3
    assert len(worker.answered) == 2
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == ["first", "last"]
    errors = read_rows(tmp_path / "out.errors.jsonl")
    assert len(errors) == 2 * len(finite)
    for row in errors:
        assert row["error"]["code"] == "invalid_request"
        assert row["error"]["message"].startswith(row["custom_id"]), row["error"]


def test_bad_defaults_of_a_run_are_refused_before_it_begins(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}])
    for arguments in (
        ("--top-p", "2", "--check"),
        ("--sampling", '{"stop": 5}', "-o", tmp_path / "out.jsonl"),
        ("--chat-template-kwargs", '{"tools": 1}', "-o", tmp_path / "out.jsonl"),
    ):
        done = program("generate", source, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] in (
        [],
        ["out.jsonl.run"],
    )


def test_help_names_every_flag_under_its_title_and_quickly(program: Program) -> None:
    for verb in ("submit", "generate"):
        took = []
        for _ in range(2):  # the first one imports; the other may have had a busy machine
            before = time.process_time()
            shown = program(verb, "--help").stdout
            took.append(time.process_time() - before)
        assert min(took) < 1.0
        _, prompt, sampling = (shown.partition(title)[2] for title in ("Options:", "Prompt:", "Sampling:"))
        assert prompt.index("--split-special-tokens") < prompt.index("Sampling:")
        for flag in FLAGS[1]:
            assert f"{flag.option} " in sampling, flag.option
