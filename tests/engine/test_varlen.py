"""What the GPU backend tells torch's kernel: a stand-in computes from the same arguments. No kernel runs here."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from engine.attention import choose_backend
from engine.attention.kv_layout import KVLayout
from engine.attention.varlen import VarlenBackend, find_varlen, fits
from engine.kv_store import KVShape, KVStore
from tests.engine.test_attention import DECODES, HEADS, MIXED, Case, make_case, run, written_out
from tests.engine.varlen_by_hand import varlen_by_hand


def token_major(case: Case) -> Case:
    """The same blocks as the store gives them to this backend: their tokens apart, their heads together."""
    call = case.call
    blocks = (
        part.transpose(1, 2).contiguous().transpose(1, 2) for part in (call.key_blocks, call.value_blocks)
    )
    key_blocks, value_blocks = blocks
    case.call = replace(call, key_blocks=key_blocks, value_blocks=value_blocks)
    return case


def backend() -> VarlenBackend:
    return VarlenBackend(varlen_by_hand, None)


def test_the_installed_torch_takes_what_the_stand_in_takes() -> None:
    def parameters(function: object) -> list[tuple[str, object, object]]:
        found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(parameter.name, parameter.kind, parameter.default) for parameter in found]

    assert parameters(varlen_attn) == parameters(varlen_by_hand)


@pytest.mark.parametrize("sizes", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    "feature", ["none", "window", "window of one", "softcap", "sinks", "window and sinks"]
)
def test_equal_to_attention_written_out(sizes: list[tuple[int, int]], feature: str) -> None:
    case = token_major(make_case(sizes, 8, torch.float32))
    case.call = replace(
        case.call,
        sliding_window=1 if feature == "window of one" else 7 if "window" in feature else None,
        softcap=0.8 if feature == "softcap" else None,
        sinks=torch.linspace(-1, 2, HEADS) if "sinks" in feature else None,
    )
    used = backend()
    torch.testing.assert_close(run(used, case).double(), written_out(case), atol=2e-6, rtol=1e-5)
    assert used.replayable == (feature != "softcap")


def test_new_keys_and_values_lie_in_pages_of_whole_tokens() -> None:
    case = token_major(make_case(MIXED, 8, torch.float32))
    run(backend(), case)
    for index, keys in enumerate(case.keys):
        for position in range(len(keys)):
            block, offset = case.batch.block_tables[index, position // 8], position % 8
            assert torch.equal(case.call.key_blocks.transpose(1, 2)[block, offset], keys[position])


def test_the_store_keeps_whole_tokens_together_and_one_block_to_itself() -> None:
    shape = KVShape(((2, 16, 16),), torch.bfloat16, 4, token_major=True)
    store = KVStore(shape, 3, torch.device("cpu"), spare=1)
    assert store.num_blocks == 3
    for part in store.layers[0]:
        assert part.shape == (4, 2, 4, 16)
        assert part.transpose(1, 2).is_contiguous()
        part.copy_(torch.arange(4.0)[:, None, None, None])
    store.copy([(1, 0)])
    assert [part[:, 0, 0, 0].tolist() for part in store.layers[0]] == [[1, 1, 2, 3]] * 2


def test_lone_rows_share_the_keys_of_their_query_heads() -> None:
    asked = []

    def watched(*given: object, **named: object) -> object:
        assert given[4] is not None, "FlashAttention 2 wants to know where keys start, pages or not"
        asked.append(named["window_size"])
        return varlen_by_hand(*given, **named)  # type: ignore[arg-type]

    for sizes, window in ((DECODES, None), (MIXED, None), (DECODES, 7)):
        case = token_major(make_case(sizes, 8, torch.float32))
        case.call = replace(case.call, sliding_window=window)
        run(VarlenBackend(watched, None), case)
    assert asked == [(-1, -1), (-1, 0), (6, 0)]


def test_newer_kernels_refuse_key_starts_and_take_any_block_size() -> None:
    def without_starts(query: torch.Tensor, *given: object, **_: object) -> torch.Tensor:
        assert given[3] is None
        return query

    newer = VarlenBackend(without_starts, "FA3")
    run(newer, token_major(make_case(DECODES, 8, torch.float32)))
    assert newer.kv_layout.block_multiple == 1
    assert newer.kv_layout.usual_block_size == 16


def test_flash_attention_2_reads_blocks_of_256_tokens() -> None:
    layout = backend().kv_layout
    assert (layout.block_multiple, layout.usual_block_size) == (256, 256)
    assert KVLayout().block_multiple == 1


@pytest.mark.parametrize(
    ("dims", "taken"),
    [((64, 64), True), ((256, 256), True), ((60, 60), False), ((192, 128), False), ((320, 320), False)],
)
def test_heads_that_the_kernels_take(dims: tuple[int, int], taken: bool) -> None:
    assert fits(*dims) == taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.float32, "not in float32"), (torch.bfloat16, "needs an NVIDIA GPU")]
)
def test_where_the_kernel_is_missing_the_log_says_why(
    dtype: torch.dtype, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_varlen(torch.device("cuda"), dtype) is None
    assert said in caplog.text
    assert choose_backend(torch.device("cuda"), dtype).name == "reference"
