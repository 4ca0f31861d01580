"""What the two clients share: a caller's arguments made into a job, and a submit's answer made into an outcome."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from broker import calls
from broker.calls import Limits, Submitted
from broker.clearing import What
from broker.keys import Keys
from broker.parts import in_parts
from broker.script import Call
from producer import ranges
from producer.nesting import DEEPEST, deeper_than
from protocol import (
    PRIORITIES,
    Job,
    JobConflict,
    JobFailed,
    Message,
    Priority,
    QueueFull,
    RequestError,
    Result,
    SamplingParams,
    describe_validation,
)
from protocol.job import CHAT_ONLY, JobId, Name
from protocol.response_format import JsonSchemaFormat
from protocol.volume import MOST_LOG_BYTES, MOST_PAYLOAD_BYTES, most_logged

LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
SUBMIT_AT_ONCE = 500
"""Jobs in one pipeline."""
SUBMIT_BYTES_AT_ONCE = 4 << 20
"""Bytes of their payloads; the largest job has as many. What fails on the way is sent again from the pipeline's
beginning, so over a slow line 500 jobs of 100 KB would hardly ever arrive.
"""

RENDERING = CHAT_ONLY | {"add_special_tokens", "split_special_tokens"}
"""Fields of a job that say how its text becomes tokens."""

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Text or token ids; a list of either is that many prompts."""
Messages = Sequence[Message | Mapping[str, Any]]

_ID: TypeAdapter[str] = TypeAdapter(JobId)
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0


def build_job(
    prompt: Prompt | None,
    messages: Messages | None,
    params: SamplingParams | None,
    sampling: Mapping[str, Any],
    job_id: str | None,
    **fields: Any,
) -> Job:
    """A job from a caller's arguments; `fields` go to `Job`, where they say something.

    Raises:
        RequestError: a value is out of its range, or the job is too large; each field is named.
    """
    if params is not None and sampling:
        raise RequestError.invalid(f"give params, or {', '.join(sampling)} by name, not both")
    params = params if params is not None else sampling_params(sampling)
    try:
        job = Job(
            id=uuid.uuid4().hex if job_id is None else check_id(job_id),
            prompt=_prompt(prompt),
            messages=_messages(messages),
            params=params,
            **{name: value for name, value in fields.items() if value != Job.model_fields[name].default},
        )
    except ValidationError as error:
        raise RequestError.invalid(describe_validation(error)) from None
    check_limits(job)
    return job


def check_defaults(sampling: Mapping[str, Any], rendering: Mapping[str, Any]) -> None:
    """Refuse what would be wrong in every row of a run.

    Raises:
        RequestError: naming the parameter or the field.
    """
    build_job(None, [{"role": "user", "content": ""}], None, sampling, "check", **rendering)


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The parameters, checked.

    Raises:
        RequestError: there is none of a name, or a value is out of its range; each is named.
    """
    try:
        return SamplingParams(**given)
    except ValidationError as error:
        raise RequestError.invalid(ranges.describe(error)) from None


def over(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of which `given` beat `defaults`, those that say the same under another name too."""
    beaten = set(given)
    if beaten & {"max_tokens", "max_completion_tokens"}:
        beaten |= {"max_tokens", "max_completion_tokens"}
    if "logprobs" in beaten:
        beaten.add("top_logprobs")
    return {**{name: value for name, value in defaults.items() if name not in beaten}, **given}


def _prompt(prompt: Any) -> Any:
    """Any sequence as a list, as JSON would have it."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    if not _is_list(prompt):
        raise RequestError.invalid(
            f"prompt: give text or a list of token ids, or a list of either, not {type(prompt).__name__}"
        )
    return [list(one) if _is_list(one) else one for one in prompt]


def _messages(messages: Any) -> list[Any] | None:
    if messages is None:
        return None
    if not _is_list(messages):
        raise RequestError.invalid(f"messages: give a list of messages, not {type(messages).__name__}")
    return list(messages)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def check_id(job_id: str) -> str:
    """The id, if a job can have it.

    Raises:
        RequestError: none can.
    """
    try:
        return _ID.validate_python(job_id)
    except ValidationError:
        raise RequestError.invalid(
            f"job id {job_id!r}: ids are 1 to 200 letters, digits, '.', '_', ':', '@' and '-'"
        ) from None


def in_pipelines(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """The jobs in order, as many at a time as are sent together.

    Raises:
        As `check_limits`.
    """
    given: Any = jobs
    if isinstance(given, Job) or not isinstance(given, Iterable):
        raise RequestError.invalid(f"jobs: give jobs, one after the other, not {type(jobs).__name__}")
    return in_parts(map(_job, jobs), check_limits, SUBMIT_AT_ONCE, SUBMIT_BYTES_AT_ONCE)


def _job(one: Any) -> Job:
    if not isinstance(one, Job):
        raise RequestError.invalid(f"jobs: each is a Job, not {type(one).__name__}")
    return one


def check_limits(job: Job) -> int:
    """Refuse a job that is too large, or whose answer could be; the bytes of its payload.

    Raises:
        RequestError: its payload or its worst-case log is over the limit, or JSON in UTF-8 cannot carry it.
    """
    _check_json(job)
    try:
        size = len(job.encode())
    except PydanticSerializationError:  # pydantic lets a lone surrogate in and not out
        raise RequestError.invalid(
            "its text holds half a character (a lone surrogate), which UTF-8 cannot carry"
        ) from None
    if size > MOST_PAYLOAD_BYTES:
        raise RequestError.invalid(f"the job has {size:,} bytes; the limit is {MOST_PAYLOAD_BYTES:,} (4 MiB)")
    logged = most_logged(job) or 0
    if logged > MOST_LOG_BYTES:
        choices = "1 choice" if job.num_choices == 1 else f"{job.num_choices:,} choices"
        raise RequestError.invalid(
            f"{choices} of {job.params.token_limit:,} tokens may have {logged:,} bytes to tell"
            f"{' with their log-probabilities' if job.params.num_logprobs is not None else ''}; the limit is "
            f"{MOST_LOG_BYTES:,} (256 MiB): ask for fewer tokens, choices or alternatives"
        )
    return size


def limits_call(keys: Keys, max_entries: int | None, max_bytes: int | None) -> Call[Limits]:
    """Set or ask a queue's bounds.

    Raises:
        RequestError: a bound is below 0, or no whole number.
    """
    for name, most in (("max_entries", max_entries), ("max_bytes", max_bytes)):
        if isinstance(most, bool) or not isinstance(most, int | float | None):
            raise RequestError.invalid(f"{name}: give a whole number, not {most!r}")
        if most is not None and not 0 <= most <= 1 << 53:
            raise RequestError.invalid(
                f"{name} is {most}: give a number from 1 to {1 << 53:,}, or 0 for the default"
            )
        if isinstance(most, float):
            raise RequestError.invalid(f"{name}: give a whole number, not {most!r}")
    return calls.limits(keys, max_entries, max_bytes)


def weight_call(keys: Keys, tenant: str, weight: float) -> Call[dict[str, float]]:
    """Set a tenant's weight.

    Raises:
        RequestError: no tenant can have that name or that weight.
    """
    _check_tenant(tenant)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RequestError.invalid(f"weight: give a number, not {weight!r}")
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise RequestError.invalid(
            f"weight {weight:g}: give {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; 1 is what every tenant has"
        )
    return calls.weights(keys, tenant, weight)


def jobs_asked_for(priority: Priority | None, tenant: str | None, running: bool) -> What:
    """Which jobs of a queue are meant.

    Raises:
        RequestError: no job can have that priority or tenant.
    """
    if priority is not None and priority not in PRIORITIES:
        raise RequestError.invalid(
            f"priority {priority!r}: give {', '.join(PRIORITIES[:-1])} or {PRIORITIES[-1]}"
        )
    if tenant is not None:
        _check_tenant(tenant)
    return What(priority, tenant, running)


def _check_tenant(tenant: str) -> None:
    try:
        TypeAdapter(Name).validate_python(tenant)
    except ValidationError:
        raise RequestError.invalid(
            f"tenant {tenant!r}: use 1 to 100 letters, digits, '.', '_', '@' and '-'"
        ) from None


def _check_json(job: Job) -> None:
    """Refuse what JSON cannot carry in fields that hold any JSON: pydantic writes NaN as null, a set as a list.

    Raises:
        RequestError: naming the field.
    """
    wanted = job.params.response_format
    schema = wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None
    tool_calls = [message.tool_calls for message in job.messages or () if message.tool_calls]
    for field, value in (
        ("tools", job.tools),
        ("chat_template_kwargs", job.chat_template_kwargs),
        ("messages: tool_calls", tool_calls),
        ("response_format.json_schema.schema", schema),
    ):
        if value:
            _check_value(field, value)


def _check_value(field: str, value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise RequestError.invalid(
            f"{field}: half a character (a lone surrogate), which UTF-8 cannot carry"
        ) from None
    except RecursionError:
        raise RequestError.invalid(f"{field}: nested more than {DEEPEST} levels deep") from None
    except (TypeError, ValueError) as error:  # NaN, an object of Python's, a list in itself
        raise RequestError.invalid(f"{field}: JSON cannot carry it: {error}") from None
    if text.count("[") + text.count("{") > DEEPEST and deeper_than(value, DEEPEST):
        raise RequestError.invalid(f"{field}: nested more than {DEEPEST} levels deep")


def not_taken(jobs: Sequence[Job], answers: Sequence[Submitted]) -> tuple[list[Job], Submitted | None]:
    """The jobs a full queue did not take, and its answer to the first of them.

    Raises:
        JobConflict: an id belongs to another job.
    """
    left: list[Job] = []
    full: Submitted | None = None
    for job, answer in zip(jobs, answers, strict=True):
        if answer.outcome == "conflict":
            raise JobConflict(
                f"job {job.id}: this id is taken by a job with another prompt or other parameters "
                f"({answer.state}); choose another id"
            )
        if answer.outcome == "full":
            left.append(job)
            full = full or answer
    return left, full


def queue_full(queue: str, answer: Submitted) -> QueueFull:
    """What to raise when the queue stays full."""
    return QueueFull(
        f"queue {queue} is full: {answer.entries:,} of {answer.max_entries:,} jobs, "
        f"{answer.bytes:,} of {answer.max_bytes:,} bytes; try again later, or give a time to wait"
    )


def memory_full(queue: str, error: Exception) -> QueueFull:
    """What to raise when the server has no memory for a job and gets none: to who submits, that is a full queue."""
    return QueueFull(
        f"queue {queue} takes no jobs: the server's memory is full ({error}); raise its maxmemory, delete results, "
        "or give a time to wait"
    )


def waits(wait_s: float | None) -> Iterator[float]:
    """Seconds to sleep before each next try, until `wait_s` are over. A full queue announces no room."""
    deadline = time.monotonic() + (wait_s or 0.0)
    pause_s = _FIRST_WAIT_S
    while (left_s := deadline - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, _LONGEST_WAIT_S)


def unless_failed(result: Result) -> Result:
    """The result of a job that succeeded.

    Raises:
        JobFailed: it ended otherwise.
    """
    if result.state == "succeeded":
        return result
    why = f"{result.error.code}: {result.error.message}" if result.error else "no reason is recorded"
    raise JobFailed(f"job {result.id}: {result.state}: {why}")
