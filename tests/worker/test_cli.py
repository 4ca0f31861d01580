"""The worker's help says what it does, and its flags are checked before anything is loaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.__main__ import main
from millstream.verbs import build

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()


def refused(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the program says of a worker's flags before it ends with 2."""
    monkeypatch.setattr(sys, "argv", ["millstream", "worker", "--model", "no/such-model", *flags])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "keyword",
    [
        "admission",
        "block_size",
        "compile",
        "device",
        "dtype",
        "kv_dtype",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_step_ms",
        "quantization",
    ],
)
def test_the_help_shows_the_defaults_of_the_page(keyword: str) -> None:
    text = CliRunner().invoke(build(), ["worker", "--help"], env={"COLUMNS": "80"}).output
    row = re.search(rf"^\| `{keyword}` \| (.*?) \|", PAGE, re.MULTILINE)
    option = re.search(rf"--{keyword.replace('_', '-')} .*?\[default: (.*?)[;\]]", " ".join(text.split()))
    assert row is not None
    assert option is not None
    assert option[1] == row[1].strip("`")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv-dtype", "int4"), "--kv-dtype 'int4' is none of auto, "),
        (("--dtype", "int3"), "--dtype 'int3' is none of auto, "),
        (("--quantization", "int8", "--compile"), "--quantization int8 and --compile exclude each other"),
        (("--admission", "x"), "--admission 'x' is none of first-fit, "),
        (
            ("--num-kv-blocks", "1", "--block-size", "1"),
            "--num-kv-blocks 1 of --block-size 1 holds one token",
        ),
    ],
    ids=" ".join,
)
def test_what_can_never_be_is_one_line_before_anything_is_loaded(
    flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = refused(flags, monkeypatch, capsys).splitlines()
    assert line.startswith(f"millstream: {said}")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--queue", "a{b} c", "queue 'a{b} c': use "),
        ("--queue", "", "queue '': use "),
        ("--log-level", "loud", "--log-level: give debug, info, warning or error, not 'loud'"),
        ("--log-level", "critical", "not 'critical'"),
        ("--lease", "inf", "Invalid value for '--lease': "),
        ("--lease", "0.5", "Invalid value for '--lease': "),
        ("--grace", "-1", "Invalid value for '--grace': "),
        ("--kv-memory", "inf", "'inf' is no amount of memory: "),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(
    flag: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused((flag, value), monkeypatch, capsys).splitlines()[-1]
