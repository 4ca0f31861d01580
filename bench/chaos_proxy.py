"""A loopback port in front of the server, whose connections can be cut, stalled, or lose a reply.

client ---- request ----> proxy ---- request ----> server
client <--- (nothing) --- proxy <--- reply ------- server      the script has run, and its caller does not know
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

CHUNK = 1 << 16
LOOK_AGAIN_S = 0.01


class _Link:
    """One client's connection and the server's side of it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers = (client, server)
        self.kept_of_reply: float | None = None
        """Share of the next reply that the client still gets before the connection ends; None: all of it."""

    def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Forwards every connection to one port of this machine; owns what goes wrong on the way."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._lost = 0

    async def start(self) -> None:
        """Listen on a free port."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        self._listener.close()
        self.cut()
        self._flowing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> int:
        """Drop every connection; how many there were."""
        links = list(self._links)
        for link in links:
            link.close()
        return len(links)

    async def stall(self, seconds: float) -> bool:
        """Nothing passes, and nothing is lost. False if nobody was connected."""
        self._flowing.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._flowing.set()
        return bool(self._links)

    async def lose_replies(self, rng: random.Random, count: int, patience_s: float) -> int:
        """Let the next replies on some connections be lost, half of them in their middle; how many were."""
        links = sorted(self._links, key=id)
        chosen = rng.sample(links, min(count, len(links)))
        before, deadline = self._lost, asyncio.get_running_loop().time() + patience_s
        for link in chosen:
            link.kept_of_reply = rng.choice((0.0, 0.5))
        while self._lost - before < len(chosen) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_AGAIN_S)
        for link in chosen:
            link.kept_of_reply = None
        return self._lost - before

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            from_server, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # it is down
            client.transport.abort()
            return
        link = _Link(client, server)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._requests(reader, server, link), self._replies(from_server, client, link)
            )
        finally:
            link.close()
            self._links.discard(link)

    async def _requests(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, link: _Link
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                server.write(data)
                await server.drain()
        link.close()

    async def _replies(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter, link: _Link) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if link.kept_of_reply is not None:
                    self._lost += 1
                    client.write(data[: int(len(data) * link.kept_of_reply)])
                    await client.drain()
                    client.close()  # sends what was written, unlike abort
                    await client.wait_closed()
                    break
                client.write(data)
                await client.drain()
        link.close()
