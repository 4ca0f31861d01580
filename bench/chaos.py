"""Everything that can go wrong, on purpose, and then the books: no job lost, doubled, torn or changed.

    python -m bench.chaos [--jobs 2000] [--seed 0] [--server valkey] [--only dry-run] [--out docs/chaos.md]

    people --- proxy ---.                 .--- proxy --- workers
                        +---- server ----+
    referee ------------'   (append-only)

First three dry-run workers, then two of a model in float32, on a queue each. A seeded schedule kills, stops, hangs
and cuts off whatever there is; jobs are poison, are cancelled, fail and are retried, have deadlines and delays.
At the end each result and each watched stream is compared with the run of an engine that nothing was done to.
Exit code 0: nothing is lost, doubled, torn, changed, leaked or stray, and each kind of disturbance took place. Else
1, and each fault is told with its job's history. Near ties are counted, and are no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from bench.chaos_books import Account, Fault, Times, judge
from bench.chaos_clients import People, cancel
from bench.chaos_disturbances import ACTS, Field, Schedule
from bench.chaos_jobs import Expected, Plan, dry_run_plans, model_plans, undisturbed
from bench.chaos_processes import Fleet, Fsync, Server, ServerKind, worker_command
from bench.chaos_proxy import Proxy
from bench.chaos_referee import Referee
from bench.chaos_report import Outcome, histories, tables
from bench.report import filled
from bench.workload import model_or_default
from broker.keys import Keys
from millstream import AsyncClient

log = logging.getLogger("chaos")

CALM_S = 60.0
"""What is not over so long after the last disturbance is lost."""
WATCHERS_CALM_S = 20.0
READY_S = 300.0
LOOK_AGAIN_S = 0.1
DECKS_SPREAD_OVER = 3
"""For so many decks' time the jobs last, all but the last, if a kind of disturbance is as late in taking place."""
KEPT_BACK = 0.1
"""Share of the jobs that come one by one, ever more slowly, while a kind of disturbance has yet to take place."""
FAILING = 0.01
FLAKY = 0.05
"""Share of the attempts that fail with an error that can pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """One queue with its workers and jobs, and how hard it is treated."""

    name: str
    model: str
    workers: int
    plans: list[Plan]
    reference: Callable[[], dict[str, Expected]]
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    lease_s: float = 2.0
    grace_s: float = 1.0
    step_timeout_s: float = 4.0
    gap_s: float = 1.0
    """Seconds from one disturbance to the next."""
    decks: int | None = None
    """How often each kind of disturbance comes; None: until all jobs have ended."""
    kinds: tuple[str, ...] = tuple(ACTS)
    most_open: int = 300
    """Jobs on the queue at a time."""

    @property
    def worker_flags(self) -> list[str]:
        """How its workers are started."""
        times = {"--lease": self.lease_s, "--grace": self.grace_s, "--step-timeout": self.step_timeout_s}
        return [*(part for flag, value in times.items() for part in (flag, str(value))), *self.flags]


def dry_run_part(jobs: int, seed: int) -> Part:
    """Three workers without a model: many jobs, and every disturbance often."""
    kind = "dry-run:words"
    plans = dry_run_plans(seed, jobs)

    def reference() -> dict[str, Expected]:
        from engine.dry_run import open_dry_run

        return undisturbed(open_dry_run(f"{kind}?fail={FAILING}"), plans, margins=False)

    model = f"{kind}?delay=20ms&slots=8&crash=BOOM&fail={FAILING}&flaky={FLAKY}"
    return Part("dry-run", model, 3, plans, reference, gap_s=0.6)


def model_part(path: Path, jobs: int, seed: int) -> Part:
    """Two workers with a model in float32, one thread each."""
    plans = model_plans(seed, jobs)

    def reference() -> dict[str, Expected]:
        from engine.loading import load_engine

        return undisturbed(load_engine(str(path), dtype="float32"), plans, margins=True)

    flags = ("--dtype", "float32", "--max-num-seqs", "8", "--kv-memory", "256MB")
    environment = {"OMP_NUM_THREADS": "1"}
    return Part(
        "model",
        str(path),
        2,
        plans,
        reference,
        flags,
        environment,
        lease_s=3.0,
        grace_s=2.0,
        step_timeout_s=15.0,
        gap_s=6.0,
        most_open=40,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all parts."""

    seed: int
    server: ServerKind
    fsync: Fsync
    minutes: float
    """A part is not disturbed for longer; what is not submitted by then is left out, and said so."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Everybody who takes part."""

    fleet: Fleet
    referee: Referee
    people: People
    schedule: Schedule


@asynccontextmanager
async def staged(part: Part, setting: Setting, folder: Path) -> AsyncGenerator[Stage]:
    """Server, proxies, workers and people of one part; whatever still runs at the end is killed."""
    keys = Keys(f"chaos-{part.name}")
    async with AsyncExitStack() as stack:
        server = Server(setting.server, setting.fsync, folder / "server")
        await server.start()
        stack.callback(server.kill)
        to_workers, to_clients = Proxy(server.port), Proxy(server.port)
        for proxy in (to_workers, to_clients):
            await proxy.start()
            stack.push_async_callback(proxy.close)
        environment = os.environ | part.environment | {"MILLSTREAM_QUEUE": keys.queue}
        command = worker_command(to_workers.url, part.model, part.worker_flags)
        fleet = Fleet(part.workers, command, environment, folder / "workers")
        fleet.start()
        stack.callback(fleet.kill)
        referee = Referee(server.url, keys)
        stack.push_async_callback(referee.close)
        client = await stack.enter_async_context(AsyncClient(to_clients.url, keys.queue))
        field = Field(server, fleet, to_workers, to_clients, referee, part.lease_s, part.step_timeout_s)
        people = People(client, referee, setting.seed)
        schedule = Schedule(field, setting.seed, part.gap_s, part.decks, part.kinds)
        yield Stage(fleet, referee, people, schedule)


async def run(part: Part, setting: Setting, folder: Path) -> Outcome:
    """One part from its start to its books; logs and data are left in `folder`."""
    expected = part.reference()
    began = time.monotonic()
    async with staged(part, setting, folder) as stage, asyncio.TaskGroup() as group:
        keeping = group.create_task(stage.fleet.keep())
        reading = group.create_task(stage.referee.read_ends())
        await _ready(stage.fleet)
        await _disturbed(part, setting, stage)
        await stage.people.leave(WATCHERS_CALM_S)
        await cancel([keeping])
        await stage.fleet.stop(READY_S)
        accounts = [
            await _account(plan, expected[plan.id], stage)
            for plan in part.plans
            if plan.id in stage.people.accepted
        ]
        faults = await _faults(accounts, stage)
        await cancel([reading])
    seconds = time.monotonic() - began
    words = _in_words(part, setting)
    return Outcome(
        part.name,
        words,
        len(part.plans),
        accounts,
        faults,
        stage.referee,
        stage.people,
        stage.schedule,
        stage.fleet,
        seconds,
    )


async def _faults(accounts: list[Account], stage: Stage) -> list[Fault]:
    """All that is wrong; the queue is emptied for it."""
    faults = [fault for account in accounts for fault in judge(account)]
    faults += await stage.referee.dead_letter_faults(accounts)
    faults += await stage.referee.lasting()
    await stage.referee.collect()
    faults += await stage.referee.left()
    return faults + [Fault("stray", "-", stray) for stray in stage.fleet.strays]


def _in_words(part: Part, setting: Setting) -> str:
    model = Path(part.model).name
    return (
        f"{part.workers} workers of `{model}`, lease {part.lease_s:g} s, a disturbance every {part.gap_s:g} s; "
        f"{setting.server} with `appendfsync {setting.fsync}`; seed {setting.seed}."
    )


async def _ready(fleet: Fleet) -> None:
    """Wait until each worker has served once."""
    async with asyncio.timeout(READY_S):
        while not all(worker.is_ready for worker in fleet.workers):
            await asyncio.sleep(LOOK_AGAIN_S)


async def _disturbed(part: Part, setting: Setting, stage: Stage) -> None:
    """Submit everything, under the schedule, until all has ended or the time is over; then let it come to rest."""
    people, schedule = stage.people, stage.schedule
    disturbing = asyncio.create_task(schedule.run())
    submitting = asyncio.create_task(
        people.submit(part.plans, partial(_room, part, setting, stage, stage.referee.now))
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(60 * setting.minutes):
            await submitting
            while people.open:
                await people.an_end(LOOK_AGAIN_S)
    await cancel([submitting])
    disturbing.cancel()
    await asyncio.wait([disturbing])
    if not disturbing.cancelled():
        disturbing.result()
    with suppress(TimeoutError):
        async with asyncio.timeout(CALM_S):
            while people.open:
                await people.an_end(LOOK_AGAIN_S)


def _room(part: Part, setting: Setting, stage: Stage, began: float) -> int:
    """How many jobs may be submitted now; at first they are spread, so that no disturbance comes when all is over.

    Since `began`, when workers were ready: starting a model may take as long as a deck.
    """
    room = part.most_open - stage.people.open
    if stage.schedule.every_kind_done.is_set():
        return room
    due = due_jobs(len(part.plans), stage.referee.now - began, part, setting)
    return min(room, due - len(stage.people.accepted))


def due_jobs(jobs: int, seconds: float, part: Part, setting: Setting) -> int:
    """How many jobs are to have come after so long, if a kind of disturbance has yet to take place.

    On a slow machine that takes longer than the jobs would last. So most come evenly; the others evenly too, but on a
    logarithmic scale of time, and the last one when the time is over. Some kinds need jobs that run: none is kept
    back altogether.
    """
    spread_s = DECKS_SPREAD_OVER * len(part.kinds) * part.gap_s
    kept = math.ceil(KEPT_BACK * jobs)
    if seconds < spread_s:
        return int((jobs - kept) * seconds / spread_s)
    longest = math.log(max(60 * setting.minutes / spread_s, 2.0))
    return jobs - kept + min(int(kept * math.log(seconds / spread_s) / longest), kept)


async def _account(plan: Plan, expected: Expected, stage: Stage) -> Account:
    found = await stage.referee.found(plan.id)
    result = found.look.result
    times = Times(*stage.people.submitted[plan.id], found.not_before, found.deadline)
    return Account(
        plan,
        expected,
        found.look.state,
        result,
        stage.referee.ends.get(plan.id, []),
        [*stage.people.streams_of(plan.id), found.log],
        times,
        stage.people.cancelled.get(plan.id),
    )


def main() -> int:
    """Run the parts and print the books."""
    args = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    setting = Setting(args.seed, args.server, args.fsync, args.minutes)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    outcomes = []
    for part in _parts(args):
        log.info("%s: %d jobs, %d workers, seed %d", part.name, len(part.plans), part.workers, args.seed)
        (folder / part.name).mkdir()
        outcomes.append(asyncio.run(run(part, setting, folder / part.name)))
        print(tables(outcomes[-1]))
        print(histories(outcomes[-1]))
    if args.out is not None:
        args.out.write_text(
            filled(args.out.read_text(), {f"chaos.{one.part}": tables(one) for one in outcomes})
        )
    if all(outcome.is_good for outcome in outcomes):
        shutil.rmtree(folder)
        return 0
    print(f"logs and data are in {folder}", file=sys.stderr)
    return 1


def _parts(args: argparse.Namespace) -> list[Part]:
    parts = []
    if args.only in (None, "dry-run"):
        parts.append(dry_run_part(args.jobs, args.seed))
    if args.only in (None, "model"):
        parts.append(model_part(model_or_default(args.model), args.model_jobs, args.seed))
    return parts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000, help="of the dry run (default: %(default)s)")
    parser.add_argument("--model-jobs", type=int, default=120, help="of the model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("dry-run", "model"), help="one of the two parts")
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--server", choices=get_args(ServerKind), default="valkey")
    parser.add_argument(
        "--fsync",
        choices=get_args(Fsync),
        default="always",
        help="of the append-only file; with everysec a killed server may lose what it has acknowledged",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of each part (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="PAGE", help="write the tables between the page's marks too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
