"""The comparison of engines: processes, interpreters, what is missing, and what is no measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from bench import children, engines, offline
from bench.children import Model, Place
from bench.engines import Answered, Engine, Loading
from bench.gemm_limit import Products
from bench.results import NotMeasured
from bench.workload import Row, Task
from tests.bench.doubles import Words, engine_figures, task
from tests.models import save_tiny, tiny_config

ROWS = [Row([5, 6, 7 + number], 3 + number) for number in range(5)]
WARM = [Row([3], 2)]


def test_an_engines_process_needs_nothing_of_ours() -> None:
    """Peers' interpreters have none of it: the standard library is enough until an engine is loaded."""
    code = (
        "import sys, bench.engines\n"
        "print({name.partition('.')[0] for name in sys.modules} - {'bench', '__main__'} - sys.stdlib_module_names)"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=children.ROOT, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


def test_groups_are_handed_over_one_after_the_other() -> None:
    groups: list[int] = []

    def answer(rows: list[Row]) -> Answered:
        groups.append(len(rows))
        steps = [(len(rows), 1)]
        return Answered(sum(row.max_tokens for row in rows), 2, steps, 100, 10)

    loading = Loading("a model", "float32", 128, {})
    found = engines.measure(lambda _: answer, loading, WARM, [Task("pairs", 2, ROWS), Task("all", 5, ROWS)])
    assert groups == [1, 2, 2, 1, 5]
    pairs = found["tasks"]["pairs"]
    assert (pairs["output_tokens"], pairs["prompt_tokens"], pairs["cached_tokens"]) == (25, 15, 6)
    assert (pairs["steps"], pairs["kv_tokens_allocated"], pairs["kv_tokens_unused"]) == (
        [(2, 1), (2, 1), (1, 1)],
        300,
        30,
    )


def test_an_engine_that_gives_less_is_no_measurement() -> None:
    loading = Loading("a model", "float32", 128, {})
    with pytest.raises(SystemExit, match="some: 25 tokens were asked for, 0 came"):
        engines.measure(lambda _: lambda _: Answered(), loading, WARM, [Task("some", 5, ROWS)])


def test_why_there_are_no_figures(tmp_path: Path) -> None:
    model = Model(tmp_path, "float32")
    with pytest.raises(NotMeasured, match=r"cannot start .*: No such file"):
        children.run("vllm", model, [], [], Place({"vllm": str(tmp_path / "python")}))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho something >&2\necho a reason >&2\nexit 3\n")
    python.chmod(0o700)
    with pytest.raises(NotMeasured, match=r"^failed: a reason$"):
        children.run("openvino-4bit", model, [], [], Place({"openvino": str(python)}))


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Engine("no_such_module", (), "given", engines.ENGINES["vllm"].load)
    monkeypatch.setitem(engines.ENGINES, "vllm", absent)
    spec, result = tmp_path / "spec.json", tmp_path / "result.json"
    spec.write_text(engines.to_json("vllm", Loading("m", "float32", 1, {}), WARM, []))
    engines.main(str(spec), str(result))
    assert json.loads(result.read_text()) == {"missing": "no_such_module"}


def test_flags_say_where_engines_are_and_what_ours_is_loaded_with() -> None:
    args = Namespace(
        python=["openvino=envs/ov/bin/python", "vllm=python3.12"], option=["compile=true", "dtype=float32"]
    )
    place = children.place_of(args)
    assert (
        place.python("openvino-4bit")
        == place.python("openvino")
        == str(Path("envs/ov/bin/python").absolute())
    )
    assert (place.python("vllm"), place.python("millstream")) == ("python3.12", sys.executable)
    assert place.options == {"compile": True, "dtype": "float32"}
    for wrong in ("vllm", "nobody=python3"):
        with pytest.raises(SystemExit, match="--python"):
            children.place_of(Namespace(python=[wrong], option=[]))


def test_what_keeps_kv_in_what() -> None:
    def kept(name: str, **options: Any) -> str:
        engine = engines.ENGINES[name]
        return engine.kv_kept(engine.loading("a model", "float32", 128, options))

    assert (kept("millstream"), kept("millstream", kv_dtype="int8")) == ("float32", "int8")
    assert kept("millstream-kv16") == kept("millstream-kv16", kv_dtype="int8") == "bfloat16"
    assert (kept("openvino"), kept("vllm"), kept("vllm", kv_dtype="int8")) == ("8 bits", "float32", "float32")
    loading = engines.ENGINES["millstream-kv16"].loading("a model", "float32", 8, {"block_size": 16})
    assert loading == Loading("a model", "float32", 8, {"block_size": 16, "kv_dtype": "bfloat16"})


def test_each_of_ours_has_a_limit_of_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"millstream": [[8, 1]] * 4, "millstream-kv16": [[8, 1]] * 2}

    def run(name: str, *_: object) -> dict[str, Any]:
        one = task(1, 2.0, 10, kv_tokens_allocated=10, steps=steps.get(name, []))
        return engine_figures({"gsm8k-1": one}, 1.0, "", "", "some dtype")

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(offline, "_products", lambda *_: Products([8], [0.1], [0.1]))
    monkeypatch.setattr(Model, "tokenizer", lambda _: Words())
    names = [flag for name in ("millstream", "openvino", "millstream-kv16") for flag in ("--engine", name)]
    model = ("--model", str(tmp_path), "--dtype", "float32", "--shared", "0", "--concurrency", "1")
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["offline", *model, *names, "--json", str(file)])
    assert offline.main() == 0
    limits = json.loads(file.read_text())["limits"]
    assert {name: limits[name]["gsm8k-1"]["same_steps"] for name in limits} == pytest.approx(
        {"millstream": 0.8, "millstream-kv16": 0.4}
    )
    assert "| millstream-kv16 | some dtype | 1 | 5.0 | 25.0 | 20% |" in capsys.readouterr().out


def test_no_prompt_of_a_task_is_known_from_another() -> None:
    warm, tasks = offline.make_tasks(Words(), 128, [128, 32, 1], 10)
    assert [(task.name, task.at_once, len(task.rows)) for task in tasks] == [
        ("gsm8k-128", 128, 128),
        ("gsm8k-32", 32, 32),
        ("gsm8k-1", 1, 8),
        ("shared-prefix", 10, 10),
    ]
    starts = [{tuple(row.prompt_ids[:2]) for row in rows} for rows in (warm, *(task.rows for task in tasks))]
    assert len(set.union(*starts)) == sum(map(len, starts))


@pytest.mark.parametrize(
    "flags",
    [
        ("--rows", "0"),
        ("--rows", "-1"),
        ("--rows", "many"),
        ("--concurrency", "0"),
        ("--concurrency", "32", "-1"),
        ("--shared", "-1"),
    ],
    ids=" ".join,
)
def test_no_rows_are_no_work(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", *flags])
    with pytest.raises(SystemExit) as end:
        offline.main()
    assert end.value.code == 2
    assert f"argument {flags[0]}: '{flags[-1]}' is not a number of rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why", "code"),
    [
        ((), "not installed: no module vllm", 0),
        (("--engine", "vllm"), "not installed: no module vllm", 1),
        (("--engine", "vllm"), "cannot start envs/python: No such file or directory", 1),
        ((), "cannot start envs/python: No such file or directory", 1),
        ((), "failed: a reason", 1),
    ],
)
def test_an_engine_that_gives_no_figures_is_told_of(
    flags: tuple[str, ...],
    why: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*_: object) -> None:
        raise NotMeasured(why)

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(Model, "tokenizer", lambda _: Words())
    model = ("--model", str(tmp_path), "--dtype", "float32", "--shared", "0")
    monkeypatch.setattr(sys, "argv", ["offline", *model, *flags])
    assert offline.main() == code
    assert f"vllm: {why}" in capsys.readouterr().err.splitlines()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "millstream",
        *(pytest.param(f"transformers-{kind}", marks=pytest.mark.long) for kind in ("static", "cb")),
    ],
)
def test_an_engine_gives_what_was_asked_for(tmp_path: Path, name: str) -> None:
    folder = save_tiny(LlamaForCausalLM, tmp_path, tiny_config(max_position_embeddings=256))
    loading = Loading(str(folder), "float32", 8, {})
    tasks = [Task("two", 2, [Row([7, 8, 9, 10], 5), Row([7, 8, 9, 11, 12], 9)])]
    found: dict[str, Any] = engines.measure(engines.ENGINES[name].load, loading, WARM, tasks)["tasks"]["two"]
    assert (found["output_tokens"], found["prompt_tokens"]) == (14, 9)
    assert found["seconds"] > 0
    if name == "millstream":
        # Both prompts at once, then a token of each, then of the one that goes on.
        assert found["steps"] == [(9, 2), *[(2, 2)] * 4, *[(1, 1)] * 4]
        assert 0 < found["kv_tokens_unused"] < found["kv_tokens_allocated"]
