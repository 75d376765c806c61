"""The contract at the edges: every row of it, for every loss, whole and streamed, value and gradient.

One compiled step per loss and way of running it serves most tests: labels, masks, weights and temperature are data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_no_nan, assert_zero

import ntxent_jax as nj

N, D = 7, 5
BLOCKS = [None, 3]  # 3 does not divide 7.
in_float64 = pytest.mark.usefixtures("x64")


class Loss(NamedTuple):
    """A loss as a function of ``arity`` stacked arrays of rows; ``library`` is the package or the oracle."""

    arity: int
    call: Callable[..., Any]
    labels: str = "none"  # What the labels are to it: "labels", "ids" (equal ones are no negatives), "none"
    cosine: bool = True
    floor: float = 0.0  # Its value where there is no negative, if gradients vanish there

    def reference(self, x, labels, **options):
        return self.call(oracle, x, labels, **options)


def _own(x):
    """[n, 1, d]: one negative for each row."""
    return x[:, None]


LOSSES = {
    "ntxent": Loss(1, lambda lib, x, y, **o: lib.ntxent(x[0], y, **o), "labels"),
    "decoupled": Loss(1, lambda lib, x, y, **o: lib.ntxent(x[0], y, denominator="negatives", **o), "labels"),
    "ntxent candidates": Loss(
        2,
        lambda lib, x, y, **o: lib.ntxent(
            x[0], y, candidates=x[1], candidate_labels=y, candidate_where=o.get("where"), **o
        ),
    ),
    "supcon out": Loss(1, lambda lib, x, y, **o: lib.supcon_loss(x[0], y, **o), "labels", floor=np.nan),
    "supcon in": Loss(
        1, lambda lib, x, y, **o: lib.supcon_loss(x[0], y, form="in", **o), "labels", floor=np.log(N - 1)
    ),
    "two views": Loss(2, lambda lib, x, y, **o: lib.ntxent_views(*x, **o)),
    "instance": Loss(2, lambda lib, x, y, **o: lib.instance_loss(*x, **o), cosine=False),
    "info_nce": Loss(2, lambda lib, x, y, **o: lib.info_nce_loss(*x, ids=y, **o), "ids"),
    "info_nce own": Loss(3, lambda lib, x, y, **o: lib.info_nce_loss(x[0], x[1], _own(x[2]), ids=y, **o)),
    "info_nce shared": Loss(
        3,
        lambda lib, x, y, **o: lib.info_nce_loss(*x, ids=y, negative_where=o.get("where"), **o),
    ),
    "info_nce only own": Loss(3, lambda lib, x, y, **o: lib.info_nce_loss(x[0], x[1], _own(x[2]), in_batch=False, **o)),
    "ranking": Loss(3, lambda lib, x, y, **o: lib.multiple_negatives_ranking_loss(x[0], x[1], _own(x[2]), ids=y, **o)),
}
ONE_OF_EACH = ["ntxent", "supcon in", "two views", "info_nce own", "ranking"]  # One of each function.
# Row 5 is alone as a label, rows 0 and 2 are the same thing as ids. No value is special: -1 is one of them.
LABELS = {
    "labels": np.array([3, 3, -1, -1, -1, 8, 3]),
    "ids": np.array([4, -1, 4, 0, 7, 8, 9]),
    "none": np.arange(N),
}
WEIGHTS = np.array([1.0, 0.5, 2.0, 1.5, 0.0, 3.0, 0.7])
REAL = np.ones(N, bool)
SOME = np.array([True, True, False, True, True, False, True])
TEMPERATURES = np.linspace(0.3, 0.9, N)

each_block = pytest.mark.parametrize("block_size", BLOCKS, ids=lambda b: "whole" if b is None else f"blocks of {b}")
each_loss = pytest.mark.parametrize("name", LOSSES)
# In float32 every loss is streamed, and each function runs whole once.
WAYS = [*((name, 3) for name in LOSSES), *((name, None) for name in ONE_OF_EACH)]
each_way = pytest.mark.parametrize(("name", "block_size"), WAYS)
each_cosine_way = pytest.mark.parametrize(("name", "block_size"), [way for way in WAYS if LOSSES[way[0]].cosine])


def rows_of(name: str, seed: int = 0) -> np.ndarray:
    return 0.7 * inputs.random_rows(LOSSES[name].arity, N, D, seed=seed)


def labels_of(name: str) -> np.ndarray:
    return LABELS[LOSSES[name].labels]


@functools.cache
def compiled(name: str, block_size: int | None):
    """Value, and gradients to rows, temperature and weights."""

    def loss(x, temperature, weights, labels, where):
        options = {"temperature": temperature, "weights": weights, "where": where, "block_size": block_size}
        return LOSSES[name].call(nj, x, labels, **options)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def step(name, block_size, x, *, temperature=None, weights=None, labels=None, where=REAL):
    """In float64 with a temperature per item, in float32 and half precision with a scalar one."""
    dtype = jnp.float64 if x.dtype == np.float64 else jnp.float32
    if dtype == jnp.float64:
        temperature = TEMPERATURES if temperature is None else np.full(N, temperature)
    elif temperature is None:
        temperature = 0.5
    return compiled(name, block_size)(
        jnp.asarray(x),
        jnp.asarray(temperature, dtype),
        jnp.asarray(np.ones(N) if weights is None else weights, dtype),
        jnp.asarray(labels_of(name) if labels is None else labels),
        where,
    )


@functools.cache
def expected(name: str, where: tuple[bool, ...], weights: tuple[float, ...]):
    """The oracle's value, derivatives along some directions, to the temperature, and to the weights."""
    x, labels, real = rows_of(name), labels_of(name), np.array(where)

    def loss(x=x, temperature=TEMPERATURES, weights=weights):
        return LOSSES[name].reference(x, labels, temperature=temperature, where=real, weights=weights)

    along = oracle.gradient(lambda t: loss(x + np.tensordot(t, directions(name), 1)), np.zeros(4))
    return (
        loss(),
        along,
        oracle.gradient(lambda t: loss(temperature=t), TEMPERATURES),
        oracle.gradient(lambda w: loss(weights=w), weights),
    )


def directions(name: str) -> np.ndarray:
    return inputs.random_rows(4, LOSSES[name].arity, N, D, seed=9)


def assert_matches(name, outcome, where, weights):
    """Value and all gradients agree with the oracle's differences."""
    value, (to_rows, to_temperature, to_weights) = outcome
    right = expected(name, tuple(where), tuple(weights))
    assert_close(value, right[0], rtol=1e-11, name="value")
    assert_close(np.tensordot(directions(name), to_rows, 3), right[1], rtol=1e-8, atol=1e-9, name="rows")
    assert_close(to_temperature, right[2], rtol=1e-8, atol=1e-9, name="temperature")
    # A weight of 0 is a jump: not counted there, counted on both sides.
    assert_close(to_weights[weights != 0], right[3][weights != 0], rtol=1e-8, atol=1e-9, name="weights")


# Every loss is right, before anything is at an edge -----------------------------------------------------------------


@in_float64
@each_block
@each_loss
def test_value_and_gradients(name, block_size):
    """Rows, temperature and weights, the weights' sum included; a weight of 0 leaves a candidate."""
    assert_matches(name, step(name, block_size, rows_of(name), weights=WEIGHTS), REAL, WEIGHTS)


@in_float64
@each_block
@each_loss
def test_padded_rows_are_absent_whatever_they_hold(name, block_size):
    for filler in (0.7, 0.0, 1e300, np.inf, -np.inf, np.nan):
        x = rows_of(name)
        x[:, ~SOME] = filler
        outcome = step(name, block_size, x, weights=WEIGHTS, where=SOME)
        assert_matches(name, outcome, SOME, WEIGHTS)
        assert_zero(outcome[1][0][:, ~SOME])


@in_float64
@each_loss
def test_labels_of_padded_rows_do_not_matter(name):
    for label in (3, -1, 4, 77, np.iinfo(np.int64).min, np.iinfo(np.int64).max):
        labels = np.where(SOME, labels_of(name), label)
        assert_matches(name, step(name, 3, rows_of(name), weights=WEIGHTS, where=SOME, labels=labels), SOME, WEIGHTS)


# Nothing counts -----------------------------------------------------------------------------------------------------


@in_float64
@each_block
@each_loss
def test_all_padded(name, block_size):
    for filler in (0.0, 1.0, np.inf, np.nan):
        x = np.full_like(rows_of(name), filler)
        assert_zero(step(name, block_size, x, where=~REAL))


@in_float64
@each_block
@each_loss
def test_all_weights_zero(name, block_size):
    value, (to_rows, to_temperature, _) = step(name, block_size, rows_of(name), weights=np.zeros(N))
    assert_zero(value, to_rows, to_temperature)


@in_float64
@each_block
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.labels == "labels"])
def test_no_positives(name, block_size):
    assert_zero(step(name, block_size, rows_of(name), labels=np.arange(N)))
    value, (to_rows, _, _) = step(name, block_size, rows_of(name), labels=labels_of(name))
    assert value != 0
    assert np.linalg.norm(to_rows[0, 5]) > 1e-3, "row 5 has no positive and is a negative of others"


@in_float64
@each_block
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.labels != "none"])
def test_no_negatives(name, block_size):
    """All labels equal, or all ids. The decoupled loss counts nobody; SupCon has its own, non-zero value."""
    labels = np.full(N, 3)
    value, gradients = step(name, block_size, rows_of(name), labels=labels)
    floor = LOSSES[name].floor
    if np.isnan(floor):
        right = LOSSES[name].reference(rows_of(name), labels, temperature=TEMPERATURES)
        assert right > 1
        assert_close(value, right)
        assert_finite(gradients)
    elif floor == 0:
        assert_zero(value, gradients)
    else:
        assert_close(value, floor)
        assert_close(gradients[0], np.zeros_like(gradients[0]))


@pytest.mark.parametrize("n", [0, 1])
@each_way
def test_no_row_or_one(name, n, block_size):
    """0 with gradient 0. Only a row that has a negative of its own has a loss."""

    def loss(x, temperature):
        return LOSSES[name].call(
            nj,
            x,
            jnp.arange(n, dtype=jnp.int32),
            temperature=temperature,
            where=jnp.ones(n, bool),
            block_size=block_size,
        )

    x = jnp.asarray(rows_of(name)[:, :n], jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, jnp.float32(0.5))
    right = LOSSES[name].reference(np.asarray(x, np.float64), np.arange(n), temperature=0.5)
    assert value.shape == ()
    if right == 0:
        assert_zero(value, gradients)
    else:
        assert n == 1
        assert_close(value, right, rtol=1e-5)
        assert_finite(gradients)


@pytest.mark.parametrize("n", [0, 1])
def test_no_row_or_one_without_reduction(n):
    rows = jnp.ones((n, D))
    assert_zero(nj.ntxent(rows, jnp.arange(n), reduction="none"))
    assert nj.ntxent(rows, jnp.arange(n), reduction="none").shape == (n,)
    assert nj.ntxent_views(rows, rows, reduction="none").shape == (n,)
    assert nj.info_nce_loss(rows, rows, reduction="none", block_size=3).shape == (n,)
    assert nj.pair_masks(jnp.arange(n)).positive.shape == (n, n)


# Scale --------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
@each_loss
def test_zero_rows(name, block_size):
    """Similarity 0 to everything; gradient 0 for that row, exact for the others."""
    x = rows_of(name)
    x[:, 3] = 0
    value, (to_rows, to_temperature, _) = step(name, block_size, x)
    assert_close(value, LOSSES[name].reference(x, labels_of(name), temperature=TEMPERATURES))
    assert_finite(to_rows, to_temperature)
    if LOSSES[name].cosine:
        assert_zero(to_rows[:, 3])
    directions_ = directions(name)
    directions_[:, :, 3] = 0  # Along the other rows.
    along = oracle.gradient(
        lambda t: LOSSES[name].reference(
            x + np.tensordot(t, directions_, 1), labels_of(name), temperature=TEMPERATURES
        ),
        np.zeros(4),
    )
    assert_close(np.tensordot(directions_, to_rows, 3), along, rtol=1e-8, atol=1e-9)
    assert_finite(step(name, block_size, np.zeros_like(x)))


@in_float64
@each_block
@pytest.mark.parametrize("similarity", [nj.dot_product, nj.negative_euclidean_distance])
@pytest.mark.parametrize("temperature", [0.5, TEMPERATURES], ids=["one temperature", "temperatures"])
def test_all_rows_zero(similarity, temperature, block_size):
    """Without a direction the gradient is 0; what bounds the similarities of rows of length 0 has none either."""
    loss = lambda x: nj.ntxent(  # noqa: E731
        x, LABELS["labels"], temperature, similarity=similarity, block_size=block_size
    )
    value, gradient = jax.value_and_grad(loss)(np.zeros((N, D)))
    assert_close(value, oracle.ntxent(np.ones((N, D)), LABELS["labels"], temperature=temperature))
    assert_zero(gradient)


@each_cosine_way
def test_any_scale_in_float32(name, block_size):
    """The cosine does not change from 1e-37 to 1e37, and a row's gradient is the unit row's over the scale."""
    x = np.asarray(rows_of(name), np.float32)
    x = np.sign(x) * np.clip(np.abs(x), 0.12, 3)  # No entry underflows at 1e-37.
    right = LOSSES[name].reference(x.astype(np.float64), labels_of(name), temperature=0.5)
    _, (right_gradient, slope, _) = step(name, block_size, x)
    reference_slope = oracle.gradient(
        lambda t: LOSSES[name].reference(x.astype(np.float64), labels_of(name), temperature=t), 0.5
    )
    assert_close(slope, reference_slope, rtol=1e-4, atol=1e-5)
    exponents = np.random.default_rng(1).integers(-37, 37, (*x.shape[:2], 1), endpoint=True)
    for scale in (1e-37, 1e-30, 1e-20, 1e-10, 1e-5, 1e10, 1e20, 1e30, 1e36, 1e37, 10.0**exponents):
        scaled = (x * scale).astype(np.float32)
        value, (to_rows, to_temperature, _) = step(name, block_size, scaled)
        assert_close(value, right, rtol=5e-6, name=f"scale {scale}")
        assert_close(to_temperature, slope, rtol=1e-4, atol=1e-5)
        # Near 1e37 the parts of a gradient are subnormal, which processors flush to 0.
        allowed = (1e-3 * np.abs(right_gradient) + 2e-6) / scale + 4 * float(np.finfo(np.float32).tiny)
        error = np.abs(np.asarray(to_rows, np.float64) - np.asarray(right_gradient, np.float64) / scale)
        assert np.all(error <= allowed), f"scale {scale}: error {error.max()}"


@each_cosine_way
def test_gradients_beyond_the_dtype_are_infinite_never_nan(name, block_size):
    """At temperature .001 and rows of 1e-37, a gradient of 1e39 is inf in float32."""
    x = np.asarray(rows_of(name) * 1e-37, np.float32)
    for temperature in (0.001, 0.01):
        value, gradients = step(name, block_size, x, temperature=temperature)
        assert_finite(value)
        assert_no_nan(gradients)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in LOSSES), ("ntxent", "float16"), ("info_nce own", "float16")]
)
def test_half_precision(name, dtype):
    """Float32 loss and slope, gradients in the rows' dtype; the full range of the dtype for cosines."""
    x = jnp.asarray(rows_of(name), dtype)
    labels = labels_of(name)
    scales = [1.0]
    if LOSSES[name].cosine:
        scales += [2.0**e for e in ([-13, -8, 13] if dtype == "float16" else [-120, -60, 60, 120])]
    for scale in scales:
        scaled = x * jnp.asarray(scale, dtype)
        right = LOSSES[name].reference(np.asarray(scaled, np.float64), labels, temperature=0.5)
        value, (to_rows, to_temperature, _) = step(name, 3, scaled)
        assert value.dtype == to_temperature.dtype == jnp.float32
        assert to_rows.dtype == dtype
        assert_close(value, right, rtol=1e-5, name=f"scale {scale}")
        assert_no_nan(to_rows)
        if scale >= 2.0**-8:
            assert_finite(to_rows)
    where_padded = x.at[:, ~SOME].set(jnp.nan)
    value, (to_rows, _, _) = step(name, 3, where_padded, where=SOME)
    right = LOSSES[name].reference(np.asarray(x, np.float64), labels, temperature=0.5, where=SOME)
    assert_close(value, right, rtol=1e-5)
    assert_zero(to_rows[:, ~SOME])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_at_its_ends(dtype):
    """The largest and the smallest normal number are ordinary rows, and so is a subnormal one in float16."""
    limits = jnp.finfo(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_normal)
    signs = np.sign(inputs.random_rows(N, D))
    labels = LABELS["labels"]
    right = oracle.ntxent(signs, labels, 0.5)
    loss = jax.jit(lambda x: nj.ntxent(x, labels, 0.5))
    for size in (largest, smallest) + ((2.0**-24,) if dtype == "float16" else ()):
        assert_close(loss(jnp.asarray(signs * size, dtype)), right, rtol=1e-5, name=f"size {size}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_matches_the_naive_formula_in_float32(dtype):
    """Products are accumulated in float32: rows of 1,000 entries are not off by the dtype's eps."""
    rows = jnp.asarray(inputs.random_rows(N, 1000), dtype)
    right = oracle.ntxent(np.asarray(rows, np.float64), LABELS["labels"], 0.01)
    assert_close(nj.ntxent(rows, LABELS["labels"], 0.01), right, atol=5e-7 / 0.01 * 4, rtol=1e-6)


# Temperature --------------------------------------------------------------------------------------------------------


@in_float64
@each_block
@each_loss
def test_temperatures(name, block_size):
    """Finite and exact from .001 to 100, slope too; infinite is log(candidates)."""
    x, labels = rows_of(name), labels_of(name)
    for temperature in (0.001, 0.02, 1.0, 100.0):
        value, (to_rows, slope, _) = step(name, block_size, x, temperature=temperature)
        assert_finite(to_rows)
        assert_close(value, LOSSES[name].reference(x, labels, temperature=temperature))
        in_log = oracle.gradient(
            lambda s: LOSSES[name].reference(x, labels, temperature=np.exp(s)),
            np.log(temperature),
            step=2e-3 * min(1, temperature),
        )
        assert_close(slope.sum() * temperature, in_log, rtol=1e-7, atol=1e-8)
    value, gradients = step(name, block_size, x, temperature=np.inf)
    assert_close(value, LOSSES[name].reference(np.ones_like(x), labels, temperature=1.0))
    assert_finite(gradients)


@each_cosine_way
def test_error_of_a_logit_in_float32(name, block_size):
    """At most 8 eps / T for a logit; a loss holds the difference of two."""
    x = np.asarray(rows_of(name), np.float32)
    for temperature in np.float32([0.001, 0.01, 0.1, 100.0]):
        value, gradients = step(name, block_size, x, temperature=temperature)
        right = LOSSES[name].reference(x.astype(np.float64), labels_of(name), temperature=float(temperature))
        assert_close(value, right, rtol=2e-6, atol=16 * np.finfo(np.float32).eps / temperature)
        assert_finite(gradients)


@each_way
def test_traced_temperature_that_is_not_positive(name, block_size):
    x = np.asarray(rows_of(name), np.float32)
    for temperature in (0.0, -0.0, -0.5, -np.inf, np.nan):
        assert_nan(step(name, block_size, x, temperature=temperature)[0])


@each_loss
@pytest.mark.parametrize("temperature", [0, 0.0, -0.5])
def test_python_temperature_that_is_not_positive(name, temperature):
    with pytest.raises(ValueError, match="temperature"):
        LOSSES[name].call(nj, jnp.asarray(rows_of(name), jnp.float32), labels_of(name), temperature=temperature)


@in_float64
@pytest.mark.parametrize("form", [float, np.float32, np.asarray, jnp.asarray, lambda t: jnp.full((1,), t)])
def test_forms_of_a_temperature(form):
    for name in ("ntxent", "two views", "info_nce", "ranking"):
        x, labels = rows_of(name), labels_of(name)
        value = LOSSES[name].call(nj, x, labels, temperature=form(0.5))
        assert value.shape == ()
        assert value.dtype == jnp.float64
        assert_close(value, LOSSES[name].reference(x, labels, temperature=0.5))


# Bad numbers are never hidden ---------------------------------------------------------------------------------------


@each_way
def test_nan_and_inf_in_a_real_row(name, block_size):
    """Every row of every argument matters: as an anchor, a positive, or only a negative."""
    clean = np.asarray(rows_of(name), np.float32)
    for array in range(len(clean)):
        for row in (0, 5, 6):
            for bad in (np.nan, np.inf, -np.inf):
                x = clean.copy()
                x[array, row, 1] = bad
                value, _ = step(name, block_size, x)
                assert np.isnan(value), f"array {array}, row {row}, {bad}: {value}"


@each_block
@pytest.mark.parametrize("similarity", ["dot_product", "negative_euclidean_distance"])
@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_rows_that_are_only_negatives(similarity, sign, block_size):
    """A logit of -inf from an infinite row is no absent candidate."""
    queries, keys, negatives = np.abs(inputs.random_rows(3, N, D)).astype(np.float32)
    negatives[4, 2] = sign * np.inf
    options = {"temperature": 0.5, "similarity": getattr(nj, similarity), "block_size": block_size}
    assert_nan(nj.info_nce_loss(queries, keys, negatives, **options))
    assert_nan(nj.info_nce_loss(queries, np.concatenate([keys, negatives]), **options))
    rows, labels = np.concatenate([queries, negatives[4:5]]), np.append(np.arange(N) // 4, 9)
    assert_nan(nj.ntxent(rows, labels, **options))


def test_log1p_cosine_at_minus_one():
    """A perfect negative has probability exactly 0; a positive there has loss inf and gradient 0."""
    query = jnp.float32([[2.0, 0.0]])
    away, aside = jnp.float32([[-3.0, 0.0]]), jnp.float32([[0.0, 1.0]])

    def loss(keys, temperature):
        return nj.info_nce_loss(query, keys, temperature=temperature, similarity=nj.log1p_cosine_similarity)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, gradients = step(jnp.concatenate([query, away]), 1.0)
    assert_zero(value, gradients)
    value, gradients = step(jnp.concatenate([away, aside]), 1.0)
    assert np.isposinf(value)
    assert_zero(gradients[0][0])
    assert_no_nan(gradients)


# Labels and ids -----------------------------------------------------------------------------------------------------

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def extreme_labels(dtype: str) -> np.ndarray:
    """Neighbours at both ends of the range, which floating numbers could not tell apart."""
    if dtype == "bool":
        return np.array([True, False, True, True, False, False, True])
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.array([low, high, high - 1, low, high, low + 1, high - 1], dtype)


@in_float64
@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_labels_of_any_integer_dtype(dtype):
    labels, x = extreme_labels(dtype), rows_of("ntxent")[0]
    masks, right = nj.pair_masks(labels), oracle.pair_masks(labels)
    assert masks.positive.dtype == masks.negative.dtype == jnp.bool_
    np.testing.assert_array_equal(masks.positive, right.positive)
    np.testing.assert_array_equal(masks.negative, right.negative)
    if dtype not in ("int8", "int64", "uint64", "bool"):  # In between, a loss sees nothing that the masks do not.
        return
    assert_close(nj.ntxent(x, labels, 0.5, block_size=3), oracle.ntxent(x, labels, 0.5))
    ids = nj.info_nce_loss(x, x[::-1], temperature=0.5, ids=labels, block_size=3)
    assert_close(ids, oracle.info_nce_loss(x, x[::-1], temperature=0.5, ids=labels))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "bool"])
def test_labels_without_float64(dtype):
    """The switch that allows int64 is off, as by default."""
    labels, x = extreme_labels(dtype), np.asarray(rows_of("ntxent")[0], np.float32)
    right = oracle.ntxent(x, labels, 0.5)
    for given in (labels, jnp.asarray(labels)):
        assert_close(nj.ntxent(x, given, 0.5, block_size=3), right, rtol=1e-5)


def test_host_integers_that_fit_are_welcome():
    x = np.asarray(rows_of("ntxent")[0], np.float32)
    labels = np.array([2**31 - 1, -(2**31), 0, 2**31 - 1, 0, 0, 1], np.int64)
    assert_close(nj.ntxent(x, labels, 0.5), oracle.ntxent(x, labels, 0.5), rtol=1e-5)
    assert_close(nj.ntxent(x, labels.tolist(), 0.5), oracle.ntxent(x, labels, 0.5), rtol=1e-5)


ROWS = np.ones((N, D), np.float32)
FITS = np.arange(N, dtype=np.int32)
BORDERS = {
    "labels": lambda v: nj.ntxent(ROWS, v),
    "labels of supcon": lambda v: nj.supcon_loss(ROWS, v),
    "candidate_labels": lambda v: nj.ntxent(ROWS, FITS, candidates=ROWS, candidate_labels=v),
    "ids": lambda v: nj.ntxent(ROWS, FITS, ids=v),
    "candidate_ids": lambda v: nj.ntxent(ROWS, FITS, candidates=ROWS, candidate_labels=FITS, ids=FITS, candidate_ids=v),
    "ids of queries": lambda v: nj.info_nce_loss(ROWS, ROWS, ids=v),
    "key_ids": lambda v: nj.info_nce_loss(ROWS, ROWS, ids=FITS, key_ids=v),
    "ids of ranking": lambda v: nj.multiple_negatives_ranking_loss(ROWS, ROWS, ids=v),
    "labels of pair_masks": lambda v: nj.pair_masks(v),
    "labels of statistics": lambda v: nj.batch_statistics(ROWS, v),
}


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize(
    "big", [np.int64(2**31), np.int64(-(2**31) - 1), np.uint64(2**64 - 1), np.uint64(2**32)], ids=str
)
def test_host_integers_that_do_not_fit_are_refused(border, big):
    """A hash of 64 bits would silently lose its upper half."""
    values = np.zeros(N, big.dtype)
    values[3] = big
    with pytest.raises(ValueError, match=border.split()[0]):
        BORDERS[border](values)


@pytest.mark.parametrize("border", ["candidate_labels", "candidate_ids", "key_ids"])
def test_integers_that_would_wrap_are_refused(border):
    """int32 against uint32 have no common dtype without int64."""
    with pytest.raises(TypeError, match=border):
        BORDERS[border](FITS.astype(np.uint32))
    with pytest.raises(TypeError, match=border):
        jax.jit(BORDERS[border])(jnp.asarray(FITS, jnp.uint32))


@in_float64
def test_integers_of_64_bits_that_would_become_floats_are_refused():
    for first, second in (("int64", "uint64"), ("uint64", "int64"), ("int8", "uint64")):
        with pytest.raises(TypeError, match="labels"):
            nj.pair_masks(np.arange(3).astype(first), np.arange(3).astype(second))


def test_integers_of_two_dtypes_are_compared_by_value():
    """-1 is not 255, and 1 is True."""
    masks = nj.pair_masks(np.array([-1, 7], np.int8), np.array([255, 7], np.uint8))
    np.testing.assert_array_equal(masks.positive, [[False, False], [False, True]])
    masks = nj.pair_masks(np.array([-1, 7], np.int32), np.array([65535, 7, 0], np.uint16))
    np.testing.assert_array_equal(masks.positive, [[False] * 3, [False, True, False]])
    masks = nj.pair_masks(np.array([0, 1], np.int32), np.array([True, False]))
    np.testing.assert_array_equal(masks.positive, [[False, True], [True, False]])


@pytest.mark.parametrize("labels", [np.arange(N) * 1.0, np.array(list("abcdefg"))], ids=["floating", "strings"])
def test_labels_that_are_not_integers_are_refused(labels):
    for loss in (nj.ntxent, nj.supcon_loss):
        with pytest.raises(TypeError, match=r"labels.*np\.unique"):
            loss(ROWS, labels)


# Arguments that belong together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nj.ntxent(ROWS, FITS, candidates=ROWS), "candidate_labels"),
        (lambda: nj.ntxent(ROWS, FITS, candidate_labels=FITS), "candidates"),
        (lambda: nj.ntxent(ROWS, FITS, candidate_ids=FITS), "ids"),
        (lambda: nj.ntxent(ROWS, FITS, candidates=ROWS, candidate_labels=FITS, ids=FITS), "candidate_ids"),
        (lambda: nj.ntxent(ROWS, FITS, candidates=ROWS, candidate_labels=FITS, candidate_ids=FITS), "ids"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, key_ids=FITS), "ids"),
        (lambda: nj.info_nce_loss(ROWS[:3], ROWS, ids=FITS[:3]), "key_ids"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, in_batch=False), "in_batch"),
        (lambda: nj.info_nce_loss(ROWS, ROWS[:3]), "keys"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, 0.1), r"negatives must have.*did you mean temperature=0\.1"),
        (lambda: nj.multiple_negatives_ranking_loss(ROWS, ROWS, 0.1), r"did you mean temperature=0\.1"),
        (lambda: nj.ntxent(ROWS, FITS, reduction="average"), "reduction"),
        (lambda: nj.ntxent(ROWS, FITS, denominator="some"), "denominator"),
        (lambda: nj.supcon_loss(ROWS, FITS, form="inside"), "form"),
        (lambda: nj.ntxent(ROWS, FITS, block_size=0), "block_size"),
        (lambda: nj.ntxent(ROWS, FITS[:3]), "labels"),
        (lambda: nj.ntxent(ROWS, FITS, where=np.ones(1, bool)), "where"),
        (lambda: nj.ntxent(ROWS, FITS, weights=np.ones(1)), "weights"),
        (lambda: nj.ntxent(ROWS, FITS, temperature=np.ones(3)), "temperature"),
        (lambda: nj.ntxent(ROWS[0], FITS), "embeddings"),
        (lambda: nj.ntxent_views(ROWS), "views"),
        (lambda: nj.ntxent_views(ROWS, ROWS[:3]), "view"),
        (lambda: nj.instance_loss(ROWS, ROWS[:1]), "view"),
        (lambda: nj.info_nce_loss(ROWS, ROWS[:, :3]), "keys"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, key_bias=np.ones(1)), "key_bias"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, pair_where=np.ones((N, 1), bool)), "pair_where"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, key_where=np.ones(1, bool)), "key_where"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, ROWS, negative_where=np.ones(1, bool)), "negative_where"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nj.ntxent(ROWS.astype(int), FITS), "embeddings"),
        (lambda: nj.ntxent(ROWS, FITS, where=FITS), "where"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, key_where=FITS), "key_where"),
        (lambda: nj.info_nce_loss(ROWS, ROWS, ids=np.ones(N)), "ids"),
    ],
)
def test_wrong_dtypes_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# Other similarities -------------------------------------------------------------------------------------------------


@in_float64
@each_block
@pytest.mark.parametrize(
    "similarity", ["dot_product", "negative_euclidean_distance", "log1p_cosine_similarity", "cosine_similarity"]
)
def test_similarities_and_their_gradients(similarity, block_size):
    queries, keys = inputs.random_rows(2, N, D)
    keys[2] = queries[2]  # A distance of 0 has no derivative of its own: 0 is used.
    value, gradients = jax.jit(
        jax.value_and_grad(
            lambda q, k: nj.info_nce_loss(
                q, k, temperature=0.5, similarity=getattr(nj, similarity), block_size=block_size
            ),
            argnums=(0, 1),
        )
    )(queries, keys)
    reference = getattr(oracle, similarity)
    assert_close(value, oracle.info_nce_loss(queries, keys, temperature=0.5, similarity=reference), rtol=1e-8)
    assert_finite(gradients)
    keep = np.arange(N) != 2 if similarity == "negative_euclidean_distance" else REAL
    right = oracle.gradient(
        lambda q: oracle.info_nce_loss(q, keys, temperature=0.5, similarity=reference), queries, step=1e-3
    )
    assert_close(gradients[0][keep], right[keep], rtol=1e-7, atol=1e-8)


# Normalisation, statistics, the floor -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-37, 1e-20, 1.0, 1e20, 1e37])
def test_l2_normalize(scale):
    rows = np.float32(inputs.random_rows(3, 4))
    rows = np.float32(np.sign(rows) * np.clip(np.abs(rows), 0.12, 3) * scale)  # No entry underflows at 1e-37.
    right = np.stack([oracle.unit(row.astype(np.float64)) for row in rows])
    assert_close(nj.l2_normalize(rows), right, rtol=1e-6)
    assert_close(nj.l2_normalize(rows.T, axis=0), right.T, rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.vdot(nj.l2_normalize(x), jnp.arange(12.0).reshape(3, 4)))(rows)
    assert_no_nan(gradient)
    if scale == 0:
        assert_zero(gradient)
    assert_nan(nj.l2_normalize(jnp.float32([[jnp.nan, 1.0]]))[0, 0])


@in_float64
def test_l2_normalize_gradient():
    rows, cotangent = inputs.random_rows(3, 4), inputs.random_rows(3, 4, seed=1)
    gradient = jax.grad(lambda x: jnp.vdot(nj.l2_normalize(x), cotangent))(rows)
    right = oracle.gradient(lambda x: sum(np.dot(oracle.unit(r), c) for r, c in zip(x, cotangent, strict=True)), rows)
    assert_close(gradient, right, rtol=1e-8, atol=1e-9)


@in_float64
@each_block
def test_statistics(block_size):
    """In the order the oracle gives them: numbers, mean similarities, accuracy, chance level."""
    x, labels = rows_of("ntxent")[0], LABELS["labels"]
    variants = [
        {},
        {"where": SOME},
        {"ids": np.array([0, 0, 1, 2, 3, 4, 5])},
        {"candidates": inputs.random_rows(11, D, seed=1), "candidate_labels": np.arange(11) % 5},
    ]
    for options in variants:
        got = nj.batch_statistics(x, labels, block_size=block_size, **options)
        right = oracle.batch_statistics(x, labels, **options)
        for field, value, expected_value in zip(right._fields, got, right, strict=True):
            assert_close(value, expected_value, name=f"{field} with {list(options)}")


def test_statistics_of_a_collapse():
    """All rows equal: every tie counts against the model, and the loss is at chance level."""
    rows, labels = np.ones((14, 3), np.float32), np.arange(14) // 2
    for block_size in (None, 3):
        stats = nj.batch_statistics(rows, labels, block_size=block_size)
        assert_close(stats[3:], [1, 1, 1, 0, np.log(13)], rtol=1e-6)


@pytest.mark.parametrize("where", [np.zeros(N, bool), None], ids=["all padded", "all labels differ"])
def test_statistics_of_a_batch_without_positives(where):
    stats = nj.batch_statistics(ROWS, FITS, where=where, block_size=3)
    assert_zero(stats[:2])
    assert stats[2] == (0 if where is not None else N * (N - 1))


def test_loss_floor():
    assert_close(nj.loss_floor(510, 0.5), np.log1p(510 * np.exp(-4)), rtol=1e-6)
    assert_close(nj.loss_floor(6, 0.5, num_positives=3), oracle.loss_floor(6, 0.5, num_positives=3), rtol=1e-6)
    simplex = nj.loss_floor(3, 0.1, lowest_similarity=-1 / 3)
    assert_close(simplex, np.log1p(3 * np.exp(-40 / 3)), rtol=1e-5, atol=0)
    corners = np.eye(4) - 0.25
    reached = nj.ntxent_views(*np.float32([corners, corners]), temperature=0.5)
    assert_close(nj.loss_floor(6, 0.5, lowest_similarity=-1 / 3), reached, rtol=1e-5)
    for traced in ((-1, 0.5), (3, 0.0), (3, -0.5), (3, 0.5, -1), (3, 0.5, 1, -1.5), (3, 0.5, 1, 1.5)):
        floor = jax.jit(lambda k, t, p=1, low=-1.0: nj.loss_floor(k, t, num_positives=p, lowest_similarity=low))
        assert_nan(floor(*traced))
