"""Run a command line in the test's own process: what is a process of its own costs a second of imports."""

from __future__ import annotations

import io
import signal
import sys
from dataclasses import dataclass

import pytest

from millstream.__main__ import main


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """`millstream`, with a server in its environment."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object, stdin: str = "", **environ: str) -> Done:
        handlers = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        }
        with self._monkeypatch.context() as patch:
            for name, value in {"REDIS_URL": self.url, **environ}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["millstream", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            with pytest.raises(SystemExit) as end:
                main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        code = end.value.code
        assert isinstance(code, int)
        return Done(code, *self._capsys.readouterr())
