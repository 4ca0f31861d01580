"""The script that measures on a GPU: its workload, what it says without one, and its parts rehearsed on a CPU."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import gpu, gpu_models, gpu_parts
from bench.workload import Row
from tests.models import tiny_config


def test_the_workload_is_the_published_one() -> None:
    rows = gpu_parts.nano_vllm_rows(256, 1024, 151_936)
    assert sum(row.max_tokens for row in rows) == 133_966
    assert all(100 <= len(row.prompt_ids) <= 1024 for row in rows)


def test_the_floor_is_weights_a_step_and_live_kv_a_token() -> None:
    """Prompts of 3 and 1 with 2 and 3 outputs see 4 + 5 and 2 + 3 + 4 tokens; three steps."""
    rows = [Row([5, 6, 7], 2), Row([5], 3)]
    assert gpu_parts.floor_seconds(1000, 10, rows, 3, 100) == (3 * 1000 + (4 + 5 + 2 + 3 + 4) * 10) / 100
    assert gpu_parts.floor_seconds(1000, 10, [], 0, 100) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_embeddings_is_read_only_where_it_makes_logits(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**tiny_config(tie_word_embeddings=tied)))
    everything = sum(weight.nbytes for weight in model.parameters())
    table = model.get_input_embeddings().weight.nbytes
    assert gpu_parts.weight_bytes(model) == (everything if tied else everything - table)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "not run: no GPU\n"


@pytest.mark.parametrize(
    "part", ["nano-vllm", *(pytest.param(name, marks=pytest.mark.long) for name in ("tokens", "llama-8b"))]
)
def test_a_part_runs_on_a_cpu(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--inside", part, "--cpu-rehearsal"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(rows) == 1
    if part == "tokens":
        assert rows[0]["tokens equal to generate"] == "100.0%"
    else:
        assert float(rows[0]["output tok/s"].replace(",", "")) > 0
        assert 0 <= float(rows[0]["KV allocated and unused"].rstrip("%")) < 100


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_script_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--cpu-rehearsal"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in gpu.BOUNDS)
    assert "FAILED" not in shown


def test_a_part_that_fails_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        part = command[command.index("--inside") + 1]
        if part == "nano-vllm":
            raise subprocess.TimeoutExpired(command, 1)
        if part == "tokens":
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nAssertionError: 90.0% of tokens")
        return subprocess.CompletedProcess(command, 0, json.dumps({"what": part}) + "\n", "")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main(["--cpu-rehearsal"]) == 1
    shown = capsys.readouterr().out
    assert "tokens: FAILED: AssertionError: 90.0% of tokens" in shown
    assert "nano-vllm: FAILED: not done after" in shown
    assert "llama-8b-transformers" in shown


@pytest.mark.long
def test_wrong_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(_: object, call: gpu_parts.Any) -> torch.Tensor:
        return torch.zeros_like(call.query)

    monkeypatch.setattr("engine.attention.numba_cpu.NumbaBackend.attend", shifted)
    with pytest.raises(AssertionError, match="of tokens are generate's"):
        list(gpu_parts.tokens(gpu_models.rehearsal()))


def test_parts_stay_within_five_minutes() -> None:
    assert sum(gpu.BOUNDS.values()) < 300
    assert gpu.BOUNDS.keys() == gpu_parts.PARTS.keys()
