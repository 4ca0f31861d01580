"""The verbs of `millstream`, as one command line."""

from __future__ import annotations

from typing import Annotated

import typer

import millstream
from producer.cli import add_verbs
from producer.cli.flags import Panelled
from worker.cli import worker


def build() -> typer.Typer:
    """The command line."""
    app = typer.Typer(
        help="Prompts on Redis streams in, completed outputs out, with a model on your own hardware.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    app.command(cls=Panelled)(worker)
    add_verbs(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(millstream.__version__)
        raise typer.Exit


def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What may stand before a verb."""
