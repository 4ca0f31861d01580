"""The parent's side of the model process: start it, talk to it, notice its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engine.interface import DeviceLost
from protocol import Fingerprint, ModelUnavailable, OptionRefused
from worker.frames import (
    HEAD_BYTES,
    Failed,
    Load,
    Lost,
    Ready,
    Step,
    ToModel,
    decode_from_model,
    encode,
    length_of,
)

STOP_S = 5.0
"""How long a model process is given to notice that its pipe is closed."""
LISTEN_S = 1.0
"""Silence is counted by no more than this at a time. A parent that was stopped itself (a suspended machine) finds its
timers over before it has read what lies in the pipe, and would kill a process that is well, and count a crash."""
READ_AHEAD = 1 << 20
"""Bytes taken off the pipe before they are asked for. A frame may be longer, but then no other waits with it."""
FRAMES_AHEAD = 16
"""Frames taken off it likewise: a parent that waits for Redis reads no more, so the engine waits too."""


class ModelCrashed(Exception):
    """The model process ended, or was ended because it hung."""


class ModelProcess:
    """One run of the model process.

    parent                      model process
    to_model  ---- pipe ---->   reader thread
    from_model <--- pipe ----   main thread, once a step
    """

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._unwritten: list[ToModel] = []
        self._heard: asyncio.Queue[bytes | None] = asyncio.Queue(FRAMES_AHEAD)
        self._listening = asyncio.create_task(self._listen())
        self._last_words: list[bytes | None] = []
        """What came behind the last steps, told once these are: the pipe's end may lie behind it in `_heard`."""
        self.fingerprint = Fingerprint(name="")
        self.slots = 0

    @classmethod
    async def start(cls) -> ModelProcess:
        """Start the process, without a model; whoever started it is to `stop` it."""
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        # A session of its own: Ctrl-C at the terminal reaches the parent alone, which decides what to do.
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.child", str(child_read), str(child_write)],
            pass_fds=(child_read, child_write),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
            env=os.environ | ({} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}),  # bars are for terminals
        )
        os.close(child_read)
        os.close(child_write)
        try:
            return cls(process, await _reader(parent_read), await _writer(parent_write))
        except BaseException:
            process.kill()
            raise

    async def load(self, model: str, options: dict[str, Any]) -> None:
        """Load the model, which may take as long as it takes.

        Raises:
            ModelUnavailable: it cannot be loaded, and never will be.
            OptionRefused: it could be, with other options.
            ModelCrashed: the process ended while it loaded.
        """
        self.send(Load(model, options))
        body = await self._heard.get()
        if body is None:
            raise await self._end(body)
        frame = decode_from_model(body)
        if isinstance(frame, Failed):
            raise OptionRefused(frame.message) if frame.by_options else ModelUnavailable(frame.message)
        if not isinstance(frame, Ready):
            raise TypeError(f"the model process began with {type(frame).__name__}")
        self.fingerprint = Fingerprint.model_validate(frame.fingerprint)
        self.slots = frame.slots
        self.load_seconds = frame.load_seconds

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, said: ToModel) -> None:
        """Queue what is to be said; what a dead process does not read is noticed by `step`.

        What is sent in one go is one frame: a write each costs more than all else about it, and wakes the model
        process for each.
        """
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(said)

    def _write(self) -> None:
        self._writer.write(encode(self._unwritten))
        self._unwritten.clear()

    async def steps(self, timeout_s: float, running_since: Callable[[], float | None]) -> list[Step]:
        """The news of the next step, and of those that have come with it.

        Args:
            timeout_s: how long a process that has jobs may say nothing.
            running_since: when it was given the oldest of them, monotonic; None without any. Asked again and again:
                jobs are sent while this waits.

        Raises:
            ModelCrashed: the process ended, or said nothing for too long and was killed.
            DeviceLost: it ended itself, since its device fails again and again.
        """
        if self._last_words:
            raise await self._end(self._last_words.pop())
        if self._heard.empty():
            body = await self._next_word(timeout_s, running_since)
        else:
            body = self._heard.get_nowait()
        steps: list[Step] = []
        while body is not None and isinstance(frame := decode_from_model(body), Step):
            steps.append(frame)
            if self._heard.empty():
                return steps
            body = self._heard.get_nowait()
        if not steps:
            raise await self._end(body)
        self._last_words.append(body)
        return steps

    async def _next_word(self, timeout_s: float, running_since: Callable[[], float | None]) -> bytes | None:
        """Wait for a frame, or the end of the pipe, as `steps` says."""
        next_frame = asyncio.ensure_future(self._heard.get())
        silent_s, listen_s = 0.0, min(timeout_s / 4, LISTEN_S)
        listening_since = time.monotonic()
        try:
            while not (await asyncio.wait({next_frame}, timeout=listen_s))[0]:
                since, now = running_since(), time.monotonic()
                heard_s = min(now - listening_since, listen_s)
                listening_since = now
                silent_s = 0.0 if since is None else min(silent_s + heard_s, now - since)
                if silent_s >= timeout_s:
                    self._process.kill()
                    raise ModelCrashed(f"no step for {timeout_s:g} s (--step-timeout): killed")
            return next_frame.result()
        finally:
            next_frame.cancel()

    async def _end(self, last_word: bytes | None) -> Exception:
        """What it means that the process says no more; None: its pipe has ended."""
        if last_word is None:
            code = await asyncio.to_thread(self._process.wait)
            return ModelCrashed(f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        frame = decode_from_model(last_word)
        if isinstance(frame, Lost):
            return DeviceLost(frame.message)
        return TypeError(f"the model process said {type(frame).__name__} while it ran")

    async def _listen(self) -> None:
        """Take frames off the pipe, a few ahead of who asks for them: what a step costs the parent beside its jobs is
        then paid once for all that came while it spoke to Redis.
        """
        with suppress(asyncio.IncompleteReadError):
            while True:
                await self._heard.put(await _read_frame(self._reader))
        await self._heard.put(None)

    async def stop(self) -> None:
        """End the process: closing its pipe is enough, a process that hangs is killed."""
        self._listening.cancel()
        if not self._writer.transport.is_closing():  # it closes itself when the process has died
            self._writer.transport.abort()
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """A frame without its length, however long it is.

    Raises:
        asyncio.IncompleteReadError: the pipe ended before the frame did.
    """
    return await reader.readexactly(length_of(await reader.readexactly(HEAD_BYTES)))


async def _reader(fd: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_AHEAD)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    return reader


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb"))
    return asyncio.StreamWriter(transport, protocol, None, loop)
