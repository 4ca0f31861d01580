"""Where a queue's server is, as a URL says it.

    redis://[user:password@]host[:6379][/db][?options]               rediss:// the same, with TLS
    unix:///path/of/the/socket[?options]
    redis+sentinel://[user:password@]host[:26379],.../service[/db]   the hosts are sentinels
    redis+cluster://[user:password@]host[:6379],...                  the hosts are some nodes of the cluster

`rediss+sentinel://` and `rediss+cluster://` are with TLS. The options are arguments of redis-py's connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.connection import parse_url

from protocol.errors import BadUrl

Setup = Literal["server", "sentinel", "cluster"]
Transport = Literal["tcp", "tls", "unix"]

EXAMPLES = {
    "server": "redis://localhost:6379/0",
    "sentinel": "redis+sentinel://one:26379,two:26379,three:26379/mymaster/0",
    "cluster": "redis+cluster://one:6379,two:6379,three:6379",
}
_PORTS = {"sentinel": 26379, "cluster": 6379}
_SCHEME = re.compile(r"(rediss?)(?:\+(sentinel|cluster))?|unix")
_OURS = ("connection_class", "decode_responses", "find", "gate", "retry")
"""Arguments of a connection that no URL may set."""
_HARMLESS = {
    *("db", "protocol", "client_name", "max_connections", "health_check_interval"),
    *("socket_timeout", "socket_connect_timeout", "socket_keepalive"),
    *("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"),
}
"""Options whose values may be shown."""


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, read."""

    setup: Setup
    transport: Transport
    hosts: tuple[tuple[str, int], ...]
    """(host, port) of sentinels, or of nodes of a cluster; empty for a single server, which `options` name."""
    service: str
    """What the sentinels call the server; empty without sentinels."""
    options: dict[str, Any]
    """Arguments of redis-py's connections."""
    sentinel_options: dict[str, Any]
    """As `options`, where they differ for a connection to a sentinel: its own user and password."""


def resolve_url(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """The server to use: flag, else `REDIS_URL`, else `MILLSTREAM_REDIS_URL`. None: the embedded broker."""
    return flag or environ.get("REDIS_URL") or environ.get("MILLSTREAM_REDIS_URL") or None


def redact(url: str) -> str:
    """The URL as it may be shown: without any password, also where it is no well-formed URL, and without what stands
    behind a name that we do not know: it may be a password's, misspelt."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    if "@" in rest:
        credentials, _, rest = rest.rpartition("@")
        user, colon, _ = credentials.partition(":")
        rest = f"{user}:***@{rest}" if colon else f"***@{rest}"
    path, mark_of_options, options = rest.partition("?")
    return scheme + mark + path + mark_of_options + "&".join(map(_shown, options.split("&")))


def _shown(option: str) -> str:
    name, equals, _ = option.partition("=")
    return option if name in _HARMLESS or not equals else f"{name}=***"


def parse(url: str) -> Address:
    """Read a URL.

    Raises:
        BadUrl: it is none, or redis-py would read it differently from what its writer meant.
    """
    scheme = _SCHEME.fullmatch(url.partition("://")[0]) if "://" in url else None
    if scheme is None:
        raise bad_url(url, "it must begin with redis://, rediss:// or unix://")
    setup: Setup = scheme[2] or "server"  # type: ignore[assignment]
    parts = _split(url, setup)
    hosts = () if setup == "server" else tuple(_hosts(url, setup, parts.netloc))
    service, db = _path(url, setup, parts.path) if parts.scheme != "unix" else ("", parts.path)
    options = _options(url, setup, parts, db)
    given = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    return Address(
        setup=setup,
        transport="unix" if parts.scheme == "unix" else "tls" if parts.scheme.startswith("rediss") else "tcp",
        hosts=hosts,
        service=service,
        options=options,
        sentinel_options={name: value for name, value in given.items() if value is not None},
    )


def bad_url(url: str, why: str, setup: Setup = "server") -> BadUrl:
    """One line about a URL that cannot be used."""
    return BadUrl(f"Cannot use the Redis URL {redact(url)}: {why}. Example: {EXAMPLES[setup]}")


def _split(url: str, setup: Setup) -> SplitResult:
    try:
        parts = urlsplit(url)
        if setup == "server":
            _ = parts.port
    except ValueError:
        raise bad_url(url, "its host or port cannot be read", setup) from None
    if parts.fragment:
        raise bad_url(url, "it holds a '#'; write it as %23 inside a password", setup)
    if parts.scheme == "unix" and not parts.path.strip("/"):
        raise bad_url(url, "it names no socket")
    for name in _OURS:
        if name in parse_qs(parts.query):
            raise bad_url(url, f"{name} is not yours to set", setup)
    return parts


def _hosts(url: str, setup: Setup, netloc: str) -> list[tuple[str, int]]:
    found = []
    for one in netloc.rpartition("@")[2].split(","):
        try:
            parts = urlsplit(f"//{one}")
            host, port = parts.hostname, parts.port or _PORTS[setup]
        except ValueError:
            host = None
        if not host:
            # Not which one: with an unescaped '/' in a password, part of it stands where hosts should.
            raise bad_url(url, "a host or port cannot be read", setup)
        found.append((host, port))
    return found


def _path(url: str, setup: Setup, path: str) -> tuple[str, str]:
    """(service, database) that follow the hosts."""
    service = ""
    if setup == "sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise bad_url(url, "the name of the sentinels' service is missing", setup)
    db = path.strip("/")
    if not re.fullmatch(r"\d*", db) or path.count("/") > 1:
        raise bad_url(url, "what follows the last '/' must be the number of a database", setup)
    if setup == "cluster" and db not in ("", "0"):
        raise bad_url(url, "a cluster has database 0 alone", setup)
    return unquote(service), db


def _options(url: str, setup: Setup, parts: SplitResult, db: str) -> dict[str, Any]:
    """What redis-py makes of the URL, rewritten as one that it knows."""
    if setup != "server":
        credentials = "".join(parts.netloc.rpartition("@")[:2])
        scheme = parts.scheme.partition("+")[0]
        url = f"{scheme}://{credentials}host/{db}?{parts.query}"
    try:
        read: Callable[..., Any] = parse_url
        options: dict[str, Any] = dict(read(url))
    except ValueError as error:
        raise bad_url(url, str(error).rstrip("."), setup) from None
    options.pop("connection_class", None)
    if setup != "server":
        del options["host"]
    return options
