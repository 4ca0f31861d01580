"""Every interleaving of two workers and their helpers on one job, run on a real server against what must happen.

    frontier  -->  restore the server  -->  one step, by a script  -->  capture  -->  compare  -->  new states
       ^                                                                                                |
       +------------------------------------------------------------------------------------------------+

A state is what the server holds and what the workers remember, times left out. Two ways that lead to the same state
are followed once from there on, so that all interleavings up to a depth are covered, and not all of them are run. A
worker never forgets a lease: it may renew, publish, finish or release under any attempt it ever had, which is what a
zombie does. Its last call may be made again at any time until the next one, which is what a lost reply does. Time
passes by scores that are set into the past.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import redis

from broker import calls
from broker.calls import Handback, Lease
from broker.keys import PERMANENT
from broker.script import Call
from protocol import TERMINAL_STATES, Job, decode_event
from tests.broker.lease_oracle import EVENT_OF_STATE, Step, View, expected
from tests.broker.server_states import HOUR_MS, KEYS, Found, Server, keys_by_name, pass_time
from tests.broker.steps import finish_call, tokens

WORKERS = ("w1", "w2")
RESCUER = "w3"


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker remembers."""

    requests: int = 0
    held: tuple[tuple[int, int], ...] = ()
    """(attempt, seq of the next event) of every lease it ever had."""
    last: Step | None = None
    """Its last call, whose reply may have been lost."""


@dataclass(frozen=True, slots=True)
class Node:
    """A state that was reached, and how."""

    keys: tuple[Found, ...]
    view: View
    memories: tuple[Memory, ...]
    way: tuple[Step, ...] = ()


class Fault(AssertionError):
    """Something that must hold does not; the way to it is in the message."""


@dataclass(slots=True)
class Model:
    """A search from an empty queue."""

    client: redis.Redis
    job: Job
    states_of_finish: Sequence[str] = ("succeeded",)
    releases: Sequence[tuple[bool, int]] = ((False, 0),)
    """(crashed, ms until it is tried again)."""
    edit: Callable[[str, str], str] = lambda _name, source: source
    """What stands in for a script's source, given its name."""
    nodes: int = 0
    steps: int = 0
    ends: set[str] = field(default_factory=set)
    """Terminal states that were reached."""
    _size: int = 0

    def __post_init__(self) -> None:
        self._size = len(self.job.encode())

    def search(self, depth: int) -> None:
        """Follow every step from every state, up to `depth` steps from the empty queue.

        Raises:
            Fault: a reply or a state is not what it must be.
        """
        server = Server(self.client, self.edit)
        start = Node((), View(), tuple(Memory() for _ in WORKERS))
        frontier, known = [start], {_shape(start)}
        for level in range(depth):
            following = []
            for node in frontier:
                for step in self._enabled(node):
                    after = self._take(server, node, step)
                    shape = _shape(after)
                    if shape in known:
                        continue
                    known.add(shape)
                    if after.view.ended:
                        self.ends.add(str(after.view.state))
                    else:
                        self._rescue(server, after)
                    if level + 1 < depth and not node.view.ended:  # nothing follows from what changes nothing
                        following.append(after)
            frontier = following
        self.nodes = len(known)

    # -- what may happen -----------------------------------------------------------------------------------------

    def _enabled(self, node: Node) -> Iterator[Step]:
        view = node.view
        if view.state is None:
            yield Step("submit")
            yield Step("cancel")
            return
        yield from (Step(kind) for kind in ("submit", "cancel", "look"))
        for worker, memory in zip(WORKERS, node.memories, strict=True):
            yield Step("lease", worker, number=memory.requests + 1)
            yield Step("beat", worker)
            for attempt, seq in memory.held:
                yield Step("renew", worker, attempt)
                yield Step("publish", worker, attempt, seq)
                for state in self.states_of_finish:
                    yield Step("finish", worker, attempt, seq, state=state)
                for crashed, retry_ms in self.releases:
                    yield Step("release", worker, attempt, crashed=crashed, retry_ms=retry_ms)
            if memory.last is not None:
                yield replace(memory.last, again=True)
        if view.leased_until == "future":
            yield Step("lapse")
        if view.delayed_until == "future":
            yield Step("due")
        if view.deadline == "future":
            yield Step("deadline")

    def _call(self, step: Step) -> Call[Any] | None:
        """The script's run; None where only time passes."""
        name = self.job.id
        lease = Lease(name, step.attempt, 0, 0, 0, 0, b"", worker=step.worker)
        made: dict[str, Callable[[], Call[Any]]] = {
            "submit": lambda: calls.submit(KEYS, self.job),
            "cancel": lambda: calls.cancel(KEYS, name),
            "look": lambda: calls.look(KEYS, name),
            "lease": lambda: calls.lease(KEYS, step.worker, step.number, 2, HOUR_MS),
            "beat": lambda: calls.heartbeat(KEYS, step.worker, {}),
            "renew": lambda: calls.renew(KEYS, step.worker, HOUR_MS, [(name, step.attempt)]),
            "publish": lambda: calls.publish(
                KEYS, step.worker, name, step.attempt, step.seq, tokens(lease, step.seq, f"{step.seq} ")
            ),
            "finish": lambda: finish_call(
                KEYS, lease, step.seq - 1, text_of(step.seq - 1), cast(Any, step.state), step.dead_reason
            ),
            "release": lambda: calls.release(
                KEYS, step.worker, [Handback(name, step.attempt, step.crashed, step.retry_ms)]
            ),
        }
        make = made.get(step.kind)
        return make() if make is not None else None

    # -- one step ------------------------------------------------------------------------------------------------

    def _take(self, server: Server, node: Node, step: Step) -> Node:
        self.steps += 1
        call = self._call(step)
        reply, keys = server.take(node.keys, call if call is not None else pass_time(step.kind, self.job.id))
        view = View.of(keys_by_name(keys), self.job.id)
        said = call.read(reply) if call is not None else None
        after = Node(keys, view, _remember(node.memories, step, said), (*node.way, step))
        with _told(f"answer {said}", node, after):
            expected(node.view, step, _short(said), view)
            _check(node.view, keys, view, self._size)
        return after

    def _rescue(self, server: Server, node: Node) -> None:
        """From every state a third worker can bring the job to its one end: it is never lost."""
        view, name = node.view, self.job.id
        if view.state is None:
            return
        lease = Step("lease", RESCUER, number=1)
        end = Step("finish", RESCUER, view.attempt + 1, len(view.log) + 1, state="succeeded")
        times = [pass_time(kind, name) for kind in ("lapse", "due")]
        _, keys = server.take(node.keys, *times, self._call(lease), self._call(end))
        after = Node(keys, View.of(keys_by_name(keys), name), (), (*node.way, lease, end))
        with _told("a third worker's turn", node, after):
            assert after.view.ended, "the job cannot be ended any more"
            _check(view, keys, after.view, self._size)


@contextmanager
def _told(what: str, before: Node, after: Node) -> Iterator[None]:
    """Put the way to a fault into its message."""
    try:
        yield
    except AssertionError as fault:
        way = "\n  ".join(map(str, after.way))
        raise Fault(f"{fault}\n  {way}\n  {what}\n  before {before.view}\n  after {after.view}") from None


def text_of(count: int) -> str:
    """What `count` token events of the model say."""
    return "".join(f"{seq} " for seq in range(1, count + 1))


def _remember(memories: tuple[Memory, ...], step: Step, said: Any) -> tuple[Memory, ...]:
    if step.worker not in WORKERS or step.kind in ("beat", "renew"):
        return memories
    index = WORKERS.index(step.worker)
    memory = memories[index]
    held = dict(memory.held)
    if step.kind == "lease":
        for lease in said.leases:
            held.setdefault(lease.attempt, lease.logged + 1)
        if not step.again:
            step = replace(step, attempt=said.leases[0].attempt if said.leases else 0)
            memory = replace(memory, requests=step.number)
    elif step.kind == "publish" and said.outcome in ("ok", "cancel"):
        held[step.attempt] = max(held[step.attempt], said.logged + 1)
    last = memory.last if step.again else step
    if step.again and step.kind == "lease" and said.leases:
        last = replace(step, again=False, attempt=said.leases[0].attempt)
    memory = replace(memory, held=tuple(sorted(held.items())), last=last)
    return (*memories[:index], memory, *memories[index + 1 :])


def _short(said: Any) -> Any:
    """What an answer says of the job, without its times."""
    if isinstance(said, calls.Leased):
        return [(lease.attempt, lease.logged) for lease in said.leases]
    if isinstance(said, calls.Published):
        return said.outcome
    if isinstance(said, calls.Submitted):
        return said.outcome
    if isinstance(said, calls.Look):
        return said.state
    return said


# -- what must hold of every state -----------------------------------------------------------------------------------


def _check(old: View, keys: tuple[Found, ...], view: View, size: int) -> None:
    assert view.log[: len(old.log)] == old.log, "the log lost or changed events"
    events: list[Any] = [decode_event(raw.encode()) for raw in view.log]
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "gap or repeat in the log"
    said = [event for event in events if event.type == "token"]
    assert [event.text for event in said] == [f"{event.seq} " for event in said], "an event is not its own"
    attempts = [event.attempt for event in events]
    assert attempts == sorted(attempts), "events of two attempts are mixed"
    ended = view.state in TERMINAL_STATES
    ends = [event.type for event in events if event.type != "token"]
    assert ends == ([EVENT_OF_STATE[str(view.state)]] if ended else []), "not one terminal event at the end"
    assert (view.result is not None) == ended, "a result without an end, or an end without one"
    if view.result is not None:
        stored = json.loads(view.result)
        assert stored["state"] == view.state, "the result tells another end"
        text = "".join(choice["text"] for choice in stored["choices"])
        assert text == text_of(len(said)), "the result's text is not the log's"
    assert view.announced == int(ended), "the run was not told once"
    live = view.state is not None and not ended
    assert (view.entries, view.bytes) == ((1, size) if live else (0, 0)), "the counts are wrong"
    if old.state in TERMINAL_STATES:
        assert (view.state, view.result, view.log) == (old.state, old.result, old.log), "an end changed"
    if not live:
        stay = {KEYS.base + name for name in PERMANENT if "*" not in name} | {KEYS.done("r")}
        lasting = {key.name for key in keys if not key.expires}
        assert lasting <= stay, f"keys without expiry are left: {sorted(lasting - stay)}"


# -- states ----------------------------------------------------------------------------------------------------------


def _shape(node: Node) -> int:
    """Equal for states from which the same can follow; the two workers are alike."""
    kept = []
    for key in node.keys:
        content = key.content
        name = key.name.removeprefix(KEYS.base)
        if isinstance(content, dict):
            content = sorted(pair for pair in content.items() if pair[0] not in IRRELEVANT)
        if name.startswith("lease:"):
            index = WORKERS.index(name.removeprefix("lease:"))
            number, _, grants = content.partition(",")
            content = (number == str(node.memories[index].requests), grants)
        kept.append(f"{name} {key.expires} {content!r}")
    server = [TIMES.sub("T", line) for line in kept]
    memories = [f"{memory.held} {_timeless(memory.last)!r}" for memory in node.memories]
    one = hash((*sorted(server), *memories))
    other = hash((*sorted(map(_mirrored, server)), *map(_mirrored, reversed(memories))))
    return min(one, other)


def _timeless(step: Step | None) -> Step | None:
    return replace(step, number=0) if step is not None else None


def _mirrored(text: str) -> str:
    """With the names of the two workers exchanged."""
    first, second = WORKERS
    return text.replace(first, "\0").replace(second, first).replace("\0", second)


TIMES = re.compile(r"\b1\d{12}(?:\.0)?(?:-\d+)?|\b1\d{9}\.\d+")
"""Milliseconds of the server's clock, ids of stream entries, seconds in a result."""
IRRELEVANT = {"picks", "vt:normal", "sweep"}
"""Of `meta`: they decide between jobs, and there is one."""
