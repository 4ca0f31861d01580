"""The face: names that load when they are asked for, and a program that starts fast."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import millstream


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_public_names() -> None:
    from producer.client import Client
    from protocol import SamplingParams

    assert millstream.Client is Client
    assert millstream.SamplingParams is SamplingParams
    assert millstream.__version__[0].isdigit()
    assert set(millstream.__all__) == set(dir(millstream)) == {*millstream._HOMES, "__version__"}
    for name in ("Nothing", "load_engine"):  # `Engine.from_pretrained` is the one way to an engine
        with pytest.raises(AttributeError, match=name):
            getattr(millstream, name)


def test_the_library_needs_nothing_of_the_engine() -> None:
    loaded = run(
        "import sys; from millstream import AsyncClient, Client, Job\n"
        "print({'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules))"
    )
    assert loaded == "set()"


def test_help_loads_nothing_slow() -> None:
    """Over a second with them; without, `--help` takes 0.23 s of processor time, an import 0.1 (measured)."""
    slow = run(
        "import sys, millstream.verbs; millstream.verbs.build()\n"
        "print({'torch', 'transformers', 'numba', 'redis', 'pydantic', 'rich'} & set(sys.modules))"
    )
    assert slow == "set()"


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{millstream.__version__}\n"


def test_a_full_disk_behind_stdout_is_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "millstream", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


HELP = """
import atexit, sys, time
atexit.register(lambda: print(time.process_time(), file=sys.stderr))
from millstream.__main__ import main
sys.argv = ["millstream", "--help"]
main()
"""
MOST_CPU_S = 1.0
"""Four times what it takes; torch alone takes more."""


def test_help_names_the_verbs_and_takes_little_time() -> None:
    def taken() -> float:
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
        for verb in ("worker", "generate", "submit", "watch", "result", "cancel", "status"):
            assert verb in done.stdout
        return float(done.stderr)

    # The first to import a module compiles it; the next one finds it compiled.
    assert taken() < MOST_CPU_S or taken() < MOST_CPU_S


def test_every_package_says_that_it_is_typed() -> None:
    """PEP 561: without the mark a type checker takes the library for untyped, and checks nothing of its use."""
    root = Path(millstream.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [pattern.removesuffix("*") for pattern in project["packages"]["find"]["include"]]
    assert "py.typed" in project["package-data"]["*"]
    assert [name for name in packages if not (root / name / "py.typed").is_file()] == []
