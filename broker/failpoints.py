"""Places on a job's way at which a process can be told to die, so that tests can show what is left behind.

    MILLSTREAM_FAILPOINT=name[:count[:file]]

The process that reaches `name` for the `count`-th time (first, if not given) gets SIGKILL: no handler runs and no
buffer is flushed. With a file it dies only if it can make that file: a model process that is started again would else
die again, as often as it is started. Unset, as everywhere outside tests, `reached` compares one constant and returns.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

VARIABLE = "MILLSTREAM_FAILPOINT"

NAMES = {
    "leased": "parent: the server has granted jobs, and nobody but the parent knows",
    "started": "model process: the engine has taken the job in, and the parent does not know",
    "stepped": "model process: tokens are drawn, and the parent does not know",
    "heard": "parent: it knows the tokens, and the server does not",
    "published": "parent: events are logged and published; one script does both, so one moment",
    "renewed": "parent: leases are renewed",
    "finished": "parent: result stored, entry acknowledged and deleted, end announced; one script, so one moment",
    "checkpointed": "parent, told to stop: what was made is logged, and the lease still held",
    "handed_back": "parent, told to stop: the lease is released",
}
"""Every failpoint: whose it is, and what has happened when it is reached."""


@dataclass(slots=True)
class _Armed:
    name: str
    left: int
    file: str

    def count_down(self) -> None:
        self.left -= 1
        if self.left == 0 and self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        if not self.file:
            return True
        try:
            os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _parse(text: str) -> _Armed | None:
    if not text:
        return None
    name, _, rest = text.partition(":")
    count, _, file = rest.partition(":")
    if name not in NAMES or not (count or "1").isdecimal():
        raise ValueError(f"{VARIABLE}={text}: give name[:count[:file]] with one of {', '.join(NAMES)}")
    return _Armed(name, int(count or 1), file)


_ARMED = _parse(os.environ.get(VARIABLE, ""))


def reached(name: str) -> None:
    """Say that this process has come to a failpoint; it does not return if it is to die here."""
    if _ARMED is not None and _ARMED.name == name:
        _ARMED.count_down()
