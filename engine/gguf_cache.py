"""GGUF files, unpacked once: `<cache>/gguf/<stem>-<key>/` holds safetensors, config and tokenizer.

Unpacking SmolLM2-135M takes 14 s, reading the converted folder under one. transformers keeps GGUF
weights packed unless asked otherwise, which is slow on a CPU; the copy is float32, so it holds exactly what
the file says.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.source import check_complete
from protocol import ModelUnavailable

log = logging.getLogger(__name__)

FORMAT = "2"
"""Part of the key: raise it when a conversion made by older code must not be used."""
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 18


def cache_root() -> Path:
    """`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`."""
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millstream"


def content_key(files: Sequence[Path]) -> str:
    """16 hex digits that stand for the files' names, sizes and contents.

    Of a large file 64 pieces of 256 KiB are read, evenly spread and with both ends: a 40 GB model must not
    be read twice at every start.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def converted(path: Path) -> tuple[Path, str]:
    """The folder with a GGUF file's unpacked weights, made if it is not there, and the file's content key.

    Safe when several processes ask at once: one converts under a file lock, the others wait; the folder
    appears whole.

    Raises:
        ModelUnavailable: the file is no GGUF transformers can read, it lacks tensors, or the cache cannot be written.
    """
    key = content_key([path])
    folder = cache_root() / "gguf" / f"{path.stem}-{key}-{FORMAT}"
    if folder.is_dir():
        return folder, key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _convert_into(path, folder)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot write the converted copy of {path.name} to {folder}: {error}; set MILLSTREAM_CACHE"
        ) from error
    return folder, key


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system drops it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(path: Path, folder: Path) -> None:
    log.info("converting %s (once; kept in %s)", path.name, folder)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _unpack(path, temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _header_read_once() -> Iterator[None]:
    """For the time of a conversion, let two of `gguf`'s functions remember their answers.

    transformers parses the header three times and builds the map of tensor names once a module, all in Python.
    Measured for SmolLM2-135M (Zen 3): 32 s plain, 14 s so, the same files bit for bit.
    """
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _unpack(path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        with _header_read_once():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path.parent,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
                **where,
            )
    except Exception as error:  # the reader raises whatever a broken or foreign file makes it meet
        raise ModelUnavailable(f"cannot read {path.name} as a GGUF model: {_first_line(error)}") from error
    check_complete(path.name, loaded["missing_keys"])  # the copy would be whole, whatever the file lacks
    # Left in the config, the mark would send the plain copy through the GGUF reader again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
