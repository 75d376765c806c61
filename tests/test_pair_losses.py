"""NT-Xent of given pairs: no labels, nothing of the size of n^2, no index ever moved to the nearest row."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle_pairs as right
import pytest
from against_oracle import assert_right, assert_second_order
from assertions import assert_close, assert_finite, assert_nan, assert_states, assert_zero
from catalog import REDUCTIONS, Case, quick_jit
from test_memory import bytes_of

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
N, M = 7, 5
ROWS, OTHERS = inputs.random_rows(N, 3, seed=31), inputs.random_rows(M, 3, seed=32)
TEMPERATURES = np.linspace(0.4, 1.1, N)[[3, 0, 6, 2, 5, 1, 4]]
# Row 0 has two positives, one of them twice; row 3 is paired with itself; row 4 has no negatives; 5 and 6 no positives.
# Unused slots stand anywhere, and one -1 is enough.
POSITIVES = np.array([[0, 1], [0, 2], [-1, -1], [0, 1], [3, 3], [4, 0], [-1, 3], [2, 4], [5, -1]])
NEGATIVES = np.array([[0, 3], [3, 1], [0, 4], [-1, 2], [2, 2], [0, 3], [1, 0], [3, 3], [2, -1], [-1, -1], [5, 1]])
EMPTY = np.zeros((0, 2), int)
PLAIN = Case(
    "ntxent_pairs",
    ("embeddings", "positives", "negatives"),
    {"embeddings": ROWS, "temperature": TEMPERATURES},
    {"positives": POSITIVES, "negatives": NEGATIVES},
)
WITH_CANDIDATES = PLAIN._replace(floats={**PLAIN.floats, "candidates": OTHERS})


@in_float64
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_against_loops(reduction):
    """Value and derivatives to rows, candidates and each anchor's temperature."""
    assert_right(WITH_CANDIDATES, ({},), reduction=reduction)
    if reduction == "mean":
        assert_right(PLAIN, ({},), reduction=reduction)


@in_float64
@pytest.mark.parametrize("similarity", ["dot_product", "negative_euclidean_distance", "log1p_cosine_similarity"])
def test_every_similarity(similarity):
    case = WITH_CANDIDATES._replace(similarity=similarity)
    assert_close(case(nj, case.floats), case(right, case.floats))


@in_float64
def test_derivatives_of_second_order():
    assert_second_order(WITH_CANDIDATES, {})


@in_float64
def test_case_36():
    """Pair (3, 4) has no negatives: its loss is 0, and it counts."""
    positives, negatives = np.array([[0, 1], [3, 4]]), np.array([[0, 2], [0, 5]])
    call = functools.partial(nj.ntxent_pairs, inputs.X, temperature=0.5)
    assert_states(call(positives, negatives, reduction="none"), [0.6271230573, 0, 0, 0, 0, 0])
    assert_states(call(positives, negatives), 0.3135615286)
    padded = np.array([[-1, -1], [0, 1], [-1, 2], [3, 4]]), np.array([[0, 2], [-1, -1], [0, 5], [0, -1]])
    assert_states(call(*padded), 0.3135615286)
    # The same pairs as a boolean matrix, by hand: cosines 01 .8, 02 0, 05 .6.
    assert_states(call(positives, negatives, reduction="sum"), np.log(1 + np.exp(-1.6) + np.exp(-0.4)))


@in_float64
@pytest.mark.parametrize(
    ("among", "reduction"), [*(("themselves", reduction) for reduction in REDUCTIONS), ("candidates", "none")]
)
def test_equals_ntxent_of_the_same_pairs(among, reduction):
    """Pairs of ``pair_masks``, in any order, slots to spare: value and gradients."""
    labels, candidate_labels = np.array([3, 3, 3, -1, 8, -1, 3]), np.array([3, -1, 8, 9, 3])
    options = {"candidate_labels": candidate_labels} if among == "candidates" else {}
    masks = nj.pair_masks(labels, **options)
    rng = np.random.default_rng(0)
    positives, negatives = (
        rng.permutation(np.concatenate([np.argwhere(np.asarray(mask)), -np.ones((3, 2), int)])) for mask in masks
    )
    factors = np.linspace(0.5, 2, N) if reduction == "none" else 1.0

    def by_pairs(x, y, t):
        others = {"candidates": y} if options else {}
        value = nj.ntxent_pairs(x, positives, negatives, temperature=t, reduction=reduction, **others)
        return jnp.sum(value * factors)

    def by_labels(x, y, t):
        others = {"candidates": y} if options else {}
        return jnp.sum(nj.ntxent(x, labels, t, reduction=reduction, **options, **others) * factors)

    got, same = (
        quick_jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(ROWS, OTHERS, TEMPERATURES) for f in (by_pairs, by_labels)
    )
    assert got[0] > 0.1
    jax.tree.map(assert_close, got, same)


@in_float64
def test_definition_of_pytorch_metric_learning():
    """NTXentLoss._compute_loss with ``indices_tuple = (a1, p, a2, n)``, mean over positive pairs."""
    a1, p = POSITIVES[(POSITIVES != -1).all(1)].T
    a2, n = NEGATIVES[(NEGATIVES != -1).all(1)].T
    unit = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    similarity = unit @ unit.T
    for temperature in (0.5, 0.07):
        positive = similarity[a1, p][:, None] / temperature
        negative = np.where(a2[None, :] == a1[:, None], similarity[a2, n] / temperature, -np.inf)
        largest = np.maximum(positive, negative.max(1, keepdims=True))
        numerator = np.exp(positive - largest)[:, 0]
        losses = -np.log(numerator / (np.exp(negative - largest).sum(1) + numerator))
        got = nj.ntxent_pairs(ROWS, POSITIVES, NEGATIVES, temperature=temperature)
        assert_close(got, losses.mean())


def values(positives, negatives, rows=ROWS, reduction="none"):
    return np.asarray(nj.ntxent_pairs(rows, positives, negatives, temperature=0.5, reduction=reduction))


@in_float64
def test_padded_is_trimmed():
    """Unused slots change neither the value nor one bit of a gradient, in front, between and behind."""

    def run(x, positives, negatives):
        return nj.ntxent_pairs(x, positives, negatives, temperature=0.5)

    trimmed = tuple(pairs[(pairs != -1).all(1)] for pairs in (POSITIVES, NEGATIVES))
    step = quick_jit(jax.value_and_grad(run))
    value, gradient = step(ROWS, *trimmed)
    for filler in ([-1, -1], [-1, 0], [6, -1], [-1, 1000]):
        padded = tuple(np.concatenate([[filler] * 2, pairs[:2], [filler], pairs[2:], [filler]]) for pairs in trimmed)
        got, got_gradient = step(ROWS, *padded)
        assert_close(got, value, rtol=1e-15)
        assert_close(got_gradient, gradient, rtol=1e-14, atol=1e-16)


@in_float64
def test_pairs_are_taken_as_given():
    """One given twice counts twice; a row with itself has cosine 1; a negative may be the positive too."""
    twice = values([[0, 1], [0, 1], [0, 2]], [[0, 3], [0, 3]])[0]
    logits = 2 * np.array([[right.cosine_similarity(ROWS[0], ROWS[i]) for i in (1, 2, 3)]])[0]
    own = [np.log1p(2 * np.exp(logits[2] - logit)) for logit in logits[:2]]
    assert_close(twice, (2 * own[0] + own[1]) / 3)
    pair_mean = values([[0, 1], [0, 1], [2, 3]], [[0, 3], [2, 4]], reduction="mean")
    single = values([[0, 1], [2, 3]], [[0, 3], [2, 4]])
    assert_close(pair_mean, (2 * single[0] + single[2]) / 3)
    assert_close(values([[0, 0]], [[0, 3]])[0], np.log1p(np.exp(logits[2] - 2)))
    assert_close(values([[0, 1]], [[0, 1]])[0], np.log(2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("positives", "negatives"),
    [
        ([[0, N]], [[0, 1]]),
        ([[0, 1], [0, -2]], [[0, 1]]),
        ([[0, 1]], [[0, N]]),
        ([[0, 1]], [[0, -2]]),
        ([[0, 1]], [[0, -1], [0, 1000]]),
        ([[0, 1]], [[N, 0]]),
        ([[0, 1]], [[-3, 0]]),
        ([[N, 1], [0, 1]], [[0, 1]]),
        ([[-2, 1], [0, 1]], [[0, 1]]),
    ],
)
def test_an_index_out_of_range_is_nan(positives, negatives, reduction):
    unused = [[-1, -1]] * 2
    result = values((positives + unused)[:2], (negatives + unused)[:2], reduction=reduction)
    assert_nan(result[0] if reduction == "none" else result)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_the_largest_unsigned_index_is_out_of_range_not_unused(dtype, x64):
    top = np.array([[np.iinfo(dtype).max, 1]], dtype)
    assert_nan(nj.ntxent_pairs(ROWS, top, [[0, 2]]), nj.ntxent_pairs(ROWS, [[0, 1]], top))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("positives", "negatives"), [([[N, 1]], [[0, 1]]), ([[-2, 1]], [[0, 1]])])
def test_an_anchor_out_of_range_is_nan_though_no_row_has_a_pair(positives, negatives, reduction):
    assert np.any(np.isnan(values(positives, negatives, reduction=reduction)))


def test_candidates_have_their_own_range():
    """The second index counts candidates: M - 1 is the last, M is too far, the anchors' N does not matter."""
    call = lambda last: nj.ntxent_pairs(ROWS, [[0, 0]], [[0, last]], candidates=OTHERS)  # noqa: E731
    assert_finite(call(M - 1))
    assert_nan(call(M))
    assert_finite(nj.ntxent_pairs(OTHERS, [[0, 6]], [[M - 1, 6]], candidates=ROWS))
    assert_nan(nj.ntxent_pairs(OTHERS, [[M, 6]], [[0, 6]], candidates=ROWS))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_empty_lists(reduction):
    """Without positives 0 with gradient 0; without negatives too, though the pairs count."""
    step = quick_jit(jax.value_and_grad(lambda x, p, n: jnp.sum(nj.ntxent_pairs(x, p, n, reduction=reduction))))
    for positives, negatives in (
        (EMPTY, EMPTY),
        (POSITIVES, EMPTY),
        (EMPTY, NEGATIVES),
        (0 * POSITIVES - 1, NEGATIVES),
    ):
        assert_zero(step(jnp.float32(ROWS), positives, negatives))


@pytest.mark.parametrize("pairs", [EMPTY, -np.ones((2, 2), int)], ids=["no slots", "unused slots"])
def test_no_rows(pairs):
    for reduction in REDUCTIONS:
        value = nj.ntxent_pairs(np.zeros((0, 3), np.float32), pairs, pairs, reduction=reduction)
        assert value.shape == ((0,) if reduction == "none" else ())
        assert_zero(value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_indices_of_any_integer_dtype(dtype):
    """300 rows do not fit 8 bits; the largest number of an unsigned dtype is an index, not -1."""
    rows = np.float32(inputs.random_rows(300, 3))
    top = min(299, np.iinfo(dtype).max)
    pairs = np.array([[0, top]]), np.array([[0, 5]])
    got = nj.ntxent_pairs(rows, *(pair.astype(dtype) for pair in pairs), temperature=0.5)
    assert_close(got, right.ntxent_pairs(rows, *pairs, temperature=0.5), rtol=1e-5)


def test_zero_nan_and_infinite_rows():
    """Only rows that are named matter; a named NaN or inf is never hidden; a row of zeros is similar to nothing."""
    step = quick_jit(jax.value_and_grad(lambda x: nj.ntxent_pairs(x, POSITIVES, NEGATIVES, temperature=0.5)))
    rows = np.float32(ROWS)
    value, gradient = step(rows)
    assert_zero(gradient[5:])
    for bad in (np.nan, np.inf):
        moved = rows.copy()
        moved[6] = bad
        got, got_gradient = step(moved)
        assert_close(got, value, rtol=1e-6)
        assert_close(got_gradient, gradient, rtol=1e-6)
        for row in (0, 3):  # Row 3 is a positive, a negative and an anchor.
            moved = rows.copy()
            moved[row, 1] = bad
            assert_nan(step(moved)[0])
    moved = rows.copy()
    moved[3] = 0
    got, got_gradient = step(moved)
    assert_close(got, right.ntxent_pairs(moved, POSITIVES, NEGATIVES, temperature=0.5), rtol=1e-5)
    assert_finite(got_gradient)
    assert_zero(got_gradient[3])


@in_float64
def test_slope_to_the_temperature_beside_an_opposite_negative():
    """Its similarity is -inf: it vanishes from the loss and from every derivative."""
    rows, positives = np.array([[1.0, 0], [0.6, 0.8], [-1, 0], [0, 1]]), [[0, 1]]

    def step(negatives):
        loss = lambda t: nj.ntxent_pairs(  # noqa: E731
            rows, positives, negatives, temperature=t, similarity=nj.log1p_cosine_similarity
        )
        return jax.value_and_grad(loss)(0.5)

    jax.tree.map(assert_close, step([[0, 2], [0, 3]]), step([[0, 3]]))
    assert_zero(step([[0, 2]]))


def test_half_precision_and_low_temperature():
    run = quick_jit(
        jax.value_and_grad(lambda x, t: nj.ntxent_pairs(x, POSITIVES, NEGATIVES, temperature=t), argnums=(0, 1))
    )
    for dtype in ("float16", "bfloat16"):
        rows = jnp.asarray(ROWS, dtype)
        for temperature in (0.5, 1e-3):
            value, gradients = run(rows, temperature)
            exact = right.ntxent_pairs(np.asarray(rows, np.float64), POSITIVES, NEGATIVES, temperature=temperature)
            assert value.dtype == jnp.float32
            assert gradients[0].dtype == rows.dtype
            assert_close(value, exact, rtol=1e-5 + 1e-6 / temperature)
            assert_finite(gradients)
    assert_nan(run(jnp.float32(ROWS), -0.5)[0])


@in_float64
def test_vmap_over_rows_and_pairs():
    stacked = np.stack([ROWS, ROWS[::-1]]), np.stack([POSITIVES, POSITIVES[::-1]]), np.stack([NEGATIVES, NEGATIVES])
    got = quick_jit(jax.vmap(lambda *x: nj.ntxent_pairs(*x, temperature=0.5)))(*stacked)
    for i in range(2):
        assert_close(got[i], right.ntxent_pairs(*(x[i] for x in stacked), temperature=0.5))


@pytest.mark.parametrize(
    ("positives", "error", "message"),
    [
        (np.zeros((3, 2)), TypeError, "positives must be integers"),
        (np.zeros((3, 3), int), ValueError, "positives must have shape"),
        (np.zeros(2, int), ValueError, "positives must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(positives, error, message):
    with pytest.raises(error, match=message):
        nj.ntxent_pairs(ROWS, positives, NEGATIVES)
    with pytest.raises(error, match=message.replace("positives", "negatives")):
        nj.ntxent_pairs(ROWS, POSITIVES, positives)


def test_memory_grows_with_the_pairs():
    """A million pairs of 65,536 rows of 128, compiled only: tens of bytes for a pair beside some arrays of rows."""
    rows = jax.ShapeDtypeStruct((65_536, 128), jnp.float32)

    def bytes_for(pairs):
        half = jax.ShapeDtypeStruct((pairs // 2, 2), jnp.int32)
        step = jax.value_and_grad(lambda x, p, n, t: nj.ntxent_pairs(x, p, n, temperature=t), argnums=(0, 3))
        return bytes_of(step, rows, half, half, jax.ShapeDtypeStruct((), jnp.float32))

    small, large = bytes_for(250_000), bytes_for(1_000_000)
    array_of_rows = 65_536 * 128 * 4
    assert large - small < 150 * 750_000, f"{small} -> {large} bytes"
    assert large < 8 * array_of_rows + 150 * 1_000_000, f"{large} bytes"
