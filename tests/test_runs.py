"""Whole runs through the command: two equal ones, kills, SIGTERM, Ctrl-C, full disks, bad input."""

import json
import math
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from launch import Started, struck
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train

SMALL = ["--sft-traces", "200", "--sft-steps", "40", "--sft-batch", "16"]
SMALL += ["--eval-tasks", "6", "--tasks-per-step", "3"]


def command(*argv) -> None:
    """A whole run in this process: a fresh one would import torch anew."""
    assert train.main([*map(str, argv)]) == 0


def start(tmp_path: Path, *argv) -> Started:
    """A run in a process of its own."""
    number = len(list(tmp_path.glob("output-*")))
    return Started(tmp_path / f"output-{number}", train.main, [*map(str, argv)])


def strike(tmp_path: Path, name: str, nth: int, number: int, argv: list) -> Started:
    """A run in a process of its own that gets a signal as it calls train.NAME for the nth time.

    The process is at its end; that the signal came is shown by how it ended.
    """
    output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
    process = Started(output, struck, name, nth, number, [*map(str, argv)])
    status = process.wait()
    assert status == (0 if number == signal.SIGTERM else -number), process.err()
    assert number != signal.SIGTERM or "SIGTERM: " in process.out()
    assert "Traceback" not in process.err()
    return process


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cold")
    command("--out", out, "--name", "c", "--train", "sft", *SMALL)
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
    command("--out", out, "--name", "r", *flags)
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


def stopped(capsys, status: int, *argv) -> str:
    """The one line, but for progress, of a command that ends so; it is run in this process."""
    capsys.readouterr()  # progress of the runs before it
    assert train.main([*map(str, argv)]) == status
    lines = capsys.readouterr().err.strip().splitlines()
    (line,) = [line for line in lines if not re.match(r"\d+ of \d+ ", line)]
    assert line.startswith({1: "train.py: failed: ", 2: "train.py: error: "}[status])
    return line


def refused(capsys, *argv) -> str:
    """The one line of a command that can't work."""
    return stopped(capsys, 2, *argv)


def test_a_run_leaves_what_a_user_looks_at(straight, cold_start, capsys):
    start_weights, moved = weights(cold_start), weights(straight / "final")
    assert any(not torch.equal(moved[name], start_weights[name]) for name in moved)
    for file in ("curve.png", "designs.md", "final/tokenizer.json", "sandbox.json"):
        assert (straight / file).stat().st_size > 0
    assert "before" in (straight / "table.md").read_text()
    assert [path.name for path in sorted(straight.glob("checkpoint-*"))] == [
        "checkpoint-000002",
        "checkpoint-000004",
    ]
    assert "is finished" in refused(capsys, "--resume", straight)
    assert "no run folder" in refused(capsys, "--resume", cold_start)


def test_kill_9_at_any_moment_and_resume_is_the_uninterrupted_run(
    straight, flags, tmp_path, capsys
):
    """Killed before the first checkpoint, in a save, and in a step after it."""
    argv = ["--out", tmp_path, "--name", "r", "--resume", "auto", *flags]
    run = tmp_path / "r"
    moments = [
        lambda: log_lines(run) >= 1,
        lambda: (run / ".checkpoint-000002.partial").exists(),
        lambda: log_lines(run) >= 3,
    ]
    for moment in moments:
        assert start(tmp_path, *argv).signal_when(moment, signal.SIGKILL).wait() == -signal.SIGKILL
        for whole in run.glob("checkpoint-*"):
            assert (whole / "state.json").exists() and (whole / ".metadata").exists()
    # A crash of the machine can leave a torn line after the checkpoint.
    (run / "log.jsonl").open("a").write('{"step": 4, "rew')
    command(*argv)
    assert_same_run(straight, run)
    assert not list(run.glob(".*.partial"))
    assert "--lr was 0.0002, is 0.5" in refused(capsys, *argv, "--lr", "0.5")


def test_a_cold_start_that_is_stopped_leaves_nothing_half_made(tmp_path):
    """SIGTERM among the teacher's traces, then kill -9 in the training, then in the save."""
    argv = ["--out", tmp_path, "--train", "sft", "--sft-traces", 40, "--sft-steps", 4]
    command(*argv, "--name", "whole")
    argv += ["--name", "c", "--resume", "auto"]
    run = tmp_path / "c"
    term = strike(tmp_path, "score", 5, signal.SIGTERM, argv)
    assert "no step was done yet; go on with: python train.py --resume" in term.out()
    strike(tmp_path, "sft_step", 3, signal.SIGKILL, argv)
    assert {path.name for path in run.iterdir()} == {"config.json", "sandbox.json"}
    strike(tmp_path, "write_json", 2, signal.SIGKILL, argv)  # the 2nd file is the folder's last one
    assert not (run / "cold_start").exists()
    assert (run / ".cold_start.partial/model.safetensors").exists()
    command("--resume", run)
    assert not list(run.glob(".*.partial"))
    a, b = weights(run / "cold_start"), weights(tmp_path / "whole/cold_start")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_kill_9_after_the_last_step_and_resume_is_the_uninterrupted_run(straight, tmp_path):
    """In the save of the final model, in its evaluation, and before its tables are written."""
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "final")
    for made_at_the_end in ("after.json", "table.md", "curve.png"):
        (run / made_at_the_end).unlink()
    argv = ["--resume", run]
    strike(tmp_path, "write_json", 2, signal.SIGKILL, argv)
    assert not (run / "final").exists() and (run / ".final.partial/model.safetensors").exists()
    strike(tmp_path, "counter", 1, signal.SIGKILL, argv)
    assert (run / "final/run_config.json").exists() and not (run / "table.md").exists()
    strike(tmp_path, "final_tables", 1, signal.SIGKILL, argv)
    assert (run / "curve.png").exists() and not (run / "table.md").exists()
    command(*argv)
    assert_same_run(straight, run)
    assert (run / "designs.md").read_text() == (straight / "designs.md").read_text()
    assert not list(run.glob(".*.partial"))


def test_sigterm_saves_and_exits_0_and_the_resumed_run_is_the_same(straight, flags, tmp_path):
    """In the evaluation before the first step, and then in a step."""
    run = tmp_path / "r"
    argv = ["--out", tmp_path, "--name", "r", "--resume", "auto", *flags]
    early = strike(tmp_path, "score", 2, signal.SIGTERM, argv)
    assert "no step was done yet; go on with: python train.py --resume" in early.out()
    assert {path.name for path in run.iterdir()} == {"config.json", "sandbox.json"}
    process = start(tmp_path, *argv)
    process.signal_when(lambda: log_lines(run) >= 1, signal.SIGTERM)
    assert process.wait() == 0, process.err()
    # One step was whole, or a second one ended before the signal was looked at.
    assert "SIGTERM: saved checkpoint-00000" in process.out()
    assert "Traceback" not in process.err()
    command("--resume", run)
    assert_same_run(straight, run)


def break_loss(patch, step: int, change) -> None:
    """From `step` on the loss that train.py takes the gradient of is change(loss)."""
    train_on, policy_loss, began = train.train_on, train.policy_loss, []

    def counted(*args):
        began.append(args)
        return train_on(*args)

    def changed(*args, **options):
        loss, metrics = policy_loss(*args, **options)
        return change(loss) if len(began) > step else loss, metrics

    patch.setattr(train, "train_on", counted)
    patch.setattr(train, "policy_loss", changed)


def test_a_loss_that_is_no_number_ends_the_run_and_what_was_saved_is_intact(
    straight, flags, tmp_path, capsys
):
    """In the last of four steps: the third one is in the log, the second in a checkpoint."""
    run = tmp_path / "r"
    argv = ["--out", tmp_path, "--name", "r", "--resume", "auto", *flags]
    with pytest.MonkeyPatch.context() as patch:
        break_loss(patch, 3, lambda loss: loss * math.nan)
        line = stopped(capsys, 1, *argv)
    assert "step 4/4: the loss is nan at update 2 of this optimizer" in line
    assert [line["step"] for line in log_without_times(run)] == [0, 1, 2]
    assert [path.name for path in run.glob("*checkpoint*")] == ["checkpoint-000002"]
    assert not list(run.glob(".*")) and not (run / "final").exists()
    command(*argv)
    assert_same_run(straight, run)


def steep(patch) -> None:
    """In step 2 the loss is what it was, and its gradient is infinite."""

    def change(loss):
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    break_loss(patch, 1, change)


def ruined(patch) -> None:
    """After step 1 the engine gets weights that are no numbers."""
    push_weights, pushed = train.push_weights, []

    def ruin(state, config):
        pushed.append(state)
        with torch.no_grad():
            state.policy.model.model.norm.weight.mul_(math.nan if len(pushed) == 2 else 1.0)
        push_weights(state, config)

    patch.setattr(train, "push_weights", ruin)


@pytest.mark.parametrize(
    "broken, says",
    [
        (steep, "step 2/2: the gradient norm is nan at update 1 of this optimizer"),
        (ruined, "step 2/2: the model's logits are not finite"),
    ],
    ids=["gradient", "weights"],
)
def test_what_else_is_not_finite_ends_the_run_too(
    broken, says, flags, tmp_path, monkeypatch, capsys
):
    broken(monkeypatch)
    argv = ["--out", tmp_path, "--name", "r", *flags, "--steps", 2, "--eval-tasks", 0]
    assert says in stopped(capsys, 1, *argv)
    assert [line["step"] for line in log_without_times(tmp_path / "r")] == [0]
    assert not list(tmp_path.glob("r/*checkpoint*")) and not (tmp_path / "r/final").exists()


def test_a_checkpoint_is_exported_for_transformers(straight, capsys):
    assert train.main(["--export", str(straight / "checkpoint-000004")]) == 0
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
    assert "can't be read" in refused(capsys, "--export", straight / "final")


def test_a_broken_checkpoint_is_one_line_that_says_what_to_do(straight, tmp_path, capsys):
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    (run / "checkpoint-000004/__0_0.distcp").unlink()
    line = refused(capsys, "--export", run / "checkpoint-000004")
    assert "checkpoint-000004 can't be read; remove it" in line
    (run / "checkpoint-000002/state.json").write_text('{"step": 2')
    assert "can't be read; remove it" in refused(capsys, "--export", run / "checkpoint-000002")


@pytest.mark.parametrize(
    "file, text, says",
    [
        ("config.json", '{"preset": "to', "config.json can't be read: put it back"),
        ("config.json", "\udcff\x00", "config.json can't be read: put it back"),
        ("before.json", '[{"task', "before.json can't be read; remove it"),
        ("log.jsonl", '{"step": 0}\n{"ste', "log.jsonl has not every step before 4 once"),
        ("log.jsonl", "\udcff\x00", "mend it, or remove it"),
        ("checkpoint-000004/state.json", '{"step": 4, "opt', "can't be read; remove it to go on"),
    ],
)
def test_a_broken_file_of_a_run_is_one_line_that_says_what_to_do(
    straight, tmp_path, capsys, file, text, says
):
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    (run / "table.md").unlink()
    (run / file).write_text(text, errors="surrogateescape")
    assert says in refused(capsys, "--resume", run)
    assert (run / file).read_text(errors="surrogateescape") == text  # it is the user's to mend


def test_a_run_without_steps_and_one_whose_log_was_removed_end_without_a_curve(
    straight, flags, tmp_path
):
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    for file in ("table.md", "log.jsonl", "curve.png"):
        (run / file).unlink()
    command("--resume", run)
    command("--out", tmp_path, "--name", "none", *flags, "--steps", 0)
    for folder in (run, tmp_path / "none"):
        assert (folder / "table.md").exists() and not (folder / "curve.png").exists()


def test_supervised_training_on_a_file_resumes_too(cold_start, tmp_path, capsys):
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
    command(*argv, "--name", "a")
    log = log_without_times(tmp_path / "a")
    assert len(log) == 12 and log[-1]["loss"] < 0.5 * log[0]["loss"]
    auto = [*argv, "--name", "b", "--resume", "auto"]
    killed = start(tmp_path, *auto)
    killed.signal_when(lambda: log_lines(tmp_path / "b") >= 4, signal.SIGKILL).wait()
    strike(tmp_path, "draw_curve", 1, signal.SIGKILL, auto)  # with "final" it would be finished
    command(*auto)
    a, b = weights(tmp_path / "a/final"), weights(tmp_path / "b/final")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert log == log_without_times(tmp_path / "b")
    traces.write_text('{"messages": []}\n')
    assert "line 1" in refused(capsys, *argv, "--name", "c") and not (tmp_path / "c").exists()


def test_ctrl_c_ends_soon_with_the_last_checkpoint_whole(cold_start, tmp_path):
    process = start(
        *(tmp_path, "--out", tmp_path, "--name", "r", "--model", cold_start, *SMALL),
        *("--steps", 10_000, "--checkpoint-every", 1, "--eval-tasks", 0),
    )
    process.signal_when(lambda: bool(list(tmp_path.glob("r/checkpoint-*"))), signal.SIGINT)
    # Measured: about a second on an idle machine. The bound is for a hang, not for the speed.
    assert process.wait(30) == 130
    assert "--resume" in process.err().strip().splitlines()[-1]
    assert "Traceback" not in process.err()
    last = sorted(tmp_path.glob("r/checkpoint-*"))[-1]
    assert (last / "state.json").exists() and (last / ".metadata").exists()
    assert train.main(["--export", str(last)]) == 0


def test_bad_model_folder_and_bad_data_are_one_line(cold_start, tmp_path, capsys):
    broken = tmp_path / "no_tokenizer"
    shutil.copytree(cold_start, broken)
    for path in broken.glob("tokenizer*"):
        path.unlink()
    empty, unanswered = tmp_path / "empty.jsonl", tmp_path / "unanswered.jsonl"
    empty.write_text("")
    unanswered.write_text('{"problem": "What is 1+1?"}\n' * 8)
    for argv, says in (
        (["--model", broken], "no tokenizer"),
        (["--model", cold_start, "--data", empty], "empty.jsonl"),
        (["--model", cold_start, "--data", unanswered], "no usable row"),
        (["--model", cold_start, "--data", f"{unanswered}=2"], "--tasks-per-step"),
        (["--model", cold_start, "--data", unanswered, "--difficulty", "7"], "--difficulty"),
    ):
        try:
            line = refused(capsys, "--out", tmp_path / "runs", *argv, *SMALL)
        except SystemExit as stop:  # the parser's own
            assert stop.code == 2
            line = capsys.readouterr().err
        assert says in line, line
    assert not (tmp_path / "runs").exists()  # nothing half-written


def limited(argv: list[str]) -> int:
    """train.main where no file may grow past 100 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return train.main(argv)


def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(cold_start, tmp_path):
    """A file-size limit stands for the full disk: writes fail in the same places."""
    argv = ["--out", tmp_path, "--name", "r", "--model", cold_start, *SMALL, "--eval-tasks", 0]
    process = Started(tmp_path / "output", limited, [*map(str, argv), "--steps", "1"])
    assert process.wait() == 1, process.err()
    last = process.err().strip().splitlines()[-1]
    assert "could not be written" in last and "MB are free there" in last
    assert "Traceback" not in process.err()
    assert not list(tmp_path.glob("r/checkpoint-*")) and not list(tmp_path.glob("r/.*partial"))
