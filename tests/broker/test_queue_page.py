"""docs/queue.md: each transition of its table is driven for real, no script makes another, every key is in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from broker import calls, dead_letters, parts
from broker.calls import Handback
from broker.clearing import What
from broker.keys import PERMANENT, Keys
from broker.queue import Queue
from broker.script import SHARED
from protocol import TERMINAL_STATES, Job
from tests.broker.steps import LONG_MS, Worker, clear, end, job, lapse, put
from worker.held import CHECKPOINT_TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "queue.md").read_text()
LUA = resources.files("broker") / "lua"
KEYS = Keys()
Step = Callable[[Queue], object]


def rows(header: str) -> list[tuple[str, ...]]:
    """The cells of the table with that header."""
    _, _, after = PAGE.partition(header + "\n")
    table = after.partition("\n\n")[0].splitlines()[1:]
    return [tuple(_plain(cell.strip()) for cell in line.strip("|").split("|")) for line in table]


def _plain(cell: str) -> str:
    """A cell whose whole is names in backquotes, without the outer ones."""
    return cell[1:-1] if re.fullmatch(r"`[^`]+`(, `[^`]+`)*", cell) else cell


def each_of(row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """A row a combination, where cells name several."""
    start, script, when, to = row
    yield from itertools.product(start.split(", "), script.split("`, `"), [when], to.split(", "))


TRANSITIONS = [one for row in rows("| from | script | when | to |") for one in each_of(row)]


def place_of(queue: Queue) -> str:
    """Where job `a` is, by what the keys say."""
    server: Any = queue.client
    state, entry = server.hmget(KEYS.job("a"), "state", "entry")
    if state is None:
        return "none"
    if state != b"queued":
        return str(state.decode())
    if server.zscore(KEYS.delayed, "a") is not None:
        return "for its time"
    assert server.xrange(KEYS.jobs("normal", "default"), entry, entry), "it waits, and has no entry"
    return "in line" if server.zscore(KEYS.leases, "a") is None else "handed back"


# -- how a job comes there -------------------------------------------------------------------------------------


def submitted(queue: Queue, **times: Any) -> None:
    put(queue, "a", deadline_in_s=3600.0, run="r", **times)


def leased(queue: Queue) -> None:
    submitted(queue)
    Worker(queue).lease_one()


def released(queue: Queue, retry_in_ms: int = 0) -> None:
    queue.run(calls.release(KEYS, "w1", [Handback("a", 1, retry_in_ms=retry_in_ms)]))


def handed_back(queue: Queue) -> None:
    leased(queue)
    released(queue)


def ended(queue: Queue, state: Any, reason: str = "") -> None:
    (lease,) = queue.run(calls.lease(KEYS, "w1", 1, 1, LONG_MS)).leases or Worker(queue, "w2").lease()
    end(queue, lease, state=state, dead_reason=reason)


def over(state: str) -> Step:
    def end_so(queue: Queue) -> None:
        leased(queue)
        ended(queue, state, "crashed_worker" if state == "dead" else "")

    return end_so


PLACES: dict[str, Step] = {
    "none": lambda _: None,
    "in line": submitted,
    "for its time": lambda queue: submitted(queue, delay_s=1800.0),
    "handed back": handed_back,
    "running": leased,
    **{state: over(state) for state in TERMINAL_STATES},
}

# -- what else must be so --------------------------------------------------------------------------------------


def time_comes(queue: Queue) -> None:
    queue.client.zadd(KEYS.delayed, {"a": 1}, xx=True)


def tried_again(queue: Queue) -> None:
    """In place of a new one: a job that waits to be tried again."""
    server: Any = queue.client
    server.flushall()
    leased(queue)
    released(queue, retry_in_ms=60_000)
    time_comes(queue)


def dead_with_a_delay(queue: Queue) -> None:
    """In place of one without: a dead job that was to wait."""
    server: Any = queue.client
    server.flushall()
    submitted(queue, delay_s=1800.0)
    time_comes(queue)
    ended(queue, "dead", "crashed_worker")


def overdue(queue: Queue) -> None:
    server: Any = queue.client
    server.hset(KEYS.job("a"), "deadline", 1)
    server.zadd(KEYS.deadlines, {"a": 1}, xx=True)


def marked(queue: Queue) -> None:
    assert queue.run(calls.cancel(KEYS, "a"))[0] == "cancelling"


def lapsed(queue: Queue) -> None:
    lapse(queue, "a")


def spoilt(queue: Queue) -> None:
    server: Any = queue.client
    server.hset(KEYS.job("a"), "about", "nonsense")


CONDITIONS: dict[str, tuple[Step, ...]] = {
    "": (),
    "`not_before` or `delay_s` is to come": (),
    "the time of a new job has come": (time_comes,),
    "the time of one that is tried again has come": (tried_again,),
    "its time has come": (time_comes,),
    "it is picked": (),
    "`delay_s` is to come": (dead_with_a_delay,),
    "the lease has lapsed": (lapsed,),
    "marked for cancelling, and the lease has lapsed": (marked, lapsed),
    "to be tried again": (),
    "marked for cancelling": (marked,),
    "it gets the mark": (),
    "past its deadline": (overdue,),
    "past its deadline, and the lease has lapsed": (overdue, lapsed),
    "a bulk run has its row on disk": (),
    "somebody spoilt its hash": (spoilt,),
    "somebody spoilt its hash, and its time has come": (spoilt, time_comes),
    "somebody spoilt its hash, and the lease has lapsed": (spoilt, lapsed),
}

# -- what is done ----------------------------------------------------------------------------------------------


def requeue(queue: Queue) -> None:
    letter = queue.run(dead_letters.dead_show(KEYS, "a"))
    assert letter is not None
    queue.run(dead_letters.dead_requeue(KEYS, letter.letter, Job.decode(letter.raw or b"")))


def forget(queue: Queue) -> None:
    server: Any = queue.client
    ((entry, _),) = server.xrange(KEYS.done("r"))
    assert queue.run(calls.forget(KEYS, "r", [("a", entry.decode())])) == 1


def act(queue: Queue, script: str, when: str, to: str) -> None:
    """Run the script as the row means it."""
    run: dict[str, Step] = {
        "submit": lambda q: q.run(calls.submit(KEYS, job("a", delay_s=60.0 if when else None))),
        "lease": lambda q: Worker(q, "w9").lease(),
        "heartbeat": lambda q: q.run(calls.heartbeat(KEYS, "w9", {})),
        "look": lambda q: q.run(calls.look(KEYS, "a")),
        "cancel": lambda q: q.run(calls.cancel(KEYS, "a")),
        "release": lambda q: released(q, 60_000 if when == "to be tried again" else 0),
        "finish": lambda q: ended(q, to, "why" if to == "dead" else ""),
        "dead_requeue": requeue,
        "forget": forget,
        "clear": lambda q: clear(q, What(running=True)),
    }
    run[script](queue)


@pytest.mark.parametrize("script", sorted({script for _, script, _, _ in TRANSITIONS}))
def test_each_transition_is_what_the_script_does(queue: Queue, script: str) -> None:
    for row in TRANSITIONS:
        if row[1] == script:
            queue.client.flushall()
            try:
                drive(queue, *row)
            except AssertionError as error:
                error.add_note(f"row: {' | '.join(row)}")
                raise


def drive(queue: Queue, start: str, script: str, when: str, to: str) -> None:
    PLACES[start](queue)
    for condition in CONDITIONS[when]:
        condition(queue)
    assert place_of(queue) == start
    server: Any = queue.client
    attempt = int(server.hget(KEYS.job("a"), "attempt") or 0)
    act(queue, script, when, to)
    assert place_of(queue) == to
    if start == to == "running" and script == "lease":
        assert int(server.hget(KEYS.job("a"), "attempt")) == attempt + 1
    assert (queue.run(calls.look(KEYS, "a")).result is not None) == (to in TERMINAL_STATES)


CHANGES = re.compile(
    r"HSET', job[^\n]*'state'|DEL', (job_key|unpack\(jobs)"
    r"|\b(begin_lives|end_jobs|end_unowned|cancel_unowned|cancel_now|standing|standing_of|expire|expire_overdue|release_due)\("
)


def test_no_other_script_changes_a_state() -> None:
    scripts = {entry.name.removesuffix(".lua"): entry.read_text() for entry in LUA.iterdir()}
    code = {name: re.sub(r"--[^\n]*", "", source) for name, source in scripts.items() if name not in SHARED}
    assert {name for name in code if CHANGES.search(code[name])} == {
        script for _, script, _, _ in TRANSITIONS
    }


def test_every_state_is_in_the_table() -> None:
    reached = {to for _, _, _, to in TRANSITIONS}
    assert reached == TERMINAL_STATES | {"running", "in line", "for its time", "handed back", "none"}


def test_every_key_is_in_the_table_and_in_the_scripts() -> None:
    table = {re.sub(r"<\w+>", "*", name): until for name, _, until in rows("| key | holds | until |")}
    header = (LUA / "common.lua").read_text().partition("\nlocal ")[0]
    in_scripts = {
        re.sub(r"<\w+>", "*", name)
        for name in re.findall(r"<base>(\S+) +(?:hash|stream|zset|list|string|channel)", header)
    }
    assert set(table) == in_scripts
    names = {name.replace("jobs:*:*", "jobs:*") for name, until in table.items() if until.startswith("stays")}
    assert names == set(PERMANENT)
    one = {
        Keys.job: "*",
        Keys.log: "*",
        Keys.result: "*",
        Keys.tokens: "*",
        Keys.done: "*",
        Keys.batch: "*",
        Keys.lease: "*",
        Keys.tenants: "*",
    }
    made = {make(KEYS, star) for make, star in one.items()} | {KEYS.jobs("*", "*")}
    made |= {
        KEYS.meta,
        KEYS.workers,
        KEYS.loading,
        KEYS.weights,
        KEYS.dead,
        KEYS.leases,
        KEYS.delayed,
        KEYS.deadlines,
        KEYS.control,
        KEYS.batches,
        KEYS.batches_swept,
    }
    assert {name.removeprefix(KEYS.base) for name in made} == set(table)


def test_the_bounds_are_those_of_the_scripts() -> None:
    bounds = {
        ("lease", "MOST_CLEARED = 1000 "): "1,000 entries that are not jobs",
        ("lease", "MOST_BYTES = 16 * 1024 * 1024 "): "| 16 MiB;",
        ("standing", "MOST_DUE = 500 "): "500 jobs whose time has come",
        ("standing", "MOST_EXPIRED = 100\n"): "100 deadlines",
        ("unowned", "MOST_EVENTS = 2000 "): "2,000 events (",
        ("unowned", "MOST_LOGGED = 3000 "): "more than 3,000 events of (or more than 12 MiB",
        ("unowned", "MOST_ENDED = 200 "): "once 200 jobs have ended",
        ("unowned", "EVENT_BYTES = 4096 "): "8 MiB of log-probabilities",
        ("clear", "MOST = 50 "): "50 jobs cleared",
    }
    for (script, bound), said in bounds.items():
        assert bound in (LUA / f"{script}.lua").read_text()
        assert said in PAGE
    assert f"{calls.DEFAULT_MAX_ENTRIES:,}" in PAGE
    assert (calls.DEFAULT_MAX_BYTES, parts.BYTES_AT_ONCE) == (1 << 30, 1 << 20)
    assert f"{parts.AT_ONCE} jobs or 1 MiB of payloads submitted" in PAGE
    assert f"every {CHECKPOINT_TOKENS} tokens of a choice" in PAGE
