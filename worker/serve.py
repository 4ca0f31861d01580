"""A worker as a process: the server it serves, its signals, its leash."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import ExitStack, suppress

import redis

from broker.address import redact, resolve_url
from broker.connection import connect_async, unreachable, wait_until_ready_async
from broker.embedded import EmbeddedBroker
from broker.keys import Keys, keys_of
from broker.queue import AsyncQueue
from engine.dry_run import is_dry_run
from engine.source import find
from protocol import MillstreamError
from worker.garbage import collect_rarely
from worker.model_process import ModelCrashed
from worker.parent import Worker, WorkerSettings

log = logging.getLogger("millstream.worker")

STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(
    redis_url: str | None, redis_timeout_s: float, queue: str, settings: WorkerSettings, leash_fd: int | None
) -> None:
    """Run a worker until it is told to stop. At its start it waits `redis_timeout_s` seconds for the server.

    Raises:
        MillstreamError: no Redis, no model, another model than the queue's, or no queue can have that name.
    """
    keys = keys_of(queue)
    look_for(settings)
    with ExitStack() as stack:
        url = resolve_url(redis_url, os.environ)
        if url is None:
            url = stack.enter_context(EmbeddedBroker()).url
        asyncio.run(_serve(url, redis_timeout_s, keys, settings, leash_fd))
        # The loop has given the signals back: a second one now, while the interpreter ends, would make it -15.
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def look_for(settings: WorkerSettings) -> None:
    """Tell a wrong name now: the model process would say so 10 s later, once it has imported torch.

    Raises:
        ModelUnavailable: there is no such model.
        OptionRefused: a revision of local files.
    """
    if is_dry_run(settings.model):
        return
    with suppress(ModuleNotFoundError):  # the worker extra is not installed: the model process says so
        find(settings.model, settings.options.get("revision"))


async def _serve(
    url: str, redis_timeout_s: float, keys: Keys, settings: WorkerSettings, leash_fd: int | None
) -> None:
    queue = AsyncQueue(connect_async(url, keys), keys)
    serving = Worker(queue, settings)
    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, serving.stop)
    if leash_fd is not None:
        loop.add_reader(leash_fd, _let_go, loop, leash_fd, serving)
    log.info("queue %s on %s", keys.queue, redact(url))
    collect_rarely()
    try:
        if await serving.wait_for_server(wait_until_ready_async(url, redis_timeout_s, keys)):
            await serving.run()
    except ModelCrashed as error:
        raise MillstreamError(
            f"the model process keeps dying while it loads {settings.model}: {error}"
        ) from None
    except redis.RedisError as error:
        raise unreachable(url, error) from None
    finally:
        await queue.close()


def _let_go(loop: asyncio.AbstractEventLoop, leash_fd: int, serving: Worker) -> None:
    if not os.read(leash_fd, 1024):
        loop.remove_reader(leash_fd)
        serving.stop_now()
