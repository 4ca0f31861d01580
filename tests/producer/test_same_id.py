"""The same id twice (E14): one run and one result for the same job, a conflict that names the id for another."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from millstream import Client, Job
from protocol import JobConflict
from tests.producer.fake_worker import FakeWorker
from tests.servers import RealServer


def test_e14_twice_at_once_and_again_after_the_end_is_one_run(server: RealServer) -> None:
    together = threading.Barrier(2)

    def produce(_: int) -> str:
        with Client(server.url) as client:
            together.wait()
            return client.submit("one job", id="a").result(timeout=10).model_dump_json()

    with FakeWorker(server.url) as worker, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(produce, range(2))
        assert first == second
        with Client(server.url) as client:
            assert client.submit("one job", id="a").result(timeout=0).model_dump_json() == first
        assert worker.answered == ["a"]


def test_e14_another_job_under_the_id_is_refused_while_it_runs_and_after(server: RealServer) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def answer(job: Job) -> str:
        runs.set()
        may_end.wait(10)
        return f"answer to {job.prompt}"

    with FakeWorker(server.url, answer=answer) as worker, Client(server.url) as client:
        first = client.submit("first", id="a")
        assert runs.wait(10)
        with pytest.raises(JobConflict, match=r"job a: this id is taken .*\(running\)"):
            client.submit("second", id="a")
        may_end.set()
        assert first.result(timeout=10).text == "answer to first"
        with pytest.raises(JobConflict, match=r"job a: this id is taken .*\(succeeded\)"):
            client.submit("second", id="a")
        assert first.result(timeout=0).text == "answer to first"
        assert worker.answered == ["a"]


def test_e14_two_producers_with_the_same_hundred_ids(server: RealServer) -> None:
    jobs = [Job(id=f"j{n}", prompt=f"p{n}") for n in range(100)]

    def produce(order: list[Job]) -> list[str]:
        with Client(server.url) as client:
            return [handle.result(timeout=20).text for handle in client.submit_many(order)]

    with FakeWorker(server.url) as worker, ThreadPoolExecutor(2) as pool:
        one, other = pool.map(produce, [jobs, jobs[::-1]])
        assert one == other[::-1] == [f"p{n}" for n in range(100)]
        assert Counter(worker.answered) == Counter(job.id for job in jobs)
