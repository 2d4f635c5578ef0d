"""GRPO: from recorded calls and their advantages to one loss (a scalar to call `backward` on).

The idea. A call is a prompt and the tokens that the engine drew after it. Every token of a call
shares the call's advantage A (advantage.py). With r_t = exp(logp_t - logp_old_t), which is 1 before
the first update on these calls,

    loss = -1/n * sum over trained tokens t of w_t * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A)
    w_t  = min(exp(logp_old_t - logp_sampler_t), tis_cap)        no gradient; 1 without logp_sampler

Worked number: one call, A = 2, three tokens with r = 1, 1.5, 0.5. The minimum is 2, 2.4 (cut at
1.2) and 1 (not cut: A > 0 asks to push up again what fell), so the loss is -5.4 / 3:

    >>> logp_old = torch.zeros(1, 3)
    >>> logp = torch.tensor([[1.0, 1.5, 0.5]]).log()
    >>> loss, metrics = policy_loss(logp, logp_old, torch.tensor([2.0]), torch.ones(1, 3), 3)
    >>> round(loss.item(), 4), metrics["clipped"].item()
    (-1.8, 1.0)

Three log-probs, three names: `logp_sampler` is what the engine drew with, `logp_old` the trainer's
before the update, `logp` the trainer's now, with gradient. The ratio r compares the last two. The
first two differ only by arithmetic (another kernel, bfloat16), and w_t, truncated importance
sampling, corrects for that. On-policy r is exactly 1, clipping is idle, the gradient is plain
REINFORCE, and the loss is a number near 0 that says nothing about progress.

n is counted once for the whole update, over all micro-batches and ranks. A mean of micro-batch
means is something else: 100 tokens at 2.0 and 900 at 0.5 have the mean 0.65, their two means 1.25
(https://github.com/huggingface/trl/issues/7206). Who counts: `tokens_and_forwards` below.

The one big tensor. Log-probs need logits, tokens x vocabulary: 16,384 x 151,936 in float32 is
10 GB, and a plain log_softmax with its gradient holds several. `token_logprobs` never builds it: it
works in chunks of tokens, and builds each chunk's logits a second time in backward. `ScoringModel`
puts it behind a `forward`, so that under FSDP the head's weight is whole where it is used.

Differences from the paper's reference implementation. It keeps the inactive role at a learning rate
of 1e-9 in the same Adam; here only the calls of `active_role` train. It throws the sampler's
log-probs away; here they give w_t. Left out, as in the paper: a KL term and an entropy bonus. The
KL here is a metric only: as a loss term the same estimator has the wrong gradient off-policy
(https://github.com/huggingface/trl/pull/4638).

Sources: MetaAgent-X (arXiv 2605.14212); clipping, PPO (arXiv 1707.06347); group advantages, GRPO
(arXiv 2402.03300); mean over tokens, DAPO (arXiv 2503.14476); k3, joschu.net/blog/kl-approx.html;
truncated importance sampling, https://github.com/verl-project/verl/pull/2953.
Run alone: `python -m doctest -v grpo.py`; memory and time: `python tests/bench_logprobs.py`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

ROLES = ("executor", "designer")
LOGPROB_CHUNK = 1024  # tokens whose logits exist at one time
MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: finite, and far outside of any clip range


def active_role(step: int, stage_length: int, first: str = "executor") -> str:
    """The role that trains in this step; steps count from 0, a stage is `stage_length` steps.

    >>> [active_role(step, 2) for step in range(5)]
    ['executor', 'executor', 'designer', 'designer', 'executor']

    Paper: stagewise co-evolution, K = 30 steps a stage. K = 1 collapsed after about 150 steps.
    """
    if first not in ROLES:
        raise ValueError(f"first is {first!r}: give one of {ROLES}")
    if step < 0 or stage_length < 1:
        raise ValueError(
            f"step {step}, stage_length {stage_length}: give step >= 0 and length >= 1"
        )
    return ROLES[(ROLES.index(first) + step // stage_length) % 2]


# Who counts, and in which tensor. A call is any object with the fields prompt_ids and output_ids
# (the token ids that the engine saw and drew), logp_sampler (a number for each output token, or
# None) and finish_reason ("stop" or "length").


def is_trained(call, mask_truncated: bool = True) -> bool:
    """False for a call that ran into its token limit: its end is the limit's, not the model's."""
    return not (mask_truncated and call.finish_reason == "length")


def tokens_and_forwards(
    calls: Sequence, advantages: Sequence[float], *, mask_truncated: bool = True
) -> tuple[int, list[int]]:
    """Returns (n_tokens, the indices of the calls that need a forward). Sum n_tokens over ranks.

    A truncated call is out of the loss and out of n_tokens. A call with advantage 0 counts in
    n_tokens, since "no push" is its share of the mean, but a forward would only add exact zeros.

    Three calls of 3, 5 and 2 tokens; the second is truncated, the third has advantage 0:

    >>> from types import SimpleNamespace as Call
    >>> calls = [Call(output_ids=[7] * n, finish_reason=why)
    ...          for n, why in [(3, "stop"), (5, "length"), (2, "stop")]]
    >>> tokens_and_forwards(calls, [1.0, -1.0, 0.0])
    (5, [0])
    >>> tokens_and_forwards(calls, [1.0, -1.0, 0.0], mask_truncated=False)
    (10, [0, 1])
    """
    trained = [i for i, call in enumerate(calls) if is_trained(call, mask_truncated)]
    n_tokens = sum(len(calls[i].output_ids) for i in trained)
    return n_tokens, [i for i in trained if advantages[i] != 0]


def micro_batches(lengths: Sequence[int], token_budget: int, ranks: int = 1) -> list[list[int]]:
    """Indices of sequences in batches of at most `token_budget` tokens, padding included.

    Longest first, equal lengths by index, so the same on every run. A sequence longer than the
    budget gets a batch of its own. At a budget of 10, [9, 2, 5, 5, 4] goes 9 | 5 + 5 | 4 + 2:

    >>> micro_batches([9, 2, 5, 5, 4], 10)
    [[0], [2, 3], [4, 1]]

    With several ranks batch i is for rank i % ranks. FSDP makes ranks wait for each other in every
    layer, so they need equally many batches, and those of one round should be of one size. The
    number is the next multiple of `ranks`, 4 here; the batches are cut with the smallest budget
    that needs no more, 8, and stand largest first: 9 positions beside 8, then 5 beside 5.

    >>> micro_batches([9, 2, 5, 5, 4], 10, ranks=2)
    [[0], [4, 1], [2], [3]]

    If these are still too few, the largest is halved. With fewer sequences than that, empty lists
    make up the number: `empty_batch` is what such a rank runs.

    >>> micro_batches([5, 5, 5, 5], 10, ranks=3), micro_batches([9, 2], 10, ranks=3)
    ([[2, 3], [0], [1]], [[0], [1], []])
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = _cut(order, lengths, token_budget)
    if ranks == 1:
        return batches

    def positions(batch):
        return len(batch) * lengths[batch[0]]

    wanted = -(-len(batches) // ranks) * ranks
    low, high = 0, token_budget  # a larger budget never needs more batches, so bisect
    while high - low > 1:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= wanted:
            high = middle
        else:
            low = middle
    batches = _cut(order, lengths, high)
    while len(batches) < min(wanted, len(lengths)):
        largest = max((batch for batch in batches if len(batch) > 1), key=positions)
        batches.remove(largest)
        half = len(largest) // 2
        batches += [largest[:half], largest[half:]]
    batches.sort(key=lambda batch: (-positions(batch), batch))
    return batches + [[] for _ in range(wanted - len(batches))]


def _cut(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts indices, longest first, into batches as full as the budget allows."""
    batches: list[list[int]] = []
    for i in order:
        # The first of a batch is its longest, so its length is the width of every row.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of padding in the positions of right-padded batches; 0 without any position.

    9 | 5 + 5 | 4 + 2 has 9 + 10 + 8 positions for 25 tokens:

    >>> round(padding_waste([9, 2, 5, 5, 4], [[0], [2, 3], [4, 1]]), 4)     # 2 / 27
    0.0741
    """
    positions = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches if batch)
    tokens = sum(lengths[i] for batch in batches for i in batch)
    return 1 - tokens / positions if positions else 0.0


class Batch(NamedTuple):
    """Right-padded calls; every tensor is [B, T] and entry t speaks of token input_ids[:, t]."""

    input_ids: torch.Tensor  # int64, pad_id after the end
    attention_mask: torch.Tensor  # int64, 1 on prompt and output
    response_mask: torch.Tensor  # bool, true on output tokens, the drawn end-of-text token included
    loss_mask: torch.Tensor  # bool, the response mask without truncated calls
    logp_sampler: torch.Tensor | None  # float32, 0 outside the response mask


def pack(calls: Sequence, pad_id: int, *, mask_truncated: bool = True, device="cpu") -> Batch:
    """Calls -> one right-padded batch, row i is calls[i].

    The masks come from lengths, never from `ids != pad_id`: where the padding token is also the
    end-of-text token, that loses the end (https://github.com/huggingface/trl/pull/4970). The ids
    are the engine's own: no text is encoded again, and a truncated call gets no invented end.
    Raises ValueError for a call that can't be trained on.
    """
    for call in calls:
        _check_call(call)
    with_sampler = [call.logp_sampler is not None for call in calls]
    if any(with_sampler) != all(with_sampler):
        raise ValueError(
            "only some calls have logp_sampler: take all calls from engines that give it"
        )
    shape = (len(calls), max(len(call.prompt_ids) + len(call.output_ids) for call in calls))
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    logp_sampler = torch.zeros(shape) if all(with_sampler) else None
    for i, call in enumerate(calls):
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        input_ids[i, :end] = torch.tensor([*call.prompt_ids, *call.output_ids])
        attention_mask[i, :end] = 1
        response_mask[i, start:end] = True
        loss_mask[i, start:end] = is_trained(call, mask_truncated)
        if logp_sampler is not None:
            logp_sampler[i, start:end] = torch.tensor(call.logp_sampler)
    batch = (input_ids, attention_mask, response_mask, loss_mask, logp_sampler)
    return Batch(*(t if t is None else t.to(device) for t in batch))


def _check_call(call) -> None:
    if call.prompt_ids is None or call.output_ids is None:
        raise ValueError(
            "a call has no token ids: train on calls of an engine that holds the model"
        )
    if len(call.prompt_ids) == 0:
        raise ValueError("a call has an empty prompt: the first output token needs one before it")
    if call.logp_sampler is not None and len(call.logp_sampler) != len(call.output_ids):
        raise ValueError(
            f"a call has {len(call.output_ids)} output tokens and {len(call.logp_sampler)} sampler "
            "log-probs: the engine must give one for each"
        )


def empty_batch(pad_id: int, device="cpu") -> Batch:
    """What a rank without calls runs while the others train, so that all take part in FSDP's
    collectives. [1, 2]: its second token is scored, so that the head is used, but not trained. Its
    loss is exactly 0 and so is every gradient.

    >>> batch = empty_batch(pad_id=7)
    >>> batch.input_ids.tolist(), batch.response_mask.tolist(), batch.loss_mask.tolist()
    ([[7, 7]], [[False, True]], [[False, False]])
    """
    input_ids = torch.full((1, 2), pad_id, device=device)
    scored = torch.tensor([[False, True]], device=device)
    trained = torch.zeros_like(scored)
    return Batch(
        input_ids, torch.ones_like(input_ids), scored, trained, torch.zeros(1, 2, device=device)
    )


# Log-probs without the [tokens, vocabulary] tensor


def token_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = LOGPROB_CHUNK,
) -> torch.Tensor:
    """log softmax(hidden @ head_weight.T / temperature)[target], one number a row.

    hidden: [N, H]; head_weight: [V, H], the same dtype; targets: [N] int64. Returns [N] float32
    (float64 for float64 inputs). N may be 0. `temperature` is the one of the sampler.
    Peak memory: two [chunk, V] float32 tensors, whatever N is, at the price of one more matrix
    product in backward. For 8,192 tokens and V = 151,936, with 4 bytes each,

        2 x 1,024 x V = 1.24 GB    against, the plain way, 3 x 8,192 x V = 14.9 GB:    1/12.

    Measured at half of that V (float32, H = 1,024, one CPU core): 605 against 6,804 MB, 1/11, at
    1.37 times the plain way's time, and 1.02 times that of a whole update of Qwen3-0.6B's shape
    (tests/bench_logprobs.py; tests/gpu_check.py measures it on a GPU).
    With bfloat16 weights the weight's gradient is summed over chunks in bfloat16: in 8 chunks it is
    1.3 times as far from the exact one as the plain way's.

    >>> hidden = torch.tensor([[1.0, 0.0]])
    >>> head_weight = torch.tensor([[2.0, 0.0], [2.0, 5.0], [0.0, 9.0]])       # logits 2, 2, 0
    >>> round(token_logprobs(hidden, head_weight, torch.tensor([0])).exp().item(), 4)
    0.4683
    """
    if hidden.ndim != 2 or head_weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)}: "
            "give [N, H] and [V, H]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)}: give one for each of {len(hidden)} rows")
    if temperature <= 0 or chunk < 1:
        raise ValueError(f"temperature {temperature}, chunk {chunk}: both must be positive")
    return _ChunkedLogProbs.apply(hidden, head_weight, targets, temperature, chunk)


class _ChunkedLogProbs(torch.autograd.Function):
    """With z = hidden @ W.T / T and p = softmax(z): logp = log p[target], and

    d logp / d z[v] = (1 if v is the target else 0) - p[v].

    Forward keeps nothing of the vocabulary's size. Backward builds z again, a chunk at a time.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        logp = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows in _chunks(len(hidden), chunk):
            # No name is given to a [chunk, V] tensor: it would outlive its round.
            logp[rows] = (
                _logits(hidden[rows], weight, temperature)
                .log_softmax(dim=1)
                .gather(1, targets[rows, None])[:, 0]
            )
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp):
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in _chunks(len(hidden), ctx.chunk):
            scale = grad_logp[rows, None] / ctx.temperature
            p = _logits(hidden[rows], weight, ctx.temperature).softmax(dim=1)
            grad_z = p.mul_(-scale).scatter_add_(1, targets[rows, None], scale).to(weight.dtype)
            grad_hidden[rows] = grad_z @ weight
            grad_weight.addmm_(grad_z.T, hidden[rows])
            del p, grad_z  # they would be a third tensor beside the next round's two
        return grad_hidden, grad_weight, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class ScoringModel(torch.nn.Module):
    """A Hugging Face causal LM whose forward returns log-probs of the given tokens, not logits.

    The head's weight is used inside this forward and only at response positions. So this module can
    be the root of `fully_shard`: FSDP gathers the weight (often tied to the embedding) just here.
    Raises ValueError for a model whose logits are more than `hidden @ weight.T`.
    """

    def __init__(self, model, *, temperature: float = 1.0, chunk: int = LOGPROB_CHUNK):
        super().__init__()
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ValueError("the model needs a language-model head without bias: give a causal LM")
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ValueError(f"the model's config sets {name}: add it to token_logprobs first")
        self.model, self.temperature, self.chunk = model, temperature, chunk

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        response_mask: torch.Tensor,
    ) -> torch.Tensor:
        """All arguments [B, T]. Returns [B, T]: entry t is the log-prob of input_ids[:, t] given
        the tokens before it, 0 outside `response_mask`. Rows may be padded on either side.
        """
        if response_mask[:, 0].any():
            raise ValueError("a response starts at position 0: give each row a prompt token first")
        if self.training and self._has_dropout():
            raise ValueError("log-probs would be random: set the model's dropout to 0 for training")
        if position_ids is None:
            position_ids = attention_mask.long().cumsum(dim=1).sub(1).clamp(min=0)
        hidden = self.model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state  # (B, T, H)
        row, column = response_mask.bool().nonzero(as_tuple=True)  # (N,) each
        logp = token_logprobs(
            hidden[row, column - 1],  # the state after token t - 1 predicts token t
            self.model.get_output_embeddings().weight,
            input_ids[row, column],
            temperature=self.temperature,
            chunk=self.chunk,
        )
        return logp.new_zeros(input_ids.shape).index_put((row, column), logp)

    def _has_dropout(self) -> bool:
        in_modules = any(m.p > 0 for m in self.model.modules() if isinstance(m, torch.nn.Dropout))
        return in_modules or bool(getattr(self.model.config, "attention_dropout", 0.0))


def policy_loss(
    logp: torch.Tensor,
    logp_old: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    n_tokens: int,
    *,
    logp_sampler: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    tis_cap: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of one micro-batch, a masked sum / n_tokens, and its metrics.

    logp, logp_old, logp_sampler, mask: [B, T]; advantage: [B]; n_tokens: trained tokens of the
    whole update over all ranks, 0 gives a loss of 0. Losses of micro-batches add up. FSDP averages
    gradients over ranks: multiply the loss by the world size there. What stands at masked
    positions, NaN or infinity included, changes neither the loss nor a gradient.
    logp_sampler None: no importance weights. The metrics are listed at `loss_metrics`.
    Raises ValueError for shapes that do not fit.
    """
    given = {"logp_old": logp_old, "mask": mask, "logp_sampler": logp_sampler}
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != logp.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}: give it logp's {tuple(logp.shape)}")
    if logp.ndim != 2 or advantage.shape != logp.shape[:1]:
        raise ValueError(
            f"logp {tuple(logp.shape)}, advantage {tuple(advantage.shape)}: give [B, T] and [B]"
        )
    mask, logp_old = mask.bool(), logp_old.detach()
    zero = logp.new_zeros(())

    # torch.where and never `* mask`: 0 * inf is NaN, in the loss or in its gradient.
    log_ratio = torch.where(mask, logp - logp_old, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    a = advantage.detach().to(logp.dtype)[:, None]  # (B, 1)
    surrogate = torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)

    gap = torch.zeros_like(logp)
    if logp_sampler is not None:
        gap = torch.where(mask, logp_old - logp_sampler.detach(), zero)
    weight = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    total = torch.where(mask, surrogate * weight.clamp(max=tis_cap), zero).sum()
    loss = -total / n_tokens if n_tokens else total * 0.0

    clipped = torch.where(a > 0, ratio > 1 + clip_high, ratio < 1 - clip_low) & (a != 0)
    return loss, loss_metrics(mask, log_ratio.detach(), clipped, gap, weight, tis_cap)


def loss_metrics(
    mask: torch.Tensor,
    log_ratio: torch.Tensor,
    clipped: torch.Tensor,
    gap: torch.Tensor,
    weight: torch.Tensor,
    tis_cap: float,
) -> dict[str, torch.Tensor]:
    """Sums over the mask, so that those of micro-batches and ranks add up. Arguments: [B, T].

    Divide by `tokens`, not by n_tokens: calls that skipped their forward are in neither sum. Of
    sampler_gap_max take the maximum. All are tensors of no dimension, in logp's dtype.
      tokens           trained tokens
      clipped          tokens whose gradient the clip took: r is past the bound that A pushes it to
      kl_sum           k3 = r - 1 - log r, estimates KL(old || now); 0 on-policy
      ratio_sum        r; its mean stays near 1
      tis_weight_sum   w; its mean is 1 where trainer and sampler agree, or without logp_sampler
      tis_capped       tokens whose w was cut at tis_cap
      sampler_gap_sum  |logp_old - logp_sampler|; 0 without logp_sampler
      sampler_gap_max  the largest of these
    """
    zero, gap = log_ratio.new_zeros(()), gap.abs()
    sums = {
        "tokens": mask.sum(),
        "clipped": clipped.sum(),  # never where masked: the ratio is 1 there
        "kl_sum": (log_ratio.exp() - 1 - log_ratio).sum(),  # 0 where masked: log_ratio is 0 there
        "ratio_sum": torch.where(mask, log_ratio.exp(), zero).sum(),
        "tis_weight_sum": torch.where(mask, weight.clamp(max=tis_cap), zero).sum(),
        "tis_capped": (mask & (weight > tis_cap)).sum(),
        "sampler_gap_sum": gap.sum(),
        "sampler_gap_max": gap.amax() if gap.numel() else zero,
    }
    return {name: value.to(log_ratio.dtype) for name, value in sums.items()}
