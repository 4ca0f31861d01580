"""The help of every verb: whole sentences, and words a user knows in place of types."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from millstream.verbs import build


def pages(command: object, name: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that lead to each verb and each group of verbs."""
    yield name
    for word, verb in getattr(command, "commands", {}).items():
        yield from pages(verb, (*name, word))


PAGES = list(pages(typer.main.get_command(build())))


def page(words: tuple[str, ...]) -> str:
    done = CliRunner().invoke(build(), [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


def test_the_pages_are_all_there() -> None:
    assert {(), ("worker",), ("generate",), ("dead", "requeue"), ("batch", "submit")} <= set(PAGES)


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
