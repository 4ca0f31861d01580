"""`millstream generate --check`: what of the inputs can be asked, and about how much that is. Nothing runs."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from producer.bulk.generate import faults
from producer.bulk.ids import OnBadIds, refuse_bad_ids
from producer.bulk.inputs import Inputs
from producer.bulk.lines import BadRow, where
from producer.bulk.requests import Requests
from producer.bulk.wording import Wording, named_columns
from producer.cli import exits
from producer.cli.flags import Given
from producer.cli.screen import note, note_torn
from producer.request import check_defaults
from protocol import Job

SHOWN_FAULTS = 20
BYTES_A_TOKEN = 4
"""English text under the tokenizers of today's models; there is no tokenizer here."""


def check_inputs(
    inputs: Inputs,
    sampling: Given,
    rendering: Given,
    wording: Wording,
    id_column: str | None,
    bad_ids: OnBadIds,
    as_json: bool,
) -> int:
    """Say what is wrong with which rows; the exit code.

    Raises:
        Refused: an input cannot be read, or its rows' names stop the run.
        RequestError: no row could be asked with these parameters.
    """
    wording.check()
    check_defaults(sampling, rendering)
    requests = Requests("check", sampling, None, rendering, wording)
    rows: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        inputs = inputs.fetched(Path(folder))
        inputs.check_columns(named_columns(wording, id_column))
        if bad_ids == "refuse":
            refuse_bad_ids(inputs, id_column)
        for asked in faults(inputs, requests, id_column):
            rows["rows"] += 1
            if isinstance(asked, BadRow):
                rows["bad"] += 1
                if rows["bad"] <= SHOWN_FAULTS:
                    note(f"{where(asked.file, asked.line)}: {asked.code}: {asked.message}")
            else:
                rows["prompt_tokens"] += prompt_tokens(asked.job)
                most = most_output_tokens(asked.job)
                rows["most_output_tokens"] += most or 0
                rows["rows_without_limit"] += most is None
    if rows["bad"] > SHOWN_FAULTS:
        note(f"and {rows['bad'] - SHOWN_FAULTS:,} more")
    note_torn(inputs.torn)
    _tell(rows, inputs, as_json)
    return exits.INPUT_INCOMPLETE if inputs.torn else exits.ROW_ERRORS if rows["bad"] else exits.OK


def prompt_tokens(job: Job) -> int:
    """About how many tokens a job's prompts have; exact for prompts of token ids."""
    return _tokens(job.prompt if job.prompt is not None else job.messages)


def most_output_tokens(job: Job) -> int | None:
    """How many tokens it may write; None where nothing but the model's context bounds it."""
    limit = job.params.token_limit
    return None if limit is None else limit * job.num_choices


def _tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt.encode(errors="replace")) // BYTES_A_TOKEN)
    if isinstance(prompt, int):
        return 1
    if isinstance(prompt, dict):
        return sum(map(_tokens, prompt.values()))
    return sum(map(_tokens, prompt)) if isinstance(prompt, list | tuple) else 0


def _tell(rows: Counter[str], inputs: Inputs, as_json: bool) -> None:
    if as_json:
        names = ("rows", "bad", "prompt_tokens", "most_output_tokens", "rows_without_limit")
        print(json.dumps({**{name: rows[name] for name in names}, "input_incomplete": inputs.torn}))
        return
    note(f"{rows['rows']:,} rows, {rows['bad']:,} of them cannot be asked")
    note(f"about {rows['prompt_tokens']:,} tokens to read{_to_write(rows)}")


def _to_write(rows: Counter[str]) -> str:
    most, endless = f"at most {rows['most_output_tokens']:,} to write", rows["rows_without_limit"]
    if not endless:
        return f", {most}"
    if rows["bad"] + endless == rows["rows"]:
        return "; no row has max_tokens"
    return f", {most} by the rows that have max_tokens ({endless:,} have none)"
