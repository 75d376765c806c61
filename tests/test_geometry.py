"""Alignment and uniformity: their values, their gradients, and their edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_retrieval
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_states, assert_zero
from conftest import double_precision
from inputs import A, B, X
from jax.test_util import check_grads

from ntxent_jax import geometry
from ntxent_jax.batch import Batch
from ntxent_jax.geometry import alignment, uniformity
from ntxent_jax.pairs import Members

in_float64 = pytest.mark.usefixtures("x64")
N, D = 7, 5


def rows(seed: int, n: int = N, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, D)) * scale


def streamed(embeddings, block: int, t: float = 2.0, where=None):
    """Uniformity in blocks of a given size; the public function chooses it."""
    x = jnp.asarray(embeddings)
    members = Members(jnp.arange(len(x)), None if where is None else jnp.asarray(where))
    return geometry._uniformity(Batch(x, members, 1 / jnp.asarray(t, x.dtype)), block)


@in_float64
def test_case_53():
    assert_states(alignment(A, B), 0.5333333333)
    assert_states(alignment(A, B, exponent=1), 0.7197794184)
    assert_states(alignment(20 * A, 20 * B), 0.5333333333)
    assert_states(uniformity(X), -1.7906668699)
    assert_states(uniformity(20 * X), -1.7906668699)
    assert_close(uniformity(np.ones((4, 3))), 0, atol=1e-14)
    assert_states(uniformity(np.eye(2)), -4)
    assert_states(uniformity(np.array([[1.0, 0], [-1, 0]])), -8)
    assert_zero(uniformity(X[:1]), jax.grad(uniformity)(X[:1]))


def test_case_53_in_float32():
    assert_states(uniformity(jnp.float32(20 * X)), -1.7906668699)
    assert_states(alignment(jnp.float32(20 * A), jnp.float32(20 * B)), 0.5333333333)
    # exp(-t * 2) is 0 in float32; the log-sum does not care.
    assert_close(uniformity(jnp.eye(3), t=200.0), -400, rtol=1e-6)
    assert_close(jax.grad(lambda t: uniformity(jnp.eye(3), t=t))(200.0), -2, rtol=1e-5)


@in_float64
@pytest.mark.parametrize("exponent", [1, 2, 2.0, 3, 0.5])
def test_alignment_is_its_definition(exponent):
    a, b = rows(0, scale=3.0), rows(1)
    where = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    assert_close(alignment(a, b, exponent=exponent), oracle_retrieval.alignment(a, b, exponent))
    value = alignment(np.where(where[:, None], a, np.nan), b, exponent=exponent, where=where)
    assert_close(value, oracle_retrieval.alignment(a, b, exponent, where))
    assert_close(jax.jit(alignment)(a, b, exponent=jnp.float64(exponent)), oracle_retrieval.alignment(a, b, exponent))


@in_float64
@pytest.mark.parametrize("block", [None, 1, 2, 3, 4, 6, 7, 100])
@pytest.mark.parametrize("t", [0.5, 2.0, 900.0])
def test_uniformity_is_its_definition(block, t):
    x = rows(2, scale=3.0)
    where = np.array([1, 0, 1, 1, 1, 0, 1], bool)
    hidden = np.where(where[:, None], x, np.inf)
    assert_close(streamed(x, block, t), oracle_retrieval.uniformity(x, t))
    assert_close(streamed(hidden, block, t, where), oracle_retrieval.uniformity(x, t, where))
    assert_close(uniformity(hidden, t=t, where=where), oracle_retrieval.uniformity(x, t, where))


@in_float64
@pytest.mark.parametrize("block", [None, 3])
def test_gradient_of_uniformity(block):
    x, t = rows(3), 2.0
    where = np.array([1, 0, 1, 1, 1, 0, 1], bool)
    check_grads(jax.jit(lambda x, t: streamed(x, block, t)), (x, t), order=1, modes=["fwd", "rev"])
    hidden = np.where(where[:, None], x, np.nan)
    gradient = jax.grad(lambda x: streamed(x, block, t, where))(hidden)
    assert_zero(gradient[~where])
    reference = oracle.gradient(lambda y: oracle_retrieval.uniformity(y, t, where), x)
    assert_close(gradient[where], reference[where], rtol=1e-6, atol=1e-8)
    assert_close(jnp.sum(gradient[where] * x[where], axis=1), 0, atol=1e-12)


@in_float64
@pytest.mark.parametrize("exponent", [1, 2, 3])
def test_gradient_of_alignment(exponent):
    a, b = rows(4), rows(5)
    where = np.array([1, 0, 1, 1, 1, 0, 1], bool)
    check_grads(lambda a, b: alignment(a, b, exponent=exponent), (a, b), order=1, modes=["fwd", "rev"])
    hidden = np.where(where[:, None], a, np.nan)
    gradient = jax.grad(lambda a: alignment(a, b, exponent=exponent, where=where))(hidden)
    assert_zero(gradient[~where])
    reference = oracle.gradient(lambda y: oracle_retrieval.alignment(y, b, exponent, where), a)
    assert_close(gradient[where], reference[where], rtol=1e-6, atol=1e-8)
    check_grads(lambda e: alignment(a, b, exponent=e), (1.5,), order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize("exponent", [0.5, 1, 2, 3])
def test_coinciding_views_and_zero_rows(exponent):
    x = jnp.asarray(rows(6), jnp.float32).at[3].set(0)
    value, gradients = jax.value_and_grad(alignment, (0, 1))(x, x, exponent=exponent)
    assert_close(value, 0, atol=1e-14)
    assert_close(gradients, 0, atol=1e-7)
    if exponent != 2:  # A root has no derivative at 0, so what is not exactly 0 there is far from it.
        assert_zero(value, gradients)
    y = jnp.asarray(rows(7), jnp.float32)
    value, (of_x, of_y) = jax.value_and_grad(alignment, (0, 1))(x, y, exponent=exponent)
    assert_zero(of_x[3])
    assert_finite(of_x, of_y)
    assert_close(value, oracle_retrieval.alignment(np.asarray(x), np.asarray(y), exponent), rtol=1e-5)


@pytest.mark.parametrize("block", [None, 3])
def test_equal_rows_and_zero_rows(block):
    x = jnp.asarray(rows(8), jnp.float32)
    x = x.at[3].set(0).at[5].set(0).at[1].set(x[0])
    value, gradient = jax.value_and_grad(streamed)(x, block)
    assert_close(value, oracle_retrieval.uniformity(np.asarray(x)), rtol=1e-5)
    assert_zero(gradient[jnp.array([3, 5])])
    assert_finite(gradient)
    assert_close(jax.grad(streamed)(jnp.ones((5, 3)), block), 0, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_nothing_to_compare(n):
    x = jnp.asarray(rows(9, n), jnp.float32)
    nobody, one = jnp.zeros(n, bool), jnp.arange(n) == 1
    for value, gradient in [
        jax.value_and_grad(uniformity)(x, where=nobody),
        jax.value_and_grad(uniformity)(x, where=one),
        jax.value_and_grad(alignment)(x, -x, where=nobody),
        jax.value_and_grad(lambda t, x=x, one=one: uniformity(x, t=t, where=one))(2.0),
    ]:
        assert_zero(value, gradient)
    if n < 2:
        assert_zero(uniformity(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_is_not_hidden(bad):
    x = jnp.asarray(rows(10), jnp.float32).at[2, 1].set(bad)
    assert_nan(uniformity(x), streamed(x, 3), alignment(x, jnp.ones_like(x)), alignment(x, x, exponent=1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_low_precision_and_scale(dtype, scale):
    a, b = (jnp.asarray(rows(seed, scale=scale), dtype) for seed in (11, 12))
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert uniformity(a).dtype == alignment(a, b).dtype == jnp.float32
    assert_close(uniformity(a), oracle_retrieval.uniformity(wide_a), rtol=1e-5)
    assert_close(alignment(a, b), oracle_retrieval.alignment(wide_a, wide_b), rtol=1e-5)
    assert jax.grad(uniformity)(a).dtype == dtype
    assert_finite(jax.grad(uniformity)(a), jax.grad(alignment)(a, b))


@in_float64
def test_transformations():
    x = np.stack([rows(13), rows(14)])
    assert_close(jax.vmap(uniformity)(x), [uniformity(x[0]), uniformity(x[1])])
    assert_close(jax.vmap(lambda x: streamed(x, 3))(x), [uniformity(x[0]), uniformity(x[1])])
    assert_close(jax.vmap(alignment, (0, None))(x, x[1]), [alignment(x[0], x[1]), 0])
    assert_close(jax.hessian(lambda x: streamed(x, 3))(x[0]), jax.hessian(uniformity)(x[0]))


def test_memory_is_linear_in_the_rows():
    def temporaries(n):
        step = jax.jit(jax.value_and_grad(lambda x: streamed(x, 16)))
        analysis = step.lower(jax.ShapeDtypeStruct((n, 8), jnp.float32)).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(4096) < 6 * temporaries(1024)


def test_new_values_do_not_compile_again():
    geometry._uniformity.clear_cache()
    for seed in range(3):
        uniformity(rows(seed).astype(np.float32), t=1.0 + seed)
    assert geometry._uniformity._cache_size() == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_traced_numbers_that_are_not_positive_give_nan(bad):
    assert_nan(jax.jit(lambda exponent: alignment(A, B, exponent=exponent))(bad))
    assert_nan(jax.jit(lambda t: uniformity(X, t=t))(bad))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: uniformity(X[0]), ValueError, r"embeddings must have shape \[n, d\]"),
        (lambda: uniformity(np.ones((3, 2), int)), TypeError, "embeddings must be floating"),
        (lambda: uniformity(X, t=0.0), ValueError, "t must be > 0, got 0.0"),
        (lambda: uniformity(X, t=np.ones(6)), ValueError, r"t must be a single number, got shape \[6\]"),
        (lambda: uniformity(X, t=[-1.0]), ValueError, r"t must be > 0, got \[-1.0\]"),
        (lambda: uniformity(X, where=np.ones(6)), TypeError, "where must be boolean"),
        (lambda: uniformity(X, where=np.ones(1, bool)), ValueError, r"where must have shape \[6\]"),
        (lambda: alignment(A, X), ValueError, r"view_a and view_b must have the same shape, got \[3, 3\] and \[6, 3\]"),
        (lambda: alignment(A, B[:1]), ValueError, "must have the same shape"),
        (lambda: alignment(A, B, exponent=-1), ValueError, "exponent must be > 0, got -1"),
        (lambda: alignment(A, B, where=[True]), ValueError, r"where must have shape \[3\]"),
    ],
)
def test_errors(call, error, message):
    with double_precision(), pytest.raises(error, match=message):
        call()
