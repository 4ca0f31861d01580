"""Finding a model and loading it: a hub id, a local folder, or a `.gguf` file. Code that comes with a model
never runs.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from engine import attention, gguf_cache
from protocol import Fingerprint, ModelUnavailable

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
CPUINFO = Path("/proc/cpuinfo")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are."""

    place: str
    """A folder, or a hub id."""
    name: str
    """What the model is called."""
    revision: str
    """Content key of local files; empty for a hub id, whose commit is known once its config is read."""
    is_hub: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model in evaluation mode, on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: Fingerprint
    eos_token_ids: frozenset[int]


def load_weights(model: str, *, dtype: str, device: str, served_model_name: str | None = None) -> Weights:
    """Find and load a model.

    Raises:
        ModelUnavailable: it is not there, or transformers cannot load it.
    """
    place = _resolve_device(device)
    kind = resolve_dtype(dtype, place)
    source = find(model)
    loaded, tokenizer = _load_anywhere(source, kind)
    try:
        loaded = loaded.to(place).eval()
    except torch.OutOfMemoryError as error:
        raise ModelUnavailable(
            f"the weights of {source.name} do not fit on {place}: {_first_line(error)}"
        ) from error
    revision = source.revision or getattr(loaded.config, "_commit_hash", None) or ""
    return Weights(
        model=loaded,
        tokenizer=tokenizer,
        fingerprint=Fingerprint(
            name=served_model_name or source.name, revision=revision, dtype=str(kind).removeprefix("torch.")
        ),
        eos_token_ids=end_tokens(loaded.generation_config, tokenizer),
    )


def find(model: str) -> Source:
    """Local files first, then the hub.

    Raises:
        ModelUnavailable: neither a folder with a model, nor a `.gguf` file, nor a possible hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"the folder {model} holds no model: no config.json (a .gguf is named as a file)"
            )
        files = sorted(
            file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".json", ".jinja")
        )
        return Source(str(path), path.resolve().name, gguf_cache.content_key(files), is_hub=False)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelUnavailable(
                f"{model} is a file but no .gguf: name a .gguf file, a folder, or a hub id"
            )
        folder, key = gguf_cache.converted(path.resolve())
        return Source(str(folder), path.stem, key, is_hub=False)
    if path.suffix == ".gguf" or not _HUB_ID.match(model):
        raise ModelUnavailable(f"no file or folder {model}, and it is no hub id (owner/name) either")
    return Source(model, model, "", is_hub=True)


def end_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's (one or several) and the tokenizer's."""
    ids: set[int] = set()
    for eos in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        ids.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    return frozenset(ids)


def _load_anywhere(source: Source, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load from disk, or for a hub id that is not wholly in the local cache, from the hub."""
    try:
        return _load(source.place, dtype, local_files_only=True)
    except OSError as error:
        if not source.is_hub:
            raise ModelUnavailable(f"cannot load {source.place}: {_first_line(error)}") from error
    _ask_hub(source.place)
    log.info("downloading %s", source.place)
    try:
        return _load(source.place, dtype, local_files_only=False)
    except OSError as error:
        raise ModelUnavailable(f"cannot load {source.place} from the hub: {_first_line(error)}") from error


def _ask_hub(hub_id: str) -> None:
    """One question before the download: its own retries take 24 s to say that there is no network.

    Raises:
        ModelUnavailable: no such model, not for this user, or no hub to ask.
    """
    nowhere = f"no model {hub_id}: no file or folder here, not in the local cache, and"
    try:
        HfApi().model_info(hub_id, timeout=10)
    except GatedRepoError as error:
        raise ModelUnavailable(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{nowhere} the hub has none (check the name; a private one needs HF_TOKEN)"
        ) from error
    except Exception as error:  # whatever the HTTP client in use calls a failure
        raise ModelUnavailable(
            f"{nowhere} the hub cannot be reached ({_first_line(error)}); check the network, or name a local copy"
        ) from error


def _load(
    place: str, dtype: torch.dtype, *, local_files_only: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    disable_progress_bar()  # of reading from disk; downloads keep theirs
    where: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(place, **where)
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
        model = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, attn_implementation=attention.NAME, **where
        )
    except (ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelUnavailable(f"transformers cannot load {place}: {_first_line(error)}") from error
    return model, tokenizer


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelUnavailable(f"no device {device!r}: give auto, cpu, cuda or cuda:<n>") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelUnavailable(f"device {device!r} was asked for and torch sees no CUDA device")
    return place


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV; `auto` is what the device computes fast.

    Raises:
        ModelUnavailable: no such dtype.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ModelUnavailable(f"no dtype {dtype!r}: give auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    # Emulated bfloat16 is slow: on Zen 3 (AVX2) the linears of 32 rows take 134 ms in bfloat16, 37 in
    # float32.
    return torch.bfloat16 if device.type == "cuda" or _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    try:
        flags = set(re.findall(r"\w+", CPUINFO.read_text()))
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
