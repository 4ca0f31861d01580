"""The way to a Redis server: a client with explicit timeouts, and what to say when nobody answers.

Redis 7.0 or later, or Valkey: one server, a primary that Sentinel watches, or a Cluster (`broker.address` has the
URLs, `broker.finding` the way to the right server).
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any

import redis
import redis.asyncio
import redis.exceptions as redis_errors
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from broker.address import EXAMPLES, Address, bad_url, parse, redact
from broker.faults import is_busy
from broker.finding import ASYNC_CONNECTIONS, CONNECTIONS, Gate, finder
from broker.keys import Keys
from broker.patience import Patient, PatientAsync
from broker.pools import AsyncPool, Pool
from protocol.errors import BadUrl, BrokerUnreachable

OLDEST_SERVER = (7, 0)
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
"""A reply that takes longer counts as a lost connection: block on the server for less than this."""
HEALTH_CHECK_S = 20.0
"""A connection idle for longer is pinged before it is used: firewalls drop idle ones without a word."""
MOST_CONNECTIONS = 10_000
"""Of one client; every watcher has one. redis-py would stop at 100, the server stops at its own `maxclients`."""
RETRIES = 3
"""Within one call; with the backoff about half a second in all. Every script may therefore run twice."""

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0


def connect(url: str, keys: Keys = Keys(), patience_s: float = 0.0) -> redis.Redis:
    """A client, bytes in and out; it connects at its first call. See `wait_until_ready`.

    Args:
        url: where the server is; `broker.address` has the forms.
        keys: of the queue the client is for: on a cluster they say which node serves it.
        patience_s: for how long one call rides out a server that is away, in seconds, beyond the `RETRIES`.

    Raises:
        BrokerUnreachable: the URL is none.
    """
    address = parse(url)
    options = _options(address, keys, Patient(patience_s, _backoff(), RETRIES))
    try:
        pool = Pool(connection_class=CONNECTIONS[address.transport], **options)
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as error:
        raise _bad_option(url, error, address) from None
    return redis.Redis.from_pool(pool)


def connect_async(url: str, keys: Keys = Keys(), patience_s: float = 0.0) -> redis.asyncio.Redis:
    """As `connect`, for asyncio.

    Raises:
        BrokerUnreachable: the URL is none.
    """
    address = parse(url)
    options = _options(address, keys, PatientAsync(patience_s, _backoff(), RETRIES))
    try:
        pool = AsyncPool(connection_class=ASYNC_CONNECTIONS[address.transport], **options)
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as error:
        raise _bad_option(url, error, address) from None
    return redis.asyncio.Redis.from_pool(pool)


def wait_until_ready(url: str, patience_s: float = 0.0, keys: Keys = Keys()) -> None:
    """Return once the server answers and is one we can use.

    Args:
        url: where it is.
        patience_s: for how long a fault that may pass (refused, loading, timeout) is waited out, in seconds.
            A wrong password or URL is never tried twice.
        keys: of the queue, as for `connect`.

    Raises:
        BrokerUnreachable: one line: which URL, what happened, what to do.
    """
    waits = _Waits(url, patience_s)
    with connect(url, keys) as client:
        client.set_retry(Retry(NoBackoff(), 0))
        while True:
            try:
                client.ping()
                _check_server(url, _server_info(client.info("server")))
                return
            except redis_errors.NoPermissionError:
                return  # it answers, and this user may not look at INFO
            except (redis.RedisError, OSError) as error:
                time.sleep(waits.next(error))


async def wait_until_ready_async(url: str, patience_s: float = 0.0, keys: Keys = Keys()) -> None:
    """As `wait_until_ready`, for asyncio."""
    waits = _Waits(url, patience_s)
    async with connect_async(url, keys) as client:
        client.set_retry(AsyncRetry(NoBackoff(), 0))
        while True:
            try:
                await client.ping()
                _check_server(url, _server_info(await client.info("server")))
                return
            except redis_errors.NoPermissionError:
                return  # it answers, and this user may not look at INFO
            except (redis.RedisError, OSError) as error:
                await asyncio.sleep(waits.next(error))


def unreachable(url: str, error: Exception) -> BrokerUnreachable:
    """One line for an error of redis-py: which URL, what happened, what to do."""
    fault = _diagnose(error)
    return BrokerUnreachable(f"Cannot use the Redis at {redact(url)}: {fault.what}. {fault.do}")


def _options(address: Address, keys: Keys, retry: Any) -> dict[str, Any]:
    """Arguments of the pool and of its connections: ours, and over them the URL's."""
    ours = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "decode_responses": False,
    }
    connection = {**ours, **address.options}
    find = finder(replace(address, options=connection), keys.meta)
    return {"max_connections": MOST_CONNECTIONS, "retry": retry, "find": find, "gate": Gate(), **connection}


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=0.05, cap=1.0)


class _Waits:
    """How long to wait before each next try, until patience ends."""

    def __init__(self, url: str, patience_s: float) -> None:
        self._url = url
        self._deadline = time.monotonic() + patience_s
        self._wait_s = _FIRST_WAIT_S

    def next(self, error: Exception) -> float:
        """Seconds to wait after `error`.

        Raises:
            BrokerUnreachable: it will not pass, or patience has ended.
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or not _diagnose(error).may_pass:
            raise unreachable(self._url, error) from None
        wait_s, self._wait_s = min(self._wait_s, left_s), min(self._wait_s * 2, _LONGEST_WAIT_S)
        return wait_s


@dataclass(frozen=True)
class _Fault:
    what: str
    do: str
    may_pass: bool = False


def _diagnose(error: Exception) -> _Fault:
    """What redis-py's error means for the person who gave the URL."""
    if isinstance(error.__cause__, redis.RedisError):  # asyncio's connect wraps whatever the server said
        return _diagnose(error.__cause__)
    match error:
        case redis.AuthenticationError() | redis_errors.AuthenticationWrongNumberOfArgsError():
            return _Fault(
                f"it refused the user name or password ({error})",
                "Put the right ones into the URL: redis://USER:PASSWORD@HOST:PORT/DB.",
            )
        case redis_errors.NoPermissionError() | redis_errors.AuthorizationError():
            return _Fault(
                f"this user may not do that ({error})", "Give the user the rights, or use another one."
            )
        case redis.BusyLoadingError():
            return _Fault("it is still loading its data", "Try again in a moment.", may_pass=True)
        case redis.OutOfMemoryError():
            return _Fault(
                f"its memory is full ({error})", "Raise its maxmemory, or delete results.", may_pass=True
            )
        case redis.ReadOnlyError():
            return _Fault("it is a replica", "Name its primary, or its sentinels.", may_pass=True)
        case redis_errors.ClusterDownError():
            return _Fault("the cluster is down", "Check its nodes.", may_pass=True)
        case redis.ResponseError() if is_busy(error):
            return _Fault("a script holds it up", "Try again in a moment, or SCRIPT KILL.", may_pass=True)
        case redis.TimeoutError() | TimeoutError():
            return _Fault(
                "it did not answer in time", "Check the host, the port and any firewall.", may_pass=True
            )
        case redis.InvalidResponse():
            return _Fault("what answers there is not a Redis server", "Check the host and the port.")
        case redis.ConnectionError() | OSError():
            return _diagnose_network(error)
    if "The user executing the script can't" in str(error):  # Redis; Valkey and redis-py have no class for it
        return _Fault(f"this user may not do that ({error})", "Give the user the rights, or use another one.")
    if "WRONGTYPE" in str(error):
        return _Fault(
            f"a key of the queue holds something else ({error})",
            "Somebody changed it by hand: delete what is not ours, or use another queue.",
        )
    return _Fault(f"it said: {error}", "Check the URL and the server's configuration.")


def _diagnose_network(error: Exception) -> _Fault:
    match _os_error(error):
        case socket.gaierror() as cause:
            may_pass = cause.errno == socket.EAI_AGAIN
            return _Fault("its host name does not resolve", "Check the host in the URL.", may_pass)
        case ConnectionRefusedError() | FileNotFoundError():
            return _Fault("nobody listens there", "Start the server, or correct the URL.", may_pass=True)
        case PermissionError():
            return _Fault("permission denied", "Ask for access to the socket.")
        case ssl.SSLError() as cause:
            return _Fault(
                f"TLS failed ({cause.reason or cause})", "Check certificates, and redis:// or rediss://."
            )
        case TimeoutError():
            return _Fault(
                "it did not answer in time", "Check the host, the port and any firewall.", may_pass=True
            )
    return _Fault(
        f"the connection failed ({error})".replace("\n", " "), "Check that the server runs.", may_pass=True
    )


def _os_error(error: BaseException) -> OSError | None:
    """The operating system's error under redis-py's own."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return below
        below = below.__cause__ or below.__context__
    return None


def _server_info(reply: Any) -> dict[str, Any]:
    """The server section of INFO; redis-py's annotation leaves its type open."""
    assert isinstance(reply, dict)
    return reply


def _check_server(url: str, info: dict[str, Any]) -> None:
    """Refuse servers that lack commands we use, and set-ups that spread one queue's keys."""
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise BrokerUnreachable(
            f"The Redis at {redact(url)} is version {version or 'unknown'}; "
            f"Millstream needs Redis {oldest} or later, or Valkey. Upgrade it, or use another server."
        )
    mode = info.get("redis_mode") or info.get("server_mode") or "standalone"  # the second is Valkey's
    if mode != "standalone" and mode != parse(url).setup:
        raise BrokerUnreachable(
            f"The Redis at {redact(url)} runs in {mode} mode. Say so in the URL, as in {EXAMPLES[mode]}"
        )


def _bad_option(url: str, error: Exception, address: Address) -> BadUrl:
    """redis-py takes what follows the '?' as arguments of its connection, and fails as Python does."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    why = f"there is no option '{unknown[1]}'" if unknown else str(error).rstrip(".")
    return bad_url(url, why, address.setup)
