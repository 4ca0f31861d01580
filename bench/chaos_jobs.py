"""The jobs of a chaos run, what is done with each, and how each would end undisturbed. All drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.interface import Delta, EngineCore
from protocol import PRIORITIES, Choice, Job, SamplingParams, TerminalState, Usage

RUN = "chaos"
POISON = "BOOM"
"""A dry run is told to die of prompts with this in them."""
TENANTS = ("acme", "burrow", "cove")
TOP_LOGPROBS = 2
"""What the undisturbed run of a model is asked for beside each token: how near its decision was."""

Watch = Literal["live", "slow", "late", "leaves", "after"]
WATCHES: tuple[Watch, ...] = ("live", "live", "live", "slow", "late", "leaves", "after")
_WORDS = (
    "stream",
    "mill",
    "wheel",
    "Grüße",
    "naïve",
    "水車",
    "🌊🌊",
    "e\u0301",
    "x" * 40,
    "a,b",
    '"q"',
    "\\n",
)
_GAPS = (" ", " ", " ", " ", "  ", "\n", "\t")


@dataclass(frozen=True, slots=True)
class Plan:
    """A job, and what its people do."""

    job: Job
    watch: Watch | None = None
    cancel_after_s: float | None = None
    is_poison: bool = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self.job.id


@dataclass(slots=True)
class Expected:
    """How a job ends undisturbed."""

    state: TerminalState
    code: str | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    margins: list[list[float]] = field(default_factory=list)
    """For each choice and token, how far the likeliest token was ahead of the next, in nats; empty for dry runs."""


def dry_run_plans(seed: int, count: int) -> list[Plan]:
    """Jobs for `dry-run:words`, which answers with the prompt: each prompt is like no other."""
    rng = random.Random(f"jobs {seed}")
    num_poison = max(1, count // 400)
    poison = set(rng.sample(range(count // 2), num_poison))
    return [_dry_run_plan(rng, number, number in poison) for number in range(count)]


def model_plans(seed: int, count: int) -> list[Plan]:
    """Jobs for a model: greedy and seeded sampling, choices, penalties, stop strings, log-probabilities, JSON."""
    rng = random.Random(f"model jobs {seed}")
    return [_plan(rng, number, **_model_job(rng, number)) for number in range(count)]


def _dry_run_plan(rng: random.Random, number: int, is_poison: bool) -> Plan:
    if is_poison:
        prompt = f"{POISON} {number}"
        return Plan(Job(id=_id(number), prompt=prompt, run=RUN, tenant=rng.choice(TENANTS)), is_poison=True)
    texts = [_text(rng, number) for _ in range(2 if rng.random() < 0.1 else 1)]
    params: dict[str, Any] = {"n": rng.choices((1, 2, 3), (14, 3, 2))[0]}
    if rng.random() < 0.2:
        params["max_tokens"] = rng.randint(1, 12)
    if rng.random() < 0.3:
        params |= {"temperature": 0.8, "seed": rng.getrandbits(32)}
    return _plan(rng, number, prompt=texts if len(texts) > 1 else texts[0], params=params)


def _model_job(rng: random.Random, number: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": rng.randint(4, 40), "ignore_eos": rng.random() < 0.5}
    kind = rng.choice(("greedy", "sampled", "choices", "penalised", "stopped", "told", "json"))
    if kind != "greedy":
        params |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.getrandbits(32)}
    if kind == "choices":
        params["n"] = 3
    if kind == "penalised":
        params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    if kind == "stopped":
        params |= {"stop": ["e", "."], "min_tokens": 2}
    if kind == "told":
        params["logprobs"] = 2
    if kind == "json":
        params |= {"response_format": {"type": "json_object"}, "ignore_eos": False}
    return {"prompt": f"Question {number}: what do {rng.randint(2, 99)} mills grind?", "params": params}


def _plan(rng: random.Random, number: int, **job: Any) -> Plan:
    """The parts that all kinds of model share: a fifth is watched, some are cancelled, due, or for later."""
    watch = rng.choice(WATCHES) if rng.random() < 0.2 else None
    job |= {
        "priority": rng.choice(PRIORITIES),
        "tenant": rng.choices(TENANTS, (8, 2, 1))[0],
        "stream": watch is not None or rng.random() < 0.6,
        "params": SamplingParams.model_validate(job["params"]),
        "max_retries": rng.choices((20, 0), (9, 1))[0],
    }
    fate = rng.random()
    if fate < 0.05:
        job["deadline_in_s"] = rng.uniform(1.0, 8.0)
    elif fate < 0.10:
        job["delay_s"] = rng.uniform(0.5, 3.0)
    cancel_after_s = rng.uniform(0.0, 6.0) if 0.10 <= fate < 0.16 else None
    return Plan(Job(id=_id(number), run=RUN, **job), watch, cancel_after_s)


def _id(number: int) -> str:
    return f"j{number:05}"


def _text(rng: random.Random, number: int) -> str:
    pieces = [f"{_id(number)}"]
    for _ in range(rng.randint(3, 40)):
        pieces += [rng.choice(_GAPS), rng.choice(_WORDS)]
    return "".join(pieces)


def undisturbed(engine: EngineCore, plans: Sequence[Plan], *, margins: bool) -> dict[str, Expected]:
    """How every job ends where nothing is done to it, by the engine alone in this process.

    Args:
        engine: idle.
        plans: what to run; poison is not run: it ends as a dead letter.
        margins: ask for the log-probabilities of the two likeliest tokens too, and keep the difference.
    """
    expected = {plan.id: Expected("dead", "crashed_worker") for plan in plans if plan.is_poison}
    jobs = {plan.id: plan.job for plan in plans if not plan.is_poison}
    for job in jobs.values():
        request = engine.prepare(_told(job) if margins else job)
        empty = [Choice(index=index, text="", token_ids=[]) for index in range(job.num_choices)]
        usage = Usage(prompt_tokens=request.num_prompt_tokens, completion_tokens=0)
        expected[job.id] = Expected("succeeded", None, empty, usage, [[] for _ in empty])
        engine.add(request)
    for delta in _deltas(engine):
        _grow(
            expected[delta.request_id],
            delta,
            keeps_logprobs=jobs[delta.request_id].params.num_logprobs is not None,
        )
    return expected


def _told(job: Job) -> Job:
    params = job.params.model_copy(update={"logprobs": TOP_LOGPROBS, "top_logprobs": None})
    return job.model_copy(update={"params": params})


def _deltas(engine: EngineCore) -> Iterator[Delta]:
    while engine.has_work():
        yield from engine.step()


def _grow(expected: Expected, delta: Delta, keeps_logprobs: bool) -> None:
    if delta.error is not None:
        expected.state, expected.code = "failed", delta.error.code
        return
    if not delta.token_ids and not delta.text and delta.finish_reason is None:
        return
    so_far = expected.choices[delta.choice]
    told = delta.logprobs or []
    expected.margins[delta.choice] += [
        _margin([top["logprob"] for top in one["top_logprobs"]]) for one in told
    ]
    expected.choices[delta.choice] = so_far.model_copy(
        update={
            "text": so_far.text + delta.text,
            "token_ids": so_far.token_ids + delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": [*(so_far.logprobs or ()), *told] if keeps_logprobs else None,
        }
    )
    if expected.usage is not None:
        total = expected.usage.completion_tokens + len(delta.token_ids)
        expected.usage = expected.usage.model_copy(update={"completion_tokens": total})


def _margin(likeliest: list[float]) -> float:
    return likeliest[0] - likeliest[1] if len(likeliest) > 1 else float("inf")
