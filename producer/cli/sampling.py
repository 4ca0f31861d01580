"""The flags for `SamplingParams`; what of it has no flag goes through `--sampling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from producer.cli.flags import Flag, json_in, json_of


def _response_format(text: str) -> Any:
    return json_of("--response-format", text)


def _json_schema(path: Path) -> dict[str, Any]:
    schema = json_in("--json-schema", path)
    return {"type": "json_schema", "json_schema": {"name": path.stem or "schema", "schema": schema}}


def _regex(pattern: str) -> dict[str, Any]:
    if not pattern:
        raise typer.BadParameter("--regex: give text that is not empty")
    return {"type": "regex", "regex": pattern}


def _choice(texts: list[str]) -> dict[str, Any]:
    if "" in texts:
        raise typer.BadParameter("--choice: give texts that are not empty")
    return {"type": "choice", "choice": texts}


def _sampling(text: str) -> dict[str, Any]:
    value = json_of("--sampling", text)
    if not isinstance(value, dict):
        raise typer.BadParameter('--sampling: give an object, such as {"logit_bias": {"42": -100}}')
    return {name: item for name, item in value.items() if item is not None}


def _not(value: bool) -> bool:
    return not value


FLAGS = (
    "Sampling",
    (
        Flag(
            "max_tokens",
            "--max-tokens",
            int,
            "N",
            "Most tokens to generate. [default: as many as fit]",
            envvar="MILLSTREAM_MAX_TOKENS",
        ),
        Flag("min_tokens", "--min-tokens", int, "N", "Do not end before this many."),
        Flag(
            "temperature",
            "--temperature",
            float,
            "T",
            "0 is greedy. [default: 1]",
            envvar="MILLSTREAM_TEMPERATURE",
        ),
        Flag("top_p", "--top-p", float, "P", "Sample from the likeliest tokens that reach this probability."),
        Flag("top_k", "--top-k", int, "K", "Sample from this many likeliest tokens."),
        Flag("min_p", "--min-p", float, "P", "Sample from tokens at least this likely beside the likeliest."),
        Flag("presence_penalty", "--presence-penalty", float, "X", "Against tokens that are in the output."),
        Flag("frequency_penalty", "--frequency-penalty", float, "X", "The same, for each time they are."),
        Flag(
            "repetition_penalty",
            "--repetition-penalty",
            float,
            "X",
            "Against tokens of prompt and output; 1 is none.",
        ),
        Flag("seed", "--seed", int, "N", "Seed of the draws. [default: one made of the job's id or row]"),
        Flag("n", "--n", int, "N", "Choices per prompt."),
        Flag("stop", "--stop", list[str], "TEXT", "End before this text; may be repeated."),
        Flag("stop_token_ids", "--stop-token-id", list[int], "ID", "End with this token; may be repeated."),
        Flag("include_stop_str_in_output", "--include-stop", bool, None, "Show the text that ended it."),
        Flag("ignore_eos", "--ignore-eos", bool, None, "Go on past an end-of-sequence token."),
        Flag(
            "skip_special_tokens",
            "--keep-special-tokens",
            bool,
            None,
            "Show special tokens' text.",
            read=_not,
        ),
        Flag("logprobs", "--logprobs", int, "K", "Tell each token's log-probability, and K likeliest ones'."),
        Flag("prompt_logprobs", "--prompt-logprobs", int, "K", "The same for the prompt's tokens."),
        Flag("bad_words", "--bad-word", list[str], "TEXT", "Never write this; may be repeated."),
        Flag(
            "truncate_prompt_tokens",
            "--truncate-prompt-tokens",
            int,
            "N",
            "Keep only the prompt's last tokens.",
        ),
        Flag(
            "response_format",
            "--response-format",
            str,
            "JSON|@FILE",
            'What the output looks like, as in the API: {"type": "json_object"}.',
            read=_response_format,
        ),
        Flag(
            "response_format",
            "--json-schema",
            Path,
            "FILE",
            "JSON that validates against this schema.",
            read=_json_schema,
        ),
        Flag("response_format", "--regex", str, "REGEX", "Text that this matches as a whole.", read=_regex),
        Flag(
            "response_format",
            "--choice",
            list[str],
            "TEXT",
            "One of these texts; repeat it.",
            read=_choice,
        ),
        Flag(
            None,
            "--sampling",
            str,
            "JSON|@FILE",
            'Any parameters of docs/sampling.md as one object: {"logit_bias": {"42": -100}}. A flag beats it.',
            read=_sampling,
        ),
    ),
)
