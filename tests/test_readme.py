"""Every code block of README.md runs, in a temporary folder with the examples beside it and a broker of its own.

A `bash` or `python` block must end well while a dry-run worker serves the default queue. A `bash` block whose last
line is `millstream worker ...` is a worker: it must become ready and end well on SIGTERM. Blocks of `make` and
`docker compose` lines are checked against Makefile and docker-compose.yml: other tests run what stands behind them.
Drawings are `text`.

Two things are replaced in what runs: the Redis of the reader's own, and the model that would have to be downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.processes import still_alive
from tests.servers import ValkeyServer

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
OWN_REDIS = "redis://localhost:6379/0"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
READY_S = 30.0
BLOCK_S = 60.0


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    line: int
    language: str
    code: str

    @property
    def commands(self) -> list[str]:
        """The lines that are neither empty nor comments."""
        return [line for line in self.code.splitlines() if line.strip() and not line.lstrip().startswith("#")]

    @property
    def kind(self) -> str:
        """How the block is tried: text, make, docker, worker, or by its language."""
        if self.language == "bash":
            for kind, start in (("make", "make "), ("docker", "docker compose ")):
                if all(command.startswith(start) for command in self.commands):
                    return kind
            if self.commands[-1].startswith("millstream worker"):
                return "worker"
        return self.language


def blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


def of_kind(*kinds: str) -> pytest.MarkDecorator:
    chosen = [block for block in blocks() if block.kind in kinds]
    return pytest.mark.parametrize("block", chosen, ids=[f"line {block.line}" for block in chosen])


@contextmanager
def state_folder() -> Iterator[str]:
    """A state folder for an embedded broker; on leaving, every process that was started with it has ended."""
    with tempfile.TemporaryDirectory(prefix="ms-", ignore_cleanup_errors=True) as state:
        yield state
        left = [
            process
            for process in psutil.process_iter()
            if environment_of(process).get("MILLSTREAM_STATE") == state
        ]
        alive = still_alive(left, 15)
        names = [process.cmdline() for process in alive]
        for process in alive:
            process.kill()
        assert names == [], "left running"


def environment_of(process: psutil.Process) -> Mapping[str, str]:
    try:
        environment: dict[str, str] = process.environ()
    except psutil.Error:
        return {}
    return environment


def environment(state: str, home: Path) -> dict[str, str]:
    """As on a reader's machine, without the settings of whoever runs the tests."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MILLSTREAM_", "REDIS_", "RQ_"))
    }
    return kept | {"MILLSTREAM_STATE": state, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}


@contextmanager
def worker(code: str, environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Run lines of bash that end with a worker; ready on entering, ended well by SIGTERM on leaving."""
    lines = code.rstrip().split("\n")
    lines[-1] = f"exec {lines[-1]}"
    log = folder / "worker.log"
    with log.open("wb") as out:
        script = "\n".join(lines)
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script], env=environment, cwd=folder, stdout=out, stderr=out
        )
    try:
        settings = "\n".join(line for line in lines[:-1] if line.startswith("export "))
        ready = f"{settings}\nmillstream status --wait-ready {READY_S}"
        waited = subprocess.run(
            ["bash", "-c", ready], env=environment, cwd=folder, capture_output=True, text=True
        )
        assert waited.returncode == 0, waited.stderr + log.read_text()
        yield
        process.terminate()
        assert process.wait(timeout=BLOCK_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    """The environment of a reader who has started a worker in another terminal."""
    with state_folder() as state, tempfile.TemporaryDirectory(prefix="ms-home-") as home:
        settings = environment(state, Path(home))
        with worker("millstream worker --model dry-run:words", settings, Path(home)):
            yield settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_every_block_is_tried() -> None:
    kinds = [block.kind for block in blocks()]
    assert {"make", "bash", "python", "worker", "text"} <= set(kinds)
    assert set(kinds) <= {"make", "docker", "bash", "python", "worker", "text"}


@of_kind("make")
def test_make_lines_name_targets(block: Block) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    for command in block.commands:
        named = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
        assert named, command
        assert set(named) <= set(targets[1].split()), command


@of_kind("docker")
def test_docker_lines_name_services(block: Block) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for command in block.commands:
        verb, *rest = shlex.split(command, comments=True)[2:]
        named = [word for word in rest if not word.startswith("-")]
        assert verb in {"up", "run", "down"}, command
        assert set(named[:1]) <= set(services), command


@of_kind("bash", "python")
def test_a_block_runs(block: Block, served: dict[str, str], folder: Path) -> None:
    run = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    code = block.code.replace(HUB_MODEL, "dry-run:words")
    done = subprocess.run(
        [*run, code], env=served, cwd=folder, capture_output=True, text=True, timeout=BLOCK_S
    )
    assert done.returncode == 0, f"README.md, line {block.line}:\n{done.stdout}{done.stderr}"


@of_kind("worker")
def test_a_worker_block_serves(block: Block, folder: Path) -> None:
    with ValkeyServer(aof=False, tcp=True) as server, state_folder() as state:
        code = block.code.replace(HUB_MODEL, "dry-run:words").replace(OWN_REDIS, server.tcp_url)
        with worker(code, environment(state, folder), folder):
            pass
