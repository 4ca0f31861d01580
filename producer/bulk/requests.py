"""A row as a job: plain rows, and the lines of OpenAI's batch files.

plain    {"prompt": text or ids, "max_tokens": 64, ...other columns}      sampling parameters beside the prompt
         {"messages": [{role, content}, ...], "tools": [...], ...}        as well as what says how it is rendered
batch    {"custom_id": ..., "method": ..., "url": ..., "body": {...}}     the same fields inside `body`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any, Self

import msgspec
from pydantic import TypeAdapter, ValidationError

from broker.script import Arg
from broker.submission import job_args
from producer.bulk import openai
from producer.bulk.lines import Row
from producer.bulk.wording import Wording
from producer.nesting import DEEPEST, deeper_than
from producer.request import RENDERING, build_job, over
from protocol import ErrorCode, Job, Message, RequestError, SamplingParams
from protocol.job import CHAT_ONLY
from protocol.volume import MOST_LOG_BYTES, MOST_PAYLOAD_BYTES, most_logged

SHORT = 1 << 16
"""Characters of a question that is far from every limit of size, however JSON writes them."""
MOST_PATTERNS = 1000
"""Ways to ask that are remembered."""
_SAMPLING = frozenset(SamplingParams.model_fields)
_TEXTS = frozenset({"chat_template"})
"""Parameters that are text whatever it looks like."""
_TURN_BYTES = 64
"""What JSON adds to a turn's text."""
_TURNS: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


class RowJob(msgspec.Struct, frozen=True, gc=False):
    """The job of a row as it is submitted. Thousands wait for their turn, so there is no more of it than that."""

    args: tuple[Arg, ...]
    """As `job_args` gives them."""
    like: Job
    """A job that differs from it in id, seed and question alone."""
    prompt: Any
    messages: list[Message] | None
    """Its question, as a job has it."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """A job by itself."""
        return cls(job_args(job), job, job.prompt, job.messages)

    @property
    def id(self) -> str:
        """The job's."""
        return str(self.args[0])

    @property
    def job(self) -> Job:
        """The job, read back."""
        return Job.decode(self.args[1])  # type: ignore[arg-type]  # bytes


class _Pattern(msgspec.Struct, frozen=True):
    """What rows have in common that differ in question and seed: a checked job, and what it becomes."""

    like: Job
    fields: dict[str, Any]
    """Of a payload, that of the job or of the last one made by it."""
    params: dict[str, Any]
    """Of these."""
    rest: tuple[Arg, ...]
    """What `job_args` gives after id, payload and digest."""

    @classmethod
    def of(cls, job: RowJob) -> Self:
        """What a job becomes that was made by itself."""
        fields = msgspec.json.decode(job.args[1])  # type: ignore[arg-type]  # bytes
        params = fields.setdefault("params", {})
        return cls(job.like, fields, params, job.args[3:])

    def row_job(self, job_id: str, seed: int | None, question: _Question) -> RowJob:
        """The job with another question."""
        self.params["seed"] = seed
        self.fields["id"] = job_id
        self.fields.update(question.fields)
        payload = msgspec.json.encode(self.fields)
        args = (job_id, payload, Job.digest(payload), *self.rest)
        return RowJob(args, self.like, question.fields.get("prompt"), question.messages)


class _Question(msgspec.Struct, frozen=True):
    """A short question of nothing but text."""

    fields: dict[str, Any]
    """Of a payload."""
    messages: list[Message] | None = None


def job_id_of(run: str, position: int, digest: str) -> str:
    """The id of a row's job: the same row is the same job whenever the run submits it."""
    return f"{run}.{position}.{digest}"


def position_of(job_id: str) -> int:
    """Where the row stands whose job it is."""
    return int(job_id.rsplit(".", 2)[1])


class Requests:
    """Makes the jobs of one run."""

    def __init__(
        self,
        run: str,
        defaults: Mapping[str, Any],
        model: str | None,
        rendering: Mapping[str, Any] | None = None,
        wording: Wording = Wording(),
        known_as: str | None = None,
    ) -> None:
        """
        Args:
            run: the run's id; job ids begin with it.
            defaults: sampling parameters for rows that do not set them.
            model: refuse to be answered by a model of another name; None: whatever the queue serves.
            rendering: how the text of rows that do not say it becomes tokens; what is of chats, for chats.
            wording: how columns become a question.
            known_as: how the command names the model, which the lines of a batch file may do too; another name than
                this and the served model's own is an error of its line.
        """
        self._run = run
        self._defaults = dict(defaults)
        self._model = model
        self._known_as = known_as
        self._rendering = dict(rendering or {})
        self._wording = wording if wording != Wording() else None
        self._patterns: dict[str, _Pattern] = {}
        """By all that rows say but question and seed. A job takes 75 us to check and write, by a pattern 6."""

    def row_job(self, row: Row) -> RowJob:
        """The job of a row.

        Raises:
            RequestError: the row cannot be asked; each field is named.
        """
        columns = row.columns if self._wording is None else self._wording.question(row.columns)
        fields, defaults, model = _read(columns)
        if model is None or model == self._known_as:
            model = self._model
        given, rendering = _set(fields, _SAMPLING), _set(fields, RENDERING)
        prompt, messages = fields.get("prompt"), _without_null_members(fields.get("messages"))
        if row.kind == "typed":
            given, rendering, messages = map(_without_nulls, (given, rendering, messages))
        if row.kind == "text":
            given, rendering = _values_of(given), _values_of(rendering)
        question, seed = _short(prompt, messages), given.pop("seed", None)
        if question is None or not _is_seed(seed):
            return RowJob.of(
                self._checked(row, prompt, messages, model, defaults, _with_seed(given, seed), rendering)
            )
        shape = f"{messages is None} {given or ''} {rendering or ''} {defaults or ''} {model}"
        pattern = self._patterns.get(shape)
        if pattern is None:
            job = self._checked(row, prompt, messages, model, defaults, _with_seed(given, seed), rendering)
            return self._remember(shape, job)
        if seed is None:
            seed = self._defaults["seed"] if "seed" in self._defaults else _seed(row)
        return pattern.row_job(self._id(row), seed, question)

    def _checked(
        self,
        row: Row,
        prompt: Any,
        messages: Any,
        model: Any,
        defaults: Mapping[str, Any],
        given: Mapping[str, Any],
        rendering: Mapping[str, Any],
    ) -> Job:
        sampling = over(over(defaults, self._defaults), given)
        sampling.setdefault("seed", _seed(row))
        usual = {
            name: value
            for name, value in self._rendering.items()
            if messages is not None or name not in CHAT_ONLY
        }
        return build_job(
            prompt,
            messages,
            None,
            sampling,
            self._id(row),
            run=self._run,
            model=model,
            stream=False,
            **{**usual, **rendering},
        )

    def _remember(self, shape: str, job: Job) -> RowJob:
        """Make a job the pattern of others, unless a longer question or id could bring those over a limit."""
        row_job = RowJob.of(job)
        payload: Any = row_job.args[1]
        if 2 * len(payload) < MOST_PAYLOAD_BYTES and 2 * (most_logged(job) or 0) < MOST_LOG_BYTES:
            if len(self._patterns) == MOST_PATTERNS:
                self._patterns.clear()
            self._patterns[shape] = _Pattern.of(row_job)
        return row_job

    def _id(self, row: Row) -> str:
        return job_id_of(self._run, row.line, row.digest)


def _read(columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], Any]:
    """Where a row keeps prompt and parameters, the parameters that hold where it is silent, and the model it names:
    in a batch file; beside a plain row's prompt `model` is a column like any other.
    """
    if "prompt" in columns or "messages" in columns:
        return columns, {}, None
    if "body" not in columns:
        raise _invalid("there is neither prompt nor messages")
    openai.check_endpoint(columns)
    body = columns["body"]
    if not isinstance(body, dict):
        raise _invalid("body is not a JSON object")
    if "prompt" not in body and "messages" not in body:
        raise _invalid("body has neither prompt nor messages")
    return openai.fields_of(body), openai.defaults_of(columns.get("url"), body), body.get("model")


def _set(fields: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Those of the names that have a value; null is none."""
    if names.isdisjoint(fields):  # as in most rows
        return {}
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _short(prompt: Any, messages: Any) -> _Question | None:
    """The question, if it is short and nothing but text; None: it has to be checked with its job."""
    if messages is None:
        return _Question({"prompt": prompt}) if _is_text(prompt) and len(prompt) <= SHORT else None
    if prompt is not None or not isinstance(messages, list) or not messages:
        return None
    size = 0
    for turn in messages:
        if not isinstance(turn, dict) or not all(map(_is_text, turn.values())):
            return None
        size += _TURN_BYTES + sum(map(len, turn.values()))
    if size > SHORT:
        return None
    try:
        return _Question({"messages": messages}, _TURNS.validate_python(messages))
    except ValidationError:
        return None


def _is_text(value: Any) -> bool:
    """Whether a value is text that UTF-8 can carry; a template may write half a character."""
    if type(value) is not str:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_seed(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 64)


def _with_seed(given: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    return {**given, "seed": seed} if seed is not None else dict(given)


def _values_of(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in a table of text: what a cell says in JSON, else its text; an empty one says nothing."""
    return {name: cell if name in _TEXTS else _value_of(name, cell) for name, cell in cells.items() if cell}


def _value_of(name: str, cell: str) -> Any:
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    if name == "stop" and not isinstance(value, list):
        return cell
    return cell if deeper_than([value], DEEPEST) else value


def _without_nulls(value: Any) -> Any:
    """A value without the members that a table's schema has filled in; a turn's `content` may be null."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(below) for name, below in value.items() if below is not None or name == "content"
    }


def _without_null_members(turns: Any) -> Any:
    """Turns as a reply of OpenAI's API holds them, whose `refusal`, `audio` and `function_call` are null."""
    if not isinstance(turns, list):
        return turns
    return [
        {name: value for name, value in turn.items() if value is not None or name == "content"}
        if isinstance(turn, dict)
        else turn
        for turn in turns
    ]


def _seed(row: Row) -> int:
    """A seed from the row's place and content: the same file gives the same draws, equal prompts differ.

    48 bits, which every JSON reader keeps exact.
    """
    return int.from_bytes(hashlib.blake2b(f"{row.line} {row.digest}".encode(), digest_size=6).digest(), "big")


def _invalid(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, why)
