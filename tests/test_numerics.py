"""Numbers at the edges: value and gradient at every bad point."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_zero

from ntxent_jax.numerics import (
    Factors,
    compute_dtype,
    divide_or_nan,
    divide_or_zero,
    inverse_norm,
    level_of,
    masked_log_sum,
    power_of_two_scale,
    softplus,
)

in_float64 = pytest.mark.usefixtures("x64")


def log_sum(scores, mask, temperature):
    parts = masked_log_sum(scores, mask, temperature)
    return parts.maximum / temperature + parts.log_sum


SCORES = inputs.random_rows(4, 5)
MASK = np.random.default_rng(1).random((4, 5)) < 0.6
TEMPERATURE = np.array([0.3, 0.5, 1.0, 2.0])


@in_float64
@pytest.mark.parametrize("filler", [0.0, 1e300, -1e300, np.inf, -np.inf, np.nan])
def test_masked_log_sum(filler):
    """Value, softmax and its derivative; nothing comes from where the mask is False."""
    scores = np.where(MASK, SCORES, filler)
    right = [oracle.log_sum(list(s[m] / t)) for s, m, t in zip(SCORES, MASK, TEMPERATURE, strict=True)]
    assert_close(log_sum(scores, MASK, TEMPERATURE), right)
    gradient = jax.grad(lambda s: log_sum(s, MASK, TEMPERATURE).sum())(scores)
    softmax = np.where(MASK, np.exp(np.where(MASK, SCORES, 0) / TEMPERATURE[:, None] - np.array(right)[:, None]), 0)
    assert_close(gradient, softmax / TEMPERATURE[:, None])
    assert_zero(gradient[~MASK])
    move = inputs.random_rows(4, 5, seed=2)
    second = jax.jvp(jax.grad(lambda s: log_sum(s, MASK, TEMPERATURE).sum()), (scores,), (move,))[1]
    inner = move - np.sum(softmax * move, axis=1, keepdims=True)
    assert_close(second, softmax * inner / TEMPERATURE[:, None] ** 2)
    to_temperature = jax.grad(lambda t: log_sum(scores, MASK, t).sum())(TEMPERATURE)
    assert_close(to_temperature, -np.sum(softmax * np.where(MASK, SCORES, 0), axis=1) / TEMPERATURE**2)


def test_log_sum_of_nothing():
    """Maximum 0 and -inf, gradient 0; so for scores of -inf."""
    nothing, one = jnp.zeros((1, 3), bool), jnp.ones(1)
    for scores, mask in ((jnp.ones((1, 3)), nothing), (jnp.full((1, 3), -jnp.inf), ~nothing), (jnp.ones((1, 0)), None)):
        mask = jnp.zeros(scores.shape, bool) if mask is None else mask
        parts = masked_log_sum(scores, mask, one)
        assert_zero(parts.maximum)
        assert np.isneginf(parts.log_sum[0])
        assert_zero(jax.grad(lambda s, t, m=mask: masked_log_sum(s, m, t).log_sum.sum(), argnums=(0, 1))(scores, one))


def test_log_sum_never_hides_nan():
    for bad in (np.nan, np.inf):
        scores = np.float32([[0.0, bad, 1.0]])
        parts = masked_log_sum(scores, np.array([[True, True, True]]), np.ones(1, np.float32))
        assert_nan(parts.log_sum)
        parts = masked_log_sum(scores, np.array([[True, False, True]]), np.ones(1, np.float32))
        assert_finite(parts)


def test_log_sum_in_two_parts():
    """Scores of 1e8 at temperature 1e-4: the parts stay exact where their sum could not."""
    parts = masked_log_sum(jnp.full((1, 4), 1e8), jnp.ones((1, 4), bool), jnp.full(1, 1e-4))
    assert_close(parts.maximum, [1e8])
    assert_close(parts.log_sum, [np.log(4)], rtol=1e-6)
    parts = masked_log_sum(jnp.float32([[3, 1]]), jnp.ones((1, 2), bool), jnp.full(1, jnp.inf))
    assert_close(parts.log_sum, [np.log(2)], rtol=1e-6)


@in_float64
def test_log_sum_at_a_level():
    """A level takes the maximum's place, a constant too; an empty sum has none; one too wide is not used."""
    mask = np.array([*MASK[:3], np.zeros(5, bool)])
    right = [oracle.log_sum(list(s[m] / t)) for s, m, t in zip(SCORES[:3], mask[:3], TEMPERATURE[:3], strict=True)]
    for temperature, used in ((TEMPERATURE, True), (1e-3 * TEMPERATURE, False)):
        level = level_of(jnp.min(SCORES) - 1, jnp.max(SCORES), temperature)
        assert bool(level.moderate) == used
        parts = masked_log_sum(SCORES, mask, temperature, level=level)
        assert np.all((parts.maximum[:3] == level.middle) == used)
        assert_zero(parts.maximum[3])
        if used:
            assert_close((parts.maximum / temperature + parts.log_sum)[:3], right)
    moved = jax.grad(lambda low, high: level_of(low, high, TEMPERATURE).middle, argnums=(0, 1))(-1.0, 1.0)
    assert_zero(moved)


@in_float64
@pytest.mark.parametrize("lowest", [-9.0, -1e6])
def test_log_sum_of_products(lowest):
    """From the rows whose products are the scores: as from the scores, in all derivatives, at a level and without."""
    left, right, moves = inputs.random_rows(4, 3), inputs.random_rows(5, 3, seed=3), inputs.random_rows(9, 3, seed=4)
    level = level_of(jnp.asarray(lowest), jnp.asarray(9.0), TEMPERATURE)
    assert bool(level.moderate) == (lowest == -9)

    def of_products(left, right, temperature):
        parts = masked_log_sum(left @ right.T, MASK, temperature, level=level, factors=Factors(left, right, "highest"))
        return parts.maximum / temperature + parts.log_sum

    def plain(left, right, temperature):
        return jax.nn.logsumexp(left @ right.T / temperature[:, None], axis=1, where=MASK)

    point = left, right, TEMPERATURE
    direction = moves[:4], moves[4:], np.array([0.1, -0.2, 0.3, 0.4])

    def derivatives(f):
        slope = jax.grad(lambda *x: jnp.sum(f(*x) * np.arange(1.0, 5)), argnums=(0, 1, 2))
        along = jax.grad(lambda *x: sum(jnp.sum(a * b) for a, b in zip(slope(*x), direction, strict=True)), (0, 1, 2))
        return jax.jvp(f, point, direction), slope(*point), jax.jvp(slope, point, direction)[1], along(*point)

    jax.tree.map(assert_close, derivatives(of_products), derivatives(plain))
    alone = jax.grad(lambda x: of_products(left, x, TEMPERATURE).sum())(right)
    assert_close(alone, jax.grad(lambda x: plain(left, x, TEMPERATURE).sum())(right))


@in_float64
def test_maximum_is_a_constant():
    gradient = jax.grad(lambda s: masked_log_sum(s, MASK, TEMPERATURE).maximum.sum())(SCORES)
    assert_zero(gradient)


@in_float64
def test_softplus():
    x = np.array([-np.inf, -800.0, -50.0, -1e-3, 0.0, 1e-3, 1.0, 50.0, 800.0, np.inf])
    right = [0.0, 0.0, np.exp(-50.0), *np.log1p(np.exp(x[3:7])), 50 + np.exp(-50.0), 800.0, np.inf]
    assert_close(softplus(x), right, rtol=1e-15, atol=0)
    first = jax.vmap(jax.grad(softplus))(x)
    sigmoid = np.array([0, 0, np.exp(-50), *(1 / (1 + np.exp(-x[3:7]))), 1, 1, 1])
    assert_close(first, sigmoid, rtol=1e-14, atol=1e-300)
    second = jax.vmap(jax.grad(jax.grad(softplus)))(x)
    assert_close(second, sigmoid * (1 - sigmoid), rtol=1e-12, atol=1e-30)
    assert_nan(softplus(jnp.asarray(np.nan)), jax.grad(softplus)(jnp.asarray(np.nan)))
    assert_close(softplus(np.float32(x)), np.logaddexp(0, np.float64(np.float32(x))), rtol=4e-7, atol=0)


def test_quotients():
    top, bottom = jnp.float32([6, 6, 0, jnp.nan, jnp.inf]), jnp.float32([3, 0, 0, 2, 0])
    assert_close(divide_or_zero(top, bottom), [2, 0, 0, np.nan, 0])
    assert_close(divide_or_nan(top, bottom), [2, np.nan, np.nan, np.nan, np.nan])
    to_top, to_bottom = jax.grad(lambda a, b: divide_or_zero(a, b).sum(), argnums=(0, 1))(top[:3], bottom[:3])
    assert_close(to_top, [1 / 3, 0, 0], rtol=1e-6)
    assert_close(to_bottom, [-2 / 3, 0, 0], rtol=1e-6)
    assert_nan(divide_or_zero(jnp.float32(1), jnp.float32(jnp.nan)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_power_of_two_scale(dtype):
    """Exact: a power of two that brings the largest entry near 1, at both ends of the range."""
    limits = jnp.finfo(dtype)
    for size in (1.0, 3.7, -5e-3, float(limits.max), float(limits.smallest_normal), -float(limits.smallest_normal)):
        x = jnp.asarray([[size, size / 4, 0]], "float32")
        scale = power_of_two_scale(x)
        assert jnp.frexp(scale)[0][0, 0] == 0.5
        assert 0.25 <= np.abs(x * scale).max() <= 4, size
    assert_close(power_of_two_scale(jnp.zeros((2, 3))), np.ones((2, 1)))
    assert power_of_two_scale(jnp.zeros((0, 3))).shape == (0, 1)
    assert_zero(jax.grad(lambda x: power_of_two_scale(x).sum())(jnp.float32([[3.0, 4.0]])))


@in_float64
def test_inverse_norm():
    x = np.array([[0.6, 0.8], [0.0, 0.0], [3.0, 4.0]])
    assert_close(inverse_norm(x), [[1], [0], [0.2]])
    assert_close(jax.grad(lambda x: inverse_norm(x).sum())(x), [[-0.6, -0.8], [0, 0], [-3 / 125, -4 / 125]])
    assert_finite(jax.hessian(lambda x: inverse_norm(x).sum())(x))


def test_compute_dtype(x64):
    assert compute_dtype(jnp.ones(1, "bfloat16")) == jnp.float32
    assert compute_dtype(jnp.ones(1, "float16"), jnp.ones(1, "float32")) == jnp.float32
    assert compute_dtype(jnp.ones(1, "float16"), jnp.ones(1, "float64")) == jnp.float64
    assert compute_dtype(jnp.ones(1, "int32")) == jnp.float32 or compute_dtype(jnp.ones(1, "int32")) == jnp.float64
