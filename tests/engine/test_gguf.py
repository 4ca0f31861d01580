"""GGUF files, unpacked once; what a file lacks is not made up."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file

from engine import gguf_cache
from engine.loading import load_engine
from engine.source import find
from protocol import ModelUnavailable
from tests.models import byte_tokenizer

HIDDEN, MIDDLE, VOCAB_SIZE = 32, 64, 300
LAYER = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MIDDLE, HIDDEN),
    "ffn_up": (MIDDLE, HIDDEN),
    "ffn_down": (HIDDEN, MIDDLE),
}
SHAPES = {
    "token_embd.weight": (VOCAB_SIZE, HIDDEN),
    **{f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in LAYER.items()},
    "output_norm.weight": (HIDDEN,),
    "output.weight": (VOCAB_SIZE, HIDDEN),
}
"""Every tensor of a Llama of two layers, as llama.cpp calls them."""


def write_llama(path: Path, lacking: tuple[str, ...] = ()) -> Path:
    """A GGUF file with a tokenizer of bytes and random weights."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokens = [*tokenizer.convert_ids_to_tokens(list(range(VOCAB_SIZE - 1))), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCAB_SIZE - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        if name not in lacking:
            weight = np.full(shape, 2.0) if name == "output_norm.weight" else random.standard_normal(shape)
            writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def copies(cache: Path) -> list[Path]:
    return [entry for entry in cache.iterdir() if entry.is_dir()]


def test_a_whole_file_is_unpacked_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder, _ = gguf_cache.converted(write_llama(tmp_path / "whole.gguf"))
    assert copies(cache) == [folder]
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == len(SHAPES)
    assert torch.equal(weights["model.norm.weight"], torch.full((HIDDEN,), 2.0))


LACKING = [
    ("blk.1.ffn_norm.weight",),
    *(
        pytest.param(names, marks=pytest.mark.long)
        for names in [
            *((name,) for name in SHAPES if name not in ("blk.1.ffn_norm.weight", "output.weight")),
            tuple(SHAPES),
            tuple(name for name in SHAPES if name.startswith("blk.1.")),
        ]
    ),
]
"""Without `output.weight` a model is one whose embeddings are tied: nothing is missing then."""


@pytest.mark.parametrize("names", LACKING, ids=lambda names: f"{len(names)} {names[0]}")
def test_a_file_that_lacks_tensors_is_refused(tmp_path: Path, cache: Path, names: tuple[str, ...]) -> None:
    path = write_llama(tmp_path / "part.gguf", lacking=names)
    for _ in range(2):  # nor is a copy of it found the next time
        with pytest.raises(ModelUnavailable, match=r"part.*\.gguf (is not whole|as a GGUF model)") as raised:
            load_engine(str(path), dtype="float32", device="cpu")
        assert "\n" not in str(raised.value)
        assert copies(cache) == []


@pytest.mark.parametrize("number", [1, 3])
def test_a_part_of_a_split_file_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    path = tmp_path / f"big-q4-{number:05}-of-00003.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match="one of 3 parts of a GGUF file") as raised:
        find(str(path))
    assert "llama-gguf-split --merge big-q4-00001-of-00003.gguf big-q4.gguf" in str(raised.value)


@pytest.mark.parametrize("name", ["big-00001-of-00001.gguf", "1-of-3.gguf", "big-00001-of-00003-q4.gguf"])
def test_other_names_are_of_whole_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    assert find(str(tmp_path / name)).kind == "gguf"


def test_two_processes_convert_one_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 100)
    context = multiprocessing.get_context("fork")
    converting = context.Event()
    go_on = context.Event()

    def convert() -> None:
        def unpack(path: Path, target: Path) -> None:
            with (path.parent / "conversions").open("a") as file:
                file.write("x")
            converting.set()
            assert go_on.wait(20)
            (target / "config.json").write_text("{}")

        gguf_cache._unpack = unpack
        folder, _ = gguf_cache.converted(path)
        assert (folder / "config.json").is_file()

    processes = [context.Process(target=convert) for _ in range(2)]
    processes[0].start()
    assert converting.wait(20)
    processes[1].start()
    assert not list((tmp_path / "cache").rglob("config.json")), "the folder appears whole or not at all"
    go_on.set()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "conversions").read_text() == "x"
    assert len([entry for entry in (tmp_path / "cache" / "gguf").iterdir() if entry.is_dir()]) == 1


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))

    def unpack(_: Path, target: Path) -> None:
        (target / "half").write_text("x")
        raise ModelUnavailable("broken")

    monkeypatch.setattr(gguf_cache, "_unpack", unpack)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable):
        gguf_cache.converted(path)
    assert [entry for entry in (tmp_path / "cache" / "gguf").iterdir() if entry.is_dir()] == []


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "own"))
    assert gguf_cache.cache_root() == tmp_path / "own"
    monkeypatch.delenv("MILLSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gguf_cache.cache_root() == tmp_path / "millstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_cache.cache_root() == Path.home() / ".cache" / "millstream"


@pytest.mark.model
def test_a_gguf_file_is_converted_once(smollm2_path: Path) -> None:
    folder, key = gguf_cache.converted(smollm2_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf_cache.converted(smollm2_path) == (folder, key)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
