"""Engines without a model: rehearse a pipeline on any machine, through the same worker and queue.

    dry-run:echo     answers with the prompt's own text (a chat: the last user message), in one token
    dry-run:words    streams the words of that text, one a step; whitespace is kept, so joined they are the prompt

Options follow as in a URL, `dry-run:words?delay=50ms&slots=8`; see `OPTIONS`. A token id is the number of the word.
Every choice of a prompt has the same answer. Of the sampling parameters only `max_tokens` and `n` count: nothing is
drawn, no stop string is looked for, no log-probability is told.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from engine.interface import Delta, DeviceLost, EngineStats, Request, StepSeconds, Written
from engine.requests import check_model, resolve_max_tokens
from protocol import PRIORITIES, ErrorCode, Fingerprint, Job, ModelUnavailable, RequestError

PREFIX = "dry-run:"
KINDS = ("echo", "words")
OPTIONS = {
    "delay": "time a step takes, as 50ms, 1s or 0.05",
    "fail": "share of the jobs that end with an engine_error, 0 to 1; chosen by the job's id",
    "flaky": "share of the attempts that end half-way with a device_error; chosen by the job's id and the attempt",
    "crash": "a prompt with this text in it kills the process, as a bad kernel would",
    "lost": "a prompt with this text in it fails the device for good, as a broken driver would",
    "slots": "requests that run at once, 256 if not given",
    "max_len": "words of prompt and answer together, 1048576 if not given",
}
_WORDS = re.compile(r"\s*\S+(?:\s+\Z)?|\s+\Z")
_NOTHING = (Written(),)


@dataclass(slots=True)
class DryRequest(Request):
    """A request that carries its answers."""

    answers: tuple[tuple[str, ...], ...] = ()
    """One a prompt: one piece of text a token."""
    fails: bool = False
    crashes: bool = False
    loses: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What follows the question mark."""

    delay: float = 0.0
    """Seconds."""
    fail: float = 0.0
    flaky: float = 0.0
    crash: str = ""
    lost: str = ""
    slots: int = 256
    max_len: int = 1 << 20


def is_dry_run(model: str) -> bool:
    """Whether a model string names an engine of this module."""
    return model.startswith(PREFIX)


def open_dry_run(model: str) -> DryRunEngine:
    """The engine for a string such as `dry-run:echo?delay=50ms`.

    Raises:
        ModelUnavailable: no such dry run or option, or a value that does not fit.
    """
    kind, _, query = model.removeprefix(PREFIX).partition("?")
    if not is_dry_run(model) or kind not in KINDS:
        names = ", ".join(PREFIX + kind for kind in KINDS)
        raise ModelUnavailable(f"there is no dry run {model!r}; there are {names}")
    return DryRunEngine(kind, _parse_options(query))


def _parse_options(query: str) -> Options:
    parsers: dict[str, Callable[[str], float | str]] = {
        "delay": _seconds,
        "fail": _share,
        "flaky": _share,
        "crash": str,
        "lost": str,
        "slots": _count,
        "max_len": _count,
    }
    values = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        try:
            values[name] = parsers[name](text)
        except (KeyError, ValueError):
            known = "; ".join(f"{option}: {meaning}" for option, meaning in OPTIONS.items())
            raise ModelUnavailable(f"dry run option {name}={text} is not understood; {known}") from None
    return Options(**values)  # type: ignore[arg-type]  # each parser gives its field's type


def _seconds(text: str) -> float:
    scale = 1e-3 if text.endswith("ms") else 1.0
    value = float(text.removesuffix("ms" if scale < 1 else "s")) * scale
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


@dataclass(slots=True)
class _Choice:
    """A choice that has not ended."""

    index: int
    answer: tuple[str, ...]
    length: int
    """How many of the answer's pieces it may have."""
    done: int
    """How many are out."""


@dataclass(slots=True)
class _Running:
    request: DryRequest
    choices: list[_Choice]


def _choices_left(request: DryRequest) -> list[_Choice]:
    written = request.written or _NOTHING * request.num_choices
    choices = []
    for index, so_far in enumerate(written):
        if not so_far.ended:
            prompt = request.prompt_of(index)
            length, done = request.max_tokens[prompt], len(so_far.token_ids)
            choices.append(_Choice(index, request.answers[prompt], length, done))
    return choices


class DryRunEngine:
    """Implements `engine.interface.EngineCore` with no model: one piece of every choice that runs a step."""

    def __init__(self, kind: str, options: Options) -> None:
        self._kind = kind
        self._options = options
        self._fingerprint = Fingerprint(name=PREFIX + kind)
        self._waiting: list[OrderedDict[str, DryRequest]] = [OrderedDict() for _ in PRIORITIES]
        self._running: dict[str, _Running] = {}
        self._places: tuple[dict[str, Any], ...] = (self._running, *self._waiting)
        self._steps = self._slot_steps = self._prompt_tokens = self._output_tokens = 0

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def max_num_seqs(self) -> int:
        return self._options.slots

    def prepare(self, job: Job) -> DryRequest:
        """Check a job and work out its answer; safe on any thread.

        Raises:
            RequestError: empty, too long, or for another model.
        """
        check_model(job, self._fingerprint.name)
        texts = _texts(job)
        answers = [tuple(_WORDS.findall(text)) if self._kind == "words" else (text,) for text in texts]
        counts = [len(text.split()) or int(bool(text)) for text in texts]  # whitespace alone counts as one
        limit, options = job.params.token_limit, self._options
        limits = [resolve_max_tokens(count, limit, options.max_len) for count in counts]
        return DryRequest(
            id=job.id,
            prompts=tuple(map(range, counts)),
            params=job.params,
            seed=job.seed,
            max_tokens=tuple(map(min, limits, map(len, answers))),
            priority=PRIORITIES.index(job.priority),
            answers=tuple(answers),
            fails=options.fail > 0 and _fraction(job.id) < options.fail,
            crashes=options.crash != "" and any(options.crash in text for text in texts),
            loses=options.lost != "" and any(options.lost in text for text in texts),
        )

    def add(self, request: Request) -> None:
        """Queue a request made by `prepare`.

        Raises:
            RequestError: its id is already here.
        """
        if not isinstance(request, DryRequest):
            raise TypeError("a dry run takes the requests its own prepare has made")
        for place in self._places:
            if request.id in place:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"a request with the id {request.id} is already here"
                )
        self._waiting[request.priority][request.id] = request

    def abort(self, request_id: str) -> bool:
        """Drop a request; no delta follows. False if it is not here."""
        return any(place.pop(request_id, None) is not None for place in self._places)

    def has_work(self) -> bool:
        return bool(self._running) or any(self._waiting)

    def step(self) -> list[Delta]:
        """Admit what there is room for and give one piece of every choice that runs.

        Raises:
            DeviceLost: a prompt asks for it.
        """
        if not self.has_work():
            return []
        self._admit()
        if self._options.delay:
            time.sleep(self._options.delay)  # in place of a forward pass
        self._steps += 1
        self._slot_steps += len(self._running)
        deltas: list[Delta] = []
        for running in list(self._running.values()):
            self._advance(running, deltas)
            if deltas[-1].last:
                del self._running[running.request.id]
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=sum(map(len, self._waiting)),
            slots=self._options.slots,
            kv_blocks_used=0,
            kv_blocks_total=0,
            steps=self._steps,
            slot_steps=self._slot_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            output_tokens=self._output_tokens,
            preemptions=0,
            recomputed_tokens=0,
            padding_rows=0,
            graph_steps=0,
            evictions=0,
            kv_tokens_allocated=0,
            kv_tokens_unused=0,
            seconds=StepSeconds(),
        )

    def _admit(self) -> None:
        for line in self._waiting:
            while line and len(self._running) < self._options.slots:
                _, request = line.popitem(last=False)
                self._running[request.id] = _Running(request, _choices_left(request))
                self._prompt_tokens += request.num_prompt_tokens

    def _advance(self, running: _Running, deltas: list[Delta]) -> None:
        request = running.request
        if request.crashes:
            os._exit(137)
        if request.loses:
            raise DeviceLost("dry run: this prompt fails the device")
        if request.fails:
            deltas.append(
                _failed(request, ErrorCode.ENGINE_ERROR, f"job is among the {self._options.fail:g}")
            )
        elif self._is_flaky(running):
            deltas.append(
                _failed(request, ErrorCode.DEVICE_ERROR, f"attempt is among the {self._options.flaky:g}")
            )
        elif not running.choices:  # all had ended before, and only the request's own end was lost
            deltas.append(Delta(request.id, [], "", last=True))
        else:
            ended = 0
            for choice in running.choices:
                delta = self._next_piece(request.id, choice)
                ended += delta.finish_reason is not None
                deltas.append(delta)
            if ended:
                delta.last = ended == len(running.choices)
                running.choices = [choice for choice in running.choices if choice.done < choice.length]

    def _is_flaky(self, running: _Running) -> bool:
        """Whether this attempt ends here. A worker calls a request attempt:job#lease."""
        if not self._options.flaky or not running.choices:
            return False
        choice = running.choices[0]
        attempt = running.request.id.rsplit("#", 1)[0]
        return 2 * choice.done >= choice.length and _fraction(attempt) < self._options.flaky

    def _next_piece(self, request_id: str, choice: _Choice) -> Delta:
        delta = Delta(request_id, [], "", choice.index)
        if choice.done < choice.length:
            delta.token_ids = [choice.done]
            delta.text = choice.answer[choice.done]
            choice.done += 1
            self._output_tokens += 1
        if choice.done >= choice.length:
            delta.finish_reason = "stop" if choice.length == len(choice.answer) else "length"
        return delta


def _failed(request: DryRequest, code: ErrorCode, why: str) -> Delta:
    error = RequestError(code, f"dry run: this {why}")
    return Delta(request.id, [], "", finish_reason="error", error=error, last=True)


def _texts(job: Job) -> list[str]:
    """What each prompt is answered with."""
    if job.messages is not None:
        asked = [message for message in job.messages if message.role == "user"]
        return [(asked or job.messages)[-1].text]
    return [
        prompt if isinstance(prompt, str) else " ".join(str(token_id) for token_id in prompt)
        for prompt in job.prompts
    ]


def _fraction(job_id: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") / 2**64
