"""A GGUF file's weights in 16 bits, for an engine that reads GGUF and should not compute with fewer.

    header   as it is, but the file's type (1: mostly float16)
    tensors  vectors float32, all else float16

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

from engine.gguf_cache import cache_root, content_key

ARCHITECTURE = "general.architecture"
FILE_TYPE = "general.file_type"


def in_16_bits(path: Path) -> Path:
    """The file's copy with 16-bit weights; made once, it lies beside the copies that `engine.gguf_cache` makes."""
    target = cache_root() / "gguf" / f"{path.stem}-{content_key([path])}.F16.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            write_in_16_bits(path, unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def write_in_16_bits(source: Path, target: Path) -> None:
    """Write the copy of a GGUF file. Values beyond float16's range would become infinite; weights have none."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields[ARCHITECTURE].contents())
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for name, entry in reader.fields.items():
        # The reader shows the header's own counts as entries too; the writer counts for itself.
        if name in (ARCHITECTURE, FILE_TYPE) or name.startswith("GGUF."):
            continue
        kind = entry.types[0]
        of = entry.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, of)
    for tensor in reader.tensors:
        # GGUF names the fastest axis first, numpy last.
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape.tolist()[::-1])
        writer.add_tensor(tensor.name, weight.astype(np.float32 if weight.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
