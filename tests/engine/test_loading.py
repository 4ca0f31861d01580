"""Finding and loading a model, and what is said when that fails."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from engine import compilation, loading, weights
from engine.attention import NAME
from engine.loading import load_engine, load_runner
from engine.probe import context_length, probe
from engine.source import find
from protocol import Job, ModelUnavailable, OptionRefused, SamplingParams
from tests.models import tiny_config

ON_CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def test_from_a_folder_to_text(tiny_model_dir: Path) -> None:
    engine = load_engine(str(tiny_model_dir), **ON_CPU)
    assert engine.fingerprint.name == tiny_model_dir.name
    assert engine.fingerprint.dtype == "float32"
    assert len(engine.fingerprint.revision) == 16
    ready = engine.prepare(
        Job.model_validate(
            {
                "id": "job",
                "messages": [{"role": "user", "content": "Hi"}],
                "params": {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True},
            }
        )
    )
    engine.add(ready)
    ids: list[int] = []
    while engine.has_work():
        ids += [token_id for delta in engine.step() for token_id in delta.token_ids]
    assert len(ids) == 5


def test_the_name_it_is_served_under(tiny_model_dir: Path) -> None:
    assert load_engine(str(tiny_model_dir), served_model_name="ours", **ON_CPU).fingerprint.name == "ours"


def test_the_revision_is_the_content(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    revision = weights.revision_of(find(str(tiny_model_dir)))
    assert weights.revision_of(find(str(copy))) == revision
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert weights.revision_of(find(str(copy))) != revision


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "no file or folder ./nowhere"),
        ("some/where/deep", "no file or folder some/where/deep"),
        ("missing.gguf", "no file or folder missing.gguf"),
        ("owner/no-such-model", "no model owner/no-such-model"),
        ("{tmp}", "no config.json"),
        ("{tmp}/notes.txt", "no .gguf"),
        ("{tmp}/broken.gguf", "cannot read broken.gguf as a GGUF model"),
        ("{tmp}/strange", "cannot load .*strange"),
    ],
)
def test_no_such_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ModelUnavailable, match=said) as caught:
        load_engine(model.replace("{tmp}", str(tmp_path)), **ON_CPU)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is none of auto, float32"),
        ({"device": "abacus"}, "device 'abacus' is none of auto, cpu, cuda, cuda:0 ...: give device auto"),
        ({"device": "meta"}, "device 'meta' is none of auto, cpu, cuda"),
        ({"device": None}, "device None is none of auto, cpu, cuda"),
        ({"max_model_len": 9999}, "max_model_len 9999 .*at most 256 tokens: give max_model_len 256"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"admission": "worst-fit"}, "admission 'worst-fit' is none of first-fit"),
        ({"kv_memory": 1000}, r"not enough KV memory: kv_memory 1000 .*: give kv_memory \d+$"),
        ({"num_kv_blocks": 1 << 40, "max_num_seqs": 1 << 40}, r"GiB are free: give num_kv_blocks \d+ and"),
        ({"num_kv_blocks": 8, "max_num_seqs": 128}, r"one block for each of 128 slots \(max_num_seqs\)"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_one_line(tiny_model_dir: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelUnavailable, ValueError), match=said) as caught:
        load_engine(str(tiny_model_dir), **{**ON_CPU, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cards", "device", "nearest"), [(0, "cuda", "cpu"), (0, "cuda:1", "cpu"), (2, "cuda:2", "cuda:1")]
)
def test_a_card_that_is_not_here_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, cards: int, device: str, nearest: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    with pytest.raises(OptionRefused, match=f"sees {cards} CUDA cards: give device {nearest}") as caught:
        load_engine("nowhere.gguf", device=device)
    assert caught.value.as_flags().startswith(f"--device '{device}' is not here")


def test_what_is_not_given_is_fitted_to_a_small_pool(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case D01 with the context left to us: a prompt of 80 tokens, 8 blocks of 8."""
    with caplog.at_level(logging.WARNING, logger="engine.loading"):
        engine = load_engine(str(tiny_model_dir), block_size=8, num_kv_blocks=8, **ON_CPU)
    assert engine.max_num_seqs == 8
    (said,) = [record.message for record in caplog.records if record.name == "engine.loading"]
    assert said == "the KV pool holds 64 tokens: max_model_len is that, and the model could take 256"
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
    big, small = engine.generate([list(range(3, 83)), [40, 41, 42]], params)
    assert big.error is not None
    assert "80" in big.error.message
    assert "64" in big.error.message
    assert len(small.choices[0].token_ids) == 8


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    MemoryError("Unable to allocate 3 GiB"),
]


@pytest.mark.parametrize("part", ["pack_linears", "warm_up"])
@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_beside_the_pool_is_told_with_a_smaller_one(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    options = {**ON_CPU, "block_size": 8, "num_kv_blocks": 40, "max_num_seqs": 4}
    with monkeypatch.context() as patch:
        patch.setattr(loading, part, fail)
        with pytest.raises(OptionRefused, match="ran out of memory") as caught:
            load_runner(str(tiny_model_dir), **options)
    assert "40 blocks takes" in str(caught.value)
    assert str(error) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.ways == ({"num_kv_blocks": 30},)
    assert load_runner(str(tiny_model_dir), **{**options, **caught.value.ways[0]}).runner.num_kv_blocks == 30


def test_another_error_while_a_model_is_made_ready_is_not_told_as_memory(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(loading, "warm_up", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        load_runner(str(tiny_model_dir), **ON_CPU)


def test_the_log_tells_where_a_start_spends_its_time(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.loading"):
        load_runner(str(tiny_model_dir), **ON_CPU)
    said = caplog.records[-1].message
    parts = re.search(
        r"in ([\d.]+) s \(weights ([\d.]+), packing ([\d.]+), warm-up ([\d.]+), compiling ([\d.]+)\)", said
    )
    assert parts is not None, said
    whole, *each = map(float, parts.groups())
    assert sum(each) <= whole + 0.2


@pytest.mark.long
def test_the_kernels_of_a_start_are_found_on_disk_by_the_next(tiny_model_dir: Path) -> None:
    """Numba keeps what it has compiled: the first start here, or one before it, has left it there."""
    load_runner(str(tiny_model_dir), **ON_CPU)
    code = (
        "import sys; from engine.compilation import compile_clock; import numba\n"
        "from engine.loading import load_runner\n"
        "with compile_clock() as clock: load_runner(sys.argv[1], dtype='float32', device='cpu')\n"
        "print(clock.seconds)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model_dir)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout.splitlines()[-1]) == 0.0, done.stdout


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
BY_KIND = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(("name", "rope"), [("Llama", DYNAMIC), ("Gemma3", BY_KIND)])
def test_a_model_whose_positions_depend_on_the_batch_is_held_to_its_first_range(
    name: str, rope: dict[str, Any]
) -> None:
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = tiny_config(rope_parameters=rope, original_max_position_embeddings=100)
    model = model_class(model_class.config_class(**config))
    assert context_length(model) == 100


@pytest.mark.parametrize(
    ("generation", "expected"),
    [([2, 0], {0, 2}), (0, {0, 2}), (None, {2}), ([], {2})],
    ids=str,
)
def test_every_end_token_ends_a_sequence(smollm2: Any, generation: Any, expected: set[int]) -> None:
    assert smollm2.eos_token_id == 2
    assert weights.end_tokens(GenerationConfig(eos_token_id=generation), smollm2) == expected
    assert weights.end_tokens(None, smollm2) == {2}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx2 avx512f", torch.float32),
        ("flags : avx512f avx512_bf16", torch.bfloat16),
        ("flags : amx_tile amx_bf16", torch.bfloat16),
    ],
)
def test_auto_is_what_the_processor_computes_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: torch.dtype
) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(weights, "CPUINFO", tmp_path / "cpuinfo")
    assert weights.resolve_dtype("auto", torch.device("cpu")) == expected
    assert weights.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert weights.resolve_dtype("float16", torch.device("cpu")) == torch.float16


def test_a_dropped_engine_frees_its_memory(tiny_model_dir: Path) -> None:
    import gc
    import weakref

    loaded = load_runner(str(tiny_model_dir), **ON_CPU)
    alive = weakref.ref(loaded.runner)
    del loaded
    gc.collect()
    assert alive() is None


def test_without_a_compiler_one_line_is_logged(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "find_cxx", lambda: None)
    with caplog.at_level(logging.WARNING, logger="engine"):
        engine = load_engine(str(tiny_model_dir), compile=True, **ON_CPU)
    assert engine.max_num_seqs
    said = [record.message for record in caplog.records if record.name == "engine.compilation"]
    assert said == ["no C++ compiler found: running without compilation"]


def test_every_decoder_layer_is_found(tiny_model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=NAME)
    layers, vocab_size = probe(model, 256)
    assert vocab_size == 512
    assert compilation.decoder_layers(model, layers) == list(model.model.layers)
