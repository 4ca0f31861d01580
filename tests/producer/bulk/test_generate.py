"""Bulk runs from file to file, with workers that need no model."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from broker import calls
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from broker.keys import Keys
from broker.queue import Queue
from producer.bulk import window
from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from producer.bulk.places import Places
from producer.bulk.progress import Lines
from protocol import BrokerUnreachable, Fingerprint, Job, MillstreamError
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.producer.fake_worker import Failure, FakeWorker, echo
from tests.producer.program import Program
from tests.servers import RealServer

DATA = Path(__file__).parents[1] / "data"


def uneven(job: Job) -> str:
    """Rows end out of order, and one in ten fails."""
    number = int(str(job.prompt).removeprefix("row "))
    time.sleep(number * 37 % 50 / 1000)
    if number % 10 == 3:
        raise Failure(f"no luck with {number}")
    return f"answer {number}"


def refuse(_: Job) -> str:
    raise Failure("never")


def test_order_and_completeness_when_jobs_end_out_of_order(
    program: Program, url: str, tmp_path: Path
) -> None:
    rows = [{"custom_id": f"id-{number}", "prompt": f"row {number}", "x": number} for number in range(200)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with ExitStack() as stack:
        workers = [stack.enter_context(FakeWorker(url, answer=uneven, name=f"w{n}")) for n in range(4)]
        done = program("generate", source, "-o", output, "--json", "--window", "100")
    assert done.returncode == 3
    assert json.loads(done.stdout)["failed"] == {"engine_error": 20}
    answers, errors = read_rows(output), read_rows(tmp_path / "out.errors.jsonl")
    good = [number for number in range(200) if number % 10 != 3]
    assert [(row["custom_id"], row["completion"], row["x"]) for row in answers] == [
        (f"id-{number}", f"answer {number}", number) for number in good
    ]
    assert [(row["line"], row["custom_id"], row["error"]["message"], row["prompt"]) for row in errors] == [
        (number + 1, f"id-{number}", f"no luck with {number}", f"row {number}")
        for number in range(3, 200, 10)
    ]
    assert sum(len(worker.answered) for worker in workers) == 200
    with redis.Redis.from_url(url) as client:
        assert [key for key in client.scan_iter() if b":job:" in key or b":done:" in key] == []


def test_a_run_where_every_row_fails_has_an_empty_output(program: Program, url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": str(number)} for number in range(7)])
    with FakeWorker(url, answer=refuse):
        done = program("generate", source, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 3
    assert "7 x engine_error, first line 1: never" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert len(read_rows(tmp_path / "out.errors.jsonl")) == 7


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_zero_rows_are_no_failure(program: Program, tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    done = program("generate", source, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "out.errors.jsonl").read_bytes() == b""


def test_joined_files_are_answered_byte_for_byte(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url):
        done = program("generate", DATA / "joined_files.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0
    assert [(row["custom_id"], row["completion"]) for row in read_rows(tmp_path / "out.jsonl")] == [
        ("a", "one"),
        ("b", "two"),
        ("c", "three \r inside"),
        ("d", "after a joined file"),
        ("e", "no newline at the end"),
    ]
    assert (tmp_path / "out.errors.jsonl").read_bytes() == b""


def test_broken_lines_are_errors_and_the_rest_is_answered(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url):
        done = program("generate", DATA / "broken_lines.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")] == ["ok1", "ok3"]
    assert [row["line"] for row in read_rows(tmp_path / "out.errors.jsonl")] == list(range(2, 18))
    checked = program("generate", DATA / "broken_lines.jsonl", "--check")
    assert (checked.returncode, "18 rows, 16 of them" in checked.stderr) == (3, True)


@pytest.mark.parametrize("column", ["custom_id", "id", "prompt", "topic"])
def test_half_a_character_anywhere_is_that_rows_error(
    program: Program, url: str, tmp_path: Path, column: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "x", column: "\ud800"}) + '\n{"prompt": "good"}\n')
    with FakeWorker(url):
        done = program("generate", source, "-o", tmp_path / "out.jsonl")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert [row["line"] for row in read_rows(tmp_path / "out.errors.jsonl")] == [1]
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == ["good"]


def test_a_second_time_there_is_nothing_to_do(program: Program, url: str, tmp_path: Path) -> None:
    source, output = (
        write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": 3}]),
        tmp_path / "out.jsonl",
    )
    with FakeWorker(url) as worker:
        assert program("generate", source, "-o", output).returncode == 3
        before = output.stat()
        again = program("generate", source, "-o", output)
    assert (again.returncode, "nothing to do; of its rows 1 failed" in again.stderr) == (3, True)
    assert (output.stat().st_mtime_ns, len(worker.answered)) == (before.st_mtime_ns, 1)


def test_other_questions_are_refused_and_changed_rows_redone_alone(
    program: Program, url: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = (DATA / "eight_rows.jsonl").read_text().splitlines()
    source.write_text("\n".join(lines))
    command = ("generate", source, "-o", output, "--temperature", "0")
    with FakeWorker(url) as worker:
        assert program(*command).returncode == 0
        before = output.read_bytes()
        for other, words in [
            (("--temperature", "0.7"), "temperature: 0.0, now 0.7"),
            (("--model", "m2"), "m2"),
        ]:
            refused = program(*command, *other)
            assert (refused.returncode, words in refused.stderr) == (2, True)
        assert (output.read_bytes(), len(worker.answered)) == (before, 8)

        lines[1] = lines[1].replace("row 1 é", "another one")
        source.write_text("\n".join(lines))
        assert program(*command, "--window", "3").returncode == 0
        assert len(worker.answered) == 9
        assert read_rows(output)[1]["completion"] == "another one"

        lines += [lines[2].replace("k2", "k8"), lines[3].replace("k3", "k9")]
        source.write_text("\n".join(lines))
        assert program(*command).returncode == 0
        assert (len(worker.answered), len(read_rows(output))) == (11, 10)

        source.write_text("\n".join(lines[:4]))
        assert program(*command).returncode == 0
        assert (len(worker.answered), len(read_rows(output))) == (11, 4)

        assert program(*command, "--temperature", "0.7", "--overwrite").returncode == 0
        assert (len(worker.answered), len(read_rows(output))) == (15, 4)


def test_what_cannot_work_is_refused_before_anything_is_submitted(
    program: Program, url: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "link.jsonl").symlink_to(source)
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.errors.jsonl").hardlink_to(source)
    (tmp_path / "packed.jsonl").write_bytes(b"PK\x03\x04rest")
    content = source.read_bytes()
    for arguments, words in [
        ((source, "-o", source), "the input itself"),
        ((source, "-o", tmp_path / "link.jsonl"), "the input itself"),
        ((source, "-o", tmp_path / "x.jsonl"), "the input itself"),
        ((source, "-o", tmp_path / "missing" / "out.jsonl"), "there is no folder"),
        ((source, "-o", tmp_path / "folder"), "no regular file"),
        ((source, "-o", "/dev/full"), "no regular file"),
        ((source, "-o", "/proc/out.jsonl"), "cannot write"),
        ((source, "-o", tmp_path / "loop.jsonl"), "cannot write"),
        ((source, "-o", tmp_path / ("n" * 255)), "cannot write"),
        ((source, "-o", "/"), "cannot write"),
        ((source,), "-o OUT"),
        ((source, "-o", tmp_path / "out.jsonl", "--resume", "--overwrite"), "one of them"),
        ((source, "-o", tmp_path / "out.jsonl", "--temperature", "-1"), "temperature"),
        ((source, "-o", tmp_path / "out.jsonl", "--window", "0"), "--window"),
        ((tmp_path / "none.jsonl", "-o", tmp_path / "out.jsonl"), "No such file"),
        ((tmp_path / "folder", "-o", tmp_path / "out.jsonl"), "Is a directory"),
        ((tmp_path / "packed.jsonl", "-o", tmp_path / "out.jsonl"), "zip"),
    ]:
        refused = program("generate", *arguments)
        assert (refused.returncode, words in refused.stderr, refused.stdout) == (2, True, ""), refused
        assert "Traceback" not in refused.stderr
    assert source.read_bytes() == content
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


def test_one_run_per_output(program: Program, url: str, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    first = threading.Thread(target=generate, args=[order(source, output, url), Interrupt()])
    first.start()
    with connect(url) as client:
        while not client.keys("*:job:*"):
            assert first.is_alive()
    second = program("generate", source, "-o", output)
    assert (second.returncode, f"process {os.getpid()}" in second.stderr) == (2, True)
    with FakeWorker(url):
        first.join(20)
    assert read_rows(output)[0]["completion"] == "a"


def test_a_full_disk_loses_no_row_and_the_same_command_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{number}"} for number in range(300)])
    output, real = tmp_path / "out.jsonl", os.pwrite
    spool = Places(source, output).spool

    def full(file: int, data: bytes, at: int) -> int:
        if at > 2000:
            raise OSError(28, "No space left on device")
        return real(file, data, at)

    with FakeWorker(url) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(MillstreamError, match="No space left"):
                generate(order(source, output, url, window=20), Interrupt())
        on_disk = spool.read_bytes().count(b"\n")
        assert 0 < on_disk < 300
        assert not output.exists()
        report = generate(order(source, output, url), Interrupt())
        assert report is not None
        assert report.counts.kept == on_disk
    assert [row["completion"] for row in read_rows(output)] == [f"p{number}" for number in range(300)]
    assert len(worker.answered) == len(set(worker.answered)) == 300


def test_what_the_server_loses_is_submitted_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "SILENCE_S", 0.2)
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{number}"} for number in range(60)])
    lost = threading.Event()

    def lose_all(job: Job) -> str:
        if job.prompt == "p30" and not lost.is_set():
            lost.set()
            with connect(url) as client:
                client.flushall()
        return echo(job)

    with FakeWorker(url, answer=lose_all):
        generate(order(source, tmp_path / "out.jsonl", url, window=40), Interrupt())
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == [f"p{n}" for n in range(60)]


def test_a_full_queue_is_waited_out(url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{number}"} for number in range(40)])
    with connect(url) as client, FakeWorker(url):
        client.hset("ms:{default}:meta", "max_entries", 3)
        generate(order(source, tmp_path / "out.jsonl", url), Interrupt())
    assert len(read_rows(tmp_path / "out.jsonl")) == 40


def test_a_server_that_comes_back_is_waited_for(fresh_server: RealServer, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{number}"} for number in range(5)])
    output = tmp_path / "out.jsonl"
    run = threading.Thread(target=generate, args=[order(source, output, fresh_server.url), Interrupt()])
    run.start()
    with connect(fresh_server.url) as client:
        while len(client.keys("*:job:*")) < 5:
            assert run.is_alive()
    fresh_server.restart()
    with FakeWorker(fresh_server.url):
        run.join(30)
    assert [row["completion"] for row in read_rows(output)] == [f"p{number}" for number in range(5)]


def test_a_server_that_stays_away_ends_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with pytest.raises(BrokerUnreachable, match="nobody listens"):
        generate(order(source, tmp_path / "out.jsonl", "redis://127.0.0.1:1", patience_s=0.1), Interrupt())
    assert not (tmp_path / "out.jsonl").exists()


def test_another_model_on_the_queue_stops_the_run(url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with FakeWorker(url, model="one"):
        generate(order(source, tmp_path / "out.jsonl", url), Interrupt())
    write_rows(source, [{"prompt": "a"}, {"prompt": "b"}])
    with connect(url) as client:
        client.flushall()
    with FakeWorker(url, model="two"), pytest.raises(MillstreamError, match="two now"):
        generate(order(source, tmp_path / "out.jsonl", url), Interrupt())
    assert len(read_rows(tmp_path / "out.jsonl")) == 1


def test_memory_holds_a_window_and_not_the_file(url: str, tmp_path: Path) -> None:
    rows = ({"prompt": "x", "ballast": "y" * 100_000} for _ in range(400))
    source = write_rows(tmp_path / "in.jsonl", rows)
    before = psutil.Process().memory_info().rss
    with FakeWorker(url, answer=lambda _: "short"):
        generate(order(source, tmp_path / "out.jsonl", url, window=20, plan=False), Interrupt())
    assert psutil.Process().memory_info().rss - before < source.stat().st_size / 2
    assert (tmp_path / "out.jsonl").stat().st_size > source.stat().st_size


def test_a_run_that_waits_says_for_what(
    program: Program, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    said, note = threading.Event(), Lines.note

    def heard(lines: Lines, text: str) -> None:
        note(lines, text)
        if "no worker" in text:
            said.set()

    monkeypatch.setattr(Lines, "note", heard)

    def come_late() -> None:
        said.wait(60)
        with FakeWorker(url, "late") as worker:
            while not worker.answered:
                time.sleep(0.01)

    late = threading.Thread(target=come_late)
    late.start()
    done = program("generate", source, "-o", tmp_path / "out.jsonl", "--queue", "late")
    late.join()
    assert (done.returncode, "no worker serves queue late yet" in done.stderr) == (0, True)
    assert "1 answered, 0 failed" in done.stderr


def test_a_named_queue_is_answered_by_its_own_workers(program: Program, tmp_path: Path) -> None:
    source, state = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "state"
    with (
        EmbeddedBroker(state) as broker,
        FakeWorker(broker.url, "mine", lambda job: str(job.model), model="m") as worker,
    ):
        command = ("generate", source, "-o", tmp_path / "out.jsonl", "--model", "m", "--queue", "mine")
        done = program(*command, REDIS_URL="", MILLSTREAM_STATE=str(state))
    assert (done.returncode, "starting a worker" in done.stderr) == (0, False)
    assert (read_rows(tmp_path / "out.jsonl")[0]["completion"], len(worker.answered)) == ("m", 1)


def test_a_model_the_queue_does_not_serve_is_refused_before_anything_is_submitted(
    program: Program, url: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with FakeWorker(url, "theirs", model="one") as worker, connect(url) as client:
        queue = Queue(client, Keys("theirs"))
        queue.run(calls.register(queue.keys, "w", Fingerprint(name="one")))
        command = ("generate", source, "-o", tmp_path / "out.jsonl", "--queue", "theirs")
        refused = program(*command, "--model", "two")
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert "one" in refused.stderr
        assert "two" in refused.stderr
        assert worker.answered == []
        assert program(*command, "--model", "one").returncode == 0
