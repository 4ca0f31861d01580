"""Drawing is launched without a look at the device's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling import Draw, launch
from protocol import SamplingParams
from tests.engine.sampling.reference import rules

VOCAB = 500
UNFILTERED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.5, "bad_words": ["a"]},
    {"temperature": 0.9, "allowed_token_ids": [3, 7], "logit_bias": {3: 1.0}, "frequency_penalty": 0.5},
]


def draws(rows: list[dict[str, Any]]) -> list[Draw]:
    given = [SamplingParams(**row) for row in rows]
    return [Draw(params, seed, 0, 0, rules(params, [3], VOCAB)) for seed, params in enumerate(given)]


def test_rows_without_filters_are_launched_on_a_device_that_has_no_values() -> None:
    """Tensors of the "meta" device have shapes only, so whatever looks at a value raises."""
    drawn = launch(torch.empty(4, VOCAB, device="meta"), draws(UNFILTERED))
    assert (drawn.token_ids.device.type, drawn.token_ids.shape) == ("meta", (4,))
    with pytest.raises((RuntimeError, NotImplementedError)):
        drawn.read()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_waits_for_the_gpu() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    expected = launch(logits, draws(UNFILTERED)).read()
    on_gpu = logits.cuda()
    launch(on_gpu, draws(UNFILTERED)).read()  # constants are sent once
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = launch(on_gpu, draws(UNFILTERED))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.read().token_ids == expected.token_ids == drawn.token_ids.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [*UNFILTERED, {"top_p": 0.5}, {"top_k": 4, "min_p": 0.1}], ids=str)
def test_what_is_on_the_device_is_an_id_even_where_there_is_none_to_draw(
    bad: float, params: dict[str, Any]
) -> None:
    """The next step looks it up before anybody has seen that the row is bad."""
    drawn = launch(torch.full((2, VOCAB), bad), draws([params, params]))
    assert drawn.read().problems == ["invalid_logits"] * 2
    assert drawn.token_ids.tolist() == [0, 0]
