"""The cluster loss of Contrastive-Clustering: the columns of two soft assignments are the items."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pairs as right
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_zero
from catalog import quick_jit

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
N, K = 11, 4


def soft(seed, n=N, k=K):
    logits = np.exp(1.5 * inputs.random_rows(n, k, seed=seed))
    return logits / logits.sum(1, keepdims=True)


C_I, C_J = soft(1), soft(2)


def repository(c_i, c_j, temperature):
    """ClusterLoss.forward of Contrastive-Clustering (modules/contrastive_loss.py), torch written as NumPy."""
    ne_loss = 0
    for c in (c_i, c_j):
        p = c.sum(0)
        p = p / p.sum()
        ne_loss = ne_loss + np.log(len(p)) + (p * np.log(p)).sum()
    k = c_i.shape[1]
    n = 2 * k
    c = np.concatenate([c_i.T, c_j.T])
    unit = c / np.linalg.norm(c, axis=1, keepdims=True)
    sim = unit @ unit.T / temperature
    positive = np.concatenate([np.diag(sim, k), np.diag(sim, -k)])[:, None]
    mask = ~np.eye(n, dtype=bool)
    mask[np.arange(k), np.arange(k) + k] = mask[np.arange(k) + k, np.arange(k)] = False
    logits = np.concatenate([positive, sim[mask].reshape(n, -1)], axis=1)
    return np.sum(np.log(np.exp(logits).sum(1)) - logits[:, 0]) / n + ne_loss


@in_float64
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.1])
def test_definition_of_the_repository(temperature):
    exact = repository(C_I, C_J, temperature)
    assert_close(right.cluster_loss(C_I, C_J, temperature), exact)
    assert_close(nj.cluster_loss(C_I, C_J, temperature), exact)
    assert_close(nj.cluster_loss(C_J, C_I, np.full(1, temperature)), exact)
    assert_close(nj.cluster_loss(C_I, C_J), repository(C_I, C_J, 1.0))


def step_of(where=None):
    return quick_jit(jax.value_and_grad(lambda a, b, t: nj.cluster_loss(a, b, t, where=where), argnums=(0, 1, 2)))


@in_float64
def test_gradients_and_padding():
    """Differences of the loops; hidden rows are as if absent, whatever they hold, with gradient exactly 0."""
    where = np.arange(N) % 4 != 2
    masked = step_of(where)
    to_a = oracle.gradient(lambda a: right.cluster_loss(a, C_J, 0.5, where=where), C_I, step=1e-3)
    to_t = oracle.gradient(lambda t: right.cluster_loss(C_I, C_J, t, where=where), 0.5)
    for filler in (C_I, 7.0, np.inf, np.nan):
        a, b = (np.where(where[:, None], x, filler) for x in (C_I, C_J))
        value, gradients = masked(a, b, 0.5)
        assert_close(value, repository(C_I[where], C_J[where], 0.5))
        assert_close(gradients[0], to_a, rtol=1e-6, atol=1e-8)
        assert_close(gradients[2], to_t, rtol=1e-8)
        assert_zero(gradients[0][~where], gradients[1][~where])
    assert_close(masked(C_J, C_I, 0.5)[1][1], to_a, rtol=1e-6, atol=1e-8)
    assert_close(step_of()(C_I, C_J, 0.5)[0], repository(C_I, C_J, 0.5))


@in_float64
@pytest.mark.parametrize("views", [1, 2])
def test_an_empty_cluster(views):
    """Similarity 0 to all others, 0 in the entropy, never NaN in a gradient."""
    a, b = C_I.copy(), C_J.copy()
    a[:, 1] = 0
    if views == 2:
        b[:, 1] = 0
    value, gradients = step_of()(a, b, 0.5)
    assert_close(value, right.cluster_loss(a, b, 0.5))
    assert_finite(gradients)
    softmaxed = quick_jit(jax.grad(lambda x: nj.cluster_loss(jax.nn.softmax(x), C_J)))(
        np.where(np.arange(K) == 1, -1e4, C_I)
    )
    assert_finite(softmaxed)


@in_float64
def test_known_values():
    """Equally full clusters lack no entropy, one that holds everything lacks log k, in each view."""
    even = np.tile(np.eye(K), (3, 1))
    exact = np.log1p((2 * K - 2) * np.exp(-2.0))
    assert_close(nj.cluster_loss(even, even, 0.5), exact)
    one = np.tile(np.eye(K)[:1], (N, 1))
    # Column 0 finds itself; an empty column has similarity 0 to everything.
    exact = (2 * np.log1p((2 * K - 2) * np.exp(-2.0)) + (2 * K - 2) * np.log(2 * K - 1)) / (2 * K) + 2 * np.log(K)
    assert_close(nj.cluster_loss(one, one, 0.5), exact)
    assert_zero(nj.cluster_loss(C_I[:, :1], C_J[:, :1]))
    assert_close(nj.cluster_loss(3 * C_I, C_J), nj.cluster_loss(C_I, C_J))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_and_bad_rows(dtype):
    a, b = jnp.asarray(C_I, dtype), jnp.asarray(C_J, dtype)
    step = step_of()
    value, gradients = step(a, b, 0.5)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients[:2]] == [a.dtype, b.dtype]
    assert_close(value, repository(np.asarray(a, np.float64), np.asarray(b, np.float64), 0.5), rtol=1e-5)
    assert_finite(gradients)
    assert_nan(step(a.at[3, 1].set(jnp.nan), b, 0.5)[0])
    assert_nan(step(a, b, -0.5)[0])


def test_no_row():
    value, gradients = step_of()(jnp.zeros((0, K)), jnp.zeros((0, K)), 0.5)
    assert_zero(value, gradients[2])


def test_all_padded_has_no_gradient():
    value, gradients = step_of(np.zeros(N, bool))(jnp.float32(C_I), jnp.full((N, K), jnp.nan), 0.5)
    assert_finite(value)
    assert_zero(gradients[:2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nj.cluster_loss(C_I, C_J[:, :3]),
            ValueError,
            "assignments_a and assignments_b must have the same shape",
        ),
        (lambda: nj.cluster_loss(C_I[:5], C_J), ValueError, "shape"),
        (lambda: nj.cluster_loss(C_I, C_J, 0.0), ValueError, "temperature"),
        (lambda: nj.cluster_loss(C_I, C_J, np.ones(K)), ValueError, "temperature"),
        (lambda: nj.cluster_loss(C_I, C_J, where=np.ones(N)), TypeError, "where"),
        (lambda: nj.cluster_loss(C_I, C_J, where=np.ones(K, bool)), ValueError, "where"),
        (lambda: nj.cluster_loss(np.ones((N, K), int), C_J), TypeError, "assignments_a must be floating"),
        (lambda: nj.cluster_loss(C_I, 0.5), ValueError, "assignments_b"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
