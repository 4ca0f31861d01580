"""`millstream generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.cli import exits, options
from producer.cli.flags import Given, spread
from producer.cli.rendering import FLAGS as RENDERING
from producer.cli.sampling import FLAGS as SAMPLING

if TYPE_CHECKING:
    from producer.bulk.generate import Report

SHOWN_FAULTS = 20


@spread(rendering=RENDERING, sampling=SAMPLING)
def generate(
    rendering: Given,
    sampling: Given,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Rows as JSON lines: {prompt} or {messages}.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Where the answers go, in the order of IN."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="M",
            envvar="MILLSTREAM_MODEL",
            help="Without --queue and a Redis configured: start a worker with this model for the time of the run. "
            "Else: refuse to be answered by a model of another name.",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="NAME", envvar="MILLSTREAM_QUEUE", help="Name of the queue. [default: default]"),
    ] = None,
    redis_url: options.RedisUrl = None,
    window: Annotated[int, typer.Option(min=1, metavar="N", help="Most rows on the queue at once.")] = 2000,
    redis_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long the server may be away.")
    ] = 60.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take rows of an OUT that Millstream does not know as done.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew; OUT is replaced at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only say which rows cannot be asked.")] = False,
) -> None:
    """Answer every row of a file. Interrupted at any moment, the same command goes on."""
    if check:
        raise typer.Exit(_check(source, sampling, rendering, as_json))
    if output is None:
        raise typer.BadParameter("give -o OUT (or --check)")
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps what --overwrite would throw away: give one of them")
    from producer.bulk.interrupt import Interrupt

    interrupt = Interrupt()
    interrupt.listen()
    from producer.bulk.generate import Order
    from producer.bulk.generate import generate as run
    from producer.cli import screen

    order = Order(
        source=source,
        output=output,
        defaults=sampling,
        rendering=rendering,
        model=model,
        queue=queue,
        redis_url=redis_url,
        window=window,
        patience_s=redis_timeout,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
    )
    try:
        report = run(order, interrupt)
    except KeyboardInterrupt:
        screen.note("interrupted: the same command goes on from here")
        raise typer.Exit(exits.INTERRUPTED) from None
    raise typer.Exit(
        _already_done(output, quiet, as_json) if report is None else _report(report, quiet, as_json)
    )


def _check(source: Path, sampling: Given, rendering: Given, as_json: bool) -> int:
    from producer.bulk.generate import faults
    from producer.cli.screen import note

    rows = bad = 0
    for fault in faults(source, sampling, rendering):
        rows += 1
        if fault is not None:
            bad += 1
            if bad <= SHOWN_FAULTS:
                note(f"line {fault.line}: {fault.code}: {fault.message}")
    if bad > SHOWN_FAULTS:
        note(f"and {bad - SHOWN_FAULTS:,} more")
    if as_json:
        print(json.dumps({"rows": rows, "bad": bad}))
    else:
        note(f"{rows:,} rows, {bad:,} of them cannot be asked")
    return exits.ROW_ERRORS if bad else exits.OK


def _already_done(output: Path, quiet: bool, as_json: bool) -> int:
    from producer.cli.screen import note

    if as_json:
        print(json.dumps({"output": str(output.resolve()), "already_complete": True}))
    elif not quiet:
        note(f"{output} is complete already: nothing to do")
    return exits.OK


def _report(report: Report, quiet: bool, as_json: bool) -> int:
    if as_json:
        print(json.dumps(_as_dict(report)))
    elif not quiet:
        for line in _summary(report):
            print(line, file=sys.stderr)
    return exits.ROW_ERRORS if report.totals.failed else exits.OK


def _summary(report: Report) -> list[str]:
    totals, counts = report.totals, report.counts
    failed = sum(totals.failed.values())
    kept = f" ({counts.kept:,} of them before)" if counts.kept else ""
    cut = f" ({totals.cut:,} cut by max_tokens)" if totals.cut else ""
    speed = counts.completion_tokens / report.seconds
    return [
        f"{totals.answered:,} answered{cut}, {failed:,} failed{kept} in {report.seconds:.1f} s",
        f"{counts.prompt_tokens:,} tokens read, {counts.completion_tokens:,} written ({speed:,.0f} tokens/s)",
        *(f"  {number:,} x {code}, first {totals.examples[code]}" for code, number in totals.failed.items()),
        f"answers: {report.places.output}",
        *([f"errors:  {report.places.errors}"] if failed else []),
    ]


def _as_dict(report: Report) -> dict[str, Any]:
    totals, counts = report.totals, report.counts
    return {
        "run": report.run,
        "rows": totals.answered + sum(totals.failed.values()),
        "answered": totals.answered,
        "cut_by_max_tokens": totals.cut,
        "failed": totals.failed,
        "kept": counts.kept,
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "seconds": round(report.seconds, 3),
        "output": str(report.places.output),
        "errors": str(report.places.errors),
    }
