"""Keys that would stay for ever: nobody's permanent ones, no job's that still waits or runs, and without expiry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import redis

from broker.keys import PERMANENT
from protocol import TERMINAL_STATES

SCAN_AT_ONCE = 5000


def leaked_keys(client: redis.Redis, prefix: str = "ms") -> list[str]:
    """The leaked keys of all queues of a server, sorted."""
    speaker: Any = client
    found = (_text(key) for key in speaker.scan_iter(f"{prefix}:{{*}}:*", count=SCAN_AT_ONCE))
    lasting = _lasting(speaker, list(found))
    return sorted(key for key in lasting if not _has_a_reason(speaker, key))


def assert_nothing_leaked(client: redis.Redis) -> None:
    """Raises AssertionError with the names of what leaked."""
    leaked = leaked_keys(client)
    assert not leaked, f"{len(leaked)} keys have no expiry, and no job that has not ended: {leaked[:10]}"


def _lasting(client: Any, keys: list[str]) -> Iterable[str]:
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.ttl(key)
        return [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl == -1]


def _has_a_reason(client: Any, key: str) -> bool:
    base, _, name = key.partition("}:")
    base += "}:"
    if any(fnmatchcase(name, pattern) for pattern in PERMANENT):
        return True
    kind, _, rest = name.partition(":")
    reason = REASONS.get(kind)
    return reason is not None and reason(client, base, rest)


def _is_live(client: Any, base: str, job_id: str) -> bool:
    """The job waits or runs."""
    state = client.hget(f"{base}job:{job_id}", "state")
    return state is not None and _text(state) not in TERMINAL_STATES


def _is_wanted(client: Any, base: str, job_id: str) -> bool:
    """The job waits or runs, or was submitted to be kept until somebody deletes it."""
    return _is_live(client, base, job_id) or _is_kept(client.hget(f"{base}job:{job_id}", "about"))


def _is_kept(about: bytes | str | None) -> bool:
    """Whether a job's retention has no end: see `job:<id>` in `broker/lua/common.lua`."""
    return about is not None and _text(about).split(",")[3] == "0"


def _all_live(client: Any, base: str, name: str) -> bool:
    return all(_is_live(client, base, _text(job_id)) for job_id in client.zrange(base + name, 0, -1))


def _has_live_entry(client: Any, base: str, stream: str) -> bool:
    """Some entry's job waits or runs: one that has ended takes its entry with it."""
    entries = (fields for _, fields in client.xrange(f"{base}jobs:{stream}"))
    return any(_is_live(client, base, _text(value)) for fields in entries for value in fields.values())


def _tenants_have_work(client: Any, base: str, priority: str) -> bool:
    tenants = client.zrange(f"{base}tenants:{priority}", 0, -1)
    return all(_has_live_entry(client, base, f"{priority}:{_text(tenant)}") for tenant in tenants)


REASONS: dict[str, Callable[[Any, str, str], bool]] = {
    "job": _is_wanted,
    "log": _is_wanted,
    "result": _is_wanted,
    "jobs": _has_live_entry,
    "tenants": _tenants_have_work,
    "leases": lambda client, base, _: _all_live(client, base, "leases"),
    "delayed": lambda client, base, _: _all_live(client, base, "delayed"),
    "deadlines": lambda client, base, _: _all_live(client, base, "deadlines"),
}


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
