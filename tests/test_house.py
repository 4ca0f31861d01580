"""The rooms and their arrows: who imports whom, and what a plain import brings along."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
ROOMS: list[str] = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["root_packages"]


def mapped(page: str) -> list[str]:
    """The modules that the page's map names, as `engine/sampling/draw`: a folder a line, modules below it.

    engine/
      engine, loop        what they are
      sampling/           logits to tokens
        draw              two spaces and more end the names
    """
    lines = page.partition("## Inside the rooms")[2].partition("\n## ")[0].splitlines()
    folders: list[tuple[int, str]] = []
    found: list[str] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if indent < 4:
            continue
        folders = [(depth, name) for depth, name in folders if depth < indent]
        names = re.split(" {2,}", line.strip())[0].split(", ")
        if names[0].endswith("/"):
            folders.append((indent, names[0]))
        else:
            found += ["".join(name for _, name in folders) + name for name in names]
    return found


def test_the_map_names_every_module_once() -> None:
    modules = [
        str(path.relative_to(ROOT).with_suffix(""))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(mapped((ROOT / "docs" / "house.md").read_text())) == sorted(modules)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the pyproject.toml in a folder against the packages in it."""
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=60)


def test_every_arrow_holds() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("protocol", "import redis"),
        ("broker", "import torch"),
        ("engine", "from broker import keys"),
        ("producer", "import worker"),
        ("worker", "import producer"),
    ],
)
def test_an_arrow_that_runs_the_other_way_is_found(room: str, line: str, tmp_path: Path) -> None:
    shutil.copy(PYPROJECT, tmp_path)
    for name in ROOMS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line if name == room else "")
    (tmp_path / "broker" / "keys.py").touch()
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout
    assert f"{room} -> " in done.stdout


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("protocol", ["torch", "transformers", "redis", "rq"]),
        ("protocol, broker, producer, millstream", ["torch", "transformers", "numpy", "engine"]),
        ("millstream.__main__, millstream.verbs", ["torch", "transformers", "numpy"]),
        ("worker", ["torch", "transformers"]),
        ("engine, engine.interface, engine.dry_run", ["torch", "transformers", "redis", "rq"]),
    ],
)
def test_a_plain_import_brings_none_of(imports: str, absent: list[str]) -> None:
    """In an interpreter of its own, as a newcomer's first line would."""
    code = f"import sys\nimport {imports}\nprint(*sorted(set(sys.modules) & {set(absent)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.long
def test_engine_computes_without_redis() -> None:
    """The whole engine, torch included, loads without redis, rq and what is built on them."""
    code = (
        "import sys\nfrom engine import Engine\nprint(*sorted({'redis', 'rq', 'broker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
