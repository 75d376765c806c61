"""Dtypes in and out, low precision against the naive formula in that precision, and the precision option."""

import functools

import catalog
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite
from catalog import BLOCK, CASES, quick_jit

import ntxent_jax as nj
from ntxent_jax.numerics import compute_dtype

NAMES = ["ntxent", "supcon in candidates", "two views", "info_nce own", "ranking shared"]


def as_dtype(name, dtype):
    """Rows in ``dtype``; temperature, weights and biases in float32, as parameters are."""
    floats = CASES[name].floats
    return {k: jnp.asarray(x, dtype if x.shape[-1:] == (catalog.D,) else "float32") for k, x in floats.items()}


# One dtype for every function; all of them are taken to float32 in one place.
EACH_ONCE = [(name, "bfloat16") for name in NAMES]
WAYS = [*EACH_ONCE, ("ntxent", "float16"), ("info_nce own", "float16"), ("info_nce own", "float32")]


@pytest.mark.parametrize(("name", "dtype"), WAYS)
def test_dtypes_of_loss_and_gradient(name, dtype):
    floats = as_dtype(name, dtype)
    step = quick_jit(jax.value_and_grad(lambda floats: CASES[name](nj, floats, block_size=BLOCK)))
    value, gradient = step(floats)
    assert value.dtype == jnp.float32
    assert {k: x.dtype for k, x in gradient.items()} == {k: x.dtype for k, x in floats.items()}
    assert_finite(gradient)
    rounded = {k: np.asarray(x, np.float64) for k, x in floats.items()}
    assert_close(value, CASES[name](oracle, rounded), rtol=1e-5)
    move = catalog.directions(name, 1)[0]
    slope = oracle.gradient(lambda t: CASES[name](oracle, catalog.moved(rounded, (t, move))), 0.0)
    tolerance = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 1e-5}[dtype]
    got = {k: np.asarray(x, np.float64) for k, x in gradient.items()}
    scale = sum(np.sum(np.abs(got[k] * move[k])) for k in got)
    assert_close(catalog.along(got, move), slope, atol=tolerance * scale)


@pytest.mark.parametrize("name", ["info_nce own"])
def test_float64(name, x64):
    value = jax.eval_shape(lambda: CASES[name](nj, CASES[name].floats))
    assert value.dtype == jnp.float64


@pytest.mark.parametrize("name", ["two views", "info_nce own"])
def test_float32_stays_float32_beside_float64(name, x64):
    """The switch changes what is possible, not what comes out; a Python number has no dtype of its own."""
    value = jax.eval_shape(lambda: CASES[name](nj, {**as_dtype(name, "float32"), "temperature": 0.5}))
    assert value.dtype == jnp.float32
    step = jax.grad(lambda x: nj.ntxent_views(x, x[::-1], temperature=0.5))
    gradient = jax.eval_shape(step, jnp.ones((3, 2), jnp.float32))
    assert gradient.dtype == jnp.float32


@pytest.mark.parametrize(("name", "dtype"), WAYS)
def test_strict_promotion(name, dtype):
    floats = as_dtype(name, dtype)
    with jax.numpy_dtype_promotion("strict"):  # Seen while tracing.
        value = jax.eval_shape(lambda: CASES[name](nj, floats, block_size=BLOCK))
    assert value.dtype == jnp.float32


def test_strict_promotion_of_similarities_and_statistics():
    rows = jnp.ones((5, 3), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        for similarity in (nj.cosine_similarity, nj.dot_product, nj.negative_euclidean_distance):
            assert jax.eval_shape(similarity, rows, rows).dtype == jnp.float32
        assert jax.eval_shape(nj.l2_normalize, rows).dtype == jnp.bfloat16
        assert jax.eval_shape(nj.batch_statistics, rows, jnp.arange(5)).accuracy.dtype == jnp.float32
        assert nj.loss_floor(3, 0.1).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(4, 3), (7, 2, 3)], ids=["shared", "own"])
def test_float64_negatives_take_all_to_float64(shape, x64):
    queries, keys = np.float32(inputs.random_rows(2, 7, 3))
    negatives = inputs.random_rows(*shape, seed=1)
    value = nj.info_nce_loss(queries, keys, negatives, temperature=0.07)
    assert value.dtype == jnp.float64
    assert_close(value, oracle.info_nce_loss(*np.float64([queries, keys]), negatives, temperature=0.07), rtol=1e-12)


@pytest.mark.parametrize("mixed", [("float16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")])
def test_rows_of_two_dtypes_get_the_common_one(mixed):
    a, b = (jnp.asarray(x, dtype) for x, dtype in zip(inputs.random_rows(2, 7, 3), mixed, strict=True))
    value, gradients = jax.value_and_grad(
        lambda a, b: nj.info_nce_loss(a, b, temperature=0.5, block_size=BLOCK), argnums=(0, 1)
    )(a, b)
    assert [g.dtype for g in gradients] == list(mixed)
    right = oracle.info_nce_loss(np.asarray(a, np.float64), np.asarray(b, np.float64), temperature=0.5)
    assert_close(value, right, rtol=1e-5)


# Against the naive formula in the same precision --------------------------------------------------------------------


def naive(x, labels, temperature):
    """NT-Xent as people write it, every step in the dtype of ``x``."""
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    similarity = jnp.exp(x @ x.T / jnp.asarray(temperature, x.dtype))
    same = labels[:, None] == labels[None, :]
    positive = same & ~jnp.eye(len(labels), dtype=bool)
    negatives = jnp.sum(jnp.where(same, 0, similarity), axis=1, keepdims=True)
    losses = -jnp.log(similarity / (similarity + negatives))
    return jnp.sum(jnp.where(positive, losses, 0)) / jnp.sum(positive).astype(x.dtype)


@pytest.mark.parametrize(("dtype", "temperature"), [("float16", 0.5), ("bfloat16", 0.07), ("float32", 0.07)])
def test_better_than_the_naive_formula(dtype, temperature, x64):
    """Errors of value and gradient, with the formula in float64 on the rounded rows as the truth."""
    labels = np.arange(64) % 16
    rows = jnp.asarray(inputs.random_rows(64, 37), dtype)
    naive_step = jax.jit(jax.value_and_grad(naive), static_argnums=2)
    truth, true_gradient = naive_step(rows.astype("float64"), labels, temperature)
    theirs, naive_gradient = naive_step(rows, labels, temperature)
    ours, gradient = quick_jit(jax.value_and_grad(lambda x: nj.ntxent(x, labels, temperature, block_size=11)))(rows)
    error = lambda x, y: float(np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y)))  # noqa: E731
    assert error(ours, truth) < 8e-6
    # Two parts of the gradient, of a row as an anchor and as a candidate, are rounded to the dtype it is returned in.
    once = error(true_gradient.astype(dtype), true_gradient)
    assert error(gradient, true_gradient) < 2 * once + 1e-6 * np.linalg.norm(true_gradient)
    if dtype != "float32":
        assert error(ours, truth) < error(theirs, truth) / 20
        assert not error(gradient, true_gradient) >= error(naive_gradient, true_gradient)  # That may be NaN.


def test_gradients_of_shared_rows_are_summed_in_float32(x64):
    """97 blocks add to the gradient of one set of half-precision candidates without losing small parts."""
    queries, keys = (jnp.asarray(x, "bfloat16") for x in inputs.random_rows(2, 97, 3))

    def loss(keys, queries, block_size=None):
        similarity = lambda x, y: (x @ y.T).astype(compute_dtype(x))  # noqa: E731
        return nj.info_nce_loss(queries, keys, temperature=2.0, similarity=similarity, block_size=block_size)

    truth = quick_jit(jax.grad(loss))(keys.astype("float64"), queries.astype("float64"))
    gradient = quick_jit(jax.grad(functools.partial(loss, block_size=1)))(keys, queries).astype("float64")
    assert np.linalg.norm(gradient - truth) < 4e-3 * np.linalg.norm(truth)


# Precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32"])
def test_precision(precision):
    """All are accepted, and none changes anything on a CPU."""
    rows = jnp.asarray(inputs.random_rows(7, 3), jnp.float32)
    value = nj.ntxent(rows, catalog.LABELS, 0.5, precision=precision)
    assert_close(value, oracle.ntxent(rows, catalog.LABELS, 0.5), rtol=1e-5)


def seen_precisions(dtype, **options):
    """The precision of every product of rows in the program."""
    rows = jnp.ones((7, 3), dtype)
    program = jax.make_jaxpr(jax.grad(lambda x: nj.info_nce_loss(x, jnp.ones_like(x), **options)))(rows)
    products = str(program).split("dot_general[")[1:]
    found = {product.split("\n  ]")[0].split("] ")[0].partition("precision=")[2].split("\n")[0] for product in products}
    assert found, "no product of rows"
    return sorted(found)


@pytest.mark.parametrize("block_size", [None, BLOCK])
def test_precision_reaches_every_product(block_size):
    """The default is the highest, except for bfloat16 rows, which a fast unit multiplies exactly."""
    highest = seen_precisions("float32", block_size=block_size)
    assert all("HIGHEST" in text for text in highest), highest
    assert seen_precisions("float16", block_size=block_size) == highest
    assert not any("HIGHEST" in text for text in seen_precisions("bfloat16", block_size=block_size))
    default = seen_precisions("float32", block_size=block_size, precision="default")
    assert not any("HIGHEST" in text for text in default), default


@pytest.mark.parametrize("block_size", [None, BLOCK])
def test_precision_reaches_a_function_of_the_user(block_size):
    options = {"similarity": lambda x, y: x @ y.T, "block_size": block_size}
    assert all("HIGHEST" in text for text in seen_precisions("float32", **options))
    assert not any("HIGHEST" in text for text in seen_precisions("float32", precision="default", **options))


@pytest.mark.parametrize("block_size", [None, BLOCK])
def test_distances_are_always_of_the_highest_precision(block_size):
    options = {"similarity": nj.negative_euclidean_distance, "precision": "bfloat16", "block_size": block_size}
    assert any("HIGHEST" in text for text in seen_precisions("float32", **options))


def test_strict_promotion_of_options():
    """Each number of an option, and the result of a function of the user, is taken to the dtype of the computation."""
    rows, number = jnp.ones((5, 3), jnp.float32), jnp.asarray(0.5, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        for options in (
            {"temperature": number, "weights": jnp.ones(5, jnp.bfloat16)},
            {"key_bias": jnp.ones(5, jnp.bfloat16), "margin": number},
            {"hardness": number, "label_smoothing": number},
            {"class_prior": number},
            {"similarity": lambda x, y: (x @ y.T).astype(jnp.bfloat16)},
        ):
            value = jax.eval_shape(lambda options=options: nj.info_nce_loss(rows, rows, **options))
            assert value.dtype == jnp.float32
