"""What a checkpoint or a flag asks for: a revision, code that comes along, quantized weights, a narrow dtype."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.loading import load_engine, load_runner
from engine.source import find
from protocol import ModelUnavailable, OptionRefused, SamplingParams

ON_CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
PROMPT = list(range(40, 60))
pytestmark = pytest.mark.usefixtures("one_thread")


def changed(folder: Path, copy: Path, **config: Any) -> Path:
    """A copy of a model with other values in its config."""
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | config))
    return copy


def greedy(folder: Path, count: int = 8, **options: Any) -> list[int]:
    """What our engine gives."""
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    (result,) = load_engine(str(folder), **ON_CPU, **options).generate([PROMPT], params)
    return result.choices[0].token_ids


def expected(folder: Path, count: int = 8, **options: Any) -> list[int]:
    """What transformers gives."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **options
    )
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False)
    return list(out[0, len(PROMPT) :].tolist())


@pytest.fixture
def hub_cache(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The local cache of a hub with `owner/tiny` in two revisions, and no way to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    home = tmp_path / "models--owner--tiny"
    commits = {"main": "a" * 40, "older": "b" * 40}
    for branch, commit in commits.items():
        changed(tiny_model_dir, home / "snapshots" / commit, rope_theta=5e3 if branch == "older" else 1e4)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / branch).write_text(commit)
    return commits


def test_a_revision_of_a_hub_id(hub_cache: dict[str, str]) -> None:
    for revision, commit in [(None, hub_cache["main"]), *hub_cache.items(), (hub_cache["older"],) * 2]:
        loaded = load_runner("owner/tiny", revision=revision, **ON_CPU)
        assert loaded.weights.fingerprint.name == "owner/tiny"
        assert loaded.weights.fingerprint.revision == commit
    with pytest.raises(ModelUnavailable, match="no model owner/tiny"):
        find("owner/tiny", "never-made")


def test_a_local_model_has_no_revision_to_choose(tiny_model_dir: Path) -> None:
    with pytest.raises(
        OptionRefused, match=r"revision 'v2' is of a model on the hub.* is local: give no revision"
    ):
        load_runner(str(tiny_model_dir), revision="v2", **ON_CPU)


def test_a_wrong_name_is_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.source import find; from protocol import ModelUnavailable\n"
        "for model in ('./nowhere', 'nowhere.gguf', sys.argv[1]):\n"
        "    try: find(model)\n"
        "    except ModelUnavailable: continue\n"
        "    sys.exit(model)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own-kind"
"""
MODELING = """
from pathlib import Path

from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

Path({ran!r}).touch()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = -out.logits
        return out
"""


def test_code_that_comes_with_a_model_runs_only_where_it_is_allowed(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    folder = changed(tiny_model_dir, tmp_path / "own", model_type="own-kind", auto_map=auto_map)
    ran = tmp_path / "ran"
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING.format(ran=str(ran)))
    with pytest.raises(
        ModelUnavailable, match=r"own comes with code of its own.*--trust-remote-code"
    ) as caught:
        load_runner(str(folder), **ON_CPU)
    assert "\n" not in str(caught.value)
    assert not ran.exists()
    own = greedy(folder, trust_remote_code=True)
    assert ran.exists()
    assert own == expected(folder, trust_remote_code=True) != greedy(tiny_model_dir)


def test_quantized_weights_stay_quantized(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Ternary weights, two bits each: a method that transformers itself computes on a CPU."""
    from transformers.integrations.bitnet import pack_weights  # takes 2 s: it decorates with torch.compile

    how = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    folder = changed(tiny_model_dir, tmp_path / "ternary", quantization_config=how)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        scale = 1 / tensor.abs().mean()
        tensors[name] = pack_weights((tensor * scale).round().clamp(-1, 1))
        tensors[f"{name}_scale"] = scale[None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.compiler.set_stance("force_eager"):  # its unpacking is compiled otherwise: 80 s
        loaded = load_runner(str(folder), **ON_CPU)
        assert loaded.weights.fingerprint.quantization == "bitnet"
        weight = loaded.weights.model.model.layers[0].mlp.up_proj.weight
        assert weight.dtype == torch.uint8
        assert greedy(folder) == expected(folder) != greedy(tiny_model_dir)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "requires optimum"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "requires bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors.* is required"),
        ({"quant_method": "fbgemm_fp8"}, "requires a GPU"),
        ({"quant_method": "abacus"}, "'abacus', a method that transformers does not know"),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_what_quantized_weights_lack_is_named(
    tiny_model_dir: Path, tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    folder = changed(tiny_model_dir, tmp_path / "packed", quantization_config=how)
    with pytest.raises(ModelUnavailable, match=said) as caught:
        load_runner(str(folder), **ON_CPU)
    assert "\n" not in str(caught.value)


def test_weights_unpacked_for_want_of_a_device_are_told_apart(tiny_model_dir: Path, tmp_path: Path) -> None:
    how = {"quant_method": "fp8", "modules_to_not_convert": ["model", "lm_head"]}
    folder = changed(tiny_model_dir, tmp_path / "fp8", quantization_config=how)
    assert load_runner(str(folder), **ON_CPU).weights.fingerprint.quantization == "fp8 dequantized"


def test_a_checkpoint_that_is_not_whole_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model_dir, tmp_path / "half")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelUnavailable, match=re.escape("lack 1 of the model's tensors (model.layers.1.mlp.up")
    ):
        load_runner(str(folder), **ON_CPU)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.long)])  # compiles
def test_sixteen_bits(tiny_model_dir: Path, dtype: str) -> None:
    loaded = load_runner(str(tiny_model_dir), **{**ON_CPU, "dtype": dtype})
    assert loaded.weights.model.dtype == getattr(torch, dtype)
    assert loaded.weights.fingerprint.dtype == dtype
    options = {**ON_CPU, "dtype": dtype}
    (result,) = load_engine(str(tiny_model_dir), **options).generate(
        [PROMPT], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    )
    assert len(result.choices[0].token_ids) == 8
