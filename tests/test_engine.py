"""engine.py against model.generate, against a plain forward pass, and against what trainers got
wrong (the numbers in brackets are those of a list of public bug reports; each has its property).

Random tiny models: a Qwen3 (rotary positions, grouped query heads, tied embeddings) and a GPT-2,
whose learned positions show a wrong position id that rotary ones would forgive.
"""

import random

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from engine import (
    PREFILL_TOKENS,
    ModelError,
    PromptTooLong,
    ScriptedEngine,
    TorchEngine,
    draw,
    prompt_groups,
    random_tiny,
    uniforms,
)


def gpt2(tokenizer, **config):
    torch.manual_seed(0)
    settings = dict(vocab_size=len(tokenizer), n_positions=128, n_embd=64, n_layer=2, n_head=4)
    settings |= dict(initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    return GPT2LMHeadModel(GPT2Config(**(settings | config))).eval()


@pytest.fixture(params=["qwen3", "gpt2"])
def tiny(request):
    model, tokenizer = random_tiny()
    return (model if request.param == "qwen3" else gpt2(tokenizer)), tokenizer


def ask(text):
    return [{"role": "user", "content": text}]


def prompt_of(tokenizer, text):
    return tokenizer.apply_chat_template(ask(text), add_generation_prompt=True, return_dict=False)


def texts_of(n, longest=40):
    rng = random.Random(n)
    return ["".join(rng.choices("abc 0123+=", k=rng.randint(1, longest))) for _ in range(n)]


def finish(engine):
    done = {}
    while engine.pending():
        done |= {c.key: c for c in engine.step()}
    return done


def run(engine, texts, *, max_tokens=8, temperature=1.0, seed=0):
    """One call a text, keyed and seeded by its place -> completions in the same order."""
    for i, text in enumerate(texts):
        engine.submit(i, ask(text), max_tokens=max_tokens, temperature=temperature, seed=seed + i)
    done = finish(engine)
    return [done[i] for i in range(len(texts))]


def generate(model, prompt_ids, max_tokens):
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt_ids) :].tolist()


def reference_table(model, completion, temperature):
    """A plain forward pass over the row alone -> log-probs at its output positions, (n, V)."""
    with torch.no_grad():
        logits = model(torch.tensor([completion.prompt_ids + completion.output_ids])).logits[0]
    logits = logits[len(completion.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, dim=-1)


def reference_logp(model, completion, temperature):
    """What a trainer computes for the drawn ids."""
    table = reference_table(model, completion, temperature)
    return table.gather(1, torch.tensor(completion.output_ids)[:, None])[:, 0].tolist()


def assert_same(a, b):
    assert (a.prompt_ids, a.output_ids, a.text, a.finish_reason) == (
        b.prompt_ids,
        b.output_ids,
        b.text,
        b.finish_reason,
    )
    assert a.logp_sampler == pytest.approx(b.logp_sampler, abs=2e-5)


# --- the decode loop -----------------------------------------------------------------------------


def test_greedy_equals_generate_with_late_joins_and_few_slots(tiny):
    model, tokenizer = tiny
    texts = texts_of(11)
    limits = [3 + i % 7 for i in range(11)]
    engine = TorchEngine(model, tokenizer, max_batch=5)
    done, waiting = {}, list(range(11))
    for first in (6, 0, 2, 1, 2):  # submitted before each of the first five steps
        for i in waiting[:first]:
            engine.submit(i, ask(texts[i]), max_tokens=limits[i], temperature=0.0, seed=i)
        waiting = waiting[first:]
        done |= {c.key: c for c in engine.step()}
    done |= finish(engine)
    assert sorted(done) == list(range(11))
    for i in range(11):
        prompt_ids = prompt_of(tokenizer, texts[i])
        assert done[i].prompt_ids == prompt_ids
        assert done[i].output_ids == generate(model, prompt_ids, limits[i])
        assert len(done[i].logp_sampler) == len(done[i].output_ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations_agree_and_are_left_as_they_were(attention):
    model, tokenizer = random_tiny()
    model.set_attn_implementation(attention)
    completions = run(TorchEngine(model, tokenizer), texts_of(4), temperature=0.0)
    assert model.config._attn_implementation == attention
    for c in completions:
        assert c.output_ids == generate(model, c.prompt_ids, 8)


def test_draws_do_not_depend_on_the_batch(tiny):
    """[31, 32] Alone, in a crowd of other lengths, or joining late: same ids, same log-probs."""
    model, tokenizer = tiny
    texts = texts_of(5)
    together = run(TorchEngine(model, tokenizer), texts, max_tokens=10)
    late = TorchEngine(model, tokenizer)
    for i, text in enumerate(texts[1:], 1):
        late.submit(i, ask(text), max_tokens=10, temperature=1.0, seed=i)
    for _ in range(3):
        late.step()
    late.submit(0, ask(texts[0]), max_tokens=10, temperature=1.0, seed=0)
    assert_same(finish(late)[0], together[0])
    for i, text in enumerate(texts):
        (alone,) = run(TorchEngine(model, tokenizer), [text], max_tokens=10, seed=i)
        assert_same(alone, together[i])


def test_same_submits_give_the_same_bits_whatever_ran_before():
    model, tokenizer = random_tiny()
    fresh, used = TorchEngine(model, tokenizer), TorchEngine(model, tokenizer)
    run(used, texts_of(20, longest=90), max_tokens=20, seed=100)
    torch.manual_seed(5)  # global generators play no part
    first = run(fresh, texts_of(8))
    torch.manual_seed(6)
    assert run(used, texts_of(8)) == first


def test_first_come_first_served():
    engine = TorchEngine(*random_tiny(), max_batch=2)
    for i in range(5):
        engine.submit(i, ask("x"), max_tokens=2, temperature=0.0, seed=i)
    steps = []
    while engine.pending():
        steps.append([c.key for c in engine.step()])
    assert [sorted(keys) for keys in steps] == [[], [0, 1], [], [2, 3], [], [4]]
    assert engine.step() == []


def test_identical_prompts_are_run_once_and_answered_each():
    """[39, 40] Calls are told apart by key, not by text; other seeds draw other replies."""
    model, tokenizer = random_tiny()
    rows = []
    hook = model.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: rows.append(tuple(args[0].shape))
    )
    texts = ["same question"] * 6 + ["another question"]
    completions = run(TorchEngine(model, tokenizer), texts)
    hook.remove()
    prompt = len(completions[-1].prompt_ids)
    assert rows[0] == (2, prompt) and rows[1] == (7, 1)
    assert len({tuple(c.output_ids) for c in completions[:6]}) == 6
    again = run(TorchEngine(model, tokenizer), texts[:1] * 2, seed=0)
    assert_same(again[0], completions[0])
    engine = TorchEngine(model, tokenizer)
    for key in "ab":
        engine.submit(key, ask("same question"), max_tokens=8, temperature=1.0, seed=3)
    done = finish(engine)
    assert done["a"].output_ids == done["b"].output_ids == completions[3].output_ids


def test_cancelled_calls_leave_nothing_behind():
    model, tokenizer = random_tiny()
    engine = TorchEngine(model, tokenizer, max_batch=3)
    for i, text in enumerate(texts_of(7)):
        engine.submit(i, ask(text), max_tokens=9, temperature=1.0, seed=50 + i)
    engine.step()
    engine.step()
    engine.cancel_all()
    assert engine.pending() == 0 and engine.step() == []
    engine.load_weights(model.named_parameters())
    fresh = TorchEngine(model, tokenizer, max_batch=3)
    assert run(engine, texts_of(4)) == run(fresh, texts_of(4))


# --- log-probs, ids, stops -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logp_is_of_the_distribution_that_was_sampled(tiny, temperature):
    """[21, 22, 24, 25] At the sampling temperature, position for position, ratio 1 at step 0."""
    model, tokenizer = tiny
    for c in run(TorchEngine(model, tokenizer), texts_of(6), temperature=temperature):
        assert c.logp_sampler == pytest.approx(reference_logp(model, c, temperature), abs=2e-5)
        if temperature != 1.0:
            raw = np.array(reference_logp(model, c, 1.0))
            assert np.abs(raw - c.logp_sampler).max() > 0.1


def test_token_t_is_drawn_with_number_t_of_the_seed(tiny):
    model, tokenizer = tiny
    for i, c in enumerate(run(TorchEngine(model, tokenizer), texts_of(4), temperature=0.8)):
        cumulative = reference_table(model, c, 0.8).exp().cumsum(dim=1)
        count = np.arange(len(c.output_ids), dtype=np.uint64)
        for row, token, u in zip(
            cumulative, c.output_ids, uniforms(np.full_like(count, i), count), strict=True
        ):
            below = row[token - 1] if token else 0.0
            assert below - 1e-5 <= u < row[token] + 1e-5


def test_greedy_logp_is_at_temperature_one():
    model, tokenizer = random_tiny()
    for c in run(TorchEngine(model, tokenizer), texts_of(3), temperature=0.0):
        assert c.logp_sampler == pytest.approx(reference_logp(model, c, 1.0), abs=2e-5)


def test_dropout_is_off_and_the_model_is_left_in_its_mode():
    """[24]"""
    _, tokenizer = random_tiny()
    model = gpt2(tokenizer, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    completions = run(TorchEngine(model, tokenizer), texts_of(3))
    assert model.training and model.transformer.drop.training
    model.eval()
    for c in completions:
        assert c.logp_sampler == pytest.approx(reference_logp(model, c, 1.0), abs=2e-5)


def test_end_of_sequence_is_kept_and_truncation_adds_none():
    """[33, 34] Also with the end of sequence as padding, and with an id of the model's own."""
    model, tokenizer = random_tiny()
    prompt_ids = prompt_of(tokenizer, "when do you stop?")
    free = generate(model, prompt_ids, 12)
    stop = next(token for token in free if free.index(token) >= 3)
    until = free.index(stop) + 1
    tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop]
    engine = TorchEngine(model, tokenizer)
    for limit in (until - 1, until, until + 5):
        engine.submit(limit, ask("when do you stop?"), max_tokens=limit, temperature=0.0, seed=0)
    done = finish(engine)
    assert done[until - 1].output_ids == free[: until - 1]
    assert done[until - 1].finish_reason == "length"
    for limit in (until, until + 5):
        assert done[limit].output_ids == free[:until]
        assert done[limit].finish_reason == "stop"
        logp = reference_logp(model, done[limit], 1.0)
        assert done[limit].logp_sampler == pytest.approx(logp, abs=2e-5)


def test_the_tokenizers_end_of_sequence_stops_and_is_not_in_the_text():
    model, tokenizer = random_tiny()
    model.generation_config.eos_token_id = None
    eos = tokenizer.eos_token_id
    completions = run(TorchEngine(model, tokenizer), texts_of(40), max_tokens=60)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert (c.output_ids[-1] == eos) == (c.finish_reason == "stop")
        assert eos not in c.output_ids[:-1]
        assert c.text == tokenizer.decode([t for t in c.output_ids if t < 256])
        assert len(c.output_ids) == 60 or c.finish_reason == "stop"


def test_ids_are_the_drawn_ones_though_text_encodes_to_others():
    """[35] Random bytes are no valid text: decoding and encoding them again changes the ids."""
    model, tokenizer = random_tiny()
    completions = run(TorchEngine(model, tokenizer), texts_of(4), temperature=1.5)
    assert any(tokenizer.encode(c.text) != c.output_ids for c in completions)
    for c in completions:
        assert c.logp_sampler == pytest.approx(reference_logp(model, c, 1.5), abs=2e-5)


# --- limits and bad input ------------------------------------------------------------------------


def test_context_limit(tiny):
    model, tokenizer = tiny
    prompt_ids = prompt_of(tokenizer, "a")
    for room in (1, 3):
        engine = TorchEngine(model, tokenizer, max_context=len(prompt_ids) + room)
        (c,) = run(engine, ["a"], max_tokens=50, temperature=0.0)
        assert c.output_ids == generate(model, prompt_ids, room)
        assert c.finish_reason == "length"
        with pytest.raises(PromptTooLong, match="leaves no room"):
            run(engine, ["a" * (room + 1)])
        assert engine.pending() == 0


def test_the_models_own_limit_is_the_default():
    _, tokenizer = random_tiny()
    engine = TorchEngine(gpt2(tokenizer), tokenizer)
    (c,) = run(engine, ["a" * 90], max_tokens=500)
    assert len(c.prompt_ids) + len(c.output_ids) == 128 or c.finish_reason == "stop"
    with pytest.raises(PromptTooLong):
        run(engine, ["a" * 128])


def test_bad_arguments_are_refused():
    engine = TorchEngine(*random_tiny())
    for wrong in ({"max_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="at least"):
            run(engine, ["a"], **wrong)
    assert engine.pending() == 0


def test_chat_arguments_reach_the_template():
    model, tokenizer = random_tiny()
    tokenizer.chat_template = "{{ messages[0].content }}{{ '!' if loud else '?' }}"
    (c,) = run(TorchEngine(model, tokenizer, chat_kwargs={"loud": True}), ["hey"])
    assert tokenizer.decode(c.prompt_ids) == "hey!"


def test_models_without_full_attention_are_refused():
    _, tokenizer = random_tiny()
    settings = dict(hidden_size=32, num_hidden_layers=1, vocab_size=258, head_dim=32)
    sliding = Qwen3ForCausalLM(
        Qwen3Config(**settings, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    )
    with pytest.raises(ValueError, match="full attention"):
        TorchEngine(sliding, tokenizer)
    TorchEngine(sliding, tokenizer, max_context=64)
    with pytest.raises(ModelError, match="of 513: this model knows 512 positions"):
        TorchEngine(random_tiny()[0], tokenizer, max_context=513)
    linear, _ = random_tiny()
    linear.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        TorchEngine(linear, tokenizer)


def test_weights_that_are_not_finite_raise():
    model, tokenizer = random_tiny()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        run(TorchEngine(model, tokenizer), ["a"])


# --- load_weights --------------------------------------------------------------------------------


def test_new_weights_take_effect_at_once_tied_head_and_same_prompt_included():
    """[42, 43] The same prompt, before and after, and an engine built on the new weights."""
    model, tokenizer = random_tiny(seed=0)
    trained, _ = random_tiny(seed=1)
    engine = TorchEngine(model, tokenizer)
    before = run(engine, texts_of(4))
    engine.load_weights((name, p.detach()) for name, p in trained.named_parameters())
    after = run(engine, texts_of(4))
    assert after == run(TorchEngine(trained, tokenizer), texts_of(4))
    assert all(a.output_ids != b.output_ids for a, b in zip(after, before, strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied
    engine.load_weights(trained.state_dict().items())  # names the tied weight twice


def test_weights_are_cast_to_the_engines_dtype():
    """[46]"""
    trained, tokenizer = random_tiny(seed=1)
    model, _ = random_tiny(seed=0)
    engine = TorchEngine(model.to(torch.bfloat16), tokenizer)
    engine.load_weights(trained.named_parameters())
    for p, q in zip(model.parameters(), trained.parameters(), strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, q.to(torch.bfloat16))
    (c,) = run(engine, ["a"], max_tokens=4)
    assert c.logp_sampler == pytest.approx(reference_logp(trained, c, 1.0), abs=0.3)


def change(kind, weights):
    name, tensor = weights[3]
    if kind == "missing":
        return weights[:3] + weights[4:]
    if kind == "unknown":
        return weights[:3] + [("model.other.weight", tensor)] + weights[4:]
    if kind == "repeated":
        return weights + [(name, tensor)]
    if kind == "shape":  # copy_ alone would broadcast this one
        return weights[:3] + [(name, tensor[:1])] + weights[4:]
    return weights + [("lm_head.weight", weights[0][1] + 1)]


@pytest.mark.parametrize("kind", ["missing", "unknown", "repeated", "shape", "tied"])
def test_a_wrong_set_of_weights_raises_and_stops_the_engine(kind):
    """[43, 44]"""
    model, tokenizer = random_tiny()
    weights = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    engine = TorchEngine(model, tokenizer)
    message = {"missing": "did not come"}.get(kind, kind)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(change(kind, weights))
    with pytest.raises(RuntimeError, match="load all weights again"):
        run(engine, ["a"])
    engine.load_weights(weights)
    assert len(run(engine, ["a"])) == 1


def test_weights_are_refused_while_calls_are_pending():
    model, tokenizer = random_tiny()
    engine = TorchEngine(model, tokenizer)
    engine.submit("a", ask("a"), max_tokens=3, temperature=0.0, seed=0)
    for _ in range(2):  # waiting, then running
        with pytest.raises(RuntimeError, match="1 calls are pending"):
            engine.load_weights(model.named_parameters())
        engine.step()
    assert len(finish(engine)) == 1
    engine.load_weights(model.named_parameters())


# --- the pure parts ------------------------------------------------------------------------------


def splitmix64(state, count):
    """The published algorithm, in Python's integers."""
    numbers, mask = [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


def test_uniforms_are_splitmix64_of_the_hashed_seed():
    assert splitmix64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # published
    for seed in (0, 7, 2**64 - 1):
        (state,) = splitmix64(seed, 1)
        want = [(n >> 12) / 2**52 for n in splitmix64(state, 5)]
        got = uniforms(np.full(5, seed, np.uint64), np.arange(5, dtype=np.uint64))
        assert got.tolist() == want


def test_uniforms_are_uniform_along_a_stream_and_across_seeds():
    n = 20_000
    count = np.arange(n, dtype=np.uint64)
    for u in (uniforms(np.full_like(count, 3), count), uniforms(count, np.full_like(count, 3))):
        assert 0 <= u.min() and u.max() < 1
        assert np.abs(np.histogram(u, 10, (0, 1))[0] - n / 10).max() < 5 * np.sqrt(n / 10)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(n)


def test_draw_inverts_the_distribution():
    """n evenly spaced u draw each token n * p times, to within one, at any temperature."""
    n, logits = 10_000, torch.tensor([1.0, -1.0, 0.5, 3.0, 0.0])
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for temperature in (0.5, 1.0, 2.0):
        p = torch.softmax(logits / temperature, dim=0)
        ids, logp = draw(logits.expand(n, 5), torch.full((n,), temperature), u)
        assert (torch.bincount(ids, minlength=5) - n * p).abs().max() <= 1
        assert torch.allclose(logp, p.log()[ids], atol=1e-6)


def test_draw_never_takes_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(3, 4)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    ids, _ = draw(logits, torch.ones(3), u)
    assert ids.tolist() == [1, 2, 2]
    ids, _ = draw(torch.rand(2000, 400).log() * 3, torch.ones(2000), u[2].expand(2000))
    assert ids.max() < 400


def test_prompt_groups_cover_all_within_their_bounds():
    rng = random.Random(0)
    for _ in range(50):
        lengths = sorted(rng.randint(1, 3000) for _ in range(rng.randint(0, 80)))
        groups = prompt_groups(lengths)
        assert [i for group in groups for i in group] == list(range(len(lengths)))
        for group in groups:
            padded = len(group) * lengths[group[-1]]
            assert len(group) == 1 or padded <= PREFILL_TOKENS
            assert padded - sum(lengths[i] for i in group) <= max(64, padded / 16)


def test_scripted_engine_answers_what_was_submitted():
    seen = []

    def reply(key, messages, seed):
        seen.append((key, messages, seed))
        return f"reply to {messages[0]['content']}"

    scripted = ScriptedEngine(reply)
    scripted.submit("dropped", ask("zero"), max_tokens=5, temperature=1.0, seed=10)
    scripted.cancel_all()
    scripted.submit("a", ask("one"), max_tokens=5, temperature=1.0, seed=11)
    scripted.submit("b", ask("two"), max_tokens=5, temperature=0.0, seed=12)
    assert scripted.pending() == 2 and not seen
    a, b = scripted.step()
    assert seen == [("a", ask("one"), 11), ("b", ask("two"), 12)]
    assert (a.key, a.text, b.key, b.text) == ("a", "reply to one", "b", "reply to two")
    assert a.prompt_ids is a.output_ids is a.logp_sampler is None and a.finish_reason == "stop"
    assert scripted.pending() == 0 and scripted.step() == []
