"""What the environment says of the embedded broker and of batches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker import embedded
from producer.batch.folder import default_dir
from protocol import BrokerUnreachable


def test_where_state_and_sockets_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert embedded.default_state_dir({"MILLSTREAM_STATE": "/s", "XDG_STATE_HOME": "/x"}) == Path("/s")
    for given, state in (("/x", "/x"), ("x", "/home/u/.local/state"), ("", "/home/u/.local/state")):
        environ = {"XDG_STATE_HOME": given}
        assert embedded.default_state_dir(environ) == Path(state) / "millstream/broker"
        assert default_dir(environ) == Path(state) / "millstream/batches"
    assert embedded.default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "millstream"
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert embedded.default_runtime_dir(gone).name == f"millstream-{os.geteuid()}"


def test_a_wrong_idle_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_BROKER_IDLE_S", "soon")
    with pytest.raises(BrokerUnreachable, match="MILLSTREAM_BROKER_IDLE_S is 'soon'"):
        embedded.EmbeddedBroker(tmp_path, runtime_dir=tmp_path / "run")
