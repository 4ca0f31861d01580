"""What `--help` says, of every verb."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from millstream.verbs import build


def verbs(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb with its parameters."""
    for part, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, f"{name} {part}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def placeholders(command: Any) -> set[str]:
    """What stands for a value of the user in the usage: `IN...` is IN."""
    named = [str(one.metavar) for one in command.params if one.param_type_name == "argument" or one.required]
    return {word for metavar in named for word in re.findall(r"[A-Z]+", metavar)}


def test_help_speaks_of_no_other_verbs_arguments() -> None:
    all_verbs = dict(verbs(typer.main.get_command(build())))
    assert "batch submit" in all_verbs
    known = {"OUT"}.union(*map(placeholders, all_verbs.values()))
    assert {"IN", "ID", "OUT", "FOLDER"} <= known
    for name, command in all_verbs.items():
        own = {str(one.metavar) for one in command.params} | placeholders(command)
        said = " ".join([command.help or "", *(getattr(one, "help", None) or "" for one in command.params)])
        strangers = (known & set(re.findall(r"\b[A-Z]+\b", said))) - own
        assert not strangers, f"millstream {name} --help"


def test_every_verb_and_option_says_what_it_does() -> None:
    for name, command in verbs(typer.main.get_command(build())):
        assert command.help, name
        for one in command.params:
            assert getattr(one, "help", None), (name, one.name)
