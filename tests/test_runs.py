"""Whole runs through the command: two equal ones, kills, SIGTERM, Ctrl-C, full disks, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--sft-traces", "400", "--sft-steps", "40", "--eval-tasks", "12", "--tasks-per-step", "3"]

ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def line_of(argv) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *map(str, argv)]


def command(*argv) -> subprocess.CompletedProcess:
    return subprocess.run(
        line_of(argv), capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )


def start(*argv) -> subprocess.Popen:
    """A run in a process group of its own, so that a signal reaches nobody else."""
    return subprocess.Popen(
        line_of(argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def signal_when(process, happened, number: int) -> tuple[str, str]:
    """Sends the signal to the run's first process once `happened()`; returns its output."""
    deadline = time.monotonic() + 120
    while not happened() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cold")
    done = command("--out", out, "--name", "c", "--train", "sft", *SMALL)
    assert done.returncode == 0, done.stderr
    return out / "c" / "cold_start"


@pytest.fixture(scope="module")
def flags(cold_start) -> list:
    """Of a run of four steps, the roles in turn, a checkpoint every second step."""
    flags = ["--model", cold_start, *SMALL, "--stage-length", 1, "--steps", 4]
    return [*flags, "--checkpoint-every", 2, "--no-tables"]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("straight")
    done = command("--out", out, "--name", "r", *flags)
    assert done.returncode == 0, done.stderr
    return out / "r"


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def log_lines(folder: Path) -> int:
    path = folder / "log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def log_without_times(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timed = ("seconds/", "tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, and every log field that is not a time."""
    first, second = weights(a / "final"), weights(b / "final")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert log_without_times(a) == log_without_times(b)
    assert (a / "table.md").read_text() == (b / "table.md").read_text()


def test_a_second_run_is_equal_and_leaves_what_a_user_looks_at(
    straight, cold_start, flags, tmp_path
):
    done = command("--out", tmp_path, "--name", "again", *flags)
    assert done.returncode == 0, done.stderr
    assert_same_run(straight, tmp_path / "again")
    start_weights = weights(cold_start)
    moved = weights(straight / "final")
    assert any(not torch.equal(moved[name], start_weights[name]) for name in moved)
    for file in ("curve.png", "designs.md", "final/tokenizer.json", "sandbox.json"):
        assert (straight / file).stat().st_size > 0
    assert "before" in (straight / "table.md").read_text()
    assert [path.name for path in sorted(straight.glob("checkpoint-*"))] == [
        "checkpoint-000002",
        "checkpoint-000004",
    ]
    again = command("--resume", straight)
    assert again.returncode == 2 and "is finished" in again.stderr
    no_run = command("--resume", cold_start)
    assert no_run.returncode == 2 and "no run folder" in no_run.stderr


def test_kill_9_at_any_moment_and_resume_is_the_uninterrupted_run(straight, flags, tmp_path):
    """Killed before the first step, in a step, in a save and in the evaluation after the last."""
    argv = ["--out", tmp_path, "--name", "r", "--resume", "auto", *flags]
    run = tmp_path / "r"
    moments = [
        lambda: (run / "sandbox.json").exists(),
        lambda: log_lines(run) >= 1,
        lambda: (run / ".checkpoint-000002.partial").exists(),
        lambda: log_lines(run) >= 3,
        lambda: (run / "final").exists(),
    ]
    for moment in moments:
        assert signal_when(start(*argv), moment, signal.SIGKILL) is not None
        for whole in run.glob("checkpoint-*"):
            assert (whole / "state.json").exists() and (whole / ".metadata").exists()
    # A crash of the machine can leave a torn line after the checkpoint.
    (run / "log.jsonl").open("a").write('{"step": 4, "rew')
    done = command(*argv)
    assert done.returncode == 0, done.stderr
    assert_same_run(straight, run)
    assert not list(run.glob(".*.partial"))
    other = command(*argv, "--lr", "0.5")
    assert other.returncode == 2 and "--lr was 0.0002, is 0.5" in other.stderr


def test_sigterm_saves_and_exits_0_and_the_resumed_run_is_the_same(straight, flags, tmp_path):
    run = tmp_path / "r"
    process = start("--out", tmp_path, "--name", "r", *flags)
    out, err = signal_when(process, lambda: log_lines(run) >= 1, signal.SIGTERM)
    assert process.returncode == 0, err
    # One step was whole, or a second one ended before the signal was looked at.
    assert "SIGTERM: saved checkpoint-00000" in out and "Traceback" not in err
    done = command("--resume", run)
    assert done.returncode == 0, done.stderr
    assert_same_run(straight, run)


def test_a_checkpoint_is_exported_for_transformers(straight):
    done = command("--export", straight / "checkpoint-000004")
    assert done.returncode == 0, done.stderr
    folder = straight / "export-000004"
    exported, final = weights(folder), weights(straight / "final")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2*3"}], add_generation_prompt=True, return_dict=False
    )
    assert model(torch.tensor([prompt])).logits.isfinite().all()
    missing = command("--export", straight / "final")
    assert missing.returncode == 2 and "can't be read" in missing.stderr


def test_a_broken_checkpoint_is_one_line_that_says_what_to_do(straight, tmp_path):
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    for made in ("table.md", "checkpoint-000004/__0_0.distcp"):
        (run / made).unlink()
    done = command("--resume", run)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "checkpoint-000004 can't be read; remove it" in last and "Traceback" not in done.stderr


def test_supervised_training_on_a_file_resumes_too(cold_start, tmp_path):
    """--train sft --data: learns the traces, and 2 steps + resume + 2 are 4, bit for bit."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"{a}+{b}"}],
            "response": f"{(a + b) % 7}",
            "role": "executor",
        }
        for a in range(5)
        for b in range(5)
    ]
    traces = tmp_path / "traces.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--train", "sft", "--data", traces, "--model", cold_start, "--out", tmp_path]
    argv += ["--sft-steps", 12, "--sft-batch", 25, "--checkpoint-every", 3]
    done = command(*argv, "--name", "a")
    assert done.returncode == 0, done.stderr
    log = log_without_times(tmp_path / "a")
    assert len(log) == 12 and log[-1]["loss"] < 0.5 * log[0]["loss"]
    auto = [*argv, "--name", "b", "--resume", "auto"]
    signal_when(start(*auto), lambda: log_lines(tmp_path / "b") >= 4, signal.SIGKILL)
    done = command(*auto)
    assert done.returncode == 0, done.stderr
    a, b = weights(tmp_path / "a/final"), weights(tmp_path / "b/final")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert log == log_without_times(tmp_path / "b")
    traces.write_text('{"messages": []}\n')
    done = command(*argv, "--name", "c")
    assert done.returncode == 2 and "line 1" in done.stderr and not (tmp_path / "c").exists()


def test_ctrl_c_ends_soon_with_the_last_checkpoint_whole(cold_start, tmp_path):
    process = start(
        *("--out", tmp_path, "--name", "r", "--model", cold_start, *SMALL),
        *("--steps", 10_000, "--checkpoint-every", 1, "--eval-tasks", 0),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("r/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    # Measured: about a second on an idle machine. The bound is for a hang, not for the speed.
    assert time.monotonic() - began < 30
    assert process.returncode == 130 and "--resume" in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    last = sorted(tmp_path.glob("r/checkpoint-*"))[-1]
    assert (last / "state.json").exists() and (last / ".metadata").exists()
    assert command("--export", last).returncode == 0


def test_bad_model_folder_and_bad_data_are_one_line(cold_start, tmp_path):
    broken = tmp_path / "no_tokenizer"
    shutil.copytree(cold_start, broken)
    for path in broken.glob("tokenizer*"):
        path.unlink()
    empty, unanswered = tmp_path / "empty.jsonl", tmp_path / "unanswered.jsonl"
    empty.write_text("")
    unanswered.write_text('{"problem": "What is 1+1?"}\n' * 8)
    for argv in (
        ["--model", broken],
        ["--model", cold_start, "--data", empty],
        ["--model", cold_start, "--data", unanswered],
    ):
        done = command("--out", tmp_path / "runs", *argv, *SMALL)
        assert done.returncode == 2, done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("train.py: error:") and "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*/log.jsonl"))  # nothing half-written


def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(cold_start, tmp_path):
    """A file-size limit stands for the full disk: writes fail in the same places."""
    limit = "import resource,signal,sys,runpy;signal.signal(signal.SIGXFSZ,signal.SIG_IGN);"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE,(100_000,100_000));"
    limit += f"sys.path.insert(0,{str(ROOT)!r});import train;sys.exit(train.main(sys.argv[1:]))"
    argv = ["--out", tmp_path, "--name", "r", "--model", cold_start, *SMALL, "--eval-tasks", 0]
    argv += ["--steps", 1]
    done = subprocess.run(
        [sys.executable, "-c", limit, *map(str, argv)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("r/checkpoint-*")) and not list(tmp_path.glob("r/.*partial"))
