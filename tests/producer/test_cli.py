"""The verbs for one job, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker import calls, watch
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from millstream import Client
from producer.cli import screen
from tests.broker.steps import Worker, end
from tests.producer.fake_worker import Failure, FakeWorker
from tests.producer.program import Program

COMMAND = [sys.executable, "-m", "millstream"]


def refuse(_: object) -> str:
    raise Failure("not today")


def test_submit_stream_shows_the_text_and_nothing_else_on_stdout(program: Program, url: str) -> None:
    with FakeWorker(url, "s1"):
        done = program("submit", "one two  three", "--queue", "s1", "--stream", "--max-tokens", "9")
        assert (done.returncode, done.stdout) == (0, "one two  three\n")
        assert done.stderr.startswith("millstream: job ")
        events = program("submit", "-", "--stream", "--json", stdin="a b", MILLSTREAM_QUEUE="s1")
        assert [json.loads(line)["type"] for line in events.stdout.splitlines()] == ["token", "token", "done"]


def test_submit_watch_result_status_cancel(program: Program, url: str) -> None:
    queue = ("--queue", "s2")
    submitted = program(
        "submit", "--chat", "hello", "--system", "be kind", "--id", "j1", *queue, "--priority", "high"
    )
    assert (submitted.returncode, submitted.stdout) == (0, "j1\n")
    not_yet = program("result", "j1", *queue)
    assert (not_yet.returncode, not_yet.stdout) == (5, "")
    assert not_yet.stderr == "millstream: job j1: not ended, it was queued\n"
    status = json.loads(program("status", "--json", *queue).stdout)
    assert (status["waiting"], status["running"], status["workers"]) == (1, 0, [])
    assert program("submit", "x", "--id", "j2", *queue, "--json").stdout == '{"id": "j2", "queue": "s2"}\n'
    assert program("cancel", "j2", *queue).stdout == "cancelled\n"
    watched = program("watch", "j2", *queue)
    assert (watched.returncode, watched.stderr) == (
        1,
        "millstream: job j2: cancelled: cancelled while it waited\n",
    )
    with FakeWorker(url, "s2"):
        result = program("result", "j1", *queue, "--wait", "20")
        assert (result.returncode, result.stdout) == (0, "hello\n")
        watched = program("watch", "j1", *queue)
        assert (watched.returncode, watched.stdout) == (0, "hello\n")
        ready = program("status", "--wait-ready", "5", *queue)
        assert ready.returncode == 0
        assert "fake" in ready.stdout
    assert json.loads(program("result", "j2", "--json", *queue).stdout)["state"] == "cancelled"
    assert program("cancel", "j2", *queue).returncode == 0
    ended = program("cancel", "j1", *queue)
    assert (ended.returncode, "succeeded" in ended.stderr) == (1, True)


def test_a_messages_file_is_a_chat(program: Program, url: str, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "from a file"}]')
    with FakeWorker(url, "s3"):
        assert (
            program("submit", "--messages", str(chat), "--stream", "--queue", "s3").stdout == "from a file\n"
        )


def test_a_failed_job_is_exit_code_1(program: Program, url: str) -> None:
    with FakeWorker(url, "s4", answer=refuse):
        done = program("submit", "x", "--id", "bad", "--stream", "--queue", "s4")
    assert done.returncode == 1
    assert "not today" in done.stderr
    result = program("result", "bad", "--queue", "s4")
    assert (result.returncode, result.stdout) == (1, "")
    assert "not today" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("submit",), 2, "give one of"),
        (("submit", "x", "--temperature", "-1"), 2, "temperature"),
        (("submit", "x", "--max-tokens", "many"), 2, "--max-tokens"),
        (("submit", "x", "--queue", "a:b"), 2, "a:b"),
        (("submit", "--messages", "no-such-file"), 2, "no-such-file"),
        (("submit", "x", "--redis-url", "redis://:secret@127.0.0.1:1"), 1, "nobody listens"),
        (("submit", "x", "--redis-url", "http://127.0.0.1"), 2, "redis://"),
        (("watch", "nobody"), 1, "not found"),
        (("result", "nobody"), 1, "not found"),
        (("cancel", "nobody"), 1, "not found"),
        (("result", "a\nb"), 2, "job id"),
        (("watch", "a\udcff"), 2, "job id"),
        (("cancel", ""), 2, "job id"),
        (("result", "x", "--wait", "nan"), 2, "not a time to wait"),
        (("submit", "x", "--wait", "inf"), 2, "not a time to wait"),
        (("status", "--wait-ready", "-1"), 2, "not a time to wait"),
        (("status", "--queue", "nobodys", "--wait-ready", "0.3"), 1, "no worker"),
        (("no-such-verb",), 2, "no-such-verb"),
    ],
)
def test_a_mistake_is_a_line_and_never_a_traceback(
    program: Program, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = program(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_the_flag_beats_the_environment(program: Program, url: str) -> None:
    done = program("status", "--json", "--redis-url", url, REDIS_URL="redis://127.0.0.1:1")
    assert done.returncode == 0
    done = program("status", REDIS_URL="", MILLSTREAM_REDIS_URL="redis://127.0.0.1:1")
    assert (done.returncode, "127.0.0.1:1" in done.stderr) == (1, True)


def test_ctrl_c_while_watching_is_130_and_silent(program: Program, url: str) -> None:
    program("submit", "x", "--id", "slow", "--queue", "s5")
    watch = subprocess.Popen(
        [*COMMAND, "watch", "slow", "--queue", "s5", "--json"],
        env={**os.environ, "REDIS_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    queue = Queue(connect(url), Keys("s5"))
    while queue.client.pubsub_numsub(queue.keys.tokens("slow"))[0][1] == 0:
        assert watch.poll() is None
    watch.send_signal(signal.SIGINT)
    _, errors = watch.communicate(timeout=20)
    assert (watch.returncode, errors) == (130, b"")
    assert queue.run(calls.look(queue.keys, "slow")).state == "queued"


def test_a_reader_that_goes_away_is_no_traceback(url: str) -> None:
    with FakeWorker(url, "s6"):
        done = subprocess.run(
            [
                "sh",
                "-c",
                'yes word | head -100000 | "$@" submit - --stream --queue s6 | head -c 5',
                "sh",
                *COMMAND,
            ],
            env={**os.environ, "REDIS_URL": url},
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == b"word\n"
    assert b"Traceback" not in done.stderr
    assert b"Broken pipe" not in done.stderr


@pytest.mark.parametrize(("is_paused", "runs"), [(True, False), (False, False), (True, True)])
def test_who_watches_a_job_that_waits_hears_once_that_its_queue_is_paused(
    program: Program, url: str, monkeypatch: pytest.MonkeyPatch, is_paused: bool, runs: bool
) -> None:
    connections: list[int] = []
    look = screen._PauseNote.look

    def looks(note: screen._PauseNote) -> None:
        look(note)
        connections.append(client.queue.client.info("stats")["total_connections_received"])
        if len(connections) == 3:
            assert len(set(connections)) == 1, "a look takes no connection of its own"
            assert client.job("j").cancel()[0] in ("cancelled", "cancelling")
            if runs:
                end(client.queue, lease, state="cancelled")

    monkeypatch.setattr(watch, "SILENCE_S", 0.05)
    monkeypatch.setattr(screen._PauseNote, "look", looks)
    with Client(url, "s9") as client:
        client.submit("p", id="j")
        if runs:
            lease = Worker(client.queue, "w").lease_one()
        if is_paused:
            client.pause()
        done = program("watch", "j", "--queue", "s9")
    said = "millstream: queue s9 is paused: job j waits until `millstream queue resume --queue s9`\n"
    assert done.stderr.count("paused") == done.stderr.count(said) == int(is_paused and not runs)
    assert done.returncode == 1


@pytest.mark.parametrize("verb", [("status",), ("submit", "p"), ("dead", "list"), ("batch", "list")])
@pytest.mark.parametrize("wrong", ["http://x", "redis://x/abc", "redis://x/0?bogus=1", "redis://x:99999/0"])
def test_a_url_that_is_none_is_wrong_usage_wherever_it_stands(
    program: Program, verb: tuple[str, ...], wrong: str
) -> None:
    for done in (program(*verb, "--redis-url", wrong), program(*verb, REDIS_URL=wrong)):
        assert done.returncode == 2
        assert done.stderr.startswith("millstream: Cannot use the Redis URL")


def test_what_stands_on_stdin_is_not_told_of_files(program: Program) -> None:
    done = program("submit", "--messages", "-", stdin="{")
    assert (done.returncode, "@FILE" in done.stderr, "give JSON" in done.stderr) == (2, False, True)
