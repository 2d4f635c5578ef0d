"""Several ranks: two gloo processes do what one does, and a lost rank ends the job.

`probe` and `loaded` run in one process and in two; the tests compare what they leave.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import start_two, two_ranks
from test_train import rollouts_of
from torch.distributed.tensor import DTensor

import engine
import train
from grpo import ScoringModel

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

# name -> rewards [B, M, N] of recorded rollouts; the probe trains on each.
CASES = {
    "many": [[[1, 0], [0, 0]], [[0, 1], [1, 1]], [[1, 0], [1, 0]]],
    "fewer calls than ranks": [[[1, 0]]],  # one of the two executions is cut off below
    "nothing to train": [[[1, 1], [1, 1]]],
}


# --- the probe, in one or several processes


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of all shards under FSDP."""
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def probe(out: Path) -> None:
    """Gradients and metrics of each case, in joint and in stagewise training -> OUT.pt."""
    changes = dict(train.PRESETS["toy"], grad_clip=1e9, token_budget=24, updates_per_step=1)
    found = {}
    for name, rewards in CASES.items():
        for mode in ("joint", "executor"):
            conf = train.Config(**changes | {"train": mode, "recompute": mode == "joint"})
            if not train.joined:
                train.start_ranks(conf)
            policy = train.shard(ScoringModel(engine.random_tiny(seed=1)[0].float()), conf)
            with torch.no_grad():  # as the step-0 check: the weights must be sharded again after it
                train.score_tokens(policy, train.empty_batch(0))
            sharded = [isinstance(weight, DTensor) for weight in policy.parameters()]
            assert all(sharded) if train.joined else not any(sharded)
            optimizer = train.Optimizer(policy, 1e-2, 0.1, lambda update: 1.0)
            rolled = rollouts_of(rewards)
            if name == "fewer calls than ranks":
                rolled[0].designs[0].executions[1].calls[0].finish_reason = "length"
            parts = [train.training_calls(rolled, r) for r in train.roles_to_train(conf, 0)]
            updates, _ = train.plan_updates(parts, conf, 0, "seed")
            gradients = {}

            def keep(policy=policy, gradients=gradients):
                gradients.update({n: whole(w.grad) for n, w in policy.named_parameters()})

            step = optimizer.step
            optimizer.step = lambda conf, keep=keep, step=step: (keep(), step(conf))[1]
            metrics = train.train_on(policy, optimizer, updates, conf)
            after = {n: w.clone() for n, w in train.full_weights(policy, torch.float32)}
            found[f"{name}, {mode}"] = (gradients, metrics, after, len(updates[0]))
    if train.rank() == 0:
        torch.save(found, out)


def loaded(folder: Path, out: Path) -> None:
    """The state of a run's last checkpoint, and the next gradients on a recorded rollout."""
    conf = train.read_config(folder)
    train.start_ranks(conf)
    state = train.make_state(folder / "cold_start", conf)
    done = train.load_checkpoint(train.checkpoints_of(folder)[-1], state, conf)

    held = {
        f"{part} {name}": whole(tensor)
        for part, named in train.tensors(state).items()
        for name, tensor in named.items()
    }
    counts = {role: (o.updates, o.lr) for role, o in state.optimizers.items()}
    rolled = rollouts_of(CASES["many"])
    for call in (c for r in rolled for d in r.designs for x in d.executions for c in x.calls):
        call.prompt_ids, call.output_ids = [1, 2, 3], [4, 5][: len(call.output_ids)]
        call.logp_sampler = call.logp_sampler[: len(call.output_ids)]
    parts = [train.training_calls(rolled, "executor")]
    updates, _ = train.plan_updates(parts, conf, 0, "seed")
    gradients = {}
    optimizer = state.optimizers["executor"]

    def keep(conf):
        gradients.update({n: whole(w.grad) for n, w in state.policy.named_parameters()})
        return 0.0

    optimizer.step = keep
    train.train_on(state.policy, optimizer, updates, conf)
    if train.rank() == 0:
        torch.save({"done": done, "held": held, "counts": counts, "gradients": gradients}, out)


# --- the tests


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def probes(tmp_path_factory) -> dict[int, dict]:
    out = tmp_path_factory.mktemp("probes")
    probe(out / "1.pt")
    two_ranks(out, probe, out / "2.pt")
    return {n: torch.load(out / f"{n}.pt", weights_only=False) for n in (1, 2)}


@pytest.mark.parametrize("mode", ["joint", "executor"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(probes, case, mode):
    """Gradients within 1e-6, the same metrics, the same weights after the step."""
    one, two = (probes[n][f"{case}, {mode}"] for n in (1, 2))
    assert one[0].keys() == two[0].keys()
    for name, gradient in one[0].items():
        torch.testing.assert_close(two[0][name], gradient, rtol=0, atol=1e-6)
    assert one[1].keys() == two[1].keys()
    for name, value in one[1].items():
        assert two[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, weight in one[2].items():
        torch.testing.assert_close(two[2][name], weight, rtol=0, atol=1e-4)
    if case == "nothing to train":
        assert one[3] == two[3] == 0 and one[1]["skipped"] == two[1]["skipped"] == 1
    else:
        assert max(g.abs().max() for g in one[0].values()) > 1e-3
    if case == "many":
        assert one[3] > two[3] > 1  # the work was shared out


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """The run r2 of two ranks: a cold start, two steps and the evaluation."""
    out = tmp_path_factory.mktemp("two")
    argv = ["--out", out, "--name", "r2", "--sft-traces", 300, "--sft-steps", 30, *STEPS]
    two_ranks(out / "output", train.main, [*map(str, argv), "--steps", "2"])
    return out


STEPS = ["--tasks-per-step", 3, "--stage-length", 1, "--eval-tasks", 3, "--no-tables"]
STEPS += ["--checkpoint-every", 2]


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_on_two_ranks_covers_the_tasks_of_one_and_its_checkpoint_loads_in_one(started):
    """The same tasks, rewards and counts; from two processes to one the state is bit-equal and
    the next gradient on a recorded rollout is within 1e-5."""
    argv = ["--out", started, "--name", "r1", "--model", started / "r2/cold_start", *STEPS]
    assert train.main([*map(str, argv), "--steps", "2"]) == 0
    one, two = log_of(started / "r1"), log_of(started / "r2")
    assert len(one) == len(two) == 2
    exact = [
        n for n in one[0] if n.startswith(("reward", "status", "structure", "length", "calls"))
    ]
    for a, b in zip(one, two, strict=True):
        assert {n: a[n] for n in exact if n in a} == {n: b[n] for n in exact if n in b}
        for name in ("loss", "grad_norm", "trained_tokens", "approx_kl"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    loaded(started / "r2", started / "1.pt")
    two_ranks(started / "output", loaded, started / "r2", started / "2.pt")
    found = {n: torch.load(started / f"{n}.pt", weights_only=False) for n in (1, 2)}
    assert found[1]["done"] == found[2]["done"] == 2
    assert found[1]["counts"] == found[2]["counts"]
    assert {"model", "designer/exp_avg", "executor/exp_avg_sq"} <= {
        name.split()[0] for name in found[1]["held"]
    }
    for name, tensor in found[1]["held"].items():
        assert torch.equal(tensor, found[2]["held"][name]), name
    for name, gradient in found[1]["gradients"].items():
        torch.testing.assert_close(found[2]["gradients"][name], gradient, rtol=0, atol=1e-5)


def test_supervised_training_on_two_ranks_is_that_of_one(started):
    """Five examples a step: the ranks get two and three of them."""
    ask = [{"role": "user", "content": "2*3"}]
    rows = [{"messages": ask, "response": "6" * (i + 1)} for i in range(5)]
    traces = started / "traces.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--train", "sft", "--data", traces, "--model", started / "r2/cold_start"]
    argv += ["--out", started, "--sft-steps", 3, "--sft-batch", 5, "--token-budget", 60]
    argv = [*map(str, argv)]
    two_ranks(started / "sft", train.main, [*argv, "--name", "s2"])
    assert train.main([*argv, "--name", "s1"]) == 0
    for one, two in zip(log_of(started / "s1"), log_of(started / "s2"), strict=True):
        assert one["trained_tokens"] == two["trained_tokens"]
        for name in ("loss", "grad_norm", "lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name


def launched(started: Path, name: str) -> subprocess.Popen:
    """A run of many steps under torchrun that has done its first one."""
    argv = ["--out", started, "--name", name, "--model", started / "r2/cold_start", *STEPS]
    process = subprocess.Popen(
        [*LAUNCH, str(ROOT / "train.py"), *map(str, argv), "--steps", "500", "--eval-tasks", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    log = started / name / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return process


def test_sigterm_to_torchrun_saves_on_all_ranks(started):
    """torchrun itself then ends with its own message and another status; the ranks exit 0."""
    process = launched(started, "term")
    try:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "SIGTERM: saved checkpoint-" in out and "failed" not in err
    (saved, *_) = sorted((started / "term").glob("checkpoint-*"), reverse=True)
    assert json.loads((saved / "state.json").read_text())["step"] == len(log_of(started / "term"))


def test_a_rank_that_dies_ends_the_job_and_is_named(started):
    process = launched(started, "dies")
    try:
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        _, err = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "SIGKILL" in err and "local_rank: 1" in err.split("Root Cause")[1]
    assert "rank 0: failed: lost another rank" in err


def engine_fails_in(what: str, argv: list[str]) -> int:
    """train.main; on rank 1 the engine fails in a step's rollout, or in the evaluation before.

    The rank that lost it gets SIGTERM as it begins to wait, as torchrun sends it.
    """
    called = getattr(train, what)

    def fails(*args, **options):
        if train.rank() == 1 and (what == "evaluate" or options["step"] == 1):
            raise engine.EngineError("vLLM failed while decoding: out of blocks")
        return called(*args, **options)

    def sleep(seconds):
        os.kill(os.getpid(), signal.SIGTERM)

    setattr(train, what, fails)
    train.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    return train.main(argv)


@pytest.mark.parametrize("what", ["rollout", "evaluate"])
def test_an_engine_that_fails_on_one_rank_ends_the_job(what, started, tmp_path):
    """That rank says why, the other one that it lost a rank, and neither hangs."""
    argv = ["--out", tmp_path, "--name", "r", "--model", started / "r2/cold_start", *STEPS]
    zero, one = start_two(tmp_path, engine_fails_in, what, [*map(str, argv), "--steps", "9"])
    assert one.wait(90) == 1 and zero.wait(90) == 1, zero.err()
    assert one.err() == "train.py: rank 1: failed: vLLM failed while decoding: out of blocks\n"
    assert zero.err().splitlines()[-1].startswith("train.py: rank 0: failed: lost another rank")
    assert "Traceback" not in zero.err()
    assert (tmp_path / "r/log.jsonl").exists() == (what == "rollout")


def pid_of_rank(parent: int, rank: int) -> int:
    """The child of torchrun whose environment says RANK=rank."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == parent and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")
