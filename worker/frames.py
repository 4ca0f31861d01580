"""What the parent and the model process say to each other, over two pipes: MessagePack, each frame after its length.

    8 bytes, little-endian   that many bytes
    length of the frame      [["Run", key, payload, written], ...]     arrays: no field's name travels

Parent to model process: `Load` once, then `Run` and `Drop`, a list of all that is said in one go. Model process to
parent: `Ready` or `Failed`, then a `Step` after every step that has something to tell, and `Lost` as the last word
where its device has failed. The pipes are bounded by the operating system: a parent that waits for a slow Redis reads
no more, so the model process waits at its next write and memory does not grow.

A step of 64 rows takes msgspec 9 us to write and 31 to read and check; JSON and dataclasses took 295 and 190.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from protocol import FinishReason, TokenLogprob


class Load(msgspec.Struct, array_like=True, tag=True):
    """First word: which engine to open."""

    model: str
    options: dict[str, Any]


class Run(msgspec.Struct, array_like=True, tag=True):
    """Run a job, going on after what earlier attempts have logged.

    Jobs go by `key` here, which names one lease of one job (`worker.held.Held`): what is still on its way for a lease
    that was dropped can not be taken for the next one's.
    """

    key: str
    payload: bytes
    """As it was stored; nobody has looked at it since."""
    written: Sequence[tuple[list[int], bool]]
    """(token ids, whether it ended) of each choice; those after the last one are untouched."""
    alone: bool = False
    """A suspect: its arrival is told before anything is done with it."""


class Drop(msgspec.Struct, array_like=True, tag=True):
    """Forget a job: cancelled, or its lease is lost."""

    key: str


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The model is loaded."""

    fingerprint: dict[str, str]
    slots: int
    load_seconds: float


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The model cannot be loaded; trying again will not help."""

    message: str
    by_options: bool = False
    """Other options would have helped, and the message says which, as flags of the command line."""


class Lost(msgspec.Struct, array_like=True, tag=True):
    """The device fails again and again: the model process ends itself, and none of its jobs is to blame."""

    message: str


class Begun(msgspec.Struct, array_like=True, gc=False):
    """A job was accepted by the engine."""

    key: str
    prompt_tokens: int
    num_choices: int
    seed: int
    stream: bool


class Piece(msgspec.Struct, array_like=True, gc=False):
    """What a step made for one choice. Its job is over with `last`, and with an error."""

    key: str
    choice: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    text: str = ""
    last: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error_code: str | None = None
    error_message: str | None = None


class Step(msgspec.Struct, array_like=True, tag=True):
    """What happened since the last frame, in this order: acceptances, then pieces."""

    begun: list[Begun]
    pieces: list[Piece]
    running: int
    waiting: int
    output_tokens: int
    counters: dict[str, int | float] | None = None
    """The engine's (`worker.figures.Counters`), with one frame a second. A float alone would make 3 jobs 3.0."""
    arrived: list[str] = msgspec.field(default_factory=list)
    """Keys of suspects that are here: what happens to the process from now on may be their doing."""


ToModel = Load | Run | Drop
FromModel = Ready | Failed | Step | Lost

HEAD_BYTES = 8
_HEAD = struct.Struct("<Q")
_ENCODER = msgspec.msgpack.Encoder()
_TO_MODEL: msgspec.msgpack.Decoder[list[ToModel]] = msgspec.msgpack.Decoder(list[ToModel])
_FROM_MODEL: msgspec.msgpack.Decoder[FromModel] = msgspec.msgpack.Decoder(FromModel)


def encode(said: Sequence[ToModel] | FromModel) -> bytes:
    """A frame with its length in front."""
    body = _ENCODER.encode(said)
    return _HEAD.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """How many bytes follow the first `HEAD_BYTES` of a frame."""
    length: int = _HEAD.unpack(head)[0]
    return length


def read(source: BinaryIO) -> bytes | None:
    """The next frame without its length, waiting for it; None once there is no whole one."""
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    length = length_of(head)
    body = source.read(length)
    return body if len(body) == length else None


def decode_to_model(body: bytes) -> list[ToModel]:
    """Read a frame of the parent's."""
    return _TO_MODEL.decode(body)


def decode_from_model(body: bytes) -> FromModel:
    """Read a frame of the model process's."""
    return _FROM_MODEL.decode(body)
