"""The engine's outside: what a worker hands in and what comes back. No torch here.

prepare(job) -> Request      any thread: render, tokenize, check
add(request)                 engine thread, between steps
step() -> [Delta, ...]       engine thread: one forward pass, at most one token a running sequence
abort(request_id)            engine thread, between steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocol import Fingerprint, FinishReason, Job, RequestError, SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """A job made ready: token ids, and every limit resolved against the model."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    """Most tokens to generate, already cut to what the context holds beside the prompt."""
    priority: int = 1
    """0 before 1 before 2; within one priority, in order of arrival."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens an earlier attempt has logged: prefilled with the prompt; the next one drawn follows them."""


@dataclass(slots=True)
class Delta:
    """What one step made for one choice of one request.

    Joined over a request (and after an earlier attempt's logged text), `text` is the whole output and
    `token_ids` are all sampled ids. A delta with `finish_reason` or `error` is the last of its choice.
    """

    request_id: str
    token_ids: list[int]
    text: str
    choice: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, for heartbeats and progress displays."""

    running: int
    waiting: int
    slots: int
    kv_blocks_used: int
    kv_blocks_total: int
    steps: int
    prompt_tokens: int
    """Prompt tokens computed since the start."""
    output_tokens: int
    """Tokens sampled since the start."""
    preemptions: int


class EngineCore(Protocol):
    """What a worker's model process runs: `engine.Engine`, or a dry run."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The model, as the queue records it."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can run at once."""
        ...

    def prepare(self, job: Job) -> Request:
        """Render and tokenize a job; safe on any thread.

        Raises:
            RequestError: the job can never run here (empty, too long, unknown ids, another model).
        """
        ...

    def add(self, request: Request) -> None:
        """Queue a request for admission; it may run from the next step on.

        Raises:
            RequestError: it can never fit, or its id is already here.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state and free what it holds; no delta follows. False if it is not here."""
        ...

    def step(self) -> list[Delta]:
        """Run one step. Empty when there is no work."""
        ...

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        ...

    def stats(self) -> EngineStats:
        """Counters as of the last step."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that one step computes.

    sequence   p p p p p p p o o          p prompt, o output so far
    in the KV  ^^^^^                      start = 5
                    ^^^^^^^ token_ids     positions 5 .. 8
    """

    token_ids: Sequence[int]
    start: int
    """Position of the first of them: how many tokens of the sequence the KV already holds."""
    block_table: Sequence[int]
    """Blocks of the sequence in order; they cover `start + len(token_ids)` tokens."""
    wants_logits: bool
    """Whether a token is drawn after the last of them (False inside a prompt)."""


class Runner(Protocol):
    """The model half: it computes chunks against KV it owns and knows nothing of requests.

    The engine decides which blocks belong to whom; the runner reads and writes only where a block table
    points. Blocks are numbered 0 .. num_kv_blocks - 1; the engine hands out every one of them.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids at or above it are refused before they get here."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens a sequence may hold, prompt and output together."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def num_kv_blocks(self) -> int:
        """Blocks in the KV store."""
        ...

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks of one step and write their KV.

        Returns:
            Logits `[chunks that want logits, vocab_size]`, floating point, in the order of the chunks.
        """
        ...


class PromptEncoder(Protocol):
    """Turns a job's prompt into token ids: `engine.prompts.Prompts`."""

    def encode(self, job: Job) -> list[int]:
        """Render the chat or take the text, and tokenize; token-id prompts come back as they are.

        Safe on any thread.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        ...
