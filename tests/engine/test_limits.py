"""What is refused before and after a model is loaded, and that what is proposed instead works."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given as sampled
from hypothesis import settings
from hypothesis import strategies as st

from engine.attention.kv_layout import KVLayout
from engine.limits import Given, Ground, Limits, check, check_context, readable, resolve
from protocol import MillstreamError, ModelUnavailable, OptionRefused

MIB = 1 << 20
TOKEN = 30 * 3 * (64 + 64) * 4
"""Bytes of one token's KV in SmolLM2-135M, float32: a block of 32 takes 1.4 MiB."""
BLOCK = 32 * TOKEN


def ground(**changes: Any) -> Ground:
    return Ground(
        **{
            "context": 1024,
            "token_bytes": TOKEN,
            "free": 1000 * MIB,
            "share": 0.5,
            "cap": None,
            "usual_block_size": 32,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("asked", "there", "blocks"),
    [
        ({}, {}, 500 * MIB // BLOCK),
        ({}, {"cap": 100 * MIB}, 100 * MIB // BLOCK),
        ({}, {"cap": MIB}, 32),  # one sequence is more than the cap: it gets what it needs
        ({"kv_memory": 200 * MIB}, {}, 200 * MIB // BLOCK),
        ({"num_kv_blocks": 40}, {}, 40),
        ({"max_num_seqs": 2}, {}, 64),
        ({"max_num_seqs": 2, "num_kv_blocks": 400}, {}, 64),  # never more than the slots can fill
        ({"block_size": 16, "max_model_len": 100, "max_num_seqs": 1}, {}, 7),
    ],
    ids=str,
)
def test_the_size_of_the_pool(asked: dict[str, Any], there: dict[str, Any], blocks: int) -> None:
    assert resolve(Given(**asked), ground(**there)).num_kv_blocks == blocks


@pytest.mark.parametrize(
    ("asked", "fitted"),
    [
        ({}, {"max_num_seqs": 128, "max_num_batched_tokens": 512, "max_model_len": 1024, "block_size": 32}),
        ({"num_kv_blocks": 8, "block_size": 8}, {"max_num_seqs": 8, "max_model_len": 64}),
        ({"kv_memory": 8 * BLOCK}, {"max_num_seqs": 8, "max_model_len": 256}),
        ({"max_num_batched_tokens": 7}, {"max_num_seqs": 7}),
        ({"max_num_batched_tokens": 7, "num_kv_blocks": 3}, {"max_num_seqs": 3, "max_model_len": 96}),
        ({"max_num_seqs": 1000}, {"max_num_batched_tokens": 1000}),
        ({"max_num_seqs": 4, "num_kv_blocks": 4}, {"max_num_batched_tokens": 512, "max_model_len": 128}),
    ],
    ids=str,
)
def test_what_is_not_given_is_fitted_to_what_is(asked: dict[str, Any], fitted: dict[str, int]) -> None:
    limits = asdict(resolve(Given(**asked), ground(free=100_000 * MIB)))
    assert fitted.items() <= limits.items()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"num_kv_blocks": 8, "max_num_seqs": 128},
            "num_kv_blocks 8 is less than one block for each of 128 slots (max_num_seqs): "
            "give num_kv_blocks 128, or max_num_seqs 8",
        ),
        (
            {"max_num_batched_tokens": 100, "max_num_seqs": 128},
            "max_num_batched_tokens 100 is less than one token a step for each of 128 slots (max_num_seqs): "
            "give max_num_batched_tokens 128, or max_num_seqs 100",
        ),
        (
            {"num_kv_blocks": 8, "kv_memory": MIB},
            "num_kv_blocks 8 and kv_memory 1048576 both say how large the KV pool is: "
            "give no kv_memory, or no num_kv_blocks",
        ),
        (
            {"max_model_len": 300, "num_kv_blocks": 8},
            "max_model_len 300 is more than the KV pool holds: 128 tokens in 8 blocks (num_kv_blocks) of 16 "
            "(block_size): give num_kv_blocks 19, or max_model_len 128",
        ),
        (
            {"max_model_len": 16, "block_size": 64},
            "block_size 64 is more than a sequence may hold (max_model_len 16): no block is ever full: "
            "give block_size 16, or max_model_len 64",
        ),
        (
            {"max_num_seqs": 0, "max_model_len": 1},
            "max_num_seqs is 0 and max_model_len is 1: give max_num_seqs 1 and max_model_len 2",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: give max_num_seqs 1"),
        ({"kv_memory": -1}, "kv_memory is -1: give no kv_memory"),
        ({"max_step_ms": float("nan")}, "max_step_ms is nan: give no max_step_ms"),
        ({"block_size": "32"}, "block_size is '32': give block_size 1"),
    ],
    ids=str,
)
def test_a_contradiction_is_refused_before_a_model_is_loaded(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionRefused) as refused:
        check_both(Given(**asked))
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        (
            {"max_model_len": 2048},
            {},
            "max_model_len 2048 is more than the model serves: sequences of at most 1024 tokens: "
            "give max_model_len 1024",
        ),
        (
            {},
            {"context": None},
            "the model's config names no context length: give max_model_len 4096",
        ),
        (
            {"kv_memory": 10 * BLOCK, "max_model_len": 1024},
            {},
            f"not enough KV memory: kv_memory {10 * BLOCK} (14.1 MiB) holds 10 blocks of 32 tokens, and "
            f"max_model_len 1024 takes 32 (45.0 MiB): give kv_memory {32 * BLOCK}, or max_model_len 320",
        ),
        (
            {"kv_memory": 10 * BLOCK, "max_num_seqs": 20},
            {},
            f"not enough KV memory: kv_memory {10 * BLOCK} (14.1 MiB) holds 10 blocks of 32 tokens, and one for each "
            f"of 20 slots (max_num_seqs) takes 20 (28.1 MiB): give kv_memory {20 * BLOCK}, or max_num_seqs 10",
        ),
        (
            {"kv_memory": 1000},
            {},
            "not enough KV memory: kv_memory 1000 (1000 bytes) holds 0 blocks of 32 tokens, and one for each of 1 "
            f"slots (max_num_seqs) takes 1 (1.4 MiB): give kv_memory {BLOCK}",
        ),
        (
            {"max_model_len": 1024},
            {"free": 60 * MIB},
            "not enough KV memory: 50% of the 60.0 MiB that are free holds 21 blocks of 32 tokens, and max_model_len "
            f"1024 takes 32 (45.0 MiB): give kv_memory {32 * BLOCK}, or max_model_len 672",
        ),
        (
            {"max_model_len": 1024},
            {"free": 30 * MIB},
            "not enough KV memory: 50% of the 30.0 MiB that are free holds 10 blocks of 32 tokens, and max_model_len "
            f"1024 takes 32 (45.0 MiB): give kv_memory {21 * BLOCK} and max_model_len 672, or max_model_len 320",
        ),
        (
            {"num_kv_blocks": 3000},
            {},
            "the KV pool of 3000 blocks of 32 tokens takes 4.12 GiB and 1000.0 MiB are free: give num_kv_blocks 711",
        ),
        (
            {"num_kv_blocks": 3000, "max_num_seqs": 2000},
            {},
            "the KV pool of 3000 blocks of 32 tokens takes 4.12 GiB and 1000.0 MiB are free: "
            "give num_kv_blocks 711 and max_num_seqs 711",
        ),
        (
            {"kv_memory": 2000 * MIB},
            {},
            "the KV pool of 1422 blocks of 32 tokens takes 1.95 GiB and 1000.0 MiB are free: "
            f"give kv_memory {711 * BLOCK}",
        ),
        (
            {"block_size": 1 << 20, "num_kv_blocks": 1},
            {},
            "a KV block of 1048576 tokens takes 45.00 GiB and 1000.0 MiB are free: give block_size 22755",
        ),
    ],
    ids=str,
)
def test_what_the_model_or_the_memory_does_not_allow(
    asked: dict[str, Any], there: dict[str, Any], said: str
) -> None:
    check(Given(**asked))
    with pytest.raises(OptionRefused) as refused:
        resolve(Given(**asked), ground(**there))
    assert str(refused.value) == said


def test_a_context_beyond_the_pool_is_the_worker_s_to_refuse() -> None:
    """An engine in one's own process works, with a warning (case D01)."""
    asked = Given(max_model_len=128, block_size=8, num_kv_blocks=8)
    check(asked)
    assert resolve(asked, ground()).max_model_len == 128
    with pytest.raises(
        OptionRefused, match=r"64 tokens in 8 blocks .*: give num_kv_blocks 16, or max_model_len 64"
    ):
        check_context(asked)


def test_no_memory_at_all() -> None:
    with pytest.raises(ModelUnavailable, match=r"32 tokens take 1.4 MiB and 1000 bytes are free"):
        resolve(Given(), ground(free=1000))


def test_blocks_of_16_tokens_where_nobody_says() -> None:
    told = Ground(context=1024, token_bytes=TOKEN, free=1000 * MIB, share=0.5)
    assert resolve(Given(num_kv_blocks=8), told) == Limits(8, 512, 128, 16, 8)
    assert KVLayout().block_size(None, "any") == 16
    assert KVLayout(block_multiple=256).block_size(None, "any") == 256


def test_flags_for_a_command_line() -> None:
    with pytest.raises(OptionRefused) as refused:
        check(Given(num_kv_blocks=8, max_num_seqs=128))
    assert refused.value.as_flags() == (
        "--num-kv-blocks 8 is less than one block for each of 128 slots (--max-num-seqs): "
        "give --num-kv-blocks 128, or --max-num-seqs 8"
    )
    assert isinstance(refused.value, MillstreamError | ValueError)


def test_bytes_for_people() -> None:
    assert [readable(number) for number in (5, 2048, 3 * MIB, 5 << 29)] == [
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2.50 GiB",
    ]


def numbers(largest: int) -> st.SearchStrategy[int | None]:
    """Often absent, mostly small, now and then out of any range."""
    return st.none() | st.integers(-1, 40) | st.integers(1, largest)


GIVEN = st.builds(
    Given,
    max_num_seqs=numbers(5000),
    max_num_batched_tokens=numbers(5000),
    max_step_ms=st.none() | st.floats(-1, 1000),
    max_model_len=numbers(200_000),
    block_size=numbers(1000),
    num_kv_blocks=numbers(100_000),
    kv_memory=numbers(1 << 34),
)
GROUND = st.builds(
    Ground,
    context=st.none() | st.integers(2, 131_072),
    token_bytes=st.integers(1, 1 << 20),
    free=st.integers(0, 1 << 34),
    share=st.sampled_from([0.5, 0.9]),
    cap=st.none() | st.integers(1, 1 << 32),
)


def check_both(asked: Given) -> None:
    check(asked)
    check_context(asked)


def proposed(asked: Given, there: Ground | None = None) -> list[Given]:
    """What is proposed in place of a refused choice of options; nothing if it is not refused."""
    try:
        check_both(asked) if there is None else sound(asked, there)
    except OptionRefused as refused:
        ways = [replace(asked, **way) for way in refused.ways]  # type: ignore[arg-type]
        return ways or pytest.fail(f"nothing is proposed: {refused}")
    return []


@settings(max_examples=150, deadline=None)
@sampled(GIVEN)
def test_what_is_proposed_before_loading_is_accepted(asked: Given) -> None:
    for way in proposed(asked):
        check_both(way)


@settings(max_examples=150, deadline=None)
@sampled(GIVEN, GROUND)
def test_every_limit_is_sound_or_what_is_proposed_gives_one_that_is(asked: Given, there: Ground) -> None:
    if proposed(asked):
        return
    if there.free < there.usual_block_size * there.token_bytes:
        with pytest.raises(MillstreamError):
            resolve(asked, there)
    else:
        for way in proposed(asked, there):
            sound(way, there)


def sound(asked: Given, there: Ground) -> None:
    """Resolve, and look at what comes out."""
    check_both(asked)
    limits = resolve(asked, there)
    assert limits.max_num_batched_tokens >= limits.max_num_seqs >= 1
    assert limits.num_kv_blocks >= limits.max_num_seqs, "a block for each slot"
    assert limits.num_kv_blocks * limits.block_size >= limits.max_model_len, "room for the longest sequence"
    assert there.context is None or limits.max_model_len <= there.context
    assert limits.num_kv_blocks * limits.block_size * there.token_bytes <= there.free
    for field in fields(Given):
        value, settled = getattr(asked, field.name), getattr(limits, field.name, None)
        if value is not None and settled is not None:
            assert settled == value or (field.name == "num_kv_blocks" and settled < value), field.name
