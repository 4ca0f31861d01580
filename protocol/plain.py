"""Jobs as most of them are, read without pydantic: those that differ in id, prompt and seed from one read before.

    {"id":"r.1","prompt":"text","params":{"seed":7,"max_tokens":9},"run":"r","stream":false}
           ^            ^                      ^      the rest is the same, byte by byte, as in an earlier one

What is read here is what `Job.decode` makes of it, to the last field, for that has read the rest; what that refuses
is not read here. A worker reads every payload once: a row of a bulk run took pydantic 15 us, where this takes 7.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from protocol.job import Job

M = TypeVar("M", bound=BaseModel)

LARGEST_REST = 4096
"""Bytes; a larger rest is not remembered: a schema may have megabytes."""
MOST_RESTS = 64
_ID = re.compile(r"[A-Za-z0-9._:@-]{1,200}")
_SEED = re.compile(rb"0|[1-9][0-9]{0,18}")
"""A seed is below 2**64: all numbers of 19 digits are."""


class _Payload(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A payload with a text for a prompt, and fields that such jobs have, in the order of `Job.encode`."""

    id: str
    prompt: str
    add_special_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    split_special_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    params: dict[str, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    priority: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tenant: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    run: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    result_ttl_s: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_retries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_PAYLOAD = msgspec.json.Decoder(_Payload)
_ENCODER = msgspec.json.Encoder()


def read_plain(payload: bytes) -> Job | None:
    """The job of a stored payload; None where it is none of the plain ones, or no job."""
    try:
        plain = _PAYLOAD.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    job_id, prompt = plain.id, plain.prompt
    if _ENCODER.encode(plain) != payload or not _ID.fullmatch(job_id):
        return None  # written otherwise than we do, where a field may be named twice
    seed = _take_seed(plain.params)
    plain.id, plain.prompt = "any", ""
    rest = _ENCODER.encode(plain)
    like = _read(rest) if len(rest) <= LARGEST_REST else None
    if like is None:
        return None
    job = _made_like(like, id=job_id, prompt=prompt)
    if seed is not None:
        job.__dict__["params"] = _made_like(like.params, seed=seed)
    return job


def _take_seed(params: dict[str, msgspec.Raw] | msgspec.UnsetType) -> int | None:
    """The seed, taken out of the parameters; None for none, or for what may be no seed, which stays."""
    if params is msgspec.UNSET or "seed" not in params or not _SEED.fullmatch(params["seed"]):
        return None
    return int(bytes(params.pop("seed")))


@lru_cache(maxsize=MOST_RESTS)
def _read(payload: bytes) -> Job | None:
    """The job of a payload as pydantic reads it."""
    try:
        return Job.decode(payload)
    except ValidationError:
        return None


def _made_like(like: M, **given: Any) -> M:
    """A copy with other values, which are checked: `model_copy` takes 5 us to do so."""
    made = like.__new__(type(like))
    object.__setattr__(made, "__dict__", {**like.__dict__, **given})
    object.__setattr__(made, "__pydantic_fields_set__", {*like.model_fields_set, *given})
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made
