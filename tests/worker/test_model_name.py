"""A model's name on the command line is looked up before anything is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import ModelUnavailable, OptionRefused
from worker.frames import Failed, Load, decode_from_model, encode, read
from worker.parent import WorkerSettings
from worker.serve import look_for


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        (["./nowhere"], 1, "no file or folder ./nowhere"),
        (["{here}", "--revision", "v2"], 2, "--revision 'v2' is of a model on the hub"),
    ],
    ids=["name", "revision"],
)
def test_a_wrong_name_is_told_before_the_server_is_waited_for(
    tmp_path: Path, model: list[str], code: int, said: str
) -> None:
    named = [part.format(here=tmp_path) for part in model]
    worker = [sys.executable, "-m", "millstream", "worker", "--model", *named, "--redis-timeout", "60"]
    run = subprocess.run(
        [*worker, "--redis-url", "redis://127.0.0.1:1"], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == code
    assert said in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_where_the_extra_is_missing_the_model_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    look_for(WorkerSettings(model="owner/name"))
    with pytest.raises(ModelUnavailable):
        look_for(WorkerSettings(model="./nowhere"))


def test_the_revision_goes_with_the_name(tmp_path: Path) -> None:
    with pytest.raises(OptionRefused, match=r"revision 'v2' is of a model on the hub"):
        look_for(WorkerSettings(model=str(tmp_path), options={"revision": "v2"}))
    look_for(WorkerSettings(model="dry-run:echo"))


@pytest.mark.long
def test_what_the_model_process_refuses_is_told_in_flags() -> None:
    (child_read, parent_write), (parent_read, child_write) = os.pipe(), os.pipe()
    child = [sys.executable, "-m", "worker.child", str(child_read), str(child_write)]
    with subprocess.Popen(child, pass_fds=(child_read, child_write)):
        os.close(child_read)
        os.close(child_write)
        os.write(parent_write, encode([Load("nowhere.gguf", {"device": "gpu0"})]))
        with open(parent_read, "rb") as pipe:
            told = decode_from_model(read(pipe) or b"")
        os.close(parent_write)
    assert isinstance(told, Failed)
    assert told.by_options
    assert told.message == "--device 'gpu0' is none of auto, cpu, cuda, cuda:0 ...: give --device auto"
