"""`millstream status`: what the workers' engines do."""

from __future__ import annotations

import json

import pytest

from broker import calls
from broker.calls import Status, WorkerBeat
from broker.connection import connect
from broker.keys import Keys
from broker.loading import Loading, note_loading
from broker.queue import Queue
from producer.cli.status import _as_dict, _show
from protocol import Fingerprint
from tests.producer.program import Program

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


def shown(capsys: pytest.CaptureFixture[str], found: Status) -> list[str]:
    _show("default", found)
    return capsys.readouterr().out.splitlines()


def test_a_worker_and_its_last_minute(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, status(lately=LATELY, waiting=2, slots=8))
    assert lines[-8:] == [
        "worker w1",
        "  model m",
        "  host h, pid 7",
        "  heard of 0 s ago",
        "  1 running, 2 waiting, 8 slots, 1,020 tokens/s",
        "  last minute: slots 98.0%, KV 64.0% (3.1% unused), cache 12.0%",
        "    preempted 3 (0.4% computed twice)",
        "    step 412 ms: schedule 1%, forward 92%, sample 5%, output 2%",
    ]


def test_eighty_columns_tell_workers_of_a_host_apart(capsys: pytest.CaptureFixture[str]) -> None:
    host = "ip-10-20-30-140.eu-central-1.compute.internal"
    name = "HuggingFaceTB/SmolLM2-1.7B-Instruct-and-some"
    busy = {**dict.fromkeys(LATELY, 1.0), "tokens_per_s": 1e6, "preemptions": 123_456, "step_ms": 98_765.4}
    info = {"host": host, "pid": 4_194_303, "model": name, "running": 1000, "waiting": 1000, "slots": 1000}
    beats = tuple(
        WorkerBeat(f"{host}-{pid}-0a1b2c3d", 100_000, {**info, "pid": pid, "lately": busy})
        for pid in (4_194_302, 4_194_303)
    )
    lines = shown(capsys, Status(None, 0, 1, 10, 0, False, beats))
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines if line.startswith("worker ")] == [
        f"worker {beat.worker}" for beat in beats
    ]


@pytest.mark.parametrize("name", ["[/x]", "[red]", "[bold]m[/bold]", "\\[red]", ":smile:", "[link=x]y"])
def test_names_are_no_markup(capsys: pytest.CaptureFixture[str], name: str) -> None:
    info = {"host": name, "pid": name, "model": name, "running": 1, "waiting": name, "slots": name}
    lines = shown(capsys, Status(Fingerprint(name=name), 0, 1, 10, 0, False, (WorkerBeat(name, 500, info),)))
    assert lines[0].startswith(f"queue default: {name}")
    assert lines[-5:] == [
        f"worker {name}",
        f"  model {name}",
        f"  host {name}, pid {name}",
        "  heard of 0 s ago",
        f"  1 running, {name} waiting, {name} slots, - tokens/s",
    ]


def test_names_neither_leave_their_line_nor_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plain = len(shown(capsys, status()))
    lines = shown(capsys, status(host="a\nb", model="\x1b[2Jm\ud800\x9b"))
    assert len(lines) == plain
    assert lines[-4:-2] == ["  model ?[2Jm??", "  host a?b, pid 7"]


@pytest.mark.parametrize(
    ("info", "speed"), [({}, "-"), ({"lately": {}}, "0")], ids=["an older worker", "an idle one"]
)
def test_a_worker_that_does_nothing_has_no_such_row(
    capsys: pytest.CaptureFixture[str], info: dict[str, object], speed: str
) -> None:
    lines = shown(capsys, status(**info))
    assert not any("last minute" in line for line in lines)
    assert lines[-1].endswith(f", {speed} tokens/s")


def test_scripts_get_every_counter() -> None:
    told = json.loads(json.dumps(_as_dict("default", status(lately=LATELY, engine={"steps": 9}))))
    assert told["workers"][0]["lately"] == LATELY
    assert told["workers"][0]["engine"] == {"steps": 9}


def test_who_waits_for_a_worker_is_told_what_for(program: Program, url: str) -> None:
    waited = program("status", "--wait-ready", "0.01", "--json")
    assert (waited.returncode, json.loads(waited.stdout)["workers"]) == (1, [])
    first, last = waited.stderr.splitlines()
    assert first.startswith("millstream: waiting for a worker of queue default: none has come yet")
    assert last.startswith("millstream: no worker serves queue default after 0.01 s: none has come yet")
    assert program("status", "--wait-ready", "0").stderr.count("\n") == 1
    queue = Queue(connect(url), Keys())
    queue.run(note_loading(queue.keys, "w1", "org/large"))
    loads = program("status", "--wait-ready", "0.01", "--json")
    assert (loads.returncode, loads.stderr.count("w1 loads org/large since ")) == (1, 2)
    (told,) = json.loads(loads.stdout)["loading"]
    assert (told["worker"], told["model"], 0 <= told["since_s"] < 60) == ("w1", "org/large", True)
    queue.run(calls.register(queue.keys, "w1", Fingerprint(name="tiny")))
    assert program("status", "--wait-ready", "5").stderr == ""
    at = int(queue.client.time()[0]) * 1000 - 450_000
    queue.client.hset(queue.keys.workers, "w1", f'{at} {{"model": "tiny"}}')
    gone = program("status", "--wait-ready", "0.01")
    assert (gone.returncode, len(gone.stderr.splitlines())) == (1, 2)
    assert "the last was w1 with tiny, heard of 4" in gone.stderr
    queue.close()


def test_a_worker_that_loads_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = Status(None, 0, 0, 0, 0, False, (), loading=(Loading("w1", "org/large\x1b[2J", 312_400),))
    assert shown(capsys, found)[-1] == "w1 loads org/large?[2J since 312 s"
