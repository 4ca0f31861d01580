"""What the parent and the model process say to each other: one JSON value a line, over two pipes.

Parent to model process: `Load` once, then `Run` and `Drop`. Model process to parent: `Ready` or `Failed`, then a
`Step` after every step that has something to tell. The pipes are bounded by the operating system: a parent that
waits for a slow Redis reads no more, so the model process waits at its next write and memory does not grow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FRAME = 64 * 1024 * 1024
"""Longest line, in bytes; payloads are bounded far below it when they are submitted."""


@dataclass(slots=True)
class Load:
    """First word: which engine to open."""

    model: str
    options: dict[str, Any]


@dataclass(slots=True)
class Run:
    """Run a job, going on after the tokens that earlier attempts have logged.

    Jobs go by `key` here, which names job and attempt: what is still on its way for an attempt that was dropped can
    not be taken for the next one's.
    """

    key: str
    payload: str
    output_token_ids: list[int]


@dataclass(slots=True)
class Drop:
    """Forget a job: cancelled, or its lease is lost."""

    key: str


@dataclass(slots=True)
class Ready:
    """The model is loaded."""

    fingerprint: dict[str, str]
    slots: int
    load_seconds: float


@dataclass(slots=True)
class Failed:
    """The model cannot be loaded; trying again will not help."""

    message: str


@dataclass(slots=True)
class Begun:
    """A job was accepted by the engine."""

    key: str
    prompt_tokens: int
    seed: int
    stream: bool


@dataclass(slots=True)
class Piece:
    """New tokens of one choice, or the error that ends its job."""

    key: str
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)
class Step:
    """What happened since the last frame, in this order: acceptances, then pieces."""

    begun: list[Begun]
    pieces: list[Piece]
    running: int
    waiting: int
    output_tokens: int


ToModel = Load | Run | Drop
FromModel = Ready | Failed | Step


def encode(frame: ToModel | Ready | Failed) -> bytes:
    """A frame as one line."""
    return _line({"t": type(frame).__name__, **asdict(frame)})


def encode_step(step: Step) -> bytes:
    """A step as one line; rows are arrays, since one is written at every step."""
    return _line(
        {
            "t": "Step",
            "b": [[b.key, b.prompt_tokens, b.seed, b.stream] for b in step.begun],
            "p": [
                [
                    p.key,
                    p.choice,
                    p.token_ids,
                    p.text,
                    p.finish_reason,
                    p.stop_reason,
                    p.error_code,
                    p.error_message,
                ]
                for p in step.pieces
            ],
            "s": [step.running, step.waiting, step.output_tokens],
        }
    )


def decode_to_model(line: bytes) -> ToModel:
    """Read a frame of the parent's."""
    fields = json.loads(line)
    kinds: dict[str, type[ToModel]] = {"Load": Load, "Run": Run, "Drop": Drop}
    return kinds[fields.pop("t")](**fields)


def decode_from_model(line: bytes) -> FromModel:
    """Read a frame of the model process's."""
    fields = json.loads(line)
    kind = fields.pop("t")
    if kind == "Ready":
        return Ready(**fields)
    if kind == "Failed":
        return Failed(**fields)
    return Step([Begun(*row) for row in fields["b"]], [Piece(*row) for row in fields["p"]], *fields["s"])


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
