"""Values that somebody wrote by hand where a reader expects ours: one clear line, or as if they were not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker import calls
from broker.keys import Keys
from broker.queue import Queue
from broker.watch import follow
from producer.wait import wait_for_result
from protocol import MillstreamError
from tests.broker.steps import Worker, end, put

KEYS = Keys()
GARBAGE = [b"garbage", b"", b"{}", b"[]", b"\xff", b'{"state":"well"}']
LOOKS: list[Callable[[Queue], object]] = [
    lambda queue: queue.run(calls.look(KEYS, "a")),
    lambda queue: wait_for_result(queue, "a", 0.0),
    lambda queue: list(follow(queue, "a")),
]


@pytest.mark.usefixtures("keys_broken_by_hand")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_result_that_is_none_is_told_in_one_line(
    queue: Queue, garbage: bytes, look: Callable[[Queue], object]
) -> None:
    put(queue, "a")
    end(queue, Worker(queue).lease_one())
    client: Any = queue.client
    client.set(KEYS.result("a"), garbage)
    with pytest.raises(MillstreamError, match="job a: what is stored as its result is none: ") as raised:
        look(queue)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.usefixtures("keys_broken_by_hand")
@pytest.mark.parametrize("garbage", [*GARBAGE, b"1 2", b"x {}", b"5 [1]", b"5 garbage"])
def test_a_heartbeat_that_is_none_is_passed_over(queue: Queue, garbage: bytes) -> None:
    client: Any = queue.client
    client.hset(KEYS.workers, mapping={"spoilt": garbage, "w": b'1 {"pid":1}'})
    assert [beat.worker for beat in queue.run(calls.status(KEYS)).workers] == ["w"]


@pytest.mark.usefixtures("keys_broken_by_hand")
@pytest.mark.parametrize("garbage", [b"garbage", b"", b"{}", b"[]", b"\xff"])
def test_a_model_that_is_none_is_told_in_one_line(queue: Queue, garbage: bytes) -> None:
    client: Any = queue.client
    client.hset(KEYS.meta, "fingerprint", garbage)
    with pytest.raises(MillstreamError, match="names no model") as raised:
        queue.run(calls.status(KEYS))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.usefixtures("keys_broken_by_hand")
def test_a_weight_that_is_none_is_passed_over(queue: Queue) -> None:
    client: Any = queue.client
    client.hset(KEYS.weights, mapping={"t": "heavy", "u": "2"})
    assert queue.run(calls.weights(KEYS)) == {"u": 2.0}


@pytest.mark.usefixtures("keys_broken_by_hand")
@pytest.mark.parametrize("garbage", [b"garbage", b"", b"x y z", b"1 2", b"\xff \xff \xff"])
def test_what_a_loading_worker_did_not_say_is_passed_over(queue: Queue, garbage: bytes) -> None:
    client: Any = queue.client
    client.hset(f"{KEYS.base}loading", "w", garbage)
    assert queue.run(calls.status(KEYS)).loading == ()
