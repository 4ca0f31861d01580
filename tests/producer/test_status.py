"""`millstream status`: what the workers' engines do."""

from __future__ import annotations

import json

import pytest

from broker.calls import Status, WorkerBeat
from producer.cli.status import _as_dict, _show

LATELY = {
    "tokens_per_s": 1020.0,
    "slots_used": 0.98,
    "kv_used": 0.64,
    "kv_unused": 0.031,
    "cached": 0.12,
    "preemptions": 3,
    "computed_twice": 0.004,
    "step_ms": 412.4,
    "schedule": 0.01,
    "forward": 0.92,
    "sample": 0.05,
    "output": 0.02,
}


def status(**info: object) -> Status:
    beats = (WorkerBeat("w1", 500, {"host": "h", "pid": 7, "model": "m", "running": 1, **info}),)
    return Status(None, 0, 1, 10, 0, False, beats)


def test_the_last_minute_of_each_worker_is_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _show("default", status(lately=LATELY))
    header, row = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert " ".join(header) == (
        "last minute slots KV unused cache preempted twice step schedule forward sample output"
    )
    assert " ".join(row) == "w1 98.0% 64.0% 3.1% 12.0% 3 0.4% 412 ms 1.0% 92.0% 5.0% 2.0%"


@pytest.mark.parametrize("info", [{}, {"lately": {}}], ids=["an older worker", "an idle one"])
def test_a_worker_that_does_nothing_has_no_such_row(
    capsys: pytest.CaptureFixture[str], info: dict[str, object]
) -> None:
    _show("default", status(**info))
    assert "last minute" not in capsys.readouterr().out


def test_scripts_get_every_counter() -> None:
    told = json.loads(json.dumps(_as_dict("default", status(lately=LATELY, engine={"steps": 9}))))
    assert told["workers"][0]["lately"] == LATELY
    assert told["workers"][0]["engine"] == {"steps": 9}
