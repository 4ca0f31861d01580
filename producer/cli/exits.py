"""Exit codes. Where several hold, the first of 130, 1, 4, 3."""

from __future__ import annotations

OK = 0
FAILED = 1
REFUSED = 2
"""Wrong usage, or refused before anything ran."""
ROW_ERRORS = 3
"""Finished, and some rows have an error instead of an answer."""
INPUT_INCOMPLETE = 4
NOT_YET = 5
"""The job has not ended."""
INTERRUPTED = 130
"""Ctrl-C or SIGTERM; the same command goes on from there."""
