"""`millstream generate`."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.cli import exits, options, rows
from producer.cli.flags import Given, spread
from producer.cli.options import one_of
from producer.cli.rendering import FLAGS as RENDERING
from producer.cli.rows import BAD_IDS, FORMATS, OUTPUT_FORMATS, ROW_ORDERS
from producer.cli.sampling import FLAGS as SAMPLING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from producer.bulk.generate import DoneBefore, Order, Report
    from producer.bulk.interrupt import Interrupt


@spread(rendering=RENDERING, sampling=SAMPLING)
def generate(
    rendering: Given,
    sampling: Given,
    sources: rows.Sources,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help=rows.OUTPUT_HELP),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(OUTPUT_FORMATS),
            help="How OUT and the error file are written; openai: as by OpenAI's Batch API. [default: by OUT's name]",
        ),
    ] = None,
    row_order: rows.RowOrderName = "input",
    input_format: rows.InputFormat = None,
    prompt_column: rows.PromptColumn = None,
    prompt_template: rows.PromptTemplate = None,
    system: rows.System = None,
    chat: rows.Chat = False,
    id_column: rows.IdColumn = None,
    bad_ids: rows.BadIdsName = "refuse",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="M",
            envvar="MILLSTREAM_MODEL",
            help="With neither --queue nor a Redis configured: start a worker with this model for the time of the "
            "run. Else: refuse to be answered by a model of another name.",
        ),
    ] = None,
    worker_flags: Annotated[
        str | None,
        typer.Option(
            metavar="FLAGS",
            help="Flags of `millstream worker` for that worker: '--kv-dtype bfloat16 --max-num-seqs 32'.",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="NAME", envvar="MILLSTREAM_QUEUE", help="Name of the queue. [default: default]"),
    ] = None,
    redis_url: options.RedisUrl = None,
    window: rows.Window = 2000,
    plan: rows.Plan = True,
    redis_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long the server may be away.")
    ] = 60.0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="OUT is not of Millstream, or its manifest is gone: take the rows in it as done."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew; OUT is replaced at the end.")
    ] = False,
    redo_changed: Annotated[
        bool,
        typer.Option(
            "--redo-changed", help="Go on with other parameters: rows that they change are asked again."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only say which rows cannot be asked, and about how much the rest is."),
    ] = False,
) -> None:
    """Answer every row of the inputs. Interrupted at any moment, the same command goes on.

    Exit code 3: some rows have errors; 4: the input ended early; 1: it had to stop, and the same command goes on.
    """
    on_bad_ids = one_of("--bad-ids", bad_ids, BAD_IDS)
    written_as = one_of("--format", output_format, OUTPUT_FORMATS)
    in_order = one_of("--order", row_order, ROW_ORDERS)
    from producer.bulk.inputs import find_inputs

    wording = rows.wording(prompt_column, prompt_template, system, chat)
    inputs = find_inputs(sources, one_of("--input-format", input_format, FORMATS))
    if check:
        from producer.cli.checking import check_inputs

        raise typer.Exit(check_inputs(inputs, sampling, rendering, wording, id_column, on_bad_ids, as_json))
    if output is None:
        raise typer.BadParameter("give -o OUT (or --check)")
    _check_together(resume, overwrite, redo_changed)
    interrupt = _listening()
    from producer.bulk.generate import Order
    from producer.bulk.own_worker import read_flags

    order = Order(
        inputs=inputs,
        output=output,
        format=written_as,
        row_order=in_order,
        defaults=sampling,
        rendering=rendering,
        wording=wording,
        id_column=id_column,
        bad_ids=on_bad_ids,
        model=model,
        worker_flags=read_flags(worker_flags or ""),
        queue=queue,
        redis_url=redis_url,
        window=window,
        plan=plan,
        patience_s=redis_timeout,
        resume=resume,
        overwrite=overwrite,
        redo_changed=redo_changed,
        quiet=quiet,
    )
    raise typer.Exit(_run(order, interrupt, as_json))


def _check_together(resume: bool, overwrite: bool, redo_changed: bool) -> None:
    for flag, given in (("--resume", resume), ("--redo-changed", redo_changed)):
        if given and overwrite:
            raise typer.BadParameter(f"{flag} keeps what --overwrite would throw away: give one of them")


def _listening() -> Interrupt:
    """Hears Ctrl-C from now on: what a run imports takes a second."""
    from producer.bulk.interrupt import Interrupt

    interrupt = Interrupt()
    interrupt.listen()
    return interrupt


def _run(order: Order, interrupt: Interrupt, as_json: bool) -> int:
    """Run it, and tell how it went; the exit code."""
    from producer.bulk.generate import Report
    from producer.bulk.generate import generate as run
    from producer.cli.screen import note

    _collect_rarely()
    try:
        report = run(order, interrupt)
    except KeyboardInterrupt:
        note("interrupted: the same command goes on from here")
        return exits.INTERRUPTED
    if isinstance(report, Report):
        return _report(report, order.quiet, as_json)
    return _already_done(report, order.output, order.quiet, as_json)


def _collect_rarely() -> None:
    """Keep Python's collector from thousands of rows that come and go, none of them in a cycle: it took a quarter of
    the command's time (117 us a row, 89 like this)."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _already_done(done: DoneBefore, output: Path, quiet: bool, as_json: bool) -> int:
    from producer.cli.screen import note, note_torn

    if as_json:
        print(
            json.dumps(
                {
                    "output": str(output.resolve()),
                    "already_complete": True,
                    "input_incomplete": list(done.torn),
                    "failed": done.failed,
                }
            )
        )
    elif not quiet:
        failed = f"; of its rows {done.failed:,} failed" if done.failed else ""
        note(f"{output} is complete already: nothing to do{failed}")
    note_torn(done.torn)
    return _code(done.torn, done.failed)


def _code(torn: Sequence[str], failed: int) -> int:
    if torn:
        return exits.INPUT_INCOMPLETE
    return exits.ROW_ERRORS if failed else exits.OK


def _report(report: Report, quiet: bool, as_json: bool) -> int:
    from producer.cli.screen import note_torn

    if as_json:
        print(json.dumps(_as_dict(report)))
    elif not quiet:
        for line in _summary(report):
            print(line, file=sys.stderr)
    note_torn(report.torn)
    return _code(report.torn, sum(report.totals.failed.values()))


def _summary(report: Report) -> list[str]:
    totals, counts = report.totals, report.counts
    failed = sum(totals.failed.values())
    kept = f" ({counts.kept:,} of them before)" if counts.kept else ""
    cut = f" ({totals.cut:,} cut by max_tokens)" if totals.cut else ""
    return [
        f"{totals.answered:,} answered{cut}, {failed:,} failed{kept} in {report.seconds:.1f} s",
        *([_tokens(report)] if counts.ended else []),
        *(f"  {number:,} x {code}, first {totals.examples[code]}" for code, number in totals.failed.items()),
        f"answers: {report.places.output}",
        *([f"errors:  {report.places.errors}"] if failed else []),
    ]


def _tokens(report: Report) -> str:
    written = report.counts.completion_tokens
    a_second = written / report.seconds
    speed = f"{a_second:,.0f}" if a_second >= 10 else f"{a_second:.1f}"
    return f"{report.counts.prompt_tokens:,} tokens read, {written:,} written ({speed} tokens/s)"


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
        "input_incomplete": list(report.torn),
    }
