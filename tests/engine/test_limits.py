"""What is refused before and after a model is loaded, and that what is proposed instead works."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import example, settings
from hypothesis import given as sampled
from hypothesis import strategies as st

from engine.attention.kv_layout import KVLayout
from engine.limits import (
    BLOCK_SIZE,
    Given,
    Ground,
    Limits,
    check,
    check_context,
    readable,
    resolve,
    smaller_pool,
)
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
            "max_model_len 300 is more than the KV pool holds: 64 tokens in 8 blocks (num_kv_blocks) of 8 "
            "(block_size): give num_kv_blocks 38, or max_model_len 64",
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
        ({"block_size": "32"}, "block_size is '32' and must be a whole number: give block_size 32"),
        ({"max_num_seqs": 2.0}, "max_num_seqs is 2.0 and must be a whole number: give max_num_seqs 2"),
        ({"max_num_seqs": True}, "max_num_seqs is True and must be a whole number: give max_num_seqs 1"),
        (
            {"max_model_len": float("inf")},
            "max_model_len is inf and must be a whole number: give max_model_len 2",
        ),
        (
            {"kv_memory": "4GiB"},
            "kv_memory is '4GiB' and must be a whole number of bytes (4 GiB are 4294967296): give no kv_memory",
        ),
        (
            {"kv_memory": 1e9},
            "kv_memory is 1000000000.0 and must be a whole number of bytes (4 GiB are 4294967296): "
            "give kv_memory 1000000000",
        ),
        ({"max_step_ms": "5"}, "max_step_ms is '5' and must be a number: give max_step_ms 5"),
        (
            {"num_kv_blocks": 1, "block_size": 1},
            "num_kv_blocks 1 of block_size 1 holds one token, and the shortest sequence has 2: "
            "give num_kv_blocks 2, or block_size 2",
        ),
        (
            {"max_num_seqs": 1, "num_kv_blocks": 1, "block_size": 1, "max_num_batched_tokens": 1},
            "num_kv_blocks 1 of block_size 1 holds one token, and the shortest sequence has 2: "
            "give num_kv_blocks 2, or block_size 2",
        ),
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
            "block_size 1048576 is more than the model serves (sequences of at most 1024 tokens): no block is ever "
            "full: give block_size 1024",
        ),
        (
            {"block_size": 1 << 20, "num_kv_blocks": 1},
            {"context": 1 << 20},
            "a KV block of 1048576 tokens takes 45.00 GiB and 1000.0 MiB are free: give block_size 22755",
        ),
        (
            {"block_size": 1025},
            {},
            "block_size 1025 is more than the model serves (sequences of at most 1024 tokens): no block is ever "
            "full: give block_size 1024",
        ),
        (
            {"block_size": 300},
            {"usual_block_size": 256, "block_multiple": 256},
            "block_size is 300, and attention reads blocks of a multiple of 256 tokens: "
            "give block_size 512, or no block_size",
        ),
        (
            {"block_size": 1, "kv_memory": TOKEN},
            {},
            f"not enough KV memory: kv_memory {TOKEN} (45.0 KiB) holds 1 blocks of 1 tokens, and max_model_len 2 "
            f"takes 2 (90.0 KiB): give kv_memory {2 * TOKEN}",
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


def test_blocks_of_8_tokens_where_nobody_says() -> None:
    told = Ground(context=1024, token_bytes=TOKEN, free=1000 * MIB, share=0.5)
    assert resolve(Given(num_kv_blocks=8), told) == Limits(8, 512, 64, 8, 8)
    assert KVLayout().usual_block_size == 8
    assert KVLayout(fewest_tokens=16).usual_block_size == 16
    assert KVLayout(block_multiple=256).usual_block_size == 256


@pytest.mark.parametrize(
    ("asked", "there", "size"),
    [
        ({"max_model_len": 10}, {}, 10),
        ({"max_model_len": 10, "num_kv_blocks": 8}, {}, 10),
        ({}, {"context": 10}, 10),
        ({"max_model_len": 33}, {}, 32),
        ({"max_model_len": 10}, {"usual_block_size": 256, "block_multiple": 256}, 256),
    ],
    ids=str,
)
def test_no_block_is_longer_than_a_sequence(asked: dict[str, Any], there: dict[str, Any], size: int) -> None:
    assert resolve(Given(**asked), ground(**there)).block_size == size


def test_what_must_change_together_is_proposed_together() -> None:
    with pytest.raises(OptionRefused, match=r"give block_size 256 and max_model_len 256, or no block_size$"):
        resolve(Given(max_model_len=100, block_size=100), ground(usual_block_size=256, block_multiple=256))


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


NO_NUMBERS: Any = st.sampled_from([2.0, 7.5, "4GiB", "32", True, float("inf"), float("nan"), [8]])


def numbers(largest: int) -> st.SearchStrategy[Any]:
    """Often absent, mostly small, now and then out of any range or no whole number."""
    return (
        st.none()
        | st.none()
        | st.just(1)
        | st.integers(1, 40)
        | st.integers(-1, 3)
        | st.integers(1, largest)
        | NO_NUMBERS
    )


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


@st.composite
def grounds(draw: st.DrawFn) -> Ground:
    multiple = draw(st.sampled_from([1, 1, 256]))
    token_bytes = draw(st.integers(1, 40) | st.integers(1, 1 << 20))
    return Ground(
        context=draw(st.none() | st.integers(2, 60) | st.integers(2, 131_072)),
        token_bytes=token_bytes,
        free=draw(st.integers(1, 2000).map(lambda tokens: tokens * token_bytes) | st.integers(0, 1 << 34)),
        share=draw(st.sampled_from([0.5, 0.9])),
        cap=draw(st.none() | st.integers(1, 1 << 32)),
        usual_block_size=max(draw(st.sampled_from([8, 16])), multiple),
        block_multiple=multiple,
    )


def check_both(asked: Given) -> None:
    check(asked)
    check_context(asked)


def proposed(asked: Given, there: Ground | None = None) -> list[Given]:
    """What is proposed in place of a refused choice of options; nothing if it is not refused."""
    try:
        check_both(asked) if there is None else resolve(asked, there)
    except OptionRefused as refused:
        ways = [replace(asked, **way) for way in refused.ways]  # type: ignore[arg-type]
        assert len({str(way) for way in ways}) == len(ways), "one is proposed twice"
        return ways or pytest.fail(f"nothing is proposed: {refused}")
    return []


@settings(max_examples=150, deadline=None)
@sampled(GIVEN)
def test_what_is_proposed_before_loading_is_accepted(asked: Given) -> None:
    for way in proposed(asked):
        check_both(way)


@settings(max_examples=300, deadline=None)
@sampled(GIVEN, grounds())
@example(Given(num_kv_blocks=1, block_size=1), ground())
def test_every_limit_is_sound_or_what_is_proposed_gives_one_that_is(asked: Given, there: Ground) -> None:
    """Whether or not what needs no model was checked first, and after what that check proposes too."""
    if there.free < there.usual_block_size * there.token_bytes:
        with pytest.raises(MillstreamError):
            resolve(asked, there)
        return
    early = proposed(asked)
    try:
        check(asked)
    except OptionRefused:
        with pytest.raises(OptionRefused):
            resolve(asked, there)
    for start in [asked, *early]:
        late = proposed(start, there)
        for way in late:
            sound(way, there)
        if not late and (start is not asked or not early):
            sound(start, there)
            smaller(start, there)


def smaller(asked: Given, there: Ground) -> None:
    """Look at the smaller pool that is proposed, if one is."""
    limits = resolve(asked, there)
    for way in smaller_pool(asked, there, limits.num_kv_blocks):
        fewer = resolve(replace(asked, **way), there)
        assert fewer.num_kv_blocks * fewer.block_size < limits.num_kv_blocks * limits.block_size


def sound(asked: Given, there: Ground) -> None:
    """Resolve, and look at what comes out."""
    check(asked)
    if there.usual_block_size == BLOCK_SIZE:  # what is told before loading reckons with that
        check_context(asked)
    limits = resolve(asked, there)
    assert limits.max_num_batched_tokens >= limits.max_num_seqs >= 1
    assert limits.num_kv_blocks >= limits.max_num_seqs, "a block for each slot"
    assert limits.num_kv_blocks * limits.block_size >= limits.max_model_len, "room for the longest sequence"
    assert there.context is None or limits.max_model_len <= there.context
    assert limits.max_model_len >= 2, "a token of prompt and one of output"
    assert limits.block_size % there.block_multiple == 0
    assert limits.block_size < limits.max_model_len + there.block_multiple, "a block can be full"
    assert limits.num_kv_blocks * limits.block_size * there.token_bytes <= there.free
    for field in fields(Given):
        value, settled = getattr(asked, field.name), getattr(limits, field.name, None)
        if value is not None and settled is not None:
            assert settled == value or (field.name == "num_kv_blocks" and settled < value), field.name


@pytest.mark.parametrize(
    ("asked", "blocks", "ways"),
    [
        ({}, 40, [{"kv_memory": 30 * BLOCK}]),
        ({"num_kv_blocks": 40}, 40, [{"num_kv_blocks": 30}]),
        ({"num_kv_blocks": 40, "max_model_len": 1024}, 40, [{"num_kv_blocks": 30, "max_model_len": 960}]),
        ({"num_kv_blocks": 4, "max_num_seqs": 4}, 4, [{"num_kv_blocks": 3, "max_num_seqs": 3}]),
        ({"num_kv_blocks": 1}, 1, []),
    ],
    ids=str,
)
def test_a_smaller_pool_is_one_that_works(asked: dict[str, Any], blocks: int, ways: list[Any]) -> None:
    assert smaller_pool(Given(**asked), ground(), blocks) == ways
