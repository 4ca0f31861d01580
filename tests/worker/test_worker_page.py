"""docs/worker.md tells the flags, bounds, variables and lines of log that the code has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from broker.calls import ALIVE_MS, FORGET_WORKER_MS
from broker.embedded import DEFAULT_IDLE_S
from protocol.job import DEFAULT_MAX_RETRIES
from worker import backoff, cli, parent, quarantine, restarts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "worker.md").read_text()
ENGINE_PAGE = (ROOT / "docs" / "engine.md").read_text()
HINTS = get_type_hints(cli.worker, include_extras=True)
DEFAULTS = {name: one.default for name, one in inspect.signature(cli.worker).parameters.items()}
ROWS = {
    name.replace("-", "_"): (default.strip("`"), what)
    for name, default, what in re.findall(r"^\| `--([a-z-]+)` \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
}


def option(name: str) -> object:
    """What typer is told of a flag."""
    assert get_origin(HINTS[name]) is Annotated
    return get_args(HINTS[name])[1]


def test_every_flag_is_on_this_page_or_on_the_engines() -> None:
    elsewhere = {"model", "leash_fd"}
    missing = [
        name for name in DEFAULTS if name not in elsewhere | ROWS.keys() and f"`{name}`" not in ENGINE_PAGE
    ]
    assert missing == []


@pytest.mark.parametrize("name", [name for name in ROWS if name != "redis_url"])
def test_the_defaults_are_those_of_the_code(name: str) -> None:
    default = DEFAULTS[name]
    told = {True: "on", False: "off"}.get(default) if isinstance(default, bool) else f"{default}"
    if isinstance(default, float):
        told = f"{default:g} s"
    assert ROWS[name][0] == told


def test_the_bounds_are_those_of_the_code() -> None:
    lease: object = option("lease")
    low, high = getattr(lease, "min", None), getattr(lease, "max", None)
    assert f"{low} s to {high:,} s" in ROWS["lease"][1]
    for said in (
        f"| {parent.LOADS_IN_A_ROW} model processes in a row that died while they loaded | 1 |",
        f"| {restarts.MOST_CRASHES} model processes in a row that died while they ran,",
        f"| {restarts.MOST_DEVICES} model processes in a row that gave up their device,",
        f"From {quarantine.ALONE_AFTER} crashes on a job runs alone",
        f"after about {backoff.FIRST_S:g} s, {2 * backoff.FIRST_S:g} s, {4 * backoff.FIRST_S:g} s",
        f"up to {backoff.LONGEST_S:g} s",
        f"its `max_retries` says ({DEFAULT_MAX_RETRIES})",
        f"finds Redis away waits {parent.LEAVE_S:g} s",
        f"it lives every\n{parent.BEAT_S:g} s",
        f"After {ALIVE_MS // 1000} s without a word",
        f"after {FORGET_WORKER_MS // 60_000} minutes it is forgotten",
        f"if its last user died; default {DEFAULT_IDLE_S:g} |",
    ):
        assert said in PAGE


def test_every_variable_of_a_flag_is_named() -> None:
    named = [getattr(option(name), "envvar", None) for name in DEFAULTS]
    assert [name for name in named if name] == [
        "MILLSTREAM_MODEL",
        "MILLSTREAM_QUEUE",
        "MILLSTREAM_LOG_LEVEL",
    ]
    for name in filter(None, named):
        assert f"`{name}`" in PAGE


def lines_of_log() -> list[str]:
    """The formats of what the parent logs at `info` and above."""
    found = []
    for name in ("ledger", "link", "parent", "resume", "serve"):
        for call in ast.walk(ast.parse((ROOT / "worker" / f"{name}.py").read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            is_log = isinstance(call.func.value, ast.Name) and call.func.value.id == "log"
            if is_log and call.func.attr in {"info", "warning", "error"}:
                assert isinstance(call.args[0], ast.Constant)
                found.append(str(call.args[0].value))
    return found


def test_every_line_of_log_is_told() -> None:
    """By the longest piece of it that is always the same."""
    lines = lines_of_log()
    assert len(lines) >= 20
    pieces = [max(re.split(r"%(?:\.\d)?[sdgf]", line), key=len) for line in lines]
    assert [piece for piece in pieces if piece.strip() not in PAGE] == []
