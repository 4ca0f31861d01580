"""`millstream submit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from producer.cli import options
from producer.cli.flags import Given, json_in, spread
from producer.cli.rendering import FLAGS as RENDERING
from producer.cli.sampling import FLAGS as SAMPLING


@spread(rendering=RENDERING, sampling=SAMPLING)
def submit(
    rendering: Given,
    sampling: Given,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads stdin.")
    ] = None,
    chat: Annotated[str | None, typer.Option(metavar="TEXT", help="What the user says in a chat.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message, with --chat.")] = None,
    messages: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A chat as JSON: [{role, content}, ...]; - reads stdin."),
    ] = None,
    id: Annotated[str | None, typer.Option(metavar="ID", help="Name the job. [default: a random id]")] = None,
    priority: Annotated[
        str,
        typer.Option(metavar="high|normal|low", help="Before which others it runs."),
    ] = "normal",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="On whose account.")] = "default",
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Refuse to be answered by a model of another name.")
    ] = None,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", callback=options.seconds, help="How long to wait for room in a full queue."
        ),
    ] = None,
    not_before: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it may start, by the server's clock: 2030-01-31T08:00Z."),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", callback=options.seconds, help="The same, from now."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it is no longer wanted: never started after, stopped at it."),
    ] = None,
    deadline_in: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", callback=options.seconds, help="The same, from now."),
    ] = None,
    max_retries: Annotated[
        int, typer.Option(min=0, max=100, metavar="N", help="Tries more after an error that can pass.")
    ] = 3,
    stream: Annotated[bool, typer.Option("--stream", help="Follow the job: live text on stdout.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Queue one prompt; prints the job's id."""
    prompt_or_chat = _input(prompt, chat, system, messages)
    if prompt is not None:
        _check_for_a_prompt(rendering)
    from producer.cli import screen
    from producer.client import Client
    from producer.request import sampling_params
    from protocol import PRIORITIES

    level = options.one_of("--priority", priority, PRIORITIES)
    with Client(redis_url, queue) as client:
        job = client.submit(
            **prompt_or_chat,
            **rendering,
            id=id,
            priority=level,
            tenant=tenant,
            model=model,
            not_before=options.moment("--not-before", not_before),
            delay_s=delay,
            deadline=options.moment("--deadline", deadline),
            deadline_in_s=deadline_in,
            max_retries=max_retries,
            wait_s=wait,
            params=sampling_params(sampling),  # by name, one from --sampling could meet an argument of submit
        )
        if not stream:
            print(json.dumps({"id": job.id, "queue": queue}) if as_json else job.id)
            return
        screen.note(f"job {job.id}")
        screen.note_missing_worker(client)
        code = screen.follow(client, job, as_json)
    raise typer.Exit(code)


def _input(prompt: str | None, chat: str | None, system: str | None, messages: Path | None) -> dict[str, Any]:
    """The one input that was given, as arguments of `Client.submit`."""
    if [prompt, chat, messages].count(None) != 2:
        raise typer.BadParameter("give one of PROMPT, --chat and --messages")
    if system is not None and chat is None:
        raise typer.BadParameter("--system goes with --chat")
    if prompt is not None:
        return {"prompt": _read_stdin() if prompt == "-" else prompt}
    if chat is not None:
        turns = [{"role": "system", "content": system}] if system is not None else []
        return {"messages": [*turns, {"role": "user", "content": chat}]}
    assert messages is not None
    return {"messages": _read_messages(messages)}


def _check_for_a_prompt(rendering: Given) -> None:
    """Refuse flags that say something of a chat alone.

    Raises:
        typer.BadParameter: naming them.
    """
    from protocol.job import CHAT_ONLY, only_with

    _, flags = RENDERING
    if given := [flag.option for flag in flags if flag.parameter in CHAT_ONLY & rendering.keys()]:
        raise typer.BadParameter(f"{only_with(given)} --chat or --messages")


def _read_messages(path: Path) -> list[Any]:
    if str(path) == "-":
        try:
            turns = json.loads(_read_stdin())
        except ValueError as error:
            raise typer.BadParameter(f"--messages -: {error}; give JSON") from None
    else:
        turns = json_in("--messages", path)
    if not isinstance(turns, list):
        raise typer.BadParameter(f"--messages {path}: it does not hold a list of messages")
    return turns


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}") from None
