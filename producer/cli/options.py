"""Options that more than one verb takes, each declared once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, TypeVar, overload

import typer

W = TypeVar("W", bound=str)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Server of the queue. Else REDIS_URL, else MILLSTREAM_REDIS_URL, else the embedded broker.",
    ),
]
QueueName = Annotated[str, typer.Option(metavar="NAME", envvar="MILLSTREAM_QUEUE", help="Name of the queue.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def moment(option: str, text: str | None) -> float | None:
    """Seconds since the epoch, as such or as a date and time.

    Raises:
        typer.BadParameter: it is not a time, or leaves open which.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        try:
            given = datetime.fromisoformat(text)
        except ValueError:
            raise typer.BadParameter(
                f"{option}: {text!r} is not a time: give 2030-01-31T08:00Z, or seconds since 1970"
            ) from None
        if given.tzinfo is None:
            raise typer.BadParameter(
                f"{option}: {text!r} has no time zone: write {text}Z or {text}+01:00"
            ) from None
        value = given.timestamp()
    from protocol.job import LATEST_S

    if not 0 <= value <= LATEST_S:
        raise typer.BadParameter(
            f"{option}: {text!r} is not a time: give seconds since 1970, from 0 to {LATEST_S:,}"
        )
    return value


@overload
def one_of(option: str, given: str, words: Sequence[W]) -> W: ...
@overload
def one_of(option: str, given: str | None, words: Sequence[W]) -> W | None: ...
def one_of(option: str, given: str | None, words: Sequence[W]) -> W | None:
    """The word that was given.

    Raises:
        typer.BadParameter: it is none of these.
    """
    if given is None:
        return None
    for word in words:
        if word == given:
            return word
    raise typer.BadParameter(f"{option}: give {', '.join(words[:-1])} or {words[-1]}, not {given!r}")


def utf8(text: str) -> str:
    """A text that UTF-8 can carry: the shell hands on any bytes.

    Raises:
        typer.BadParameter: it cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{text!r} is not UTF-8") from None
    return text


def seconds(value: float | None) -> float | None:
    """A time one can wait.

    Raises:
        typer.BadParameter: it is none.
    """
    if value is None:
        return None
    from protocol.job import LONGEST_S

    if not 0 <= value <= LONGEST_S:
        raise typer.BadParameter(
            f"{value} is not a time to wait: give seconds from 0 to {LONGEST_S:,} (100 years)"
        )
    return value
