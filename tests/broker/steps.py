"""What happens to a job, in one line each, and what to look at afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from broker import calls
from broker.calls import Lease
from broker.clearing import Cleared, What, clear_all
from broker.keys import Keys
from broker.queue import Queue
from protocol import (
    Choice,
    Fingerprint,
    Job,
    Result,
    TerminalState,
    TokenEvent,
    decode_event,
    encode_terminal,
    encode_token,
)

LONG_MS = 60_000
MODEL = Fingerprint(name="tiny")
TERMINAL_EVENT = {
    "succeeded": "done",
    "failed": "error",
    "cancelled": "cancelled",
    "expired": "expired",
    "dead": "dead",
}


def job(job_id: str, **fields: Any) -> Job:
    return Job(id=job_id, **{"prompt": "p", **fields})


def put(queue: Queue, *ids: str, **fields: Any) -> None:
    """Submit jobs that must be queued."""
    for answer in queue.run_all([calls.submit(queue.keys, job(job_id, **fields)) for job_id in ids]):
        assert answer.outcome == "queued"


class Worker:
    """A worker's side of the calls; it counts its lease requests."""

    def __init__(self, queue: Queue, name: str = "w1") -> None:
        self.queue = queue
        self.name = name
        self.requests = 0

    def ask(self, count: int = 1, lease_ms: int = LONG_MS) -> calls.Leased:
        self.requests += 1
        return self.queue.run(calls.lease(self.queue.keys, self.name, self.requests, count, lease_ms))

    def lease(self, count: int = 1, lease_ms: int = LONG_MS) -> list[Lease]:
        return self.ask(count, lease_ms).leases

    def lease_one(self, lease_ms: int = LONG_MS) -> Lease:
        (lease,) = self.lease(1, lease_ms)
        return lease


def tokens(lease: Lease, first_seq: int, *texts: str) -> list[bytes]:
    """One token event a text; a token's id is its seq."""
    return [
        encode_token(lease.id, seq, lease.attempt, 0, text, [seq])
        for seq, text in enumerate(texts, start=first_seq)
    ]


def say(queue: Queue, lease: Lease, first_seq: int, *texts: str) -> calls.Published:
    events = tokens(lease, first_seq, *texts)
    return queue.run(calls.publish(queue.keys, lease.worker, lease.id, lease.attempt, first_seq, events))


def finish_call(
    keys: Keys,
    lease: Lease,
    logged: int,
    text: str = "",
    state: TerminalState = "succeeded",
    dead_reason: str = "",
) -> calls.Call[calls.Finished]:
    """The call that ends a job of which `logged` events are logged."""
    choice = Choice(text=text, token_ids=list(range(1, logged + 1)), finish_reason="stop")
    result = Result(id=lease.id, state=state, choices=[choice], attempt=lease.attempt)
    kind: Any = TERMINAL_EVENT[state]
    end = encode_terminal(lease.id, logged + 1, lease.attempt, kind)
    fence = (keys, lease.worker, lease.id, lease.attempt)
    return calls.finish(*fence, state, result.encode(), logged + 1, [end], dead_reason)


def end(queue: Queue, lease: Lease, logged: int = 0, text: str = "", **rest: Any) -> calls.Finished:
    return queue.run(finish_call(queue.keys, lease, logged, text, **rest))


def clear(queue: Queue, what: What) -> Cleared:
    """Cancel a queue's jobs, slice by slice."""
    return clear_all(queue.run, queue.keys, what)


def lapse(queue: Queue, *ids: str) -> None:
    """As if the time of these leases had passed."""
    client: Any = queue.client
    client.zadd(queue.keys.leases, dict.fromkeys(ids, 1), xx=True)


def events_of(queue: Queue, job_id: str) -> list[Any]:
    raw: Any = queue.client.lrange(queue.keys.log(job_id), 0, -1)
    return [decode_event(event) for event in raw]


def log_text(queue: Queue, job_id: str) -> str:
    return "".join(event.text for event in events_of(queue, job_id) if isinstance(event, TokenEvent))


def counts(queue: Queue) -> tuple[int, int]:
    """Entries and bytes as the queue's meta counts them."""
    raw: Any = queue.client.hmget(queue.keys.meta, "entries", "bytes")
    return int(raw[0] or 0), int(raw[1] or 0)


def snapshot(queue: Queue) -> dict[bytes, Any]:
    """Everything on the server, what is pending included, times to live left out."""
    client: Any = queue.client
    names = sorted(client.keys())
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
        kinds = pipe.execute()
        for name, kind in zip(names, kinds, strict=True):
            READERS[kind](pipe, name)
        values: list[Any] = pipe.execute()
    held = dict(zip(names, values, strict=True))
    for stream in (name for name, kind in zip(names, kinds, strict=True) if kind == b"stream"):
        held[stream + b" pending"] = [pending(queue, stream) for _ in client.xinfo_groups(stream)]
    return held


READERS: dict[bytes, Callable[[Any, bytes], Any]] = {
    b"string": lambda pipe, key: pipe.get(key),
    b"hash": lambda pipe, key: pipe.hgetall(key),
    b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
    b"zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    b"stream": lambda pipe, key: pipe.xrange(key),
}


def key_names(queue: Queue) -> set[str]:
    """Every key on the server."""
    client: Any = queue.client
    return {key.decode() for key in client.scan_iter()}


def told(queue: Queue, run: str = "r") -> list[dict[str, str]]:
    """How the jobs of a bulk run ended, as its stream tells: an entry each."""
    client: Any = queue.client
    entries = client.xrange(queue.keys.done(run))
    return [{id_.decode(): Result.decode(raw).state for id_, raw in fields.items()} for _, fields in entries]


def stored_result(queue: Queue, job_id: str) -> bytes | None:
    """A job's result, from where it is kept."""
    client: Any = queue.client
    about, entry = client.hmget(queue.keys.job(job_id), "about", "entry")
    run = about.decode().split(",")[2] if about else ""
    if not run:
        kept: bytes | None = client.get(queue.keys.result(job_id))
        return kept
    for _, results in client.xrange(queue.keys.done(run), entry or "-", entry or "-"):
        raw: bytes | None = results.get(job_id.encode())
        return raw
    return None


def pending(queue: Queue, stream: str | bytes) -> int:
    """Entries of a stream that were delivered and neither acknowledged nor handed back."""
    client: Any = queue.client
    count: int = client.xpending(stream, "workers")["pending"]
    return count


def assert_drained(queue: Queue) -> None:
    """Nothing of ended jobs is left that does not expire, and nothing is counted, leased or pending."""
    client: Any = queue.client
    keys = queue.keys
    assert counts(queue) == (0, 0)
    left = {name for name in key_names(queue) if client.ttl(name) == -1}
    stay = {keys.meta, keys.workers, keys.dead, keys.weights}
    assert {name for name in left - stay if not name.startswith(keys.done(""))} == set()


def assert_ended_once(queue: Queue, job_id: str, state: str = "succeeded") -> Result:
    """A job has one result, and a log numbered 1..n whose only terminal event is the last."""
    look = queue.run(calls.look(queue.keys, job_id))
    assert look.state == state
    assert look.result is not None
    assert look.result.state == state
    events = events_of(queue, job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events if event.type != "token"] == [TERMINAL_EVENT[state]]
    assert events[-1].type == TERMINAL_EVENT[state]
    assert look.result.text == log_text(queue, job_id)
    return look.result


def dead_letters(queue: Queue) -> list[dict[str, Any]]:
    raw: Any = queue.client.xrange(queue.keys.dead)
    return [{name.decode(): value for name, value in fields.items()} for _, fields in raw]


def server_ms(queue: Queue) -> int:
    """The server's clock."""
    client: Any = queue.client
    seconds, micros = client.time()
    return int(seconds * 1000 + micros // 1000)


def beat_at(queue: Queue, worker: str, age_ms: int) -> None:
    """As if a worker had last been heard of that long ago."""
    client: Any = queue.client
    at = server_ms(queue) - age_ms
    client.hset(queue.keys.workers, worker, f"{at} {json.dumps({'pid': 1})}")


def hear(pubsub: Any, count: int, timeout_s: float = 2.0) -> list[str]:
    """The next messages of a subscription, fewer when the time is up."""
    heard: list[str] = []
    deadline = time.monotonic() + timeout_s
    while len(heard) < count and (left_s := deadline - time.monotonic()) > 0:
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=left_s)
        if message is not None:
            heard.append(message["data"].decode())
    return heard


def ids_of(leases: Iterable[Lease]) -> list[str]:
    return [lease.id for lease in leases]
