"""grpo.py against plain numpy, plain autograd, Hugging Face's own logits, and reported faults."""

import copy
import doctest
import math
import weakref
from types import SimpleNamespace

import gpu_check
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

import grpo
from grpo import (
    Batch,
    ScoringModel,
    active_role,
    empty_batch,
    micro_batches,
    pack,
    padding_waste,
    policy_loss,
    token_logprobs,
    tokens_and_forwards,
)

VOCAB, PAD, EOS = 61, 0, 2


def make_call(prompt_ids, output_ids, logp_sampler=None, finish_reason="stop"):
    return SimpleNamespace(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logp_sampler=logp_sampler,
        finish_reason=finish_reason,
    )


def random_calls(n: int, seed: int = 0) -> list:
    """Calls of unequal lengths; number 3 is truncated."""
    rng = np.random.default_rng(seed)
    calls = []
    for i in range(n):
        prompt, output = rng.integers(1, 6), rng.integers(1, 12)
        ids = rng.integers(3, VOCAB, prompt + output).tolist()
        gap = (rng.random(output) - 2).tolist()
        why = "length" if i == 3 else "stop"
        calls.append(make_call(ids[:prompt], ids[prompt:], gap, why))
    return calls


def qwen3(seed: int = 0, tie: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tie,
        initializer_range=0.5,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def gpt2(**kwargs) -> GPT2LMHeadModel:
    """Learned positions: a wrong position shows, where rotary ones would hide it."""
    torch.manual_seed(1)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.5,
        **{**no_dropout, **kwargs},
    )
    return GPT2LMHeadModel(config)


def score(model: ScoringModel, batch: Batch, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = batch.response_mask if mask is None else mask
    return model(batch.input_ids, batch.attention_mask, None, mask)


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a: dict, b: dict, **tolerance) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance)


def backward_in_parts(
    model, calls, advantages, parts, n_tokens, scale=1.0, off_policy=0.5
) -> tuple[float, dict]:
    """One update's loss and gradients, the calls scored in the given parts. With off_policy > 0
    ratios and weights differ from token to token, some of them past the clip and the cap.
    """
    model.zero_grad()
    total = 0.0
    for part in parts:
        batch = pack([calls[i] for i in part], PAD)
        logp = score(model, batch, batch.loss_mask)
        logp_old = logp.detach() + off_policy * (batch.input_ids % 7 - 3) / 3
        loss, _ = policy_loss(
            logp,
            logp_old,
            torch.tensor([advantages[i] for i in part]),
            batch.loss_mask,
            n_tokens,
            logp_sampler=logp_old - off_policy * (batch.input_ids % 5 - 2),
        )
        (loss * scale).backward()
        total += loss.item()
    return total, grads(model)


# Which role trains


def test_active_role():
    roles = [active_role(step, 30) for step in range(120)]
    expected = ["executor"] * 30 + ["designer"] * 30
    assert roles == expected * 2
    assert [active_role(s, 1) for s in range(4)] == ["executor", "designer"] * 2
    assert [active_role(s, 2, first="designer") for s in range(3)] == ["designer"] * 2 + [
        "executor"
    ]
    for bad in [(-1, 30), (0, 0), (0, 30, "judge")]:
        with pytest.raises(ValueError):
            active_role(*bad)


# The loss


def numpy_loss(logp, logp_old, advantage, mask, n_tokens, sampler, low, high, cap):
    """The formula of grpo.py, token by token."""
    total, clipped, kl, ratios, weights, capped, gaps = 0.0, 0, 0.0, 0.0, 0.0, 0, []
    for b, t in zip(*np.nonzero(mask), strict=True):
        r = math.exp(logp[b, t] - logp_old[b, t])
        gap = logp_old[b, t] - sampler[b, t] if sampler is not None else 0.0
        w, a = math.exp(gap), advantage[b]
        total += min(w, cap) * min(r * a, min(max(r, 1 - low), 1 + high) * a)
        clipped += (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        kl += r - 1 - math.log(r)
        ratios += r
        weights += min(w, cap)
        capped += w > cap
        gaps.append(abs(gap))
    return -total / n_tokens, {
        "tokens": len(gaps),
        "clipped": clipped,
        "kl_sum": kl,
        "ratio_sum": ratios,
        "tis_weight_sum": weights,
        "tis_capped": capped,
        "sampler_gap_sum": sum(gaps),
        "sampler_gap_max": max(gaps),
    }


def random_loss_inputs(seed=0, b=5, t=9):
    rng = np.random.default_rng(seed)
    logp = -rng.random((b, t)) * 3
    logp_old = logp + rng.normal(0, 0.3, (b, t))
    sampler = logp_old + rng.normal(0, 0.5, (b, t))
    advantage = np.array([1.3, -0.7, 0.0, 2.1, -1.9])[:b]
    return logp, logp_old, advantage, rng.random((b, t)) < 0.6, sampler


@pytest.mark.parametrize(("with_sampler", "tis_cap"), [(True, 1.5), (True, 0.8), (False, 2.0)])
def test_loss_equals_plain_numpy(with_sampler, tis_cap):
    """trainer_bugs 29 (github.com/huggingface/trl/pull/3867): weights, their cap, and the mask."""
    logp, logp_old, advantage, mask, sampler = random_loss_inputs()
    sampler = sampler if with_sampler else None
    limits = {"clip_low": 0.1, "clip_high": 0.3, "tis_cap": tis_cap}
    expected, expected_metrics = numpy_loss(
        logp, logp_old, advantage, mask, 40, sampler, *limits.values()
    )
    loss, metrics = policy_loss(
        *(torch.tensor(x) for x in (logp, logp_old, advantage, mask)),
        40,
        logp_sampler=None if sampler is None else torch.tensor(sampler),
        **limits,
    )
    assert expected_metrics["clipped"] > 3 and (not with_sampler or expected_metrics["tis_capped"])
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        expected_metrics, rel=1e-9, abs=1e-12
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_loss_is_a_token_mean():
    """trainer_bugs 6 (github.com/hiyouga/EasyR1/issues/212): by hand, two calls of 1 and 3 tokens.

    Token mean: -(1 * 2 + 3 * -1) / 4 = 0.25. The mean of the calls' means would be -0.5, a division
    by the padded size 6 would give 0.167.
    """
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    logp = torch.zeros(2, 3)
    loss, _ = policy_loss(logp, logp, torch.tensor([2.0, -1.0]), mask, 4)
    assert loss.item() == 0.25


def test_gradient_by_hand_and_where_it_is_clipped():
    """A token past the bound that its advantage pushes it to has no gradient; one that moved the
    other way keeps it: d loss / d logp = -r * A / n.
    """
    ratio = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 1.1]], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss, metrics = policy_loss(
        logp, torch.zeros_like(logp), torch.tensor([1.0, -2.0]), torch.ones(2, 3), 6
    )
    loss.backward()
    expected = torch.tensor([[0, 0.5, 1.1], [1.5 * -2, 0, 1.1 * -2]], dtype=torch.float64) / -6
    torch.testing.assert_close(logp.grad, expected)
    assert metrics["clipped"] == 2


def test_on_policy_gradient_is_reinforce():
    """trainer_bugs 20 (github.com/huggingface/trl/issues/3452): the loss is near 0, the gradient is
    not: it is that of -mean(A * logp), and clipping is idle.
    """
    model = ScoringModel(qwen3())
    batch = pack([make_call([5], [7, 8, EOS]), make_call([6, 4], [9, 3, EOS])], PAD)
    advantage = torch.tensor([0.8, -0.8])
    logp = score(model, batch)
    loss, metrics = policy_loss(logp, logp.detach(), advantage, batch.loss_mask, 6)
    loss.backward()
    ours = grads(model)
    model.zero_grad()
    (-(advantage[:, None] * score(model, batch)).sum() / 6).backward()
    assert_same(ours, grads(model), rtol=1e-5, atol=1e-7)
    assert abs(loss.item()) < 1e-7 and max(g.norm() for g in ours.values()) > 0.01
    assert metrics["clipped"] == 0 and metrics["kl_sum"] == 0 and metrics["ratio_sum"] == 6


def test_importance_weight_has_no_gradient_and_stands_outside_of_the_clip():
    logp_old = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.5, -3.0]], requires_grad=True)
    logp = torch.tensor([[-1.0, -1.0 + math.log(5.0)]], requires_grad=True)
    loss, _ = policy_loss(logp, logp_old, torch.ones(1), torch.ones(1, 2), 2, logp_sampler=sampler)
    loss.backward()
    # exp(0.5) * 1, and the cap 2 times the clipped 1.2: not min(2 * 5, 1.2)
    assert loss.item() == pytest.approx(-(math.exp(0.5) + 2 * 1.2) / 2)
    assert logp_old.grad is None and sampler.grad is None
    torch.testing.assert_close(logp.grad, torch.tensor([[-math.exp(0.5) / 2, 0.0]]))


@pytest.mark.parametrize("junk", [1e6, math.inf, -math.inf, math.nan, -100.0])
def test_masked_positions_are_inert(junk):
    """trainer_bugs 7 (github.com/alibaba/ROLL/pull/444), 9
    (github.com/PrimeIntellect-ai/prime-rl/pull/2084), 11 (github.com/NVIDIA-NeMo/RL/pull/3551) and
    30 (github.com/PeterGriffinJin/Search-R1/pull/21): what stands outside of the mask, in any of
    the three log-probs, reaches neither loss, nor metric (KL included), nor gradient.
    """
    logp, logp_old, advantage, mask, sampler = (torch.tensor(x) for x in random_loss_inputs(1))
    mask[4] = False

    def run(logp, logp_old, sampler, advantage):
        logp = logp.clone().requires_grad_()
        loss, metrics = policy_loss(logp, logp_old, advantage, mask, 20, logp_sampler=sampler)
        loss.backward()
        return loss.item(), metrics, logp.grad

    loss, metrics, grad = run(logp, logp_old, sampler, advantage)
    assert (grad[~mask] == 0).all() and (grad[mask & (advantage != 0)[:, None]] != 0).any()
    for place in range(7):
        fill = [
            x.masked_fill(~mask, junk) if place in (i, 3) else x
            for i, x in enumerate((logp, logp_old, sampler))
        ]
        bad_advantage = advantage.clone()
        if place >= 4:
            bad_advantage[4] = junk  # a row with no trained token
        out = run(*fill, bad_advantage)
        assert out[0] == loss and torch.equal(out[2], grad)
        assert_same(out[1], metrics, rtol=0, atol=0)


def test_extreme_tokens_stay_finite():
    """trainer_bugs 9: a sampler log-prob of -100 or -inf on a trained token is capped, not inf."""
    logp = torch.full((1, 3), -1.0, requires_grad=True)
    sampler = torch.tensor([[-100.0, -math.inf, -1.0]])
    for advantage in (1.0, -1.0):
        loss, metrics = policy_loss(
            logp,
            torch.tensor([[-1.0, -1.0, -200.0]]),
            torch.tensor([advantage]),
            torch.ones(1, 3),
            3,
            logp_sampler=sampler,
        )
        logp.grad = None
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all()
        assert metrics["tis_capped"] == 2
    logp = torch.tensor([[math.nan, -1.0]])  # a NaN on a trained token must be seen by train.py
    assert policy_loss(logp, logp, torch.ones(1), torch.ones(1, 2), 2)[0].isnan()


def test_nothing_to_train_gives_zero():
    """trainer_bugs 10 (open-thought/tiny-grpo, masked_mean divides by mask.sum()): no NaN."""
    for mask in (torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(0, 3)):
        logp = torch.full(mask.shape, -1.0, requires_grad=True)
        loss, metrics = policy_loss(logp, logp.detach(), torch.ones(len(mask)), mask, 0)
        loss.backward()
        assert loss.item() == 0 and not logp.grad.any()
        assert all(value == 0 for value in metrics.values())
    mixed = torch.tensor([[0, 0, 0], [1, 1, 1]])
    logp = torch.zeros(2, 3)
    assert policy_loss(logp, logp, torch.tensor([5.0, 1.0]), mixed, 3)[0].item() == -1.0


def test_constant_group_is_exactly_zero():
    """trainer_bugs 19 (github.com/huggingface/trl/pull/6365): advantage 0 gives a gradient of
    exactly 0 (there is no KL term to move it), and its tokens stay in the denominator.
    """
    logp, logp_old, _, mask, sampler = (torch.tensor(x) for x in random_loss_inputs(2))
    logp.requires_grad_()
    loss, metrics = policy_loss(logp, logp_old, torch.zeros(5), mask, 20, logp_sampler=sampler)
    loss.backward()
    assert loss.item() == 0 and (logp.grad == 0).all() and metrics["clipped"] == 0


def test_kl_metric_is_the_kl_from_old_to_now():
    """trainer_bugs 28 (github.com/huggingface/trl/pull/4638): which KL k3 estimates. Ten tokens
    exactly in proportion to a 5-symbol distribution `old`: the mean of k3 is KL(old || now).
    """
    old = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)
    now = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2], dtype=torch.float64)
    drawn = torch.tensor([[0, 1, 1, 2, 2, 2, 3, 3, 3, 4]])
    _, metrics = policy_loss(
        now.log()[drawn], old.log()[drawn], torch.ones(1), torch.ones(1, 10), 10
    )
    exact = (old * (old / now).log()).sum()
    assert metrics["kl_sum"].item() / 10 == pytest.approx(exact.item())
    assert exact.item() != pytest.approx((now * (now / old).log()).sum().item(), rel=0.01)


def test_arguments_are_not_changed():
    tensors = [torch.tensor(x) for x in random_loss_inputs(3)]
    before = copy.deepcopy(tensors)
    policy_loss(*tensors[:4], 20, logp_sampler=tensors[4])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    calls = random_calls(4)
    before = copy.deepcopy(calls)
    batch = pack(calls, PAD)
    tokens_and_forwards(calls, [1.0, 0.0, 1.0, 1.0])
    micro_batches([3, 1, 2], 4)
    assert calls == before
    copied = copy.deepcopy(batch)
    score(ScoringModel(qwen3()), batch).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(batch, copied, strict=True))


def test_wrong_shapes_raise():
    ok = torch.zeros(2, 3)
    for logp, old, advantage, mask, sampler in [
        (ok, torch.zeros(2, 2), torch.zeros(2), ok, None),
        (ok, ok, torch.zeros(2, 1), ok, None),
        (ok, ok, torch.zeros(3), ok, None),
        (ok, ok, torch.zeros(2), torch.zeros(1, 3), None),
        (ok, ok, torch.zeros(2), ok, torch.zeros(3)),
        (ok[0], ok[0], torch.zeros(3), ok[0], None),
    ]:
        with pytest.raises(ValueError, match="give"):
            policy_loss(logp, old, advantage, mask, 6, logp_sampler=sampler)


# Micro-batches, ranks, updates


SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[6, 1], [3, 0], [2, 7], [5, 4]],
    [[3], [0], [1], [7], [6], [5], [4], [2]],  # [3] is truncated: a part without one token
]
ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.5, 0.0, 1.0, -1.0]


def test_gradient_is_the_same_for_every_split():
    """trainer_bugs 1 (github.com/huggingface/trl/issues/7206) and 5
    (github.com/verl-project/verl/issues/3741): the parts differ in tokens and in padded width.
    Equal after an optimiser step too.
    """
    calls = random_calls(8)
    n_tokens, _ = tokens_and_forwards(calls, ADVANTAGES)
    results = []
    for split in SPLITS:
        model = ScoringModel(qwen3())
        loss, gradient = backward_in_parts(model, calls, ADVANTAGES, split, n_tokens)
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3).step()
        results.append((loss, gradient, dict(model.named_parameters())))
    assert max(g.abs().max() for g in results[0][1].values()) > 1e-2
    for loss, gradient, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert_same(gradient, results[0][1], rtol=1e-4, atol=1e-6)
        assert_same(weights, results[0][2], rtol=1e-4, atol=1e-6)


def test_last_short_part_counts_once():
    """trainer_bugs 2 (github.com/ml-explore/mlx-lm/pull/1413): 7 calls in parts of 4 and 3, then a
    part that holds only the truncated call.
    """
    calls = random_calls(7)
    n_tokens, _ = tokens_and_forwards(calls, ADVANTAGES)
    model = ScoringModel(qwen3())
    _, whole = backward_in_parts(model, calls, ADVANTAGES, [list(range(7))], n_tokens)
    for split in ([[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 4], [5, 6], [3]]):
        _, parts = backward_in_parts(model, calls, ADVANTAGES, split, n_tokens)
        assert_same(parts, whole, rtol=1e-4, atol=1e-6)


def test_each_update_has_its_own_token_mean():
    """trainer_bugs 3 (github.com/huggingface/trl/pull/6024): the calls of one rollout in two
    updates; with advantage 1 everywhere each update's loss is -1, however it is accumulated.
    """
    calls, ones = random_calls(8), [1.0] * 8
    model = ScoringModel(qwen3())
    for update in ([0, 1, 2, 3, 4], [5, 6, 7]):
        n_tokens, _ = tokens_and_forwards([calls[i] for i in update], [1.0] * len(update))
        for split in ([update], [[i] for i in update]):
            loss, _ = backward_in_parts(model, calls, ones, split, n_tokens, off_policy=0.0)
            assert loss == pytest.approx(-1.0)


def test_two_ranks_equal_one():
    """trainer_bugs 4 (github.com/huggingface/trl/pull/3231): n_tokens is global, and the mean over
    ranks that FSDP takes is undone by the world size. The ranks hold 6 and 2 calls.
    """
    calls = random_calls(8)
    n_tokens, _ = tokens_and_forwards(calls, ADVANTAGES)
    model = ScoringModel(qwen3())
    _, one = backward_in_parts(model, calls, ADVANTAGES, [list(range(8))], n_tokens)
    ranks = [
        backward_in_parts(model, calls, ADVANTAGES, parts, n_tokens, scale=2.0)[1]
        for parts in ([[0, 1, 2], [3, 4, 5]], [[6, 7]])
    ]
    averaged = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in one}
    assert_same(averaged, one, rtol=1e-4, atol=1e-6)


def test_padded_width_does_not_matter():
    """trainer_bugs 5 (github.com/verl-project/verl/pull/2435) and 8
    (github.com/huggingface/trl/pull/6654).
    """
    logp, logp_old, advantage, mask, sampler = (torch.tensor(x) for x in random_loss_inputs(4))
    loss, metrics = policy_loss(logp, logp_old, advantage, mask, 20, logp_sampler=sampler)
    wide = [torch.nn.functional.pad(x, (0, 7)) for x in (logp, logp_old, mask, sampler)]
    wide_loss, wide_metrics = policy_loss(
        wide[0], wide[1], advantage, wide[2], 20, logp_sampler=wide[3]
    )
    assert wide_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert_same(wide_metrics, metrics)


def test_metrics_of_parts_add_up():
    logp, logp_old, advantage, mask, sampler = (torch.tensor(x) for x in random_loss_inputs(5))

    def metrics(rows):
        return policy_loss(
            logp[rows], logp_old[rows], advantage[rows], mask[rows], 20, logp_sampler=sampler[rows]
        )[1]

    whole, first, second = metrics(slice(0, 5)), metrics(slice(0, 2)), metrics(slice(2, 5))
    for name, value in whole.items():
        join = max if name.endswith("_max") else sum
        assert join([first[name].item(), second[name].item()]) == pytest.approx(value.item())


def test_skipped_zero_advantage_calls_change_nothing():
    """The calls that `tokens_and_forwards` leaves out would add exact zeros; their tokens count."""
    calls = random_calls(8)
    n_tokens, needed = tokens_and_forwards(calls, ADVANTAGES)
    assert needed == [0, 1, 2, 4, 6, 7]  # 3 is truncated, 5 has advantage 0
    assert n_tokens == sum(len(c.output_ids) for i, c in enumerate(calls) if i != 3)
    model = ScoringModel(qwen3())
    _, every = backward_in_parts(model, calls, ADVANTAGES, [[i] for i in range(8)], n_tokens)
    _, some = backward_in_parts(model, calls, ADVANTAGES, [[i] for i in needed], n_tokens)
    assert_same(some, every, rtol=0, atol=0)


def test_micro_batches_keep_the_budget_and_lose_nothing():
    """trainer_bugs 27 (github.com/allenai/open-instruct/pull/1483): a tag in each row is found
    again through the index lists.
    """
    rng = np.random.default_rng(0)
    for budget in (1, 17, 64, 1000):
        lengths = rng.integers(1, 40, 50).tolist()
        batches = micro_batches(lengths, budget)
        assert batches == micro_batches(lengths, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(50))
        for batch in batches:
            width = max(lengths[i] for i in batch)
            assert width * len(batch) <= budget or len(batch) == 1
        flat = [lengths[i] for batch in batches for i in batch]
        assert flat == sorted(lengths, reverse=True)
    calls = [make_call([100 + i], [200 + i] * n) for i, n in enumerate(lengths)]
    for part in micro_batches([1 + n for n in lengths], 90):
        batch = pack([calls[i] for i in part], PAD)
        assert batch.input_ids[:, 0].tolist() == [100 + i for i in part]
        assert batch.response_mask.sum(1).tolist() == [lengths[i] for i in part]
    assert micro_batches([], 10) == []


def plain_cut(lengths: list[int], budget: int) -> list[list[int]]:
    """Micro-batches of one rank, written another way: always the longest that are left."""
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    while left:
        rows = max(1, budget // lengths[left[0]])
        batches.append(left[:rows])
        left = left[rows:]
    return batches


def call_lengths(n: int, seed: int) -> list[int]:
    """Prompt + reply, each log-normal up to 8,192: medians 700 and 1,200, the longest over 8,500"""
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(np.log(700), 0.7, n).clip(50, 8192).astype(int)
    replies = rng.lognormal(np.log(1200), 0.9, n).clip(5, 8192).astype(int)
    return (prompts + replies).tolist()


def test_micro_batches_of_one_rank_are_the_longest_that_are_left():
    """The toy's numbers depend on this order bit for bit."""
    for seed in range(5):
        lengths = call_lengths(100, seed)
        for budget in (1, 900, 4000, 16384):
            assert micro_batches(lengths, budget) == plain_cut(lengths, budget)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_micro_batches_over_ranks(ranks):
    """Equal numbers, nothing lost, nothing twice, the budget kept, empty only where it must be."""
    rng = np.random.default_rng(ranks)
    seen = {"recut": 0, "halved": 0, "empty": 0}
    for n in [0, 1, 2, 5, 7, 16, 50] * 4:
        lengths = rng.integers(1, 9 if n % 2 else 40, n).tolist()
        for budget in (1, 10, 17, 64):
            batches = micro_batches(lengths, budget, ranks)
            needed = len(plain_cut(lengths, budget))
            assert len(batches) == math.ceil(needed / ranks) * ranks
            assert sorted(i for batch in batches for i in batch) == list(range(n))
            filled = [batch for batch in batches if batch]
            assert len(filled) == min(len(batches), n) and batches[: len(filled)] == filled
            sizes = [len(batch) * max(lengths[i] for i in batch) for batch in filled]
            assert sizes == sorted(sizes, reverse=True)
            for batch, size in zip(filled, sizes, strict=True):
                assert len(batch) == 1 or size <= budget
            smallest = next(
                b for b in range(1, budget + 1) if len(plain_cut(lengths, b)) <= len(batches)
            )
            cut = plain_cut(lengths, smallest)
            if len(cut) == len(filled):
                assert sorted(filled) == sorted(cut)
            seen["recut"] += smallest < budget
            seen["halved"] += len(cut) < len(filled)
            seen["empty"] += len(filled) < len(batches)
    assert all(seen.values()), seen


def test_the_largest_micro_batches_are_halved():
    """50 equal rows, 4 in a batch: 13 batches, 16 wanted. 3 in a batch would make 17, so the budget
    stays, and three of the twelve full ones are halved.
    """
    batches = micro_batches([5] * 50, 20, ranks=8)
    assert [len(batch) for batch in batches] == [4] * 9 + [2] * 7
    assert sorted(i for batch in batches for i in batch) == list(range(50))


@pytest.mark.parametrize("n", [300, 600])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_padding_and_balance_of_realistic_calls(n, ranks):
    """Measured here: 2.2 % padding at most. Over 8 ranks the busiest has 1.05 times the mean of
    tokens (300 calls; 1.02 of 600), and of the positions that a round's largest batch makes all
    ranks wait for, 96 % are batches (98 % of 600).
    """
    for seed in range(3):
        lengths = call_lengths(n, seed)
        assert max(lengths) > 8500 and np.median(lengths) < 2200
        batches = micro_batches(lengths, 16384, ranks)
        assert 0 < padding_waste(lengths, batches) < 0.03
        tokens = [
            sum(lengths[i] for batch in batches[r::ranks] for i in batch) for r in range(ranks)
        ]
        assert max(tokens) / np.mean(tokens) < 1.06
        sizes = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
        waited_for = sum(ranks * size for size in sizes[::ranks])  # the first of a round is largest
        assert sum(sizes) / waited_for > 0.95


def test_padding_waste_counts_the_padding_that_pack_adds():
    lengths = np.random.default_rng(0).integers(2, 30, 40).tolist()
    batches = micro_batches(lengths, 100, ranks=3) + [[]]
    packed = [pack([make_call([5], [7] * (lengths[i] - 1)) for i in b], PAD) for b in batches if b]
    padding = sum((batch.attention_mask == 0).sum().item() for batch in packed)
    positions = sum(batch.input_ids.numel() for batch in packed)
    assert padding and padding_waste(lengths, batches) == pytest.approx(padding / positions)
    assert padding_waste([], []) == 0 and padding_waste([3, 3], [[0, 1], []]) == 0


# Packing


def test_pack_by_hand_with_pad_equal_to_eos():
    """trainer_bugs 33 (github.com/huggingface/trl/pull/4970), 34
    (github.com/meta-pytorch/torchtune/pull/2967): the drawn EOS is trained although it is also the
    padding; a truncated call gets no EOS, and is out of the loss unless the switch is off.
    """
    calls = [
        make_call([7], [8, 9, EOS], [-1.0, -2.0, -3.0]),
        make_call([7, 6], [5, 4, 3], [-4.0, -5.0, -6.0], "length"),
        make_call([EOS, 6], [EOS], [-7.0]),
    ]
    batch = pack(calls, pad_id=EOS)
    assert batch.input_ids.tolist() == [[7, 8, 9, EOS, EOS], [7, 6, 5, 4, 3], [EOS, 6, *[EOS] * 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0], [1] * 5, [1, 1, 1, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 1, 0], [0] * 5, [0, 0, 1, 0, 0]]
    sampler = [[0, -1, -2, -3, 0], [0, 0, -4, -5, -6], [0, 0, -7, 0, 0]]
    assert batch.logp_sampler.tolist() == sampler
    unmasked = pack(calls, pad_id=EOS, mask_truncated=False)
    assert torch.equal(unmasked.loss_mask, unmasked.response_mask)
    assert pack([make_call([7], [8])], PAD).logp_sampler is None


def test_pack_keeps_the_engines_ids():
    """trainer_bugs 35 (github.com/huggingface/trl/issues/5224): random ids, which no tokenizer
    would give for their own text (as "he" "llo" for "hello"), come through as they are.
    """
    calls = random_calls(6, seed=1)
    batch = pack(calls, PAD)
    for call, ids, mask in zip(calls, batch.input_ids, batch.attention_mask.bool(), strict=True):
        assert ids[mask].tolist() == call.prompt_ids + call.output_ids


def test_pack_refuses_what_cannot_be_trained():
    with pytest.raises(ValueError, match="no token ids"):
        pack([make_call(None, None)], PAD)
    with pytest.raises(ValueError, match="empty prompt"):
        pack([make_call([], [3])], PAD)
    with pytest.raises(ValueError, match="2 output tokens and 1 sampler"):
        pack([make_call([3], [4, 5], [-1.0])], PAD)
    with pytest.raises(ValueError, match="only some calls"):
        pack([make_call([3], [4], [-1.0]), make_call([3], [4])], PAD)


# Chunked log-probs


def plain_logprobs(hidden, weight, targets, temperature=1.0):
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    return (logits / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [1, 7, 20, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_equals_plain(chunk, temperature):
    """trainer_bugs 47 (github.com/pytorch/torchtitan/pull/3704): values and both gradients, in
    float32 and float64, for a chunk that divides the 20 rows and for ones that do not.
    """
    torch.manual_seed(0)
    for dtype, tolerance in [(torch.float64, 1e-12), (torch.float32, 2e-5)]:
        hidden = torch.randn(20, 8, dtype=dtype, requires_grad=True)
        weight = torch.randn(101, 8, dtype=dtype, requires_grad=True)
        targets, upstream = torch.randint(101, (20,)), torch.randn(20, dtype=dtype)
        expected = plain_logprobs(hidden, weight, targets, temperature)
        expected_grads = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
        logp = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
        ours = torch.autograd.grad((logp * upstream).sum(), (hidden, weight))
        assert logp.dtype == dtype and logp.shape == (20,)
        torch.testing.assert_close(logp, expected, rtol=tolerance, atol=tolerance)
        for a, b in zip(ours, expected_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_chunked_gradcheck():
    torch.manual_seed(1)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.7, chunk=2), (hidden, weight)
    )


def test_chunked_bfloat16():
    """float32 out of bfloat16 weights, as near to the exact values as the plain way is."""
    torch.manual_seed(2)
    hidden = torch.randn(256, 64).bfloat16().requires_grad_()
    weight = (torch.randn(512, 64) / 4).bfloat16().requires_grad_()
    targets, upstream = torch.randint(512, (256,)), torch.randn(256)
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = plain_logprobs(*exact_inputs, targets)
    exact_grads = torch.autograd.grad((exact * upstream).sum(), exact_inputs)

    def errors(logp):
        ours = torch.autograd.grad((logp * upstream).sum(), (hidden, weight))
        pairs = zip((logp.double(), *ours), (exact, *exact_grads), strict=True)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]

    chunked = token_logprobs(hidden, weight, targets, chunk=16)
    assert chunked.dtype == torch.float32
    plain = errors(plain_logprobs(hidden, weight, targets))
    for ours, theirs in zip(errors(chunked), plain, strict=True):
        assert ours < 2 * theirs + 1e-6 and ours < 0.01


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_tokens_by_vocabulary(dtype):
    """trainer_bugs 47: nothing larger than [chunk, V], in forward and in backward."""
    n, vocab, chunk = 64, 101, 8
    hidden = torch.randn(n, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 4, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (n,))
    sizes = []
    for way in (plain_logprobs, lambda *x: token_logprobs(*x, chunk=chunk)):
        with LargestTensor() as largest:
            way(hidden, weight, targets).sum().backward()
        sizes.append(largest.elements)
    assert sizes == [n * vocab, chunk * vocab]


class LiveTensors(TorchDispatchMode):
    """Records the most tensors of so many elements that exist at one time."""

    def __init__(self, elements: int):
        super().__init__()
        self.elements, self.most, self.made = elements, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.elements:
                self.made.append(weakref.ref(tensor))
        live = [tensor for ref in self.made if (tensor := ref()) is not None]
        self.most = max(self.most, len({tensor.data_ptr() for tensor in live}))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tensors_of_chunk_by_vocabulary_at_most(dtype):
    """What token_logprobs says of its peak; the plain way holds three of its [N, V]."""
    n, vocab, chunk = 64, 101, 8
    hidden = torch.randn(n, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 4, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (n,))
    with LiveTensors(chunk * vocab) as live:
        token_logprobs(hidden, weight, targets, chunk=chunk).sum().backward()
    assert live.most == 2


def test_token_logprobs_of_no_rows():
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(9, 4, requires_grad=True)
    logp = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    logp.sum().backward()
    assert logp.shape == (0,) and hidden.grad.shape == (0, 4)
    assert weight.grad.shape == (9, 4) and not weight.grad.any()


def test_token_logprobs_refuses_wrong_arguments():
    hidden, weight, targets = torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.long)
    for args, kwargs in [
        ((hidden, weight.T, targets), {}),
        ((hidden[None], weight, targets), {}),
        ((hidden, weight, targets[:2]), {}),
        ((hidden, weight, targets), {"chunk": 0}),
        ((hidden, weight, targets), {"temperature": 0.0}),
    ]:
        with pytest.raises(ValueError):
            token_logprobs(*args, **kwargs)


# The scoring model


@pytest.mark.parametrize("make", [qwen3, lambda: qwen3(tie=False), gpt2])
def test_scores_equal_hugging_face_logits(make):
    """Values and the gradient of every weight, the tied head included."""
    model = make()
    scoring = ScoringModel(model, chunk=3)
    batch = pack(random_calls(5), PAD)
    upstream = torch.randn(batch.input_ids.shape)
    logp = score(scoring, batch)
    (logp * upstream).sum().backward()
    ours = grads(model)
    model.zero_grad()
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    plain = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    plain = torch.nn.functional.pad(plain, (1, 0)) * batch.response_mask
    (plain * upstream).sum().backward()
    torch.testing.assert_close(logp, plain, rtol=1e-5, atol=1e-5)
    assert (logp[~batch.response_mask] == 0).all() and logp.dtype == torch.float32
    assert_same(ours, grads(model), rtol=1e-4, atol=1e-4)


class Following(torch.nn.Module):
    """Not a language model: after token t comes t + 1, surely (logit 1000)."""

    def __init__(self, vocab: int = 10):
        super().__init__()
        self.config = SimpleNamespace()
        self.head = torch.nn.Linear(vocab, vocab, bias=False)
        self.head.weight.data = torch.eye(vocab).roll(1, dims=0) * 1000
        self.vocab, self.hidden = vocab, None

    def get_output_embeddings(self):
        return self.head

    def base_model(self, input_ids, attention_mask, position_ids, use_cache):
        self.hidden = torch.nn.functional.one_hot(input_ids, self.vocab).float().requires_grad_()
        return SimpleNamespace(last_hidden_state=self.hidden)


def test_entry_t_is_the_log_prob_of_token_t():
    """trainer_bugs 25 (github.com/PrimeIntellect-ai/prime-rl/pull/1525): no shift by one."""
    batch = pack([make_call([4, 5], [6, 7, 8]), make_call([1], [2, 9])], PAD)
    logp = score(ScoringModel(Following()), batch)
    assert logp.tolist() == [[0, 0, 0, 0, 0], [0, 0, -1000, 0, 0]]


def test_gradient_reaches_exactly_the_predicting_positions():
    """trainer_bugs 26 (github.com/CarperAI/trlx/pull/509): the state before each trained token, the
    last one included, and no other: prompt, padding and truncated calls get exactly 0.
    """
    model = Following()
    model.head.weight.data = torch.randn(10, 10)
    calls = [
        make_call([4, 5], [6, 7, EOS]),
        make_call([1], [3]),
        make_call([1], [3, 8, 9], finish_reason="length"),
    ]
    batch = pack(calls, pad_id=EOS)
    for mask_zeros in (True, False):  # the truncated call is masked before or after the forward
        logp = score(ScoringModel(model), batch, batch.loss_mask if mask_zeros else None)
        loss, _ = policy_loss(logp, logp.detach(), torch.ones(3), batch.loss_mask, 4)
        loss.backward()
        reached = model.hidden.grad.abs().sum(-1) > 0
        assert reached.int().tolist() == [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0] * 5]


@pytest.mark.parametrize("make", [qwen3, gpt2])
def test_padding_on_either_side_changes_nothing(make):
    """trainer_bugs 31 (github.com/huggingface/trl/pull/2708) and 32
    (github.com/huggingface/trl/issues/6800): GPT-2's learned positions show what rotary ones hide.
    """
    scoring = ScoringModel(make())
    call, longer = make_call([5, 6, 7], [8, 9, EOS]), make_call([11, 12], [13] * 9)
    alone = pack([call], PAD)
    expected = score(scoring, alone)[alone.response_mask]
    ids, attention, mask = (torch.nn.functional.pad(x, (5, 0)) for x in alone[:3])
    left = scoring(ids, attention, None, mask)[mask]
    torch.testing.assert_close(left, expected, rtol=1e-5, atol=1e-5)
    both = pack([call, longer], PAD)
    right = score(scoring, both)[0, both.response_mask[0]]
    torch.testing.assert_close(right, expected, rtol=1e-5, atol=1e-5)


def test_given_positions_are_used():
    scoring = ScoringModel(gpt2())
    batch = pack([make_call([5, 6, 7], [8, 9, EOS])], PAD)
    args = (batch.input_ids, batch.attention_mask)
    positions = torch.arange(6)[None]
    default = scoring(*args, None, batch.response_mask)
    torch.testing.assert_close(scoring(*args, positions, batch.response_mask), default)
    assert not torch.allclose(scoring(*args, positions + 9, batch.response_mask), default)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_the_samplers(temperature):
    """trainer_bugs 21 (github.com/huggingface/trl/pull/3029), 22
    (github.com/huggingface/trl/issues/4159): sampled at T, scored at T; a scorer at another
    temperature, as an engine that returns raw log-probs, shows in the gap.
    """
    model = qwen3(seed=3)
    generator = torch.Generator().manual_seed(0)
    ids, sampled = [5, 6], []
    with torch.no_grad():
        for _ in range(8):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature
            token = torch.multinomial(logits.softmax(0), 1, generator=generator).item()
            sampled.append(logits.log_softmax(0)[token].item())
            ids.append(token)
    batch = pack([make_call(ids[:2], ids[2:], sampled), make_call([3], [4] * 12, [0.0] * 12)], PAD)
    logp = score(ScoringModel(model, temperature=temperature), batch)
    _, metrics = policy_loss(
        logp[:1],
        logp[:1],
        torch.ones(1),
        batch.loss_mask[:1],
        8,
        logp_sampler=batch.logp_sampler[:1],
    )
    assert metrics["sampler_gap_max"] < 1e-5
    other = score(ScoringModel(model, temperature=0.8), batch)
    assert (other - batch.logp_sampler)[0].abs().max() > 0.01


def test_ratio_is_one_before_the_first_update():
    """trainer_bugs 24 (github.com/verl-project/verl/issues/2088): old scores in evaluation mode and
    one batch, new ones in training mode, with gradient checkpointing, in other micro-batches.
    """
    model = qwen3()
    scoring = ScoringModel(model).eval()
    calls = random_calls(6)
    whole = pack(calls, PAD)
    with torch.no_grad():
        logp_old = score(scoring, whole)
    model.gradient_checkpointing_enable()
    scoring.train()
    for part in ([0, 1], [4], [2, 3, 5]):
        batch = pack([calls[i] for i in part], PAD)
        logp = score(scoring, batch)
        old = logp_old[part][:, : logp.shape[1]]
        assert ((logp - old).exp() - 1).abs().max() < 1e-5


def test_dropout_in_training_raises():
    """trainer_bugs 24: with dropout the ratio would be noise."""
    batch = pack([make_call([5], [6])], PAD)
    scoring = ScoringModel(gpt2(resid_pdrop=0.1))
    assert score(scoring.eval(), batch).shape == (1, 2)
    with pytest.raises(ValueError, match="dropout"):
        score(scoring.train(), batch)
    model = qwen3()
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        score(ScoringModel(model).train(), batch)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_batch_has_no_loss_and_zeros_as_gradients(tie, dtype):
    """Every weight gets a gradient of exact zeros (not None), so the collectives of all ranks
    match, also with recomputed activations; the metrics add nothing.
    """
    hf = qwen3(tie=tie).to(dtype)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    model = ScoringModel(hf).train()
    batch = empty_batch(PAD)
    packed = pack([make_call([PAD], [PAD], [0.0], finish_reason="length")], PAD)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, packed, strict=True))
    logp = score(model, batch)
    assert logp[0, 1] < 0  # the head was used
    loss, metrics = policy_loss(
        logp,
        logp.detach(),
        torch.ones(1),
        batch.loss_mask,
        123,
        logp_sampler=batch.logp_sampler,
    )
    loss.backward()
    assert loss.item() == 0 and not any(metrics.values())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_scoring_model_refuses_what_it_would_score_wrongly():
    batch = pack([make_call([5], [6])], PAD)
    with pytest.raises(ValueError, match="position 0"):
        score(ScoringModel(qwen3()), batch, torch.ones(1, 2, dtype=torch.bool))
    model = qwen3()
    with pytest.raises(ValueError, match="head without bias"):
        ScoringModel(model.model)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        ScoringModel(model)
    model = qwen3(tie=False)
    model.lm_head = torch.nn.Linear(16, VOCAB, bias=True)
    with pytest.raises(ValueError, match="head without bias"):
        ScoringModel(model)


# The check of a GPU


def test_gpu_check_runs_at_toy_size(capsys):
    """Every row of its table, from the code that a GPU runs; all that must agree does."""
    assert gpu_check.main(["--device", "cpu", "--tiny"]) == 0
    table = dict(
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    )
    expected = [
        *("forward and backward", "tokens/s", "MFU", "peak memory, weights included"),
        *("plain log-probs", "chunked log-probs", "chunked / plain", "gradients apart"),
        *("time, FSDP2 / without", "TorchEngine, 2 sequences", "TorchEngine, 4 sequences"),
    ]
    assert set(expected) <= set(table)
    assert table["MFU"].startswith("unknown")
    assert sum("(ok)" in value for value in table.values()) == 4


def test_gpu_check_says_what_differs(capsys, monkeypatch):
    """Chunked log-probs that are off by 0.1 in bfloat16, with the right gradients."""

    def wrong(hidden, *args, **kwargs):
        off = 0.1 if hidden.dtype == torch.bfloat16 else 0.0
        return token_logprobs(hidden, *args, **kwargs) + off

    monkeypatch.setattr(gpu_check, "token_logprobs", wrong)
    for check in ("check_training", "check_fsdp", "check_decoding"):
        monkeypatch.setattr(gpu_check, check, lambda bench: None)
    assert gpu_check.main(["--device", "cpu", "--tiny"]) == 1
    said = capsys.readouterr().out
    assert "TOO MUCH" in said and said.endswith("does not agree: log-probs, error\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_says_that_there_is_no_gpu(capsys):
    assert gpu_check.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


def test_gpu_check_counts_the_flop_that_torch_counts(monkeypatch):
    """The MFU formula against torch's counter, which counts the masked half of attention too."""
    results = doctest.testmod(gpu_check)
    assert results.attempted >= 2 and results.failed == 0
    size = gpu_check.TINY
    bench = gpu_check.Bench(torch.device("cpu"), "CPU", size, [])
    model = gpu_check.make_model(bench, torch.float32)
    model.config._attn_implementation = "eager"  # plain matrix products: these are counted
    monkeypatch.setattr(grpo, "token_logprobs", gpu_check.plain_logprobs)
    with FlopCounterMode(display=False) as counter:
        gpu_check.backward(ScoringModel(model), gpu_check.one_row(bench))
    masked = 6 * size.layers * size.tokens**2 * size.heads * size.head_dim
    expected = masked + gpu_check.training_flop(size, size.tokens, size.tokens * 7 // 8)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)
