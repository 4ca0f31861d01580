"""`Client.clear` and `millstream queue clear`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from broker.clearing import Cleared
from millstream import AsyncClient, Client
from protocol import JobFailed, RequestError
from tests.producer.program import Program


def test_clear_cancels_what_waits_and_says_how_many(url: str) -> None:
    with Client(url) as client:
        waiting = [client.submit("p", tenant="t") for _ in range(3)]
        later = client.submit("p", delay_s=60.0, priority="low")
        assert client.clear(tenant="t") == Cleared(3, 0)
        assert waiting[0].result(timeout=0).state == "cancelled"
        with pytest.raises(JobFailed, match="cancelled: cancelled as its queue was cleared"):
            waiting[1].result(timeout=0, check=True)
        assert client.clear(priority="high") == Cleared(0, 0)
        assert client.clear() == Cleared(1, 0)
        assert later.status().state == "cancelled"
        wrong: Any = "urgent"
        with pytest.raises(RequestError, match="priority 'urgent': give high, normal or low"):
            client.clear(priority=wrong)
        with pytest.raises(RequestError, match="tenant 'a b'"):
            client.clear(tenant="a b")


def test_clear_for_asyncio(url: str) -> None:
    async def story() -> Cleared:
        async with AsyncClient(url) as client:
            await client.submit("p")
            return await client.clear(running=True)

    assert asyncio.run(story()) == Cleared(1, 0)


def test_clear_asks_on_a_terminal_and_elsewhere_wants_to_be_told(
    program: Program, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url) as client:
        for _ in range(2):
            client.submit("p")
    refused = program("queue", "clear")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "this would cancel the 2 waiting jobs for good; give --yes" in refused.stderr
    monkeypatch.setattr(sys.modules["producer.cli.queue"], "is_at_a_terminal", lambda: True)
    kept = program("queue", "clear", "--running", stdin="n\n")
    assert kept.returncode == 1
    assert "cancel the 2 waiting and 0 running jobs for good? [y/N] " in kept.stderr
    assert kept.stderr.endswith("millstream: nothing was cancelled\n")
    assert program("queue", "clear", "--tenant", "t", stdin="y\n").stdout == "queue default: 0 cancelled\n"
    assert program("queue", "clear", stdin="y\n").stdout == "queue default: 2 cancelled\n"
    told = program("queue", "clear", "--yes", "--running", "--json")
    assert json.loads(told.stdout) == {"queue": "default", "cancelled": 0, "cancelling": 0}
    running = program("queue", "clear", "--yes", "--running")
    assert running.stdout == "queue default: 0 cancelled, 0 that run are being cancelled\n"
    assert program("queue", "clear", "--yes", "--priority", "urgent").returncode == 2


def test_an_empty_queue_has_nothing_to_clear(program: Program) -> None:
    for flags in ((), ("--tenant", "nobody"), ("--running",)):
        done = program("queue", "clear", *flags)
        assert done.returncode == 0
        assert "there is nothing to clear" in done.stderr
