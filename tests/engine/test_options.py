"""Options that are a word or a switch are refused before anything is loaded, and each that is named can be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.kv_dtype import KV_DTYPES
from engine.loading import load_engine, load_runner
from engine.options import WORDS, check_words
from engine.slots import POLICIES
from engine.weights import resolve_dtype
from protocol import OptionRefused
from tests.engine.doubles import PagedDouble, hashed, make_engine


def test_the_words_are_those_that_can_be_had() -> None:
    assert set(WORDS["kv_dtype"]) == {"auto", *KV_DTYPES}
    assert set(WORDS["admission"]) == set(POLICIES)
    for name in WORDS["dtype"]:
        assert resolve_dtype(name, torch.device("cpu")).is_floating_point


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int3"}, "dtype 'int3' is none of auto, float32, bfloat16, float16: give dtype "),
    (
        {"kv_dtype": "int4"},
        "kv_dtype 'int4' is none of auto, float32, bfloat16, float16, int8, fp8: give kv_dtype int8",
    ),
    ({"kv_dtype": torch.int8}, "kv_dtype torch.int8 is none of auto, .*: give kv_dtype int8"),
    ({"quantization": "int4"}, "quantization 'int4' is none of none, int8: give quantization int8"),
    ({"quantization": ""}, "quantization '' is none of none, int8: give quantization "),
    (
        {"quantization": "int8", "compile": True},
        "quantization int8 and compile exclude each other: .*: give no compile, or no quantization",
    ),
    ({"compile": "no"}, "compile is 'no': give compile True, or compile False"),
    ({"trust_remote_code": "no"}, "trust_remote_code is 'no': give trust_remote_code True, or "),
]
OF_THE_ENGINE: list[tuple[dict[str, Any], str]] = [
    (
        {"admission": "best"},
        "admission 'best' is none of first-fit, best-fit, priority: give admission best-fit",
    ),
    ({"overlap": "yes"}, "overlap is 'yes': give overlap True, or overlap False"),
    ({"overlap": 1}, "overlap is 1: give overlap True, or overlap False"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED + OF_THE_ENGINE, ids=str)
def test_what_cannot_be_is_told_before_the_model_is_looked_for(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(OptionRefused, match=f"^{said}") as refused:
        load_engine(nowhere, **options)
    for way in refused.value.ways:
        check_words({**options, **way})
    if (options, said) in REFUSED:
        with pytest.raises(OptionRefused, match=f"^{said}"):
            load_runner(nowhere, **options)
    else:
        with pytest.raises(OptionRefused, match=f"^{said}"):
            make_engine(PagedDouble(hashed), **options)


def test_on_a_command_line_words_are_flags_too() -> None:
    with pytest.raises(OptionRefused) as refused:
        check_words({"quantization": "int8", "compile": True})
    assert refused.value.as_flags() == (
        "--quantization int8 and --compile exclude each other: int8 layers are no part of compiled code: "
        "give no --compile, or no --quantization"
    )
    with pytest.raises(OptionRefused) as refused:
        check_words({"admission": "best"})
    assert refused.value.as_flags() == (
        "--admission 'best' is none of first-fit, best-fit, priority: give --admission best-fit"
    )


def test_what_a_user_wrote_is_no_flag_even_if_it_looks_like_one() -> None:
    why = "revision 'v_2' is not the model's own, 'my_model' is local, as max_num_seqs is"
    refused = OptionRefused(why, [{"revision": None}])
    assert refused.as_flags() == (
        "--revision 'v_2' is not the model's own, 'my_model' is local, as --max-num-seqs is: give no --revision"
    )
    told = OptionRefused(refused.as_flags())  # as a worker's parent hears of it
    assert told.as_flags() == refused.as_flags()


def test_none_is_not_given(tiny_model_dir: Path) -> None:
    loaded = load_runner(
        str(tiny_model_dir),
        kv_dtype=None,
        quantization=None,
        dtype="float32",
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
    )
    assert (loaded.weights.fingerprint.kv_dtype, loaded.weights.fingerprint.quantization) == ("", "")


def test_an_option_that_there_is_not_is_told_of_the_function_that_was_called(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^load_engine\(\) got an unexpected keyword argument 'foo'$"):
        load_engine(str(tmp_path / "nowhere"), foo=1)  # type: ignore[call-arg]


def test_words_are_checked_without_torch() -> None:
    code = (
        "import sys; from engine.options import check_words; from protocol import OptionRefused\n"
        "try: check_words({'kv_dtype': 'int4'})\n"
        "except OptionRefused: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
