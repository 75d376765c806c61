"""Derivatives: first and second order, in both modes, to every argument, and to what a similarity closes over."""

import functools

import catalog
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close
from catalog import BLOCK, CASES, SOME_CASES, along, directions, moved, quick_jit
from jax.test_util import check_grads

import ntxent_jax as nj

pytestmark = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])


@functools.cache
def curvature(name: str, reduction: str) -> float:
    """The oracle's mixed second derivative along two directions."""
    u, v = directions(name, 2)

    def slope(s):
        def value(t):
            return catalog.total(name, oracle, moved(CASES[name].floats, (s, u), (t, v)), reduction=reduction)

        return float(oracle.gradient(value, 0.0, step=6e-3))

    return float(oracle.gradient(slope, 0.0, step=6e-3))


@pytest.mark.parametrize(
    ("name", "reduction", "block_size"),
    [
        *((name, "mean", BLOCK) for name in SOME_CASES),
        ("supcon in candidates", "mean", None),
        ("info_nce own", "mean", None),
        ("info_nce own", "none", BLOCK),
    ],
)
def test_second_derivatives(name, reduction, block_size):
    """Forward over reverse and reverse over reverse agree, and are the oracle's differences."""

    def loss(floats):
        return catalog.total(name, nj, floats, reduction=reduction, block_size=block_size)

    def products(floats, u, v):
        slope, forward = jax.jvp(jax.grad(loss), (floats,), (v,))

        def inner(x):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(x), v)))

        return slope, jax.jvp(loss, (floats,), (u,))[1], forward, jax.grad(inner)(floats)

    u, v = directions(name, 2)
    slope, tangent, forward, reverse = quick_jit(products)(CASES[name].floats, u, v)
    right = catalog.expected(name, reduction)[1]
    assert_close(tangent, right[0], rtol=1e-8, atol=1e-9, name="forward")
    assert_close(along(slope, u), right[0], rtol=1e-8, atol=1e-9, name="reverse")
    second = curvature(name, reduction)
    assert_close(along(forward, u), second, rtol=1e-6, atol=1e-7, name="forward over reverse")
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-9, atol=1e-12), forward, reverse)


@pytest.mark.parametrize(("name", "block_size"), [("instance", BLOCK)])
def test_check_grads(name, block_size):
    """Modes mixed in every order."""
    floats = {key: value for key, value in CASES[name].floats.items() if key != "weights"}
    weights = {"weights": CASES[name].floats["weights"]}
    loss = jax.jit(lambda x: catalog.total(name, nj, {**x, **weights}, block_size=block_size))
    check_grads(loss, (floats,), order=2, modes=["fwd", "rev"], rtol=1e-4, atol=1e-4)


@streamed
def test_scalar_temperature(block_size):
    """One number for all rows has the sum of the rows' slopes."""
    for name in ("ntxent", "two views", "info_nce own"):
        floats = CASES[name].floats

        def loss(t, name=name, floats=floats, library=nj, **options):
            return CASES[name](library, {**floats, "temperature": t}, **options)

        slope = quick_jit(jax.grad(lambda t, loss=loss: loss(t, block_size=block_size)))(0.6)
        assert_close(slope, oracle.gradient(lambda t, loss=loss: loss(t, library=oracle), 0.6), rtol=1e-8)


@streamed
def test_weights_change_the_divisor(block_size):
    """d/dw_a of sum w l / sum w P is (l_a - P_a mean) / sum w P."""
    x, labels, weights = inputs.random_rows(5, 3), np.array([0, 0, 0, 1, 1]), np.array([1.0, 2, 0.5, 1, 3])
    number = np.array([2, 2, 2, 1, 1])
    rows = number * oracle.ntxent(x, labels, 0.5, reduction="none")
    mean = np.sum(weights * rows) / np.sum(weights * number)
    gradient = jax.grad(lambda w: nj.ntxent(x, labels, 0.5, weights=w, block_size=block_size))(weights)
    assert_close(gradient, (rows - number * mean) / np.sum(weights * number))
    doubled = jax.grad(lambda w: nj.ntxent(x, labels, 0.5, weights=w, block_size=block_size))(2 * weights)
    assert_close(doubled, gradient / 2)


# Similarities of the user -------------------------------------------------------------------------------------------

QUERIES, KEYS = inputs.random_rows(2, 7, 3)
FORM = np.eye(3) + 0.3 * inputs.random_rows(3, 3, seed=5)


class Bilinear:
    """A similarity with a state that changes between calls."""

    def __init__(self, weight):
        self.weight = weight

    def compare(self, x, y):
        return x @ self.weight @ y.T


def dense(weight, queries=QUERIES, keys=KEYS):
    logits = queries @ weight @ keys.T / 2
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits))


def by_closure(weight):
    return lambda x, y: x @ weight @ y.T


def by_method(weight):
    return Bilinear(weight).compare


def by_partial(weight):
    return jax.tree_util.Partial(lambda w, x, y: x @ w @ y.T, weight)


@pytest.mark.parametrize("form", [by_closure, by_method, by_partial])
@pytest.mark.parametrize(("reduction", "block_size"), [("mean", None), ("mean", BLOCK), ("none", BLOCK)])
def test_gradient_to_the_parameters_of_a_similarity(form, reduction, block_size):
    def loss(weight, queries):
        options = {"temperature": 2.0, "block_size": block_size, "reduction": reduction}
        return jnp.mean(nj.info_nce_loss(queries, KEYS, similarity=form(weight), **options))

    value, gradients = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(FORM, QUERIES)
    right, right_gradients = jax.value_and_grad(dense, argnums=(0, 1))(FORM, QUERIES)
    assert_close(value, right)
    jax.tree.map(assert_close, gradients, right_gradients)


@streamed
def test_second_derivative_to_the_parameters_of_a_similarity(block_size):
    def loss(weight):
        return nj.info_nce_loss(QUERIES, KEYS, temperature=2.0, similarity=by_closure(weight), block_size=block_size)

    move = inputs.random_rows(3, 3, seed=6)
    run = quick_jit(lambda w: jax.jvp(jax.grad(loss), (w,), (move,))[1])
    assert_close(run(FORM), jax.jvp(jax.grad(dense), (FORM,), (move,))[1])


@streamed
def test_own_negatives_with_parameters_of_a_similarity(block_size):
    own = inputs.random_rows(7, 2, 3, seed=8)

    def loss(weight):
        return nj.info_nce_loss(
            QUERIES, KEYS, own, temperature=2.0, similarity=by_closure(weight), block_size=block_size
        )

    def right(weight):
        logits = jnp.concatenate([QUERIES @ weight @ KEYS.T, jnp.einsum("nd,de,nke->nk", QUERIES, weight, own)], axis=1)
        return jnp.mean(jax.nn.logsumexp(logits / 2, axis=1) - jnp.diag(logits) / 2)

    value, gradient = quick_jit(jax.value_and_grad(loss))(FORM)
    assert_close(value, right(FORM))
    assert_close(gradient, jax.grad(right)(FORM))


@pytest.mark.parametrize(("loss", "block_size"), [("info_nce_loss", None), ("ntxent_views", BLOCK)])
def test_a_weight_that_changed_is_seen(loss, block_size):
    """The same method of the same object: never the value of the call before."""
    model = Bilinear(FORM)

    def call():
        options = {"temperature": 2.0, "block_size": block_size}
        return getattr(nj, loss)(QUERIES, KEYS, similarity=model.compare, **options)

    reference = functools.partial(getattr(oracle, loss), QUERIES, KEYS, temperature=2.0)
    first = call()
    assert_close(first, reference(similarity=lambda x, y: x @ FORM @ y))
    model.weight = 2 * FORM
    assert_close(call(), reference(similarity=lambda x, y: x @ (2 * FORM) @ y))
    statistics = nj.batch_statistics(QUERIES, np.arange(7) % 3, similarity=model.compare, block_size=block_size)
    model.weight = FORM
    again = nj.batch_statistics(QUERIES, np.arange(7) % 3, similarity=model.compare, block_size=block_size)
    assert_close(2 * again.positive_similarity, statistics.positive_similarity)


@streamed
def test_a_similarity_need_not_be_hashable_nor_symmetric(block_size):
    class Unhashable(Bilinear):
        __hash__ = None

        def __call__(self, x, y):
            return self.compare(x, y)

    value = nj.info_nce_loss(QUERIES, KEYS, temperature=2.0, similarity=Unhashable(FORM), block_size=block_size)
    assert_close(value, dense(FORM))
