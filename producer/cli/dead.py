"""`millstream dead`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.cli import exits, options
from producer.cli.flags import Panelled
from producer.cli.screen import note
from producer.printing import printable, printable_lines

if TYPE_CHECKING:
    from broker.dead_letters import DeadLetter

dead = typer.Typer(help="Dead letters: what killed its worker, or was no job.")

Letter = Annotated[str, typer.Argument(metavar="ID", help="The letter's id, or its job's.")]
Letters = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Letters' ids, or their jobs'.")]


@dead.command("list", cls=Panelled)
def list_(
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Most letters to show.")] = 100,
    after: Annotated[str, typer.Option(metavar="LETTER", help="Show those behind this one.")] = "",
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show dead letters, a line each, the oldest first."""
    from producer.client import Client

    with Client(redis_url, queue) as client:
        letters = client.dead.list(count, after)
        more = client.status().dead if len(letters) == count else 0
    for letter in letters:
        print(json.dumps(_as_dict(letter)) if as_json else _line(letter))
    if not letters:
        note("no dead letters" if not after else f"no dead letters behind {after}")
    elif more > count:
        note(f"there may be more: go on with --after {letters[-1].letter}")


@dead.command(cls=Panelled)
def show(
    name: Letter,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show one dead letter with all that it holds."""
    from producer.client import Client

    with Client(redis_url, queue) as client:
        letter = client.dead.show(name)
    held = (letter.raw or b"").decode("utf-8", "replace")
    if as_json:
        print(json.dumps({**_as_dict(letter), "raw": held, "history": letter.history}))
        return
    print(_line(letter))
    for life in letter.history:
        before = f"{life.get('letter')}  {life.get('reason')}, attempt {life.get('attempt')}"
        print(f"  before: {printable(before)}")
    print(printable_lines(held))


@dead.command(cls=Panelled)
def requeue(
    names: Letters = None,
    all_: Annotated[bool, typer.Option("--all", help="Every letter that holds a job.")] = False,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Give the jobs of dead letters another life. Exit code 1: some could not be."""
    from producer.client import Client
    from protocol import JobNotFound, QueueFull, WrongState

    _check_which(names, all_)
    code = exits.OK
    with Client(redis_url, queue) as client:
        after = ""
        while batch := names or [letter.letter for letter in client.dead.list(after=after)]:
            for name in batch:
                try:
                    job_id = client.dead.requeue(name)
                    print(json.dumps({"id": job_id}) if as_json else job_id)
                except (JobNotFound, QueueFull, WrongState) as error:
                    note(str(error))
                    code = exits.FAILED
            after = batch[-1]
            if names:
                break
    if all_ and not after:
        note("0 requeued")
    raise typer.Exit(code)


@dead.command(cls=Panelled)
def purge(
    names: Letters = None,
    all_: Annotated[bool, typer.Option("--all", help="Every letter.")] = False,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Delete dead letters for good. Those that are gone already are no fault."""
    from producer.client import Client

    _check_which(names, all_)
    with Client(redis_url, queue) as client:
        purged = client.dead.purge_all() if names is None or all_ else client.dead.purge(*names)
    print(json.dumps({"purged": purged}) if as_json else f"{purged:,} purged")


def _check_which(names: list[str] | None, all_: bool) -> None:
    if bool(names) == all_:
        raise typer.BadParameter("give ids, or --all")


def _died_s(letter: DeadLetter) -> float:
    return int(letter.letter.partition("-")[0]) / 1000


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter": letter.letter,
        "id": letter.job_id or None,
        "reason": letter.reason,
        "died_at": _died_s(letter),
        "attempt": letter.attempt,
        "worker": letter.worker or None,
        "bytes": letter.size,
    }


def _line(letter: DeadLetter) -> str:
    died = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_died_s(letter)))
    job = printable(letter.job_id) if letter.job_id else "no job"
    ran = f", attempt {letter.attempt}" if letter.attempt else ""
    return f"{letter.letter}  {died}  {job}  {printable(letter.reason)}{ran}, {letter.size:,} bytes"
