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

from protocol import (
    Fingerprint,
    FinishReason,
    Job,
    RequestError,
    ResponseFormat,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class DeviceLost(Exception):
    """The device fails again and again: nothing is told any more, and the process should be started anew."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an earlier attempt has logged of one choice."""

    token_ids: tuple[int, ...] = ()
    ended: bool = False
    """The choice has its end already; nothing more is made for it."""


@dataclass(slots=True)
class Request:
    """A job made ready: token ids, and every limit and word resolved against the model.

    prompts [p0, p1], n = 2      choices 0 1 answer p0, choices 2 3 answer p1

    Whoever had it prepared may give it another `id`, and what was `written` before, until it is added.
    """

    id: str
    prompts: tuple[Sequence[int], ...]
    params: SamplingParams
    seed: int
    max_tokens: tuple[int, ...]
    """Most tokens to generate after each prompt, already cut to what the context holds beside it."""
    priority: int = 1
    """0 before 1 before 2; within one priority, in order of arrival."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of each form of each barred word."""
    grammar: Grammar | None = None
    written: tuple[Written, ...] = ()
    """One a choice, where an earlier attempt got anywhere: prefilled with the prompt, and gone on from."""

    def prompt_of(self, choice: int) -> int:
        """Number of the prompt that a choice answers."""
        return choice // self.params.n

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, however many choices it has."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class Delta:
    """What one step made for one choice of one request.

    Joined over a choice (and after an earlier attempt's logged text), `text` is the whole output and `token_ids` are
    all sampled ids. A delta with `finish_reason` is the last of its choice; one with `last` is the last of its
    request. An `error` ends the request, whatever its other choices are at.
    """

    request_id: str
    token_ids: list[int]
    text: str
    choice: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    last: bool = False
    logprobs: list[TokenLogprob] | None = None
    """One an id, where asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first token of a prompt's first choice, where asked for."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where the time of steps went. On a GPU what `forward` has started may be waited for in `sample`."""

    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    output: float = 0.0
    """Text, stop strings, ends."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, for heartbeats and progress displays."""

    running: int
    waiting: int
    slots: int
    kv_blocks_used: int
    kv_blocks_total: int
    steps: int
    slot_steps: int
    """Slots held, summed over all steps: their use is this over `steps * slots`."""
    prompt_tokens: int
    """Prompt tokens computed since the start."""
    cached_tokens: int
    """Prompt tokens whose KV was there already, of another request or another choice."""
    output_tokens: int
    """Tokens sampled since the start."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again after a preemption."""
    padding_rows: int
    """Rows computed that were no token of anybody: what fills up a CUDA graph's batch, and rows of a step that was
    launched before it was known that their sequence had ended."""
    graph_steps: int
    """Steps that were a recorded CUDA graph's: their share is this over `steps`."""
    evictions: int
    """Blocks whose cached prefix was given up for room."""
    kv_tokens_allocated: int
    """Tokens that the blocks in use could hold, summed over all steps: over the tokens of `steps * kv_blocks_total`
    blocks, the use of the pool."""
    kv_tokens_unused: int
    """How many of those held none: over `kv_tokens_allocated`, the share of KV that is wasted."""
    seconds: StepSeconds
    """Where the time of all steps went."""


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
        """Run one step. Empty when there is no work.

        Raises:
            DeviceLost: the device fails again and again.
        """
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
    num_logits: int
    """Logits are wanted after this many of the last of them: 0 inside a prompt, 1 where a token is drawn, all where
    the prompt's log-probabilities are asked for."""
    follows: int | None = None
    """Its last token is not known on the host yet: it is this entry of `drawn`, and `token_ids` holds a 0 for it."""


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

    @property
    def is_asynchronous(self) -> bool:
        """Whether `forward` returns before it has computed anything, as on a GPU."""
        ...

    @property
    def num_padding_rows(self) -> int:
        """Rows computed so far that belonged to no token, such as those that fill up a CUDA graph's batch."""
        ...

    @property
    def num_replays(self) -> int:
        """Steps so far that were a recorded CUDA graph's."""
        ...

    def forward(self, chunks: Sequence[Chunk], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the chunks of one step and write their KV.

        Args:
            chunks: at least one.
            drawn: int64 `[rows]` on the runner's device: what the last step drew, which the host may not have read
                yet. Needed where a chunk has `follows`; never to be read from the host here.

        Returns:
            Logits `[sum of num_logits, vocab_size]`, floating point, in the order of the chunks and their tokens.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, `(from, to)` each, before the next forward pass."""
        ...


class PromptEncoder(Protocol):
    """Turns a job's prompts into token ids: `engine.prompts.Prompts`. Safe on any thread."""

    def encode(self, job: Job) -> list[list[int]]:
        """Render the chat or take the texts, and tokenize; token-id prompts come back as they are.

        Returns:
            One list a prompt (a chat is one prompt); any may be empty.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        ...

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of every form in which the words can be written: as they stand, and after a space."""
        ...


class Matcher(Protocol):
    """Where one choice stands in its grammar."""

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        """Write which ids may come next: bit `i % 32` of word `i // 32`, `[ceil(vocab_size / 32)]`.

        Where the grammar is complete, the model's end-of-sequence ids are among them.
        """
        ...

    def push(self, token_id: int) -> None:
        """Go on by a token; an end-of-sequence id changes nothing.

        Raises:
            RequestError: the grammar does not allow it here (a resumed output under another grammar).
        """
        ...


class Grammar(Protocol):
    """A compiled grammar; immutable, shared by all requests that ask for the same."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning."""
        ...


class GrammarCompiler(Protocol):
    """Compiles what `response_format` asks for: `engine.grammar.Grammars`. Safe on any thread; keeps what it made."""

    def compile(self, response_format: ResponseFormat) -> Grammar | None:
        """The grammar of a format; None where it constrains nothing.

        Raises:
            RequestError: it cannot be compiled, or is too large; the message names the field and the reason.
        """
        ...
