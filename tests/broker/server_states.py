"""Whole states of a server: put there, changed by a step, and read again, in one round trip."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from broker.keys import Keys
from broker.script import Call

KEYS = Keys()
HOUR_MS = 3_600_000
"""Of every time that is still to come: far longer than a search takes."""

RESTORE = """
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('DEL', key) end
for i = 1, #ARGV, 3 do redis.call('RESTORE', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
"""
CAPTURE = """
local read = {
  hash = function(key) return redis.call('HGETALL', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  string = function(key) return redis.call('GET', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  stream = function(key) return redis.call('XRANGE', key, '-', '+') end,
}
local keys, found, dumps = redis.call('KEYS', '*'), {}, {}
for i, key in ipairs(keys) do
  local kind = redis.call('TYPE', key).ok
  found[i] = {key, kind, read[kind](key), redis.call('PTTL', key) > 0}
  dumps[i] = redis.call('DUMP', key)
end
return {cjson.encode(found), dumps}
"""
PASS_TIME = """
local base, id, kind = ARGV[1], ARGV[2], ARGV[3]
local times = {lapse = 'leases', due = 'delayed', deadline = 'deadlines'}
redis.call('ZADD', base .. times[kind], 'XX', 1, id)
if kind == 'deadline' then
  redis.call('HSET', base .. 'job:' .. id, 'deadline', 1)
elseif kind == 'lapse' and redis.call('HGET', base .. 'job:' .. id, 'deadline') == '1' then
  redis.call('ZADD', base .. 'deadlines', 'XX', 1, id) -- it is looked at again when the lease lapses
end
"""


@dataclass(frozen=True, slots=True)
class Found:
    """One key as it was captured."""

    name: str
    content: Any
    expires: bool
    dump: bytes


def keys_by_name(keys: tuple[Found, ...]) -> dict[str, Any]:
    """Contents by the name after the queue's base."""
    return {key.name.removeprefix(KEYS.base): key.content for key in keys}


Command = tuple[Any, ...]


def pass_time(kind: str, job_id: str) -> Command:
    """A script that sets a time into the past, if there is one: `lapse`, `due` or `deadline`."""
    return ("EVAL", PASS_TIME, 0, KEYS.base, job_id, kind)


class Server:
    """Puts a state on the server, runs a step, and reads what came of it, in one round trip."""

    def __init__(self, client: redis.Redis, edit: Callable[[str, str], str]) -> None:
        self._connection: Any = client.connection_pool.get_connection()
        self._edit = edit
        self._loaded: dict[str, str] = {}
        self._restore, self._capture = (self._load(source) for source in (RESTORE, CAPTURE))

    def take(
        self, keys: tuple[Found, ...], *steps: Call[Any] | Command | None
    ) -> tuple[Any, tuple[Found, ...]]:
        """The reply of the last step, and the keys after it."""
        state = [part for key in keys for part in (key.name, HOUR_MS if key.expires else 0, key.dump)]
        commands: list[Command] = [("EVALSHA", self._restore, 0, *state)]
        commands += [self._command(step) if isinstance(step, Call) else step for step in steps if step]
        replies = self._speak([*commands, ("EVALSHA", self._capture, 0)])
        found, dumps = replies[-1]
        return replies[-2], tuple(
            Found(name, _content(kind, content), expires, dump)
            for (name, kind, content, expires), dump in zip(json.loads(found), dumps, strict=True)
        )

    def _command(self, call: Call[Any]) -> Command:
        return ("EVALSHA", self._sha(call), 1, call.key, *call.args)

    def _sha(self, call: Call[Any]) -> str:
        name = call.script.name
        if name not in self._loaded:
            self._loaded[name] = self._load(self._edit(name, call.script.source))
        return self._loaded[name]

    def _load(self, source: str) -> str:
        sha: str = self._speak([("SCRIPT", "LOAD", source)])[0].decode()
        return sha

    def _speak(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        return [self._connection.read_response() for _ in commands]


def _content(kind: str, raw: Any) -> Any:
    """Hashes and sorted sets as dicts."""
    return dict(zip(raw[::2], raw[1::2], strict=True)) if kind in ("hash", "zset") else raw
