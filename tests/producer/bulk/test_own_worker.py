"""Flags for the worker that a run brings along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from producer.bulk.own_worker import MOST_RESTARTS, RUNS_OWN, OwnWorker, answering, read_flags
from producer.refusal import Refused
from protocol import MillstreamError
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.program import Program


@pytest.mark.parametrize(
    ("text", "changing"),
    [
        ("", {}),
        ("--max-num-seqs 32 --eager", {}),
        ("--kv-dtype bfloat16 --max-num-seqs 32", {"--kv-dtype": "bfloat16"}),
        ("--max-num-seqs=32 --kv-dtype=int8 --dtype 'float32'", {"--kv-dtype": "int8", "--dtype": "float32"}),
        ("--dtype", {"--dtype": ""}),
    ],
)
def test_flags_that_change_answers_are_told_from_the_others(text: str, changing: dict[str, str]) -> None:
    assert answering(read_flags(text)) == changing


def test_an_open_quote_is_refused() -> None:
    with pytest.raises(Refused, match="--worker-flags --dtype 'x: No closing quotation"):
        read_flags("--dtype 'x")


@pytest.mark.parametrize("flag", RUNS_OWN)
def test_what_a_run_sets_itself_is_refused(flag: str) -> None:
    for text in (flag, f"--eager {flag}=5"):
        with pytest.raises(Refused, match=f"drop {flag}"):
            read_flags(text)


def test_they_are_refused_where_others_bring_the_workers(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = ["generate", source, "-o", tmp_path / "out.jsonl", "--worker-flags", "--kv-dtype bfloat16"]
    for more in ([], ["--model", "dry-run:echo"], ["--queue", "q"]):
        done = program(*command, *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert "start the workers of queue" in done.stderr


def generate(folder: Path, *flags: str) -> tuple[int, str]:
    """`millstream generate` with a broker and a worker of its own: its exit code, and what it says."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("REDIS_URL")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "millstream",
            "generate",
            "in.jsonl",
            "-o",
            "out.jsonl",
            "--model",
            "dry-run:echo",
            *flags,
        ],
        env={**inherited, "MILLSTREAM_STATE": str(folder / "state"), "MILLSTREAM_BROKER_IDLE_S": "2"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_a_flag_that_the_worker_refuses_is_one_line_and_wrong_usage(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = ("generate", source, "-o", tmp_path / "out.jsonl", "--model", "dry-run:echo")
    alone = {"REDIS_URL": "", "MILLSTREAM_STATE": str(tmp_path / "state"), "MILLSTREAM_BROKER_IDLE_S": "2"}
    done = program(*command, "--worker-flags", "--kv-dtype float3", **alone)
    assert done.returncode == 2
    assert "cannot be started so: --kv-dtype 'float3' is none of auto" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def ended(model: str, flags: str, url: str, folder: Path) -> MillstreamError:
    """What a run raises whose worker has ended by itself."""
    worker = OwnWorker(model, read_flags(flags), "q", url, folder / "worker.log")
    worker.start()
    assert worker._process is not None
    worker._process.wait(60)
    try:
        with pytest.raises(MillstreamError) as fault:
            worker.check(answered=0)
    finally:
        worker.stop()
    return fault.value


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nonsense", "No such option: --nonsense"),
        ("stray", "unexpected extra argument(s) (stray)"),
        ("--dtype", "Option '--dtype' requires an argument"),
        ("--max-num-seqs x", "'--max-num-seqs'"),
        ("--max-num-seqs 0", "'--max-num-seqs'"),
        ("--kv-memory 4QB", "'4QB' is no amount of memory"),
        ("--log-level loud", "warning or error, not 'loud'"),
        ("--max-num-seqs 600 --max-num-batched-tokens 32", "give --max-num-batched-tokens 600"),
        ("--quantization int8 --compile", "--quantization int8 and --compile exclude each other"),
    ],
)
def test_whatever_a_worker_refuses_is_wrong_usage_in_its_own_words(
    flags: str, words: str, url: str, tmp_path: Path
) -> None:
    fault = ended("dry-run:echo", flags, url, tmp_path)
    assert isinstance(fault, Refused)
    assert words in str(fault)


@pytest.mark.long
def test_so_is_what_contradicts_the_model(tiny_model_dir: Path, url: str, tmp_path: Path) -> None:
    fault = ended(str(tiny_model_dir), "--max-model-len 1000000", url, tmp_path)
    assert isinstance(fault, Refused)
    assert "--max-model-len 1000000" in str(fault)


def test_a_worker_that_was_killed_is_no_wrong_usage(url: str, tmp_path: Path) -> None:
    worker = OwnWorker("dry-run:echo", [], "q", url, tmp_path / "worker.log")
    assert not worker.check(answered=0)
    worker.start()
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait(60)
    with pytest.raises(MillstreamError, match="ended: killed by signal 9") as fault:
        worker.check(answered=0)
    worker.stop()
    assert not isinstance(fault.value, Refused)


@pytest.mark.long
def test_rows_that_are_mended_after_the_end_are_answered(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": 3}, {"prompt": "c"}])
    assert generate(tmp_path)[0] == 3
    write_rows(source, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    code, errors = generate(tmp_path)
    assert (code, "3 answered, 0 failed (2 of them before)" in errors) == (0, True)
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == ["a", "b", "c"]
    write_rows(source, [{"prompt": "a"}, {"prompt": "b"}])
    code, errors = generate(tmp_path)
    assert (code, "starting a worker" in errors) == (0, False), "there was nothing to ask"


@pytest.mark.long
def test_a_run_keeps_to_them_where_they_change_answers(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert generate(tmp_path, "--worker-flags", "--kv-dtype bfloat16")[0] == 0
    code, errors = generate(tmp_path, "--worker-flags", "--kv-dtype int8")
    assert code == 2
    assert "--kv-dtype: bfloat16, now int8" in errors
    code, errors = generate(tmp_path, "--worker-flags", "--kv-dtype bfloat16 --max-num-seqs 4")
    assert code == 0
    assert "nothing to do" in errors
    code, errors = generate(tmp_path, "--worker-flags", "--kv-dtype int8", "--redo-changed")
    assert code == 0
    assert "1 answered, 0 failed in" in errors, "asked again, not kept"
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == ["a"]


def test_only_deaths_without_an_answer_between_them_count(url: str, tmp_path: Path) -> None:
    """A run may take a week, and a worker may die once a day."""
    worker = OwnWorker("dry-run:echo", [], "q", url, tmp_path / "worker.log")
    worker.start()

    def die() -> None:
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait(60)

    try:
        for answered in range(1, 2 * MOST_RESTARTS + 2):
            die()
            assert worker.check(answered=answered)
        for _ in range(MOST_RESTARTS - 1):
            die()
            assert worker.check(answered=answered)
        die()
        with pytest.raises(MillstreamError, match="ended: killed by signal 9"):
            worker.check(answered=answered)
    finally:
        worker.stop()
