"""train.py: settings, one update worked by hand, the stage mask, moments, the sampler's check."""

import copy
import dataclasses
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import engine
import sft
import toy
import train
from execute import Call, Design, Execution, Rollout
from grpo import ScoringModel

ROOT = Path(__file__).resolve().parent.parent


def config(**changes) -> train.Config:
    defaults = dict(train.PRESETS["toy"], lr=1e-2, weight_decay=0.1)
    return train.Config(**{**defaults, **changes})


def call(role, prompt, output, reason="stop") -> Call:
    return Call(role, role, [], "x", prompt, output, [-1.0] * len(output), reason)


def rollouts_of(rewards, seed=0) -> list[Rollout]:
    """Recorded rollouts with these rewards [B, M, N]; designer tokens below 50, others above."""
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return rng.integers(low, high, rng.integers(2, 6)).tolist()

    rolled = []
    for designs in rewards:
        made = []
        for row in designs:
            runs = [
                Execution("x", [call("executor", ids(50, 100), ids(50, 100))], float(r), "ok")
                for r in row
            ]
            made.append(Design("s", "single", None, call("designer", ids(1, 50), ids(1, 50)), runs))
        rolled.append(Rollout(SimpleNamespace(kind="math", source=""), made))
    return rolled


@pytest.fixture
def policy() -> ScoringModel:
    model, _ = engine.random_tiny(seed=1)
    return ScoringModel(model.float())


def optimizer_of(policy, conf) -> train.Optimizer:
    return train.Optimizer(policy, conf.lr, conf.weight_decay, lambda update: 1.0)


def updates_of(rolled, role, conf):
    return plan([train.training_calls(rolled, role)], conf)


def plan(parts, conf, seed="seed") -> list:
    return train.plan_updates(parts, conf, 0, seed)[0]


# --- settings


def test_preset_first_then_what_the_user_gave():
    assert train.parse([]).steps == train.PRESETS["toy"]["steps"]
    assert train.parse(["--steps", "7", "--preset", "toy"]).steps == 7
    assert train.parse(["--no-normalize-std"]).normalize_std is False


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--nonsense", "1"], "unrecognized"),
        (["--step", "1"], "unrecognized"),  # no abbreviations: a later flag would change meaning
        (["--preset", "none"], "no preset"),
        (["--model", "/nowhere"], "--model"),
        (["--data", "/nowhere.jsonl"], "--data"),
        (["--n-designs", "0"], "--n-designs"),
        (["--n-executions", "0"], "--n-executions"),
        (["--temperature", "0.9"], "--temperature"),
        (["--train", "both"], "invalid choice"),
        (["--n-designs", "1", "--n-executions", "1"], "nothing to compare"),
        (["--n-designs", "1"], "--n-designs is 1"),
        (["--lr", "-1"], "--lr"),
        (["--grad-clip", "0"], "--grad-clip"),
        (["--weight-decay", "nan"], "--weight-decay"),
        (["--data", "aime24"], "--model"),
        (["--train", "sft", "--sft-steps", "0"], "--sft-steps"),
        (["--resume", "/nowhere"], "--resume"),
        (["--name", "a/b"], "--out says where"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        train.parse(argv)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("train.py: ") and says in line


def test_every_setting_is_read_somewhere():
    """A flag that nothing reads is a promise that is not kept."""
    source = (ROOT / "train.py").read_text()
    for name in (f.name for f in dataclasses.fields(train.Config)):
        used = re.findall(rf"config\.{name}\b", source) or re.findall(rf'"{name}"', source)
        assert used, f"--{name} is never read"


def test_every_number_has_a_range():
    """By its setting; the three others are checked in words, or may be anything (the seed)."""
    for f in dataclasses.fields(train.Config):
        if f.type in ("int", "float") and f.name not in ("seed", "temperature", "vllm_memory"):
            assert len(f.metadata.keys() & {"least", "above"}) == 1, f.name


# --- one update


def test_one_update_equals_reinforce_by_hand(policy):
    """The gradient of a step = sum over trained tokens of -A * grad logp / n_tokens."""
    conf = config(grad_clip=1e9, token_budget=12)  # several micro-batches
    rolled = rollouts_of([[[1, 0], [0, 0]], [[1, 1], [1, 0]]])
    calls, advantages = train.training_calls(rolled, "executor")
    by_hand = copy.deepcopy(policy)
    n_tokens = sum(len(c.output_ids) for c in calls)
    for c, a in zip(calls, advantages, strict=True):
        ids = torch.tensor([c.prompt_ids + c.output_ids])
        logits = by_hand.model(ids).logits[0, len(c.prompt_ids) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(c.output_ids)[:, None])
        (-a * logp.sum() / n_tokens).backward()
        c.logp_sampler = logp[:, 0].tolist()  # as drawn by this model: importance weights are 1
    seen = {}

    class Spy(train.Optimizer):
        def step(self, conf):
            seen.update({n: p.grad.clone() for n, p in policy.named_parameters()})
            return super().step(conf)

    spy = Spy(policy, conf.lr, 0.0, lambda update: 1.0)
    updates = updates_of(rolled, "executor", conf)
    assert len(updates[0]) > 2
    metrics = train.train_on(policy, spy, updates, conf)
    for name, p in by_hand.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-4, atol=1e-6)
    assert metrics["ratio"] == 1.0 and metrics["clip_fraction"] == 0.0  # on-policy, exactly
    assert abs(metrics["loss"]) < 1.0 and metrics["grad_norm"] > 0  # trainer_bugs 20


def test_updates_are_disjoint_and_each_has_its_own_token_mean():
    """trainer_bugs 3: n_tokens of an update is that of its own calls."""
    conf = config(updates_per_step=3, token_budget=10_000)
    rolled = rollouts_of([[[1, 0, 1], [0, 0, 1]]])
    calls, advantages = train.training_calls(rolled, "executor")
    updates = plan([(calls, advantages)], conf)
    rows = [tuple(r.tolist()) for u in updates for m in u for r in m.batch.input_ids]
    assert len(updates) == 3 and len(rows) == len(set(rows)) == 6
    for update in updates:
        (micro,) = update
        assert micro.n_tokens == micro.batch.loss_mask.sum()
    again = plan([(calls, advantages)], conf)
    assert torch.equal(again[1][0].batch.input_ids, updates[1][0].batch.input_ids)


def test_logp_old_is_from_before_the_first_update(policy):
    """With two updates the second one's ratio has moved; with one it is exactly 1."""
    rolled = rollouts_of([[[1, 0, 1, 0], [0, 0, 1, 1]]])
    conf = config(updates_per_step=2)
    metrics = train.train_on(
        policy, optimizer_of(policy, conf), updates_of(rolled, "executor", conf), conf
    )
    assert metrics["approx_kl"] > 1e-6 and metrics["ratio"] != 1.0


def test_a_step_without_any_advantage_moves_nothing(policy):
    """trainer_bugs 19 and 49: no decay, no momentum, and the step is counted."""
    conf = config()
    optimizer = optimizer_of(policy, conf)
    train.train_on(policy, optimizer, updates_of(rollouts_of([[[1, 0]]]), "executor", conf), conf)
    before = copy.deepcopy(policy.state_dict())
    constant = rollouts_of([[[1, 1], [1, 1]], [[0, 0], [0, 0]]])
    metrics = train.train_on(policy, optimizer, updates_of(constant, "executor", conf), conf)
    assert metrics["skipped"] == 1 and optimizer.updates == 1
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name])


def test_non_finite_gradients_raise(policy):
    conf = config()
    with torch.no_grad():
        next(iter(policy.parameters())).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="loss is nan"):
        train.train_on(
            policy,
            optimizer_of(policy, conf),
            updates_of(rollouts_of([[[1, 0]]]), "executor", conf),
            conf,
        )


def test_no_reward_for_long_is_said(monkeypatch, tmp_path, capsys):
    """trainer_bugs 41: once, after ZERO_STEPS steps in a row, not before and not again."""
    rewards = iter([0.0] * 4 + [0.5] + [0.0] * 25)
    line = {"reward/math": 0.0, "valid_designs": 1.0, "calls_per_execution": 1.0}
    line |= {"truncated/executor": 0.0, "approx_kl": 0.0, "sampler_gap_max": 0.0}
    line |= {"grad_norm": 0.0, "seconds/step": 0.0, "role": "executor"}

    def step(step, first):
        return line | {"step": step, "reward": next(rewards)}

    monkeypatch.setattr(train, "save_checkpoint", lambda *rest: None)
    train.learn(step, None, config(), tmp_path, 0, 14)
    assert "no reward" not in capsys.readouterr().out
    train.learn(step, None, config(), tmp_path, 0, 14)
    assert capsys.readouterr().out.count("no reward in 10 steps") == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 11])
def test_the_ranks_shares_are_disjoint_and_make_up_the_whole(ranks, monkeypatch):
    items, shares = list("abcdefgh"), []
    monkeypatch.setattr(train, "ranks", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(train, "rank", lambda rank=rank: rank)
        shares.append(train.my_share(items))
    assert sum((mine for _, mine in shares), []) == items
    assert [place for places, _ in shares for place in places] == list(range(8))
    assert all([items[place] for place in places] == mine for places, mine in shares)
    sizes = [len(mine) for _, mine in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_path_holds_from_anywhere_also_with_an_equals_sign_in_it(tmp_path, monkeypatch):
    (tmp_path / "k=1").mkdir()
    (tmp_path / "k=1/rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "k=1/rows.jsonl")
    assert train.absolute_names("k=1/rows.jsonl") == path
    assert train.absolute_names("k=1/rows.jsonl=2,apps=1") == f"{path}=2,apps=1"


def test_sigterm_before_and_after_the_work_raises_nothing_where_nobody_catches_it():
    preemption = train.Preemption()
    with preemption.raising(at_once=True), preemption.raising(at_once=False):
        preemption(15, None)  # among the steps: noted
    preemption(15, None)  # the run is over
    with pytest.raises(train.Preempted), preemption.raising(at_once=True):
        raise AssertionError("it was asked for before")
    assert not preemption.at_once


def test_sigterm_in_the_last_step_is_not_forgotten(monkeypatch, tmp_path):
    """What comes after the steps takes long on a full run: the machine is wanted back before it."""
    saved = []
    line = {"role": "sft", "loss": 0.0, "lr": 0.0, "grad_norm": 0.0, "seconds/step": 0.0}

    def step(step, first):
        monkeypatch.setattr(train.preemption, "asked", step == 1)
        return line | {"step": step}

    monkeypatch.setattr(train, "save_checkpoint", lambda folder, done, *rest: saved.append(done))
    with pytest.raises(train.Preempted):
        train.learn(step, None, config(), tmp_path, 0, 2)
    assert saved == [2]


@pytest.mark.parametrize(
    "log, step, left",
    [
        ("0 1 2", 2, "0 1"),
        ("0 1 2 torn", 3, "0 1 2"),
        ("2 3 4", 4, "2 3"),  # the file was removed before
        ("0 1", 0, ""),
        ("torn", 0, ""),
        ("", 2, None),
        ("0 torn", 2, None),
        ("0 2", 3, None),
        ("0 0 1", 2, None),
        ("0 1 torn 2", 3, None),
        ("3 4", 3, None),
    ],
)
def test_a_resumed_log_has_every_step_once_or_is_refused(log, step, left, tmp_path):
    lines = {word: f'{{"step": {word}}}\n' for word in "0 1 2 3 4".split()}
    lines["torn"] = '{"step": '
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines[word] for word in log.split()))
    before = path.read_text()
    if left is None:
        with pytest.raises(train.UsageError, match=f"every step before {step} once"):
            train.cut_log(path, step)
        assert path.read_text() == before
    else:
        train.cut_log(path, step)
        assert path.read_text() == "".join(lines[word] for word in left.split())


# --- stages


@pytest.mark.parametrize("role", ["executor", "designer"])
def test_in_a_stage_only_the_active_roles_tokens_pass_through_the_model(policy, role):
    conf = config()
    seen = set()

    def spy(module, args):
        seen.update(args[0].flatten().tolist())

    policy.register_forward_pre_hook(spy)
    rolled = rollouts_of([[[1, 0], [0, 0]], [[0, 1], [1, 1]]])
    train.train_on(policy, optimizer_of(policy, conf), updates_of(rolled, role, conf), conf)
    assert seen and all(token == 0 or (token < 50) == (role == "designer") for token in seen)


def test_a_roles_moments_stand_still_in_the_other_roles_stage(policy):
    """trainer_bugs 49, reference fault 8: bit-equal moments and step count."""
    conf = config()
    optimizers = {role: optimizer_of(policy, conf) for role in ("designer", "executor")}
    rolled = rollouts_of([[[1, 0], [0, 0]], [[0, 1], [1, 1]]])
    train.train_on(policy, optimizers["executor"], updates_of(rolled, "executor", conf), conf)
    frozen = copy.deepcopy(optimizers["executor"].adamw.state_dict()["state"])
    for _ in range(3):
        train.train_on(policy, optimizers["designer"], updates_of(rolled, "designer", conf), conf)
    now = optimizers["executor"].adamw.state_dict()["state"]
    assert optimizers["executor"].updates == 1 and optimizers["designer"].updates == 3
    assert frozen.keys() == now.keys() and frozen
    for i in frozen:
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(frozen[i][name], now[i][name])


def test_roles_by_mode():
    roles = [train.roles_to_train(config(stage_length=2), step) for step in range(5)]
    assert [r[0] for r in roles] == ["executor", "executor", "designer", "designer", "executor"]
    assert train.roles_to_train(config(train="joint"), 0) == ("designer", "executor")
    assert train.roles_to_train(config(train="designer"), 0) == ("designer",)
    assert train.roles_to_train(config(train="single"), 0) == ("executor",)


def test_joint_sums_two_losses_each_with_its_own_token_count():
    rolled = rollouts_of([[[1, 0], [0, 0]]])
    conf = config(train="joint", token_budget=10_000)
    parts = [train.training_calls(rolled, role) for role in ("designer", "executor")]
    (update,) = plan(parts, conf)
    counted = [sum(len(c.output_ids) for c in calls) for calls, _ in parts]
    assert [micro.n_tokens for micro in update] == counted


def test_truncated_calls_keep_their_place_in_the_group_but_not_in_the_loss():
    """trainer_bugs 33 and 34; DESIGN decision 9."""
    rolled = rollouts_of([[[1, 0]]])
    cut = rolled[0].designs[0].executions[1].calls[0]
    cut.finish_reason = "length"
    calls, advantages = train.training_calls(rolled, "executor")
    assert advantages == pytest.approx([0.70711, -0.70711], abs=1e-5)  # centred on both
    ((micro,),) = plan([(calls, advantages)], config())
    assert len(micro.batch.input_ids) == 1 and micro.n_tokens == len(calls[0].output_ids)
    ((both,),) = plan([(calls, advantages)], config(mask_truncated=False))
    assert len(both.batch.input_ids) == 2


def test_an_api_engines_calls_are_refused(policy):
    rolled = rollouts_of([[[1, 0]]])
    for execution in rolled[0].designs[0].executions:
        execution.calls[0].prompt_ids = execution.calls[0].output_ids = None
    with pytest.raises(ValueError, match="is it an API"):
        updates_of(rolled, "executor", config())


def test_a_step_in_which_no_script_was_valid_has_all_its_metrics(monkeypatch, policy):
    """Every design invalid: nobody executed, and the step ends with the designers' calls."""
    refused = rollouts_of([[[0, 0], [0, 0]]])
    for made in refused[0].designs:
        made.structure, made.error = None, "no_script: ..."
        made.executions = [Execution(None, [], 0.0, "invalid_design") for _ in made.executions]
    monkeypatch.setattr(train, "roll_out", lambda *_: (refused, 0.0))
    playing = SimpleNamespace(load_weights=lambda weights: list(weights))
    conf = config()
    optimizers = {role: optimizer_of(policy, conf) for role in ("designer", "executor")}
    state = train.State(policy, SimpleNamespace(pad_token_id=0), playing, optimizers)
    metrics = train.train_step(0, state, None, None, conf, first=True)
    assert metrics["reward"] == 0.0 and metrics["skipped"] == 1
    assert metrics["status/invalid_design"] == 4 and metrics["tokens_per_second"] > 0


# --- the engine and its weights


def drawn(policy, n=3) -> list[Call]:
    """Calls that a TorchEngine with the policy's weights really drew."""
    _, tokenizer = engine.random_tiny(seed=1)
    playing = engine.TorchEngine(copy.deepcopy(policy.model), tokenizer)
    for i in range(n):
        ask = [{"role": "user", "content": "x" * (i + 1)}]
        playing.submit(i, ask, max_tokens=9, temperature=1.0, seed=i)
    done = []
    while playing.pending():
        done += playing.step()
    return [
        Call(
            *("executor", "a", [], c.text),
            *(c.prompt_ids, c.output_ids, c.logp_sampler, c.finish_reason),
        )
        for c in done
    ]


def test_the_step_0_check_passes_for_the_same_weights(policy):
    assert train.check_sampler(policy, drawn(policy), config(), 0, None) < 1e-5
    assert train.check_sampler(policy, [], config(), 0, None) == 0.0


def test_the_step_0_check_names_what_differs(policy):
    """Other weights, another temperature, a shift by one, a NaN: each stops the run."""
    calls = drawn(policy)
    with torch.no_grad():
        stale = copy.deepcopy(policy)
        stale.model.model.norm.weight.mul_(1.1)
        broken = copy.deepcopy(policy)
        broken.model.model.norm.weight.fill_(float("nan"))
    hot = ScoringModel(policy.model, temperature=0.9)
    shifted = copy.deepcopy(calls)
    for c in shifted:
        c.logp_sampler = [*c.logp_sampler[1:], c.logp_sampler[0]]
    for other, their in ((stale, calls), (broken, calls), (hot, calls), (policy, shifted)):
        with pytest.raises(
            engine.EngineError, match=r"disagree before any update: .* executor call"
        ):
            train.check_sampler(other, their, config(), 0, None)
    assert train.check_sampler(stale, calls, config(gap_bound=5.0), 0, None) > 0.01
    one = copy.deepcopy(calls)
    one[0].logp_sampler[2] -= 0.1  # a single token: the mean is within its bound, this is not
    with pytest.raises(engine.EngineError, match="output token 2"):
        train.check_sampler(policy, one, config(gap_bound=4e-3), 0, None)


def test_weights_are_pushed_one_at_a_time_in_the_engines_dtype(policy):
    """trainer_bugs 45 and 46: never two casts alive at once, and nothing is left behind."""
    alive, most = weakref.WeakSet(), 0
    names = []
    for name, weight in train.full_weights(policy, torch.bfloat16):
        assert weight.dtype == torch.bfloat16 and not weight.requires_grad
        alive.add(weight)
        most = max(most, len(alive))
        names.append(name)
    del weight
    assert names == [name for name, _ in policy.model.named_parameters()]
    assert most <= 2 and len(alive) == 0  # the loop's own, and the one that comes


def test_vllm_asked_for_and_missing_is_one_line(monkeypatch, capsys, tmp_path):
    missing = "vLLM is not installed: pip install -r requirements-gpu.txt"
    for module in (train, engine):
        monkeypatch.setattr(module, "vllm_missing", lambda: missing)
    assert train.main(["--engine", "vllm", "--no-tables", "--out", str(tmp_path / "r")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == f"train.py: error: {missing}" and not (tmp_path / "r").exists()
    assert train.settle(config(engine="auto", device="cuda")).engine == "torch"
    assert missing in capsys.readouterr().out  # auto says why
    for module in (train, engine):
        monkeypatch.setattr(module, "vllm_missing", lambda: None)
    assert train.settle(config(engine="auto", device="cuda", tables=False)).engine == "vllm"
    assert capsys.readouterr().out == "engine auto: vllm\n"
    assert train.settle(config(engine="auto", device="cpu")).engine == "torch"


def test_an_engine_that_fails_ends_the_run_with_one_line(monkeypatch, capsys, tmp_path):
    def fails(*_):
        raise engine.EngineError("vLLM failed while decoding: out of blocks")

    monkeypatch.setattr(train, "work", fails)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    assert train.main(["--out", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == "train.py: failed: vLLM failed while decoding: out of blocks\n"
    )


# --- the toy


def test_the_toys_training_and_held_out_tasks_share_no_question():
    held_out = {t.question for t in toy.make_tasks(512, "0 eval", held_out=True)}
    assert len(held_out) == 512
    trained = {t.question for t in toy.make_tasks(2000, 1)} | {
        t.question for t in toy.make_tasks(2000, "c", kinds=toy.COLD_START_KINDS)
    }
    assert not held_out & trained
    assert len({t.id for t in toy.make_tasks(300, 5)}) == 300


def test_the_toys_golds_and_its_careful_teacher_are_right():
    """Every program task is solved by one of the three programs; the verifier agrees."""
    from reward import score

    for task in toy.make_tasks(30, "golds", held_out=True):
        if task.kind == "math":
            assert score(task, rf"\boxed{{{toy.value(task.question)}}}") == 1.0
            continue
        rewards = [score(task, program) for program in toy.PROGRAMS.values()]
        assert sorted(rewards) == [0.0, 0.0, 1.0]
        numbers = "".join(re.findall(r"\d", task.question)[:4])
        right = list(toy.FORMULAS)[rewards.index(1.0)]
        assert toy.value(toy.fill(right, numbers)) == int(task.question[-1])


def test_the_cold_start_keeps_correct_traces_only():
    """sft.examples_of: reward 1 and complete replies; a design's call once an execution."""
    from sft import examples_of

    (rolled,) = rollouts_of([[[1, 0], [0, 0]]])
    rolled.designs[0].executions[0].calls.append(call("executor", [60], [61], "length"))
    kept = examples_of([rolled])
    assert len(kept) == 2  # the designer's call and one executor call of the correct execution


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--device", "cuda"], "CUDA devices are here"),
        (["--model", "no/where"], "no folder no/where, and the hub gives none"),
        (["--preset", "qwen3-8b", "--tables", "--engine", "vllm"], "--no-tables"),
    ],
)
def test_what_this_machine_can_not_do_is_one_line(argv, says, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(engine, "vllm_missing", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # and so what the run sets is taken back
        monkeypatch.delenv(name)
    assert train.main([*argv, "--out", str(tmp_path / "r")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line and not (tmp_path / "r").exists()


def test_memory_and_lost_ranks_are_not_blamed_on_the_file(tmp_path):
    """A checkpoint must not be called unreadable because the GPU is full or a rank has gone."""
    for error in (torch.OutOfMemoryError("full"), RuntimeError("[gloo] Connection closed by peer")):
        with pytest.raises(type(error)), train.whole(tmp_path / "folder"):
            raise error
    with pytest.raises(OSError, match="could not be written"):
        with train.whole(tmp_path / "folder"):
            raise RuntimeError("unexpected pos 704")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings, last",
    [
        ({}, "table.md"),
        ({"eval_tasks": 0}, "after.json"),
        ({"train": "sft", "data": "traces.jsonl"}, "final"),
    ],
)
def test_a_run_is_finished_by_the_last_thing_that_it_writes(settings, last, tmp_path):
    config_ = config(**settings)
    for name in ("final", "after.json", "table.md"):
        if name != last:
            (tmp_path / name).touch()
    assert not train.finished(tmp_path, config_)
    (tmp_path / last).touch()
    assert train.finished(tmp_path, config_)


def test_a_tokenizer_without_a_pad_token_will_do():
    """Which id fills a row matters to nobody: masks come from lengths."""
    losses = []
    for pad in (None, "a"):
        model, tokenizer = engine.random_tiny()
        tokenizer.pad_token = pad
        ask = [{"role": "user", "content": "1+1"}]
        examples = [sft.Example(ask, "2"), sft.Example(ask, "two of them")]
        settings = config(sft_steps=1, sft_batch=2, max_context=200)
        _, step_of = train.imitation(ScoringModel(model), tokenizer, examples, settings)
        losses.append(step_of(0)["loss"])
    assert losses[0] == losses[1] > 0


def test_after_the_ranks_have_joined_each_says_what_it_can_not_do(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(train, "rank", lambda: 1)
    monkeypatch.setattr(train, "ranks", lambda: 2)
    assert train.fail("error", "no model", 2) == 2
    assert capsys.readouterr().err == ""  # rank 0 of this machine says it
    monkeypatch.setattr(train, "joined", True)
    assert train.fail("error", "no model", 2) == 2
    assert capsys.readouterr().err == "train.py: rank 1: error: no model\n"
