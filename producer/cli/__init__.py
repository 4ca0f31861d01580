"""The producer's verbs, each file one or a group of them. What is slow to import is imported when the verb runs."""

from __future__ import annotations

import typer

from producer.cli.batch import batch_worker
from producer.cli.batch import group as batch
from producer.cli.cancel import cancel
from producer.cli.dead import dead
from producer.cli.flags import Panelled
from producer.cli.generate import generate
from producer.cli.queue import group as queue
from producer.cli.result import result
from producer.cli.status import status
from producer.cli.submit import submit
from producer.cli.watch import watch


def add_verbs(app: typer.Typer) -> None:
    """Register the producer's verbs."""
    for verb in (generate, submit, watch, result, cancel, status):
        app.command(cls=Panelled)(verb)
    app.command("batch-worker", cls=Panelled)(batch_worker)
    app.add_typer(batch, name="batch", no_args_is_help=True)
    app.add_typer(dead, name="dead", no_args_is_help=True)
    app.add_typer(queue, name="queue", no_args_is_help=True)
