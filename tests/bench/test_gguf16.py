"""A quantized GGUF file and its copy in 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from bench.gguf16 import in_16_bits, write_in_16_bits

QUANTIZED = [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1]


def quantized_file(path: Path) -> Path:
    """A file with every kind of header entry that models have, matrices in several types, and a vector."""
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_name("a name")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ß", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    random = np.random.default_rng(0)
    for kind in QUANTIZED:
        weight = random.standard_normal((6, 64)).astype(np.float32)
        writer.add_tensor(f"{kind.name}.weight", quantize(weight, kind), raw_dtype=kind)
    writer.add_tensor("norm.weight", random.standard_normal(64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_header_are_the_same(tmp_path: Path) -> None:
    source, target = quantized_file(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    write_in_16_bits(source, target)
    before, after = GGUFReader(source), GGUFReader(target)
    told = {name: entry.contents() for name, entry in after.fields.items() if not name.startswith("GGUF.")}
    expected = {
        name: entry.contents() for name, entry in before.fields.items() if not name.startswith("GGUF.")
    }
    assert told == expected | {"general.file_type": int(LlamaFileType.MOSTLY_F16)}
    assert {name: entry.types for name, entry in after.fields.items() if name in told} == {
        name: entry.types for name, entry in before.fields.items() if name in told
    }
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for one, other in zip(before.tensors, after.tensors, strict=True):
        vector = len(one.shape) == 1
        assert other.tensor_type == (GGMLQuantizationType.F32 if vector else GGMLQuantizationType.F16)
        assert other.shape.tolist() == one.shape.tolist()
        value = dequantize(one.data, one.tensor_type)
        np.testing.assert_array_equal(other.data, value if vector else value.astype(np.float16))


def test_the_copy_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    source = quantized_file(tmp_path / "a.gguf")
    made = in_16_bits(source)
    stamp = made.stat().st_mtime_ns
    assert in_16_bits(source) == made
    assert made.stat().st_mtime_ns == stamp
    assert [file.name for file in made.parent.iterdir()] == [made.name]


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no such format")
    with pytest.raises(ValueError):
        in_16_bits(broken)
    assert [*(tmp_path / "cache").rglob("*.F16.gguf*")] == []
