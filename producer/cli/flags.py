"""Flags that several verbs take as one argument: a table row each, declared once.

@spread(sampling=FLAGS)
def verb(source: Path, sampling: Given) -> None: ...      millstream verb SOURCE --max-tokens 8
                                                         verb(SOURCE, {"max_tokens": 8})
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Given = dict[str, Any]
"""What was given, by the names of the parameters that the flags are for."""

_CONTEXT = "context"


@dataclass(frozen=True)
class Flag:
    """A flag for a parameter; `read` makes the parameter's value of what stands on the command line."""

    parameter: str | None
    """None: its value is an object of parameters, which beats the environment and is beaten by every flag."""
    option: str
    kind: Any
    """Type on the command line: int, float, str, bool (a switch), list[int] or list[str] (repeatable)."""
    metavar: str | None
    help: str
    read: Callable[[Any], Any] = lambda value: value
    envvar: str | None = None

    @property
    def argument(self) -> str:
        """Its name among the verb's arguments."""
        return "given_" + self.option.lstrip("-").replace("-", "_")  # `continue` is a word of Python

    def declare(self, panel: str) -> inspect.Parameter:
        """As typer reads it from a signature."""
        switch = self.kind is bool
        option = typer.Option(
            self.option, metavar=self.metavar, help=self.help, envvar=self.envvar, rich_help_panel=panel
        )
        return inspect.Parameter(
            self.argument,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if switch else None,
            annotation=Annotated[bool if switch else self.kind | None, option],
        )


def spread(**groups: tuple[str, Sequence[Flag]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put flags in the place of arguments of a verb; each group has the title of its part of the help.

    The verb gets a dictionary for each group. Of two flags for one parameter only one may be given.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        parameters = [inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for parameter in signature.parameters.values():
            if parameter.name in groups:
                title, flags = groups[parameter.name]
                parameters += [flag.declare(title) for flag in flags]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(verb)
        def run(**values: Any) -> None:
            context = values.pop(_CONTEXT)
            for name, (_, flags) in groups.items():
                values[name] = _collect(flags, values, context)
            verb(**values)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _collect(flags: Sequence[Flag], values: dict[str, Any], context: typer.Context) -> Given:
    """The values of a group's flags, taken out of a verb's arguments."""
    from producer.request import over

    given: Given = {}
    environment: Given = {}
    together: Given = {}
    by: dict[str, str] = {}
    for flag in flags:
        value = values.pop(flag.argument)
        source = context.get_parameter_source(flag.argument)
        if value is None or value is False or value == []:
            continue
        if flag.parameter is None:
            together = flag.read(value)
        elif source is not None and source.name == "ENVIRONMENT":
            environment[flag.parameter] = flag.read(value)
        elif flag.parameter in by:
            raise typer.BadParameter(f"give one of {by[flag.parameter]} and {flag.option}")
        else:
            by[flag.parameter] = flag.option
            given[flag.parameter] = flag.read(value)
    return over(over(environment, together), given)


class Panelled(TyperCommand):
    """Help in plain text whose options stand under the titles they were declared with."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as they were declared: typer would put its own braces, brackets and dots around `[ID]...`."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return [self.options_metavar or "", *(str(one.metavar) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options, and each titled part."""
        parts: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            name, text = record
            plain = "Options"
            if parameter.param_type_name == "argument":
                plain, name = "Arguments", str(parameter.metavar)
            title = getattr(parameter, "rich_help_panel", None) or plain
            parts.setdefault(title, []).append((name, text))
        for title, records in parts.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def json_of(option: str, text: str) -> Any:
    """What a flag's JSON says; `@FILE` reads it from a file.

    Raises:
        typer.BadParameter: it is not JSON, or the file cannot be read.
    """
    if text.startswith("@"):
        return json_in(option, Path(text[1:]))
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}; give JSON, or @FILE") from None


def json_in(option: str, path: Path) -> Any:
    """What a JSON file says.

    Raises:
        typer.BadParameter: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(text_in(option, path))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {path}: {error}") from None


def text_in(option: str, path: Path) -> str:
    """The text of a file.

    Raises:
        typer.BadParameter: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
