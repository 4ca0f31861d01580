"""Slots, tokens a step, context and KV pool: what was given is kept or refused, what was not is fitted to it.

    given                    fitted
    num_kv_blocks 8          max_num_seqs 8, not 128: each slot needs a block
    max_num_seqs 1000        max_num_batched_tokens 1000, not 512: each slot needs a token a step
    num_kv_blocks 8          max_model_len 64, whatever the model can take: no sequence outgrows the pool
    max_model_len 5          block_size 5, not 8: each block can be full

Options that contradict each other, the model or the memory are refused, with the nearest settings that work. Each
setting that is named has been tried: with it, everything else stays as it was given and nothing is refused. What is
refused before the model is known is tried without it: the model or the memory may have more to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from typing import Any

from protocol import ModelUnavailable, OptionRefused

SLOTS = 128
BUDGET = 512
BLOCK_SIZE = 8
"""Tokens of a block where neither user nor device say. Of 16, twice as much KV lies unused (`bench/NOTES.md`)."""
_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "block_size": 1,
    "num_kv_blocks": 1,
}
_KINDS = {"max_step_ms": "a number", "kv_memory": "a whole number of bytes (4 GiB are 4294967296)"}
_SOME_CONTEXT = 4096
"""Tokens to propose for a model that names no context length."""
_TRIES = 12
"""Changes in a row, of seven options, after which a way is given up."""

Change = dict[str, int | None]
"""Options and their values; None: not given."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the user said; None where he left it to us."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_step_ms: float | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Ground:
    """The model and the memory that it runs on."""

    context: int | None
    """Most tokens of a sequence that the model was made for; None: it does not say."""
    token_bytes: int
    """KV of one token, all layers."""
    free: int
    """Bytes that can be taken."""
    share: float
    """The part of them that the KV pool takes by itself."""
    cap: int | None = None
    """Bytes it then stops at, unless one sequence needs more; None: no such bound."""
    usual_block_size: int = BLOCK_SIZE
    """Tokens of a block where none is given: the attention backend has a say."""
    block_multiple: int = 1
    """Tokens that it reads together: a block is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine runs with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int


def check(given: Given) -> None:
    """Check what does not depend on the model.

    Raises:
        OptionRefused: an option is out of its range, or two contradict each other. This check lets pass what it
            proposes; `resolve`, which knows the model, may still refuse it, and then proposes something else.
    """
    _refuse(chain(_out_of_range(given), _contradictions(given)), given, None)


def check_context(given: Given) -> None:
    """Check that the pool holds a sequence of `max_model_len`, as a worker's must: whoever sends it jobs reckons with
    that. An engine in the caller's own process only warns, and ends longer ones early.

    Raises:
        OptionRefused: it holds less.
    """
    _refuse(_outgrown(given, BLOCK_SIZE), given, None)


def resolve(given: Given, ground: Ground) -> Limits:
    """Settle every limit, once the model is known.

    A pool that is not given takes `share` of what is free but no more than `cap`; no pool takes more than its slots
    can fill.

    Raises:
        OptionRefused: an option is out of its range, or contradicts another, the model or the memory.
        ModelUnavailable: there is no memory for the KV of one block of the usual size.
    """
    _refuse(chain(_out_of_range(given), _contradictions(given), _beyond(given, ground)), given, ground)
    blocks = _blocks(given, ground)
    slots, budget = slots_and_budget(given.max_num_seqs, given.max_num_batched_tokens, blocks)
    length, size = _length(given, ground, blocks), _block_size(given, ground)
    return Limits(slots, budget, length, size, _filled(given, ground))


def smaller_pool(given: Given, ground: Ground, blocks: int) -> list[Change]:
    """The way to three quarters of so many blocks, with whatever else must change for it; empty: there is none."""
    fewer, size = blocks * 3 // 4, _block_size(given, ground)
    name, amount = (
        ("kv_memory", size * ground.token_bytes) if given.num_kv_blocks is None else ("num_kv_blocks", 1)
    )
    way = _completed({name: fewer * amount}, given, ground) or {}
    after = replace(given, **way)
    return [way] if _blocks(after, ground) * _block_size(after, ground) < blocks * size else []


def slots_and_budget(
    max_num_seqs: int | None, max_num_batched_tokens: int | None, num_kv_blocks: int
) -> tuple[int, int]:
    """Slots, and tokens a step: what is not given is fitted, so that each slot has a block and a token a step."""
    slots = max_num_seqs or min(SLOTS, max_num_batched_tokens or SLOTS, num_kv_blocks)
    return slots, max_num_batched_tokens or max(BUDGET, slots)


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why something is refused, and changes each of which lifts that; another fault may then stand in the way."""

    why: str
    changes: tuple[Change, ...]


def _refuse(faults: Iterator[_Fault], given: Given, ground: Ground | None) -> None:
    for fault in faults:
        ways: list[Change] = []
        for change in fault.changes:
            way = _completed(change, given, ground)
            if way is not None and replace(given, **way) not in [replace(given, **other) for other in ways]:
                ways.append(way)
        raise OptionRefused(fault.why, ways or _left_out(given, ground))


def _left_out(given: Given, ground: Ground | None) -> list[Change]:
    """Ways that leave out as few options as can be: where no change of what is wrong leads anywhere."""
    names = [field.name for field in fields(given) if getattr(given, field.name) is not None]
    for count in range(1, len(names) + 1):
        changes: list[Change] = [dict.fromkeys(some) for some in combinations(names, count)]
        ways = [way for change in changes if (way := _completed(change, given, ground)) is not None]
        if ways:
            return ways
    return []


def _completed(change: Change, given: Given, ground: Ground | None) -> Change | None:
    """A change with whatever else must then change for nothing to be refused; None: it leads nowhere."""
    way = dict(change)
    for _ in range(_TRIES):
        fault = _first_fault(replace(given, **way), ground)
        if fault is None:
            return way
        others = [other for other in fault.changes if not other.items() <= way.items()]
        others.sort(key=lambda other: len(way.keys() & other.keys()))  # rather what is not settled yet
        if not others:
            return None
        way |= others[0]
    return None


def _first_fault(given: Given, ground: Ground | None) -> _Fault | None:
    usual = BLOCK_SIZE if ground is None else ground.usual_block_size
    beyond = () if ground is None else _beyond(given, ground)
    faults = chain(_out_of_range(given), _contradictions(given), _outgrown(given, usual), beyond)
    return next(faults, None)


def _out_of_range(given: Given) -> Iterator[_Fault]:
    told: list[str] = []
    change: Change = {}
    for name in (field.name for field in fields(given)):
        value = getattr(given, name)
        wanted = int | float if name == "max_step_ms" else int
        is_number = isinstance(value, wanted) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0 and value >= _LEAST.get(name, 0)):
            kind = "" if is_number else f" and must be {_KINDS.get(name, 'a whole number')}"
            told.append(f"{name} is {value!r}{kind}")
            change[name] = _nearest(name, value)
    if told:
        yield _Fault(" and ".join(told), (change,))


def _nearest(name: str, value: Any) -> int | None:
    """The whole number in range that is meant by what is out of it, or is none; None: there is none to propose."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = 0
    return max(whole, _LEAST[name]) if name in _LEAST else whole if whole > 0 else None


def _contradictions(given: Given) -> Iterator[_Fault]:
    """What is wrong whatever the model."""
    slots, budget, length = given.max_num_seqs, given.max_num_batched_tokens, given.max_model_len
    blocks, shortest = given.num_kv_blocks, _LEAST["max_model_len"]
    if blocks is not None and given.block_size is not None and blocks * given.block_size < shortest:
        yield _Fault(
            f"num_kv_blocks {blocks} of block_size {given.block_size} holds one token, and the shortest sequence has "
            f"{shortest}",
            ({"num_kv_blocks": shortest}, {"block_size": shortest}),
        )
    if slots is not None and budget is not None and budget < slots:
        yield _Fault(
            f"max_num_batched_tokens {budget} is less than one token a step for each of {slots} slots (max_num_seqs)",
            ({"max_num_batched_tokens": slots}, {"max_num_seqs": budget}),
        )
    if blocks is not None and given.kv_memory is not None:
        yield _Fault(
            f"num_kv_blocks {blocks} and kv_memory {given.kv_memory} both say how large the KV pool is",
            ({"kv_memory": None}, {"num_kv_blocks": None}),
        )
    if blocks is not None and slots is not None and blocks < slots:
        yield _Fault(
            f"num_kv_blocks {blocks} is less than one block for each of {slots} slots (max_num_seqs)",
            ({"num_kv_blocks": slots}, {"max_num_seqs": blocks}),
        )
    if length is not None and given.block_size is not None and given.block_size > length:
        yield _Fault(
            f"block_size {given.block_size} is more than a sequence may hold (max_model_len {length}): no block is "
            "ever full",
            ({"block_size": length}, {"max_model_len": given.block_size}),
        )


def _outgrown(given: Given, usual_block_size: int) -> Iterator[_Fault]:
    """A pool of so many blocks that one sequence fills it and goes on."""
    blocks, length, size = given.num_kv_blocks, given.max_model_len, given.block_size or usual_block_size
    if length is not None and blocks is not None and blocks * size < length:
        yield _Fault(
            f"max_model_len {length} is more than the KV pool holds: {blocks * size} tokens in {blocks} blocks "
            f"(num_kv_blocks) of {size} (block_size)",
            ({"num_kv_blocks": -(-length // size)}, {"max_model_len": blocks * size}),
        )


def _beyond(given: Given, ground: Ground) -> Iterator[_Fault]:
    """What this model, or the memory at hand, does not allow."""
    size, length = _block_size(given, ground), given.max_model_len
    block_bytes = size * ground.token_bytes
    most = ground.free // block_bytes
    if ground.free < ground.usual_block_size * ground.token_bytes:
        raise ModelUnavailable(
            f"no memory for KV: {ground.usual_block_size} tokens take "
            f"{readable(ground.usual_block_size * ground.token_bytes)} and "
            f"{readable(ground.free)} are free"
        )
    yield from _block_faults(given, ground)
    fits = ground.free // ground.token_bytes
    if most < 1:
        yield _Fault(
            f"a KV block of {size} tokens takes {readable(block_bytes)} and {readable(ground.free)} are free",
            ({"block_size": fits - fits % ground.block_multiple},),
        )
    if length is None and ground.context is None:
        yield _Fault(
            "the model's config names no context length",
            ({"max_model_len": min(max(_SOME_CONTEXT, size), most * size)},),
        )
    if length is not None and ground.context is not None and length > ground.context:
        yield _Fault(
            f"max_model_len {length} is more than the model serves: sequences of at most {ground.context} tokens",
            ({"max_model_len": ground.context},),
        )
    if (short := _too_small(given, ground)) is not None:
        yield short
    taken = _filled(given, ground)
    if taken > most:
        name, room = (
            ("kv_memory", most * block_bytes) if given.num_kv_blocks is None else ("num_kv_blocks", most)
        )
        yield _Fault(
            f"the KV pool of {taken} blocks of {size} tokens takes {readable(taken * block_bytes)} and "
            f"{readable(ground.free)} are free",
            ({name: room},),
        )


def _block_faults(given: Given, ground: Ground) -> Iterator[_Fault]:
    """A block that the attention backend cannot read, or that no sequence fills."""
    size = given.block_size
    if size is None:
        return
    if size % ground.block_multiple:
        yield _Fault(
            f"block_size is {size}, and attention reads blocks of a multiple of {ground.block_multiple} tokens",
            ({"block_size": _raised(size, ground)}, {"block_size": None}),
        )
    if ground.context is not None and size > _raised(ground.context, ground):
        yield _Fault(
            f"block_size {size} is more than the model serves (sequences of at most {ground.context} tokens): no "
            "block is ever full",
            ({"block_size": _raised(ground.context, ground)},),
        )


def _raised(tokens: int, ground: Ground) -> int:
    """The smallest block of so many tokens, or more, that attention reads."""
    return -(-tokens // ground.block_multiple) * ground.block_multiple


def _too_small(given: Given, ground: Ground) -> _Fault | None:
    """Whether memory holds fewer blocks than a sequence of the length asked for, or than slots asked for."""
    if given.num_kv_blocks is not None:  # their number has been checked
        return None
    size, slots = _block_size(given, ground), given.max_num_seqs or 1
    length = given.max_model_len or _LEAST["max_model_len"]
    block_bytes = size * ground.token_bytes
    held = _blocks(given, ground)
    need = max(-(-length // size), slots)
    if held >= need:
        return None
    source = (
        f"kv_memory {given.kv_memory} ({readable(given.kv_memory)})"
        if given.kv_memory is not None
        else f"{ground.share:.0%} of the {readable(ground.free)} that are free"
    )
    purpose = f"one for each of {slots} slots (max_num_seqs)" if need == slots else f"max_model_len {length}"
    # Lowering what is too much works only if at least one block is held.
    lower: Change = {"max_model_len": held * size} if length > held * size >= _LEAST["max_model_len"] else {}
    lower |= {"max_num_seqs": held} if slots > held else {}
    larger: Change = {"kv_memory": min(need, ground.free // block_bytes) * block_bytes}
    return _Fault(
        f"not enough KV memory: {source} holds {held} blocks of {size} tokens, and {purpose} takes {need} "
        f"({readable(need * block_bytes)})",
        (larger, lower) if held and lower else (larger,),
    )


def _block_size(given: Given, ground: Ground) -> int:
    if given.block_size is not None:
        return given.block_size
    usual = ground.usual_block_size
    longest = min(usual, given.max_model_len or usual, ground.context or usual)
    return _raised(longest, ground)


def _blocks(given: Given, ground: Ground) -> int:
    """Blocks of the pool, before it is seen how many can be filled."""
    if given.num_kv_blocks is not None:
        return given.num_kv_blocks
    size = _block_size(given, ground)
    block_bytes = size * ground.token_bytes
    if given.kv_memory is not None:
        return given.kv_memory // block_bytes
    budget = int(ground.free * ground.share)
    if ground.cap is not None:
        longest = given.max_model_len or ground.context or 1
        budget = min(budget, max(ground.cap, -(-longest // size) * block_bytes))
    return budget // block_bytes


def _length(given: Given, ground: Ground, blocks: int) -> int:
    """Most tokens of a sequence."""
    if given.max_model_len is not None:
        return given.max_model_len
    held = blocks * _block_size(given, ground)
    return held if ground.context is None else min(ground.context, held)


def _filled(given: Given, ground: Ground) -> int:
    """Blocks of the pool: never more than its slots can fill."""
    blocks = _blocks(given, ground)
    slots, _ = slots_and_budget(given.max_num_seqs, given.max_num_batched_tokens, blocks)
    return min(blocks, slots * -(-_length(given, ground, blocks) // _block_size(given, ground)))


def readable(number: int) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.{2 if unit == 2**30 else 1}f} {name}"
    return f"{number} bytes"
