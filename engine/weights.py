"""Loading a model with transformers: weights, tokenizer, and what they are called."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from engine import attention, gguf_cache
from engine.source import Source, ask_hub, cached_config, check_complete, find
from protocol import Fingerprint, ModelUnavailable, OptionRefused

log = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model in evaluation mode, on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: Fingerprint
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _How:
    """What does not depend on where the files are."""

    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool


def load_weights(
    model: str,
    *,
    dtype: str,
    device: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    served_model_name: str | None = None,
) -> Weights:
    """Find and load a model.

    Args:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run modeling code that comes with the model.

    Raises:
        ModelUnavailable: it is not there, or transformers cannot load it.
        OptionRefused: no such device, or a revision of local files.
    """
    place = _resolve_device(device)
    how = _How(resolve_dtype(dtype, place), place, trust_remote_code)
    source = find(model, revision)
    loaded, tokenizer, method = _load_anywhere(source, how)
    return Weights(
        model=loaded.eval(),
        tokenizer=tokenizer,
        fingerprint=Fingerprint(
            name=served_model_name or source.name,
            revision=revision_of(source),
            dtype=str(how.dtype).removeprefix("torch."),
            quantization=method,
        ),
        eos_token_ids=end_tokens(loaded.generation_config, tokenizer),
    )


def revision_of(source: Source) -> str:
    """The commit of a hub id that is in the local cache, a key of the content of local files."""
    if source.kind == "hub":
        return Path(cached_config(source) or "").parent.name
    if source.kind == "gguf":
        return gguf_cache.content_key([Path(source.place)])
    parts = (".safetensors", ".bin", ".json", ".jinja", ".py")
    return gguf_cache.content_key(
        sorted(file for file in Path(source.place).iterdir() if file.suffix in parts)
    )


def end_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's (one or several) and the tokenizer's."""
    ids: set[int] = set()
    for eos in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        ids.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    return frozenset(ids)


_Parts = tuple[PreTrainedModel, PreTrainedTokenizerBase, str]
"""The model, its tokenizer, and the method its weights are quantized by."""


def _load_anywhere(source: Source, how: _How) -> _Parts:
    """Load from disk, or for a hub id that is not wholly in the local cache, from the hub."""
    try:
        return _load(source, how, local_files_only=True)
    except OSError as error:
        if source.kind != "hub":
            raise ModelUnavailable(f"cannot load {source.place}: {_first_line(error)}") from error
    ask_hub(source)
    log.info("downloading %s", source.place)
    try:
        return _load(source, how, local_files_only=False)
    except OSError as error:
        raise ModelUnavailable(f"cannot load {source.place} from the hub: {_first_line(error)}") from error


def _load(source: Source, how: _How, *, local_files_only: bool) -> _Parts:
    disable_progress_bar()  # of reading from disk; downloads keep theirs
    place = str(gguf_cache.converted(Path(source.place))[0]) if source.kind == "gguf" else source.place
    where: dict[str, Any] = {
        "local_files_only": local_files_only,
        "trust_remote_code": how.trust_remote_code,
        "revision": source.revision or "main",
    }
    try:
        config = AutoConfig.from_pretrained(place, **where)
        if config.is_encoder_decoder:
            raise ModelUnavailable(
                f"{source.name} cannot run here: {config.model_type} is an encoder-decoder, "
                "and only decoders are served"
            )
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
        method = quantization(config)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=how.dtype,
            attn_implementation=attention.NAME,
            # Quantized weights are laid out for their device while they are read and cannot be moved afterwards.
            device_map={"": how.device} if method else None,
            output_loading_info=True,
            **where,
        )
        model = model if method else model.to(how.device)
    except torch.OutOfMemoryError as error:
        raise ModelUnavailable(
            f"the weights of {source.name} do not fit on {how.device}: {_first_line(error)}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ModelUnavailable(_why(source, error)) from error
    check_complete(source.name, loaded["missing_keys"])
    return model, tokenizer, _as_loaded(source, method, model)


def quantization(config: PreTrainedConfig) -> str:
    """The method a checkpoint's weights are quantized by (`awq`, `fp8`, `bitnet` ...); empty: they are not."""
    found: Any = getattr(config, "quantization_config", None)
    if not isinstance(found, dict):
        found = found.to_dict() if found is not None else {}
    method = found.get("quant_method", "")
    return str(getattr(method, "value", method))


def _as_loaded(source: Source, method: str, model: PreTrainedModel) -> str:
    """The method, as it is in force: where the device has no kernels for it, transformers unpacks the weights."""
    if not method:
        return ""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None and hasattr(model.config, "quantization_config"):
        raise ModelUnavailable(
            f"{source.name} is quantized by {method!r}, a method that transformers does not know"
        )
    return method if quantizer is not None else f"{method} dequantized"


def _why(source: Source, error: Exception) -> str:
    """What a user can do about an error of transformers."""
    if "trust_remote_code" in str(error):
        return (
            f"{source.name} comes with code of its own and transformers has none for it: "
            "read that code, and allow it to run with trust_remote_code (--trust-remote-code)"
        )
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return f"{source.name} cannot run here: its layers do not use transformers' attention interface"
    return f"transformers cannot load {source.name}: {_first_line(error)}"


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise OptionRefused(f"device {device!r} is none of auto, cpu, cuda, cuda:0 ...", [{"device": "auto"}])
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= cards:
        nearest = f"cuda:{cards - 1}" if cards else "cpu"
        raise OptionRefused(
            f"device {device!r} is not here: torch sees {cards} CUDA cards", [{"device": nearest}]
        )
    return place


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV; `auto` is what the device computes fast.

    Args:
        dtype: one of `engine.options.WORDS`.
    """
    if dtype != "auto":
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
