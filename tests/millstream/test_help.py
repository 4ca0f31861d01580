"""The help of every verb: whole sentences, words a user knows in place of types, and its own arguments alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from millstream.verbs import build


def pages(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each verb and each group of verbs, with the words that lead to it."""
    yield name, command
    for word, verb in getattr(command, "commands", {}).items():
        yield from pages(verb, (*name, word))


PAGES: dict[tuple[str, ...], Any] = dict(pages(typer.main.get_command(build())))
VERBS = {name: command for name, command in PAGES.items() if not hasattr(command, "commands")}


def page(words: tuple[str, ...]) -> str:
    done = CliRunner().invoke(build(), [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


def test_the_pages_are_all_there() -> None:
    assert {(), ("worker",), ("generate",), ("dead", "requeue"), ("batch", "submit")} <= PAGES.keys()


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_what_it_shows(words: tuple[str, ...]) -> None:
    text = page(words)
    summaries = text.partition("Commands:\n")[2].splitlines()
    assert [line for line in summaries if line.endswith("...")] == [], (
        "a verb's summary does not fit in its line"
    )
    typed = re.findall(r"<(?:str|int|float|bool|path|list)[^>]*>", text)
    assert typed == []
    assert "{" not in text.splitlines()[0], "typer's braces around an argument"
    bare = re.findall(r"^  (--[\w-]+ [A-Z]\S*) +\[", text, re.MULTILINE)
    assert bare == [], "an option that nothing is said about"


def test_every_verb_and_option_says_what_it_does() -> None:
    for name, command in VERBS.items():
        assert command.help, name
        for one in command.params:
            assert getattr(one, "help", None), (name, one.name)


def placeholders(command: Any) -> set[str]:
    """What stands for a value of the user in the usage: `IN...` is IN."""
    named = [str(one.metavar) for one in command.params if one.param_type_name == "argument" or one.required]
    return {word for metavar in named for word in re.findall(r"[A-Z]+", metavar)}


def test_help_speaks_of_no_other_verbs_arguments() -> None:
    known = {"OUT"}.union(*map(placeholders, VERBS.values()))
    assert {"IN", "ID", "OUT", "FOLDER"} <= known
    for name, command in VERBS.items():
        own = {str(one.metavar) for one in command.params} | placeholders(command)
        said = " ".join([command.help or "", *(getattr(one, "help", None) or "" for one in command.params)])
        strangers = (known & set(re.findall(r"\b[A-Z]+\b", said))) - own
        assert not strangers, f"millstream {' '.join(name)} --help"
