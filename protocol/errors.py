"""What can go wrong, in words a user can act on.

Two families. A `RequestError` belongs to one job: it becomes the `error` of that job's result and never stops a
worker. Every other `MillstreamError` belongs to the caller of a command or of the client library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Self


class ErrorCode(StrEnum):
    """Stable names for what went wrong with one job; they stand in results, events and error files."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_LOGITS = "invalid_logits"
    NO_CANDIDATES = "no_candidates"
    ENGINE_ERROR = "engine_error"
    CRASHED_WORKER = "crashed_worker"
    LOST_PAYLOAD = "lost_payload"
    SPOILT_JOB = "spoilt_job"
    """Somebody changed its keys by hand, so that no script could go by them."""
    DEVICE_ERROR = "device_error"
    """Memory or device failed under it; another try may pass."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"


MAY_PASS = frozenset({ErrorCode.DEVICE_ERROR})
"""Errors after which a job is tried again; with every other one the next try would end as this one did."""


class MillstreamError(Exception):
    """Base of everything we raise on purpose. `str(error)` is one line fit for a user."""


class RequestError(MillstreamError):
    """One job cannot be answered; its neighbours go on."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def invalid(cls, why: str) -> Self:
        """What was asked cannot be done as it was asked."""
        return cls(ErrorCode.INVALID_REQUEST, why)


class BrokerUnreachable(MillstreamError):
    """No Redis behind the URL, or it stopped answering."""


class BadUrl(BrokerUnreachable):
    """The URL is none, or not one that we can use: nothing was tried."""


class ClientClosed(MillstreamError, RuntimeError):
    """The client was closed, before the call or under it."""


class QueueFull(MillstreamError):
    """The queue's bound on entries or bytes is reached."""


class JobConflict(MillstreamError):
    """The id is taken by a job with another payload."""


class JobNotFound(MillstreamError):
    """No such job: never submitted, or its result has expired."""

    @classmethod
    def of(cls, job_id: str) -> Self:
        """The error for the job of that id."""
        return cls(f"job {job_id}: not found; it was never submitted, or its result has expired")


class WrongState(MillstreamError):
    """A job's state does not allow what was asked of it."""


class JobFailed(MillstreamError):
    """The job ended without a completion; `result` says how."""


class ModelMismatch(MillstreamError):
    """The queue serves another model than the one offered."""


class ModelUnavailable(MillstreamError):
    """The model cannot be loaded, or does not fit; the message says what is missing."""


class OptionRefused(MillstreamError, ValueError):
    """An option cannot be had as it was given. The message names options by their Python keywords."""

    def __init__(self, why: str, ways: Sequence[Mapping[str, object]] = ()) -> None:
        """
        Args:
            why: what is wrong, with the numbers.
            ways: settings that work instead, each the options to change; None: an option to leave out.
        """
        told = ", or ".join(map(_told, ways))
        super().__init__(f"{why}: give {told}" if told else why)
        self.ways = tuple(ways)

    def as_flags(self) -> str:
        """The message for a command line: `num_kv_blocks` is `--num-kv-blocks` there.

        A name of one word is known for an option by the settings that are proposed. What stands between quotes is
        somebody's own text, and left as it is.
        """
        words = [name for way in self.ways for name in way]
        names = "|".join([r"[a-z]+(?:_[a-z]+)+", *map(re.escape, words)])
        parts = re.split(r"(?<!\w)('[^']*')(?!\w)", str(self))
        parts[::2] = [re.sub(rf"\b(?:{names})\b", _flag, part) for part in parts[::2]]
        return "".join(parts)


def _flag(name: re.Match[str]) -> str:
    return "--" + name[0].replace("_", "-")


def _told(way: Mapping[str, object]) -> str:
    return " and ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in way.items())
