"""What the parent and the model process say to each other: one JSON value a line, over two pipes.

Parent to model process: `Load` once, then `Run` and `Drop`. Model process to parent: `Ready` or `Failed`, then a
`Step` after every step that has something to tell. The pipes are bounded by the operating system: a parent that
waits for a slow Redis reads no more, so the model process waits at its next write and memory does not grow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from protocol import FinishReason, TokenLogprob


@dataclass(slots=True)
class Load:
    """First word: which engine to open."""

    model: str
    options: dict[str, Any]


@dataclass(slots=True)
class Run:
    """Run a job, going on after what earlier attempts have logged.

    Jobs go by `key` here, which names job and attempt: what is still on its way for an attempt that was dropped can
    not be taken for the next one's.
    """

    key: str
    payload: str
    written: Sequence[tuple[list[int], bool]]
    """(token ids, whether it ended) of each choice; those after the last one are untouched."""


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
    by_options: bool = False
    """Other options would have helped, and the message says which."""


@dataclass(slots=True)
class Begun:
    """A job was accepted by the engine."""

    key: str
    prompt_tokens: int
    num_choices: int
    seed: int
    stream: bool


@dataclass(slots=True)
class Piece:
    """What a step made for one choice. Its job is over with `last`, and with an error."""

    key: str
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
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
    counters: dict[str, float] | None = None
    """The engine's (`worker.figures.Counters`), with one frame a second."""


ToModel = Load | Run | Drop
FromModel = Ready | Failed | Step


def encode(frame: ToModel | Ready | Failed) -> bytes:
    """A frame as one line."""
    return _line(
        {"t": type(frame).__name__} | {part.name: getattr(frame, part.name) for part in fields(frame)}
    )


def encode_step(step: Step) -> bytes:
    """A step as one line; rows are arrays, since one is written at every step."""
    return _line(
        {
            "t": "Step",
            "b": [[b.key, b.prompt_tokens, b.num_choices, b.seed, b.stream] for b in step.begun],
            "p": [_row(piece) for piece in step.pieces],
            "s": [step.running, step.waiting, step.output_tokens, *filter(None, [step.counters])],
        }
    )


def _row(p: Piece) -> list[Any]:
    """A piece's fields in their order; what is absent at the end, as it mostly is, is left out."""
    row = [p.key, p.choice, p.token_ids, p.text, p.last, p.finish_reason, p.stop_reason]
    row += [p.logprobs, p.prompt_logprobs, p.error_code, p.error_message]
    while row[-1] is None or row[-1] is False:
        row.pop()
    return row


def decode_to_model(line: bytes) -> ToModel:
    """Read a frame of the parent's."""
    said = json.loads(line)
    kinds: dict[str, type[ToModel]] = {"Load": Load, "Run": Run, "Drop": Drop}
    return kinds[said.pop("t")](**said)


def decode_from_model(line: bytes) -> FromModel:
    """Read a frame of the model process's."""
    said = json.loads(line)
    kind = said.pop("t")
    if kind == "Ready":
        return Ready(**said)
    if kind == "Failed":
        return Failed(**said)
    return Step([Begun(*row) for row in said["b"]], [Piece(*row) for row in said["p"]], *said["s"])


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
