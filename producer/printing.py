"""What others wrote, on a terminal of ours."""

from __future__ import annotations


def printable(name: object) -> str:
    """A name that others chose, so that it cannot leave its line or command the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(name))


def printable_lines(text: str) -> str:
    """A text with what others chose in it: its lines and tabs stay, and nothing in it commands the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
