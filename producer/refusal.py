"""What is refused before anything runs, and what is said of it in a line."""

from __future__ import annotations

from protocol import MillstreamError


class Refused(MillstreamError):
    """The command as given would do harm or cannot work; nothing was changed."""


def first_line(error: Exception) -> str:
    """What an error of a library says first, or what it is called."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
