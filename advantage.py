"""Rewards of the M x N tree -> advantages of the designer and of the executor.

A task gets M designs, a design gets N executions, an execution gets one reward: rewards[M, N].
The two roles are judged on the same numbers, but each against its own group:

    designer:  v[m] = mean over n of rewards[m, n];    A[m]    = (v[m] - mean(v)) / std(v)
    executor:  R = {rewards[m, n] that ran};           A[m, n] = (rewards[m, n] - mean(R)) / std(R)

Worked number, 4 designs x 2 executions, before the division by std (`normalize_std=False`):

    >>> rewards = np.array([[1, 0], [1, 1], [0, 0], [0, 1]])      # design means .5, 1, 0, .5
    >>> designer_advantages(rewards, normalize_std=False).tolist()
    [0.0, 0.5, -0.5, 0.0]
    >>> ran = np.array([[1, 1], [1, 1], [0, 0], [1, 1]], bool)    # design 2 was invalid
    >>> (6 * executor_advantages(rewards, ran, normalize_std=False)).round(9).tolist()
    [[2.0, -4.0], [2.0, 2.0], [0.0, 0.0], [-4.0, 2.0]]

An invalid design stays in the designer's group with reward 0: to write it was a choice, and it has
to cost something. For the executor there is nothing to learn from it, as no call was made: it is
not in the group (the mean of R above is 4 / 6, not 4 / 8) and its advantage is 0.

Why once per execution, and not per call. The reference implementation takes mean and std over
calls, so a long execution enters them once for each of its calls. Two designs with 4 executions
each, the first with 4 calls an execution and reward 1.8, the second with 1 call and reward 0.8.
Half of the executions are good, so good and bad should lie equally far from the mean. Per call they
do not:

    >>> both = np.array([[1.8] * 4, [0.8] * 4])
    >>> executor_advantages(both, both > 0).round(2)[:, 0].tolist()           # per execution
    [0.94, -0.94]
    >>> per_call = np.array([[1.8] * 16 + [0.8] * 4])                          # the fault
    >>> executor_advantages(per_call, per_call > 0).round(2)[0, [0, -1]].tolist()
    [0.49, -1.95]

What the executor's advantage does not cure:
- It also pays an executor for the design that it got. With rewards [[1, 1], [0, 0]] no execution
  did better than its twin on the same design, and still the first two are pushed up, the others
  down:

    >>> executor_advantages([[1, 1], [0, 0]], [[1, 1], [1, 1]]).round(2).tolist()
    [[0.87, 0.87], [-0.87, -0.87]]

  (Groups within a design would cure that, at a price: N members instead of M x N, so more constant
  groups, and nothing learnt from a task where every design is all right or all wrong.)
- The loss is a mean over tokens (grpo.py), so an execution with 4 calls of 100 tokens still weighs
  4 times as much as one with a single call of 100 tokens. Only the baseline is per execution.

How many designs, how many executions. Vd is the variance of design values within a task, Vn that of
the executions of one design. A design's mean reward has the variance Vd + Vn / N, of which Vd is
worth learning from, so the squared signal-to-noise ratio of the designer's gradient is about

    M * Vd / (Vd + Vn / N)

    >>> def snr(m, n, vd, vn): return m * vd / (vd + vn / n)
    >>> [round(snr(*shape, vd=1, vn=1), 2) for shape in ((16, 1), (8, 1), (4, 4))]
    [8.0, 4.0, 3.2]
    >>> [round(snr(*shape, vd=1, vn=9), 2) for shape in ((16, 1), (8, 1), (4, 4))]
    [1.6, 0.8, 1.23]

At equal executions 16 x 1 is never worse for the designer than 4 x 4. Against 8 x 1, half of the
executions, 4 x 4 is better where Vn > 2 Vd. (Centring on the mean of the same M designs makes
M - 1 of the factor M: then where Vn > 3.2 Vd.) If a design costs c_d and an execution c_e,
the best N is sqrt((c_d / c_e) * (Vn / Vd)). The paper compares 4 x 4 with 8 x 1; `--n-designs` and
`--n-executions` are the controls. The executor's group has M * N members in each case.

Differences from the usual code, each for a reported fault:
- A group is constant when max - min < 1e-6, or when it has fewer than two members. Then all its
  advantages are exactly 0, and only then are they all 0: that is how to count constant groups.
- No epsilon in the denominator. The reference's std + 1e-6 gave constant float32 groups advantages
  up to 0.37. Sums are in float64, and the variance is a mean of squared differences, because
  E[x^2] - E[x]^2 cancels (https://github.com/NVIDIA-NeMo/RL/pull/4161).
- std divides by (members - 1), for numpy and torch alike (their defaults differ).
- A reward that is not finite raises. One NaN would silently zero or poison the whole batch
  (https://github.com/modelscope/ms-swift/issues/8123).

Source: MetaAgent-X (arXiv 2605.14212), GRPO (arXiv 2402.03300). Without the division by std this is
the baseline of Dr. GRPO (arXiv 2503.20783). Run alone: `python -m doctest -v advantage.py`.
"""

import numpy as np
import torch

CONSTANT_BELOW = 1e-6  # two rewards of one group that differ by less are the same reward


def designer_advantages(rewards, *, normalize_std: bool = True):
    """Advantage of each design against the M designs of its task.

    rewards: [..., M, N], numpy, torch or nested lists; an invalid design has reward 0.
    Returns [..., M]: torch for torch (same device), else numpy; the floating dtype of the input
    (from integers: float32 in torch, float64 in numpy). Rewards are not changed.
    Raises ValueError for a wrong shape or a reward that is not finite.
    """
    design_values = _checked(rewards).mean(axis=-1)  # (..., M)
    everyone = np.ones_like(design_values, dtype=bool)
    return _like(rewards, _centred(design_values, everyone, normalize_std))


def executor_advantages(rewards, ran, *, normalize_std: bool = True):
    """Advantage of each execution against all executions of its task that ran, across designs.

    rewards: [..., M, N]; ran: same shape, true where at least one executor call was recorded,
    whatever became of the execution afterwards (a crash after a call has reward 0 and counts).
    Returns [..., M, N], exactly 0 where not ran; types and errors as `designer_advantages`.
    """
    values, members = _checked(rewards), _numpy(ran).astype(bool)
    if members.shape != values.shape:
        raise ValueError(f"ran has shape {members.shape}: give it that of rewards, {values.shape}")
    group = (*values.shape[:-2], -1)  # (..., M * N): one group a task
    advantages = _centred(values.reshape(group), members.reshape(group), normalize_std)
    return _like(rewards, advantages.reshape(values.shape))


def _centred(values: np.ndarray, members: np.ndarray, normalize_std: bool) -> np.ndarray:
    """Centre and scale each group, the last axis; float64 in and out, 0 outside `members`."""
    count = members.sum(axis=-1, keepdims=True)
    mean = np.where(members, values, 0.0).sum(axis=-1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(members, values - mean, 0.0)
    highest = np.where(members, values, -np.inf).max(axis=-1, keepdims=True)
    lowest = np.where(members, values, np.inf).min(axis=-1, keepdims=True)
    constant = highest - lowest < CONSTANT_BELOW  # true for one member (0) and for none (-inf)
    if normalize_std:
        variance = (centred**2).sum(axis=-1, keepdims=True) / np.maximum(count - 1, 1)
        centred = centred / np.where(constant, 1.0, np.sqrt(variance))
    return np.where(constant, 0.0, centred)


def _checked(rewards) -> np.ndarray:
    values = _numpy(rewards).astype(np.float64)
    if values.ndim < 2 or 0 in values.shape[-2:]:
        raise ValueError(f"rewards have shape {values.shape}: give [..., M designs, N executions]")
    if not np.isfinite(values).all():
        where = np.argwhere(~np.isfinite(values))[0].tolist()
        raise ValueError(f"the reward at {where} is not finite: drop that task before the rollout")
    return values


def _numpy(array) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        array = array.double() if array.is_floating_point() else array  # numpy has no bfloat16
    return np.asarray(array)


def _like(example, values: np.ndarray):
    """`values` as the type, floating dtype and device of `example`."""
    if isinstance(example, torch.Tensor):
        dtype = example.dtype if example.is_floating_point() else torch.float32
        return torch.as_tensor(values, dtype=dtype, device=example.device)
    dtype = np.asarray(example).dtype
    return values.astype(dtype if np.issubdtype(dtype, np.floating) else np.float64)
