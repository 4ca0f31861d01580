"""One engine in a process of its own, in the interpreter where it is installed.

parent   tokens, weights in the form it reads  --> spec.json   -->  python -m bench.engines
         figures, or why there are none        <-- result.json <--  an interpreter that may lack our packages
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engines import ENGINES, to_json
from bench.results import NotMeasured
from bench.workload import Row, Task

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is compared on."""

    path: Path
    """A folder, or a .gguf file."""
    dtype: str
    """What everybody computes in."""

    @property
    def folder(self) -> Path:
        """Where the plain weights are: a GGUF file is unpacked once."""
        from engine.gguf_cache import converted

        return converted(self.path)[0] if self.path.suffix == ".gguf" else self.path

    def weights(self, form: str) -> Path:
        """The weights in the form that an engine reads."""
        from bench.bf16 import in_bfloat16
        from bench.gguf16 import in_16_bits

        if self.path.suffix != ".gguf" or form == "given":
            return self.path
        return in_bfloat16(self.folder) if form == "checkpoint" else in_16_bits(self.path)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)


def model_of(path: Path, dtype: str) -> Model:
    """A model, with `auto` made definite: what this machine computes fast."""
    import torch

    from engine.weights import resolve_dtype

    return Model(path.resolve(), str(resolve_dtype(dtype, torch.device("cpu"))).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines run."""

    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters by the beginning of engines' names; others run in this one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More keywords of `load_engine`, for ours."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def python(self, engine: str) -> str:
        """The interpreter of an engine."""
        given = (path for start, path in self.pythons.items() if engine.startswith(start))
        return next(given, sys.executable)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags that `place_of` reads."""
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=INTERPRETER",
        help="where an engine is installed; `openvino` stands for all whose names begin so",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword of our load_engine, such as compile=true",
    )


def place_of(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Place:
    """From the flags.

    Raises:
        SystemExit: one of them is no pair, or names no engine.
    """
    pythons, options = _pairs("--python", args.python), _pairs("--option", args.option)
    for start in pythons:
        if not any(name.startswith(start) for name in ENGINES):
            raise SystemExit(f"--python {start}: no engine's name begins so; there are {', '.join(ENGINES)}")
    # Not resolved: a virtual environment's interpreter is a link, and it is the link that makes the difference.
    pythons = {start: str(Path(path).absolute()) if "/" in path else path for start, path in pythons.items()}
    return Place(pythons, {name: _value(text) for name, text in options.items()}, environment or {})


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise SystemExit(f"{flag} {pair}: write it as NAME=VALUE")
    return dict(pair.split("=", 1) for pair in given)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def run(
    engine: str, model: Model, warm: list[Row], tasks: list[Task], place: Place, slots: int = 128
) -> dict[str, Any]:
    """Measure an engine; `bench.engines.measure` says what comes back; `versions`, `note` and `kv_dtype` beside it.

    Raises:
        NotMeasured: it is not installed there, or failed.
    """
    kind = ENGINES[engine]
    loading = kind.loading(str(model.weights(kind.weights)), model.dtype, slots, place.options)
    with tempfile.TemporaryDirectory() as folder:
        spec, result = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec.write_text(to_json(engine, loading, warm, tasks))
        try:
            done = subprocess.run(
                [place.python(engine), "-m", "bench.engines", str(spec), str(result)],
                cwd=ROOT,
                env=os.environ | dict(kind.environment) | dict(place.environment),
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise NotMeasured(f"cannot start {place.python(engine)}: {error.strerror}") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise NotMeasured(f"failed: {said[-1]}" if said else f"failed: exit status {done.returncode}")
        figures: dict[str, Any] = json.loads(result.read_text())
    if "missing" in figures:
        raise NotMeasured(f"{NOT_INSTALLED}: no module {figures['missing']}")
    return figures
