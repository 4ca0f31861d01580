"""What a call has done, times left out: so that one disturbed can be compared with one undisturbed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.keys import Keys
from broker.queue import Queue
from broker.script import Call
from tests.broker.cases import Case
from tests.broker.steps import snapshot

KEYS = Keys()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a call has done: to its caller, to those who listen, to the server."""

    outcome: Any
    heard: list[Any]
    state: Any


def seen(queue: Queue, case: Case, use: Callable[[Call[Any]], Any]) -> Seen:
    """Run a case on an emptied server."""
    queue.client.flushall()
    call = case.prepare(queue)
    assert call.script.name == case.script
    queue.client.script_load(call.script.source)
    with queue.client.pubsub() as channel:  # what is said on the jobs' channels
        channel.psubscribe(f"{KEYS.prefix}:*:tokens:*")
        outcome = use(call)
        channel.ping()
        heard = []
        while (message := channel.get_message(timeout=5)) is not None and message["type"] != "pong":
            heard.append(message["data"])
    state = snapshot(queue)
    meta = state.get(KEYS.meta.encode(), {})
    meta.pop(b"hungry", None)  # a hint: whoever found nothing is to be woken
    return Seen(without_times(outcome), without_times(heard[1:]), without_times(state))


def without_times(value: Any) -> Any:
    """As text, with the server's clock and what is numbered by it (entries of streams) made equal."""
    text = repr(value)
    text = re.sub(r"\b1\d{12}(\.0)?(-\d+)?\b", "TIME", text)  # milliseconds, stream ids
    text = re.sub(r"\b1\d{9}(\.\d+)?\b", "TIME", text)  # seconds
    return re.sub(r"(next_ms|age_ms)=(\d+|None)", r"\1=SOON", text)
