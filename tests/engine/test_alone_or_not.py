"""No batch-mate changes a row, and none can hurt it: the tiny model through the whole engine, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.interface import Request
from protocol import ErrorCode, SamplingParams
from tests.engine.doubles import (
    PagedDouble,
    choices,
    hashed,
    make_engine,
    optimistic,
    request,
    resumed,
    run,
    token_ids,
)
from tests.engine.test_equal_generate import engine_for
from tests.models import tiny_recipe

PROMPTS = [row["prompt_ids"] for row in tiny_recipe()["requests"]]
SEEDED = request("seeded", PROMPTS[3], 16, seed=7, temperature=1.1, top_p=0.95, frequency_penalty=0.3)

ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"block_size": 8},
    "chunked": {"block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    "tight": {"block_size": 4, "num_kv_blocks": 18},
}
NEIGHBOURS: dict[str, list[Request]] = {
    "none": [],
    "greedy": [request(f"g{i}", PROMPTS[i], 12) for i in (0, 1, 2, 4)],
    "sampled": [request(f"s{i}", PROMPTS[i], 9 + i, seed=99 * i, temperature=0.9) for i in (5, 6, 8)],
    "several": [
        Request("n", (tuple(PROMPTS[7]), tuple(PROMPTS[3])), SamplingParams(n=2, ignore_eos=True), 7, (9, 9)),
        request("like", PROMPTS[3], 16, seed=8, temperature=1.1, top_p=0.95, frequency_penalty=0.3),
    ],
}


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path) -> dict[str, Engine]:
    torch.set_num_threads(1)
    return {name: optimistic(engine_for(tiny_model_dir, **options)) for name, options in ENGINES.items()}


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path) -> list[int]:
    return token_ids(run(engine_for(tiny_model_dir), [SEEDED])["seeded"])


@pytest.mark.parametrize("place", ["first", pytest.param("last", marks=pytest.mark.long)])
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_seeded_row_in_24_arrangements(
    engine: str, neighbours: str, place: str, engines: dict[str, Engine], undisturbed: list[int]
) -> None:
    others = NEIGHBOURS[neighbours]
    preemptions = engines[engine].stats().preemptions
    out = run(engines[engine], [SEEDED, *others] if place == "first" else [*others, SEEDED])
    assert token_ids(out["seeded"]) == undisturbed
    if engine == "tight" and neighbours == "greedy":
        assert engines[engine].stats().preemptions > preemptions
    if neighbours == "several":
        assert token_ids(out["like"]) != undisturbed, "seed 8 draws as seed 7"


@pytest.mark.parametrize("cut", [1, 8, 15])
def test_a_seeded_row_goes_on_where_it_was(
    cut: int, engines: dict[str, Engine], undisturbed: list[int]
) -> None:
    out = run(engines["roomy"], [*NEIGHBOURS["greedy"], resumed(SEEDED, undisturbed[:cut])])
    assert token_ids(out["seeded"]) == undisturbed[cut:]


def test_seed_0_is_a_seed_and_no_seed_is_one_made_of_the_id(engines: dict[str, Engine]) -> None:
    def drawn(name: str, seed: int | None) -> tuple[list[int], int | None]:
        params = SamplingParams(temperature=1.2, max_tokens=8, ignore_eos=True, seed=seed)
        engines["roomy"].add_request(name, PROMPTS[0], params)
        return token_ids(run(engines["roomy"])[name]), seed

    assert drawn("a", 0) == drawn("b", 0)
    assert drawn("a", None) == drawn("a", None)
    assert drawn("a", None) != drawn("b", None)
    params = SamplingParams(temperature=1.2, max_tokens=8, ignore_eos=True)
    (first,) = engines["roomy"].generate([PROMPTS[0]], params)
    (again,) = engines["roomy"].generate([PROMPTS[0]], params.model_copy(update={"seed": first.seed}))
    assert again.choices == first.choices


FAULTS = {
    "NaN logits": ({}, "nan", ErrorCode.INVALID_LOGITS),
    "no logits": ({}, "-inf", ErrorCode.INVALID_LOGITS),
    "infinite logits": ({}, "inf", ErrorCode.INVALID_LOGITS),
    "rules that leave nothing": (
        {"allowed_token_ids": [7], "logit_bias": {}},
        "barred",
        ErrorCode.NO_CANDIDATES,
    ),
    "a fault in its text": ({}, "text", ErrorCode.ENGINE_ERROR),
    "a fault in its grammar": ({}, "grammar", ErrorCode.ENGINE_ERROR),
}


class BrokenText:
    stopped = None

    def push(self, token_id: int) -> str:
        raise ZeroDivisionError(f"no text for {token_id}")

    def flush(self) -> str:
        return ""


class BrokenGrammar:
    def matcher(self) -> BrokenGrammar:
        return self

    def allowed(self, mask: Any) -> None:
        raise ZeroDivisionError(f"no mask of {len(mask)} words")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_fails_leaves_the_others_as_they_were(fault: str) -> None:
    params, kind, code = FAULTS[fault]
    at_step = 4

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = hashed(sequences)
        for row, tokens in enumerate(sequences):
            if tokens[0] == 50 and len(tokens) == 9 + at_step and kind in ("nan", "inf", "-inf"):
                out[row] = float(kind)
        return out

    bad = request("bad", [50] * 9, 12, **params)
    if kind == "barred":
        bad = Request(bad.id, bad.prompts, bad.params, 0, bad.max_tokens, bad_words=((7,),))
    if kind == "grammar":
        bad = Request(bad.id, bad.prompts, bad.params, 0, bad.max_tokens, grammar=BrokenGrammar())
    others = [request(f"r{i}", [9 + i] * (3 + 5 * i), 12, temperature=i % 2, seed=i) for i in range(4)]
    engine = make_engine(PagedDouble(logits))
    for new in [*others[:2], bad, *others[2:]]:
        engine.add(new)
    if kind == "text":
        engine._loop.roster._requests["bad"][0].choice._text = BrokenText()  # type: ignore[assignment]
    out = run(engine)
    ends = [delta for delta in out["bad"] if delta.error is not None]
    assert len(ends) == 1
    assert ends[0] is out["bad"][-1]
    assert ends[0].last
    assert ends[0].error is not None
    assert ends[0].error.code == code
    quiet = run(make_engine(PagedDouble(hashed)), others)
    assert {new.id: choices(out[new.id]) for new in others} == {
        new.id: choices(quiet[new.id]) for new in others
    }
    assert engine.stats().kv_blocks_used == 0
    engine.check_integrity()
    assert token_ids(run(engine, [others[0]])["r0"]) == token_ids(quiet["r0"]), "the next request is served"
