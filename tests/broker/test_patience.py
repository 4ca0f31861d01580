"""How often a call is tried, and how long a message may take."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
from redis.backoff import NoBackoff

from broker.connection import connect_async
from broker.patience import Patient, PatientAsync
from tests.proxy import Proxy
from tests.servers import ValkeyServer


class Away(redis.ConnectionError):
    """Nobody answered."""


@pytest.mark.parametrize("patience_s", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_tries_within_tries_are_left_out(kind: str, patience_s: float) -> None:
    """redis-py connects within a call with the same retries: what it waits for is waited for once, not by each."""
    calls, connects = 0, 0

    def connect_in_vain() -> None:
        nonlocal connects
        connects += 1
        raise Away

    async def connect_in_vain_async() -> None:
        connect_in_vain()

    patient = Patient(patience_s, NoBackoff(), 3)
    patient_async = PatientAsync(patience_s, NoBackoff(), 3)

    def call() -> None:
        nonlocal calls
        calls += 1
        patient.call_with_retry(connect_in_vain, lambda _: None)

    async def call_async() -> None:
        nonlocal calls
        calls += 1
        await patient_async.call_with_retry(connect_in_vain_async, _nothing)

    run = {
        "sync": lambda: patient.call_with_retry(call, lambda _: None),
        "asyncio": lambda: asyncio.run(patient_async.call_with_retry(call_async, _nothing)),
    }
    with pytest.raises(Away):
        run[kind]()
    assert calls == connects > 3
    assert calls == 4 or patience_s


async def _nothing(_: Exception) -> None: ...


@pytest.mark.long
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_message_may_take_its_time_while_it_moves(way: str) -> None:
    """Four megabytes over a way that carries a piece every 20 ms: in all longer than a reply may be silent."""
    value = b"x" * (1 << 22)

    async def set_and_get(url: str) -> bool:
        async with connect_async(url) as client:
            await client.set("k", value)
            return bool(await client.get("k") == value)

    with ValkeyServer(aof=False) as server, Proxy(server.socket_path) as proxy:
        if way == "there":
            proxy.request_delay_s = 0.02
        else:
            proxy.delay_s = 0.02
        began = time.monotonic()
        assert asyncio.run(set_and_get(f"{proxy.url}?socket_timeout=1"))
        assert time.monotonic() - began > 1.1, "it was no slow way"
