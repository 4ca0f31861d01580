"""Rows whose logits are no numbers: reported, and without effect on their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling import Draw, sample
from protocol import SamplingParams
from tests.engine.doubles import case, tiny, tiny_references
from tests.engine.sampling.reference import generate, rules

pytestmark = pytest.mark.usefixtures("one_thread")

BAD: dict[str, tuple[Any, float]] = {
    "nan": ([0], torch.nan),
    "-inf": (slice(None), -torch.inf),
    "+inf": ([3, 7], torch.inf),
}


@pytest.mark.parametrize("vocab", [512, 500])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.5},
        {"top_k": 4},
        {"min_p": 0.1},
        {"logit_bias": {3: 5.0}, "logprobs": 2},
        {"allowed_token_ids": [3, 7], "repetition_penalty": 2.0},
    ],
    ids=str,
)
def test_only_the_bad_row_is_reported(bad: str, params: dict[str, Any], vocab: int) -> None:
    def draws() -> list[Draw]:
        given = SamplingParams(**params)
        return [Draw(given, seed, 0, 0, rules(given, [3], vocab)) for seed in range(4)]

    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    good = sample(logits, draws())
    places, value = BAD[bad]
    logits[2, places] = value
    sampled = sample(logits, draws())
    assert sampled.problems == [None, None, "invalid_logits", None]
    assert 0 <= sampled.token_ids[2] < vocab
    assert sampled.logprobs[2] is None
    for row in (0, 1, 3):
        assert sampled.token_ids[row] == good.token_ids[row]
        assert sampled.logprobs[row] == good.logprobs[row]


@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_goes_bad_in_mid_output_leaves_the_others_their_tokens(bad: str) -> None:
    given = case("B13")
    references = [tiny_references()[index] for index in given["requests"]]
    prompts = [reference["prompt_ids"] for reference in references]
    broken = prompts[2]

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = tiny()(sequences).clone()
        for row, tokens in enumerate(sequences):
            if tokens[: len(broken)] == broken and len(tokens) == len(broken) + 5:
                places, value = BAD[bad]
                out[row, places] = value
        return out

    params = SamplingParams(temperature=given["params"]["temperature"])
    rows = generate(logits, prompts, [params] * 4, given["params"]["max_tokens"])
    assert [row.problem for row in rows] == [None, None, "invalid_logits", None]
    for place, (row, reference) in enumerate(zip(rows, references, strict=True)):
        assert row.token_ids == reference["greedy_40"][: 5 if place == 2 else 12]
