"""A worker of ours as a process, for as long as a benchmark needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PROGRAM = (sys.executable, "-m", "millstream")
QUIET = ("--log-level", "warning")
"""Flags of a worker that says nothing while all is well."""
READY_S = 300


@contextmanager
def started_worker(
    url: str, model: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that is not waited for, so that nothing of it is spent before it has jobs.

    Args:
        url: the server of its queue.
        model: as `--model` takes it.
        flags: more of them.
        environment: more variables than this process has.
    """
    process = subprocess.Popen(
        [*PROGRAM, "worker", "--model", model, *flags], env=_environment(url, environment)
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def ready_worker(
    url: str, model: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """As `started_worker`, once it serves.

    Raises:
        subprocess.CalledProcessError: it does not within `READY_S`.
    """
    with started_worker(url, model, flags, environment) as process:
        subprocess.run(
            [*PROGRAM, "status", "--wait-ready", str(READY_S)],
            env=_environment(url, environment),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        yield process


def _environment(url: str, more: Mapping[str, str] | None) -> dict[str, str]:
    return os.environ | {"REDIS_URL": url} | dict(more or {})
