"""docs/bulk.md says what `generate` does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from millstream.verbs import build
from producer.batch.stopping import WHY
from producer.bulk.lines import RowFault
from producer.bulk.openai_output import _STATUS
from producer.cli import exits
from protocol import ErrorCode
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

PAGE = (Path(__file__).parents[3] / "docs" / "bulk.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = next(code for language, code in BLOCKS if language == "bash")
PLAIN, OPENAI = (code for language, code in BLOCKS if language == "text")


def test_every_flag_is_one_of_the_program() -> None:
    command = typer.main.get_command(build()).commands["generate"]  # type: ignore[attr-defined]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert named - options == set()
    assert {
        "--format",
        "--order",
        "--redo-changed",
        "--resume",
        "--overwrite",
        "--check",
        "--bad-ids",
    } <= named


def test_every_exit_code_of_a_run_is_in_the_table() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    assert rows == codes - {exits.NOT_YET}


@pytest.mark.parametrize(
    ("flags", "shown"), [([], PLAIN), (["--format", "openai"], OPENAI)], ids=["rows", "openai"]
)
def test_the_example_is_what_comes_out(
    program: Program, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written, asked, shows = COMMANDS.splitlines()
    _, _, *rows, _, source = shlex.split(written)
    Path(source).write_text("".join(f"{row}\n" for row in rows))
    words = shlex.split(asked.partition(" ||")[0])
    with FakeWorker(url, answer=lambda _: " 4"):
        done = program(*words[1:], *flags)
    assert str(done.returncode) == asked.split()[-1]
    lines = [line for name in shows.split()[1:] for line in Path(name).read_text().splitlines()]
    told = shown.splitlines()
    assert len(lines) == len(told)
    for line, example in zip(lines, told, strict=True):
        there = iter(re.findall(r'"(\w+)":', line))
        missing = [name for name in re.findall(r'"(\w+)":', example) if name not in there]
        assert missing == []
        if "..." not in example:
            assert list(json.loads(line)) == list(json.loads(example))


def test_every_code_of_an_error_is_in_the_table_with_its_status() -> None:
    told = re.findall(r"^\| `(\w+)` \| .* \| (\d*) ?\|$", PAGE, re.MULTILINE)
    of_no_row = {
        ErrorCode.LOST_PAYLOAD,
        ErrorCode.DEADLINE_EXCEEDED,
    }  # dead letters have it; rows have no deadline
    codes = {*ErrorCode, *RowFault, *(code for code, _ in WHY.values())} - of_no_row
    assert dict(told) == {code: str(_STATUS.get(code, "")) for code in codes}
    assert len(told) == len(codes)
