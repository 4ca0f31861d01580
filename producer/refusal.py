"""What is refused before anything runs."""

from __future__ import annotations

from protocol import MillstreamError


class Refused(MillstreamError):
    """The command as given would do harm or cannot work; nothing was changed."""
