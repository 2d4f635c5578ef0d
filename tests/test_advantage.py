"""advantage.py against hand-worked numbers, plain loops, and reported faults of other trainers."""

import math

import numpy as np
import pytest
import torch

from advantage import designer_advantages, executor_advantages


def test_designer_by_hand():
    rewards = np.array([[1, 0], [1, 1], [0, 0], [0, 1]])
    centred = designer_advantages(rewards, normalize_std=False)
    assert centred.tolist() == [0.0, 0.5, -0.5, 0.0]
    std = math.sqrt((0.5**2 + 0.5**2) / 3)  # ddof = 1 over the 4 design means
    np.testing.assert_allclose(designer_advantages(rewards), [0, 0.5 / std, -0.5 / std, 0])


def test_executor_by_hand():
    rewards = np.array([[1.0, 0.0], [1.0, 0.0]])
    ran = np.array([[True, True], [True, False]])
    std = math.sqrt(((1 / 3) ** 2 * 2 + (2 / 3) ** 2) / 2)
    expected = np.array([[1 / 3, -2 / 3], [1 / 3, 0]]) / std
    np.testing.assert_allclose(executor_advantages(rewards, ran), expected)


def loop_group(values: list[float], normalize_std: bool) -> list[float]:
    """The formula with Python's statistics, one group."""
    if len(values) < 2 or max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std if normalize_std else 1.0) for v in values]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_against_plain_loops(kind, normalize_std):
    """trainer_bugs 14 (github.com/JIA-Lab-research/Seg-Zero/issues/104): std of each group, not of
    the batch; ddof is 1 in numpy and torch alike.
    """
    rng = np.random.default_rng(0)
    rewards = rng.random((6, 4, 3)) * np.array([1, 1, 1, 10, 100, 1])[:, None, None]
    ran = rng.random((6, 4, 3)) < 0.7
    ran[5] = False
    convert = torch.from_numpy if kind == "torch" else np.asarray
    designer = designer_advantages(convert(rewards), normalize_std=normalize_std)
    executor = executor_advantages(convert(rewards), convert(ran), normalize_std=normalize_std)
    assert designer.shape == (6, 4) and executor.shape == (6, 4, 3)
    for b in range(6):
        means = [sum(row) / 3 for row in rewards[b].tolist()]
        np.testing.assert_allclose(designer[b], loop_group(means, normalize_std))
        expected = loop_group(rewards[b][ran[b]].tolist(), normalize_std)
        np.testing.assert_allclose(executor[b][convert(ran)[b]], expected)
        assert not np.asarray(executor[b])[~ran[b]].any()


def test_leading_axes_do_not_mix():
    rng = np.random.default_rng(1)
    rewards, ran = rng.random((2, 3, 4, 2)), rng.random((2, 3, 4, 2)) < 0.8
    designer, executor = designer_advantages(rewards), executor_advantages(rewards, ran)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(designer[i, j], designer_advantages(rewards[i, j]))
        alone = executor_advantages(rewards[i, j], ran[i, j])
        np.testing.assert_array_equal(executor[i, j], alone)


def test_every_task_has_its_own_baseline():
    """trainer_bugs 12 (github.com/PrimeIntellect-ai/prime-rl/pull/600) and 39
    (github.com/huggingface/trl/issues/3045): the reward is the task's number, so a baseline that
    mixed tasks would not be 0. Two equal tasks stay two groups, as groups are an axis, not a text.
    """
    rewards = np.broadcast_to(np.array([0.0, 1.0, 1.0, 5.0])[:, None, None], (4, 3, 2))
    assert not designer_advantages(rewards).any()
    assert not executor_advantages(rewards, np.ones((4, 3, 2), bool)).any()


def test_groups_of_unequal_size():
    """trainer_bugs 13 (github.com/THUDM/slime/issues/2230): no fallback to a global baseline."""
    rewards = np.array([[[1.0, 1, 1, 9]], [[0, 1, 0, 9]], [[0, 9, 9, 9]], [[9, 9, 9, 9]]])
    ran = np.array([[[1, 1, 1, 0]], [[1, 1, 1, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]], bool)
    out = executor_advantages(rewards, ran, normalize_std=False)
    assert not executor_advantages(rewards, ran)[0].any()  # equal rewards where they count
    assert not out[0].any()
    np.testing.assert_allclose(out[1, 0], [-1 / 3, 2 / 3, -1 / 3, 0])
    assert not out[2:].any()  # one member, no member
    assert designer_advantages(rewards[:, :, :1]).tolist() == [[0.0]] * 4  # M = 1


def test_each_group_sums_to_zero():
    """trainer_bugs 15 (github.com/ServiceNow/PipelineRL/pull/54): every member enters the mean."""
    rng = np.random.default_rng(2)
    rewards, ran = rng.random((20, 4, 4)), rng.random((20, 4, 4)) < 0.6
    assert np.abs(designer_advantages(rewards).sum(-1)).max() < 1e-12
    assert np.abs(executor_advantages(rewards, ran).sum((-2, -1))).max() < 1e-12


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float32_residue_is_not_blown_up(kind):
    """trainer_bugs 16 (github.com/NVIDIA-NeMo/RL/pull/4161): float32 E[x^2] - E[x]^2 gave
    advantages of -2075 and 7428; an epsilon of 1e-6 gave up to 0.37 to constant groups.
    """
    make = (lambda x: torch.tensor(x)) if kind == "torch" else (lambda x: np.array(x, np.float32))
    for row in ([0.0] + [0.95] * 7, [0.35] * 8, [0.4] * 7 + [0.45]):
        out = executor_advantages(make([row]), make([[1.0] * 8]))
        assert abs(out).max() < 10
    for value in (0.1, 0.35, 0.95, 1.8, 1 / 3):
        assert not executor_advantages(make([[value] * 7]), make([[1.0] * 7])).any()
        assert not designer_advantages(make([[value] * 3] * 7)).any()


def test_constant_threshold():
    ran = np.ones((1, 2), bool)
    below = executor_advantages(np.array([[0.5, 0.5 + 0.9e-6]]), ran)
    above = executor_advantages(np.array([[0.5, 0.5 + 1.1e-6]]), ran)
    assert below.tolist() == [[0.0, 0.0]]
    np.testing.assert_allclose(above, [[-math.sqrt(0.5), math.sqrt(0.5)]], rtol=1e-6)
    # The same design values up to the rounding of their means are a constant group too.
    assert not designer_advantages(np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])).any()


@pytest.mark.parametrize("normalize_std", [True, False])
def test_only_constant_groups_are_all_zero(normalize_std):
    """trainer_bugs 19 (github.com/huggingface/trl/pull/6365): constant groups can be counted."""
    rng = np.random.default_rng(3)
    rewards = rng.integers(0, 2, (200, 2, 2)).astype(float)
    out = executor_advantages(rewards, np.ones_like(rewards), normalize_std=normalize_std)
    constant = (rewards == rewards[:, :1, :1]).all((-2, -1))
    assert 0 < constant.sum() < 200
    np.testing.assert_array_equal((out == 0).all((-2, -1)), constant)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_reward_that_is_no_number_raises(bad):
    """trainer_bugs 17 (github.com/modelscope/ms-swift/issues/8123), also where nothing ran."""
    with pytest.raises(ValueError, match=r"reward at \[1, 0\] is not finite"):
        designer_advantages([[1.0, 0.0], [bad, 1.0]])
    with pytest.raises(ValueError, match=r"reward at \[1, 0\] is not finite"):
        executor_advantages([[1.0, 0.0], [bad, 1.0]], [[True, True], [False, True]])
    if bad is not None:
        with pytest.raises(ValueError, match="not finite"):
            designer_advantages(torch.tensor([[1.0, bad]]))


def test_baseline_is_per_execution():
    """The reference implementation's mean over calls gives 0.49 and -1.95 here."""
    rewards = np.array([[1.8] * 4, [0.8] * 4])
    out = executor_advantages(rewards, np.ones((2, 4), bool))
    np.testing.assert_allclose(out, [[math.sqrt(7 / 8)] * 4, [-math.sqrt(7 / 8)] * 4])


def test_what_did_not_run_changes_nothing():
    rng = np.random.default_rng(4)
    rewards, ran = rng.random((5, 4, 4)), rng.random((5, 4, 4)) < 0.5
    changed = np.where(ran, rewards, 1e6)
    np.testing.assert_array_equal(
        executor_advantages(rewards, ran), executor_advantages(changed, ran)
    )


def test_invalid_design_counts_for_the_designer_only():
    rewards, ran = np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[True, True], [False, False]])
    assert designer_advantages(rewards, normalize_std=False).tolist() == [0.5, -0.5]
    assert not executor_advantages(rewards, ran).any()


def test_arguments_are_not_changed():
    """trainer_bugs 18 (github.com/axon-rl/gem/pull/113): the rewards stay rewards, so a second call
    gives the same, and the advantages are centred once.
    """
    for convert in (np.asarray, torch.from_numpy):
        rewards = convert(np.random.default_rng(5).random((3, 4, 2)))
        ran = convert(np.ones((3, 4, 2), bool))
        before = np.asarray(rewards).copy()
        for normalize_std in (True, False):
            first = executor_advantages(rewards, ran, normalize_std=normalize_std)
            designer_advantages(rewards, normalize_std=normalize_std)
            second = executor_advantages(rewards, ran, normalize_std=normalize_std)
            np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(rewards, before)
        assert np.asarray(ran).all()


def test_same_type_out_as_in():
    rows = [[1, 0], [1, 1], [0, 0]]
    expected = designer_advantages(rows)
    assert isinstance(expected, np.ndarray) and expected.dtype == np.float64
    assert designer_advantages(np.array(rows, np.float32)).dtype == np.float32
    assert designer_advantages(np.array(rows, bool)).dtype == np.float64
    for dtype, out_dtype in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ]:
        out = designer_advantages(torch.tensor(rows).to(dtype))
        assert isinstance(out, torch.Tensor) and out.dtype == out_dtype
        np.testing.assert_allclose(out.double(), expected, rtol=1e-2)
        out = executor_advantages(torch.tensor(rows).to(dtype), torch.ones(3, 2))
        assert out.dtype == out_dtype and out.shape == (3, 2)


def test_wrong_shapes_raise():
    for rewards in ([1.0, 0.0], 1.0, np.zeros((2, 0)), np.zeros((0, 2)), [[1.0], [1.0, 0.0]]):
        with pytest.raises(ValueError):
            designer_advantages(rewards)
    with pytest.raises(ValueError, match="ran has shape"):
        executor_advantages(np.zeros((2, 3)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="ran has shape"):
        executor_advantages(np.zeros((2, 3)), np.ones(3))


@pytest.mark.parametrize("shape, vd, vn", [((16, 1), 1, 9), ((4, 4), 1, 9), ((8, 1), 4, 1)])
def test_the_signal_to_noise_of_the_designers_gradient(shape, vd, vn):
    """The header's formula against a simulated gradient with one direction.

    Every design has a score s (the gradient of its log-probability) that knows little of its value
    v: s = rho v / sqrt(Vd) + noise. The gradient is the mean of advantage * s over M designs; its
    mean over its standard deviation, squared, is rho**2 times the formula. The centring costs a
    factor (M - 1) / M, and the formula is for small rho.
    """
    (m, n), rho, tasks = shape, 0.1, 200_000
    rng = np.random.default_rng(0)
    v = rng.normal(0, np.sqrt(vd), (tasks, m, 1))
    rewards = v + rng.normal(0, np.sqrt(vn), (tasks, m, n))
    score = rho * v[..., 0] / np.sqrt(vd) + rng.normal(0, np.sqrt(1 - rho**2), (tasks, m))
    gradient = (designer_advantages(rewards, normalize_std=False) * score).mean(axis=-1)
    measured = (gradient.mean() / gradient.std()) ** 2
    expected = rho**2 * (m - 1) * vd / (vd + vn / n)
    assert measured == pytest.approx(expected, rel=0.15)
