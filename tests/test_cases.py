"""What people ran into with other libraries, each reduced to a small input whose value was derived in float64."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import (
    STATED,
    assert_close,
    assert_finite,
    assert_same_direction,
    assert_states,
    assert_zero,
)
from inputs import L2, LATTICE_K, LATTICE_Q, LATTICE_W, LS, LY, A, B, X, Y

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
# Whole, and streamed in blocks that do not divide six rows.
each_block = pytest.mark.parametrize("block_size", [None, 4])


def float32(*arrays):
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def value_and_grad(function, *arguments):
    """Value and gradients to all floating arguments, compiled."""
    return jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arguments)))))(*arguments)


def rows_with_cosines(*cosines):
    """Unit rows in the plane with these cosines to [1, 0]."""
    return np.array([[c, np.sqrt(1 - c**2)] for c in cosines])


# The values all other cases refer to --------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block_size", [None, 3, 4, 100])
def test_anchor_values(block_size):
    """NT-Xent of two views, one name per definition, and its exact gradient."""
    options = {"block_size": block_size}
    value, (gradient,) = value_and_grad(lambda x: nj.ntxent(x, L2, 0.5, **options), X)
    assert_states(value, inputs.NTXENT_L2)
    assert_states(gradient, inputs.NTXENT_L2_GRADIENT)
    assert_states(nj.ntxent(X, L2, 0.5, reduction="none", **options), inputs.NTXENT_L2_ROWS)
    assert_states(nj.ntxent(X, L2, 0.5, reduction="sum", **options), np.sum(inputs.NTXENT_L2_ROWS))
    assert_states(nj.supcon_loss(X, L2, 0.5, **options), inputs.NTXENT_L2)
    assert_states(nj.info_nce_loss(A, B, temperature=0.5, **options), inputs.INFO_NCE_AB)
    assert_states(nj.info_nce_loss(B, A, temperature=0.5, **options), inputs.INFO_NCE_BA)


@in_float64
def test_gradient_is_orthogonal_to_each_row_and_follows_permutations():
    """Invariants: no force along a row, no dependence on the order of rows."""
    order = np.array([3, 5, 0, 2, 4, 1])
    loss = jax.jit(jax.value_and_grad(lambda x, labels: nj.ntxent(x, labels, 0.5)))
    value, gradient = loss(X, LS)
    permuted, permuted_gradient = loss(X[order], LS[order])
    assert_close(np.sum(gradient * X, axis=1), np.zeros(6))
    assert_close(permuted, value)
    assert_close(permuted_gradient, gradient[order])


# Case 1 -------------------------------------------------------------------------------------------------------------


@each_block
@pytest.mark.parametrize(
    ("rows", "labels", "temperature", "value"),
    [
        (Y, LY, 0.5, 0.3156677342),
        (Y, LY, 0.07, 0.2310494768),
        *((Y, LY, temperature, np.log(2) / 3) for temperature in (0.02, 0.011, 0.01, 0.005, 0.001)),
        (X, LS, 0.01, 15.1732875778),
        (X, LS, 0.001, 150.1732867951),
        (X, L2, 0.01, 3.5643824324),
        (X, L2, 0.001, 33.5643823935),
    ],
)
def test_case_1_low_temperature(rows, labels, temperature, value, block_size):
    """Loss -inf and NaN gradient at an ordinary low temperature: the row maximum was not in the denominator."""
    loss, gradient = case_1(*float32(rows, temperature), jnp.asarray(labels), block_size=block_size)
    # A cosine of .8 is off by eps in float32, and so is the logit by eps / temperature.
    assert_close(loss, value, rtol=1e-6, atol=8 * 1.2e-7 / temperature if rows is X else 1e-6)
    assert_finite(gradient)


def _case_1(x, temperature, labels, block_size):
    return jax.value_and_grad(lambda x: nj.ntxent(x, labels, temperature, block_size=block_size))(x)


case_1 = jax.jit(_case_1, static_argnames="block_size")


@each_block
def test_case_1_supcon_rows(block_size):
    """SupCon at temperature .01: the other positive stays in the denominator."""
    loss = nj.supcon_loss(*float32(Y), LY, 0.01, reduction="none", block_size=block_size)
    assert_close(loss, [50, 50, np.log(2), 0], rtol=1e-6)


# Cases 2, 3 and 7: the single-device values; parts on many devices are tested where devices are ---------------------

LATTICE_LOSS = 1.4858352399
LATTICE_GRADIENT = [
    [-0.0985154937, -0.0956258575, -0.0660987502],
    [-0.0544814472, -0.0305893042, 0.0055941483],
    [0.0151760753, 0.0488338768, 0.0746560314],
]


def projected(w, **options):
    queries, keys = (unit_rows(x @ w) for x in (LATTICE_Q, LATTICE_K))
    return nj.info_nce_loss(queries, keys, temperature=0.5, **options)


def unit_rows(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


@in_float64
@each_block
def test_case_2_gradient_of_one_device(block_size):
    """What every device must agree with: value, length and direction of the gradient."""
    value, (gradient,) = value_and_grad(lambda w: projected(w, block_size=block_size), LATTICE_W)
    assert_states(value, LATTICE_LOSS)
    assert_states(gradient, LATTICE_GRADIENT)
    assert_states(jnp.linalg.norm(gradient), 0.1879959143)


@in_float64
@each_block
def test_case_3_keys_carry_gradient(block_size):
    """Keys under stop_gradient train one side only: cosine -.3876 to the truth, and 1.925 times its length."""

    def stopped(w):
        queries, keys = (unit_rows(x @ w) for x in (LATTICE_Q, LATTICE_K))
        return nj.info_nce_loss(queries, jax.lax.stop_gradient(keys), temperature=0.5, block_size=block_size)

    _, (right,) = value_and_grad(lambda w: projected(w, block_size=block_size), LATTICE_W)
    _, (wrong,) = value_and_grad(stopped, LATTICE_W)
    length = jnp.linalg.norm(wrong) / jnp.linalg.norm(right)
    assert_same_direction(right, LATTICE_GRADIENT)
    assert_close(jnp.vdot(right, wrong) / jnp.linalg.norm(right) ** 2 / length, -0.3876, atol=5e-5)
    assert_close(length, 1.925, atol=5e-4)


@in_float64
@each_block
def test_case_7_positions_of_positives(block_size):
    """Positives at the wrong index after concatenation: one-way, two views, and hard negatives."""
    value = nj.ntxent_views(LATTICE_Q, LATTICE_K, temperature=0.5, block_size=block_size)
    assert_states(value, 1.9462923238)
    hard = X[[2, 5]]
    for negatives in (hard, hard[:, None]):
        loss = nj.multiple_negatives_ranking_loss(
            X[[0, 4]], X[[1, 3]], negatives, temperature=0.1, reduction="none", block_size=block_size
        )
        assert_states(loss, [0.1275187855, 0.6934825869])
    mean = nj.multiple_negatives_ranking_loss(X[[0, 4]], X[[1, 3]], hard, temperature=0.1, block_size=block_size)
    assert_states(mean, 0.4105006862)


# Case 4 -------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
@pytest.mark.parametrize("filler", [0.9, 0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", ["own", "shared", "key", "candidate"])
def test_case_4_temperature_gradient_beside_a_mask(form, filler, block_size):
    """Masked first and divided afterwards: a good loss, and a temperature whose gradient is NaN."""
    query = np.array([[1.0, 0.0]])
    positive, negatives = rows_with_cosines(0.8), rows_with_cosines(0.1, 0.9)
    if filler != 0.9:
        negatives[1] = filler

    value, (to_rows, slope) = case_4(form, block_size)(negatives, 0.1, query, positive)
    assert_states(value, 0.0009114665)
    assert_states(slope, 0.0637735833)
    assert_finite(to_rows)
    assert_zero(to_rows[1])


@functools.cache
def case_4(form, block_size):
    """One compilation for all fillers."""
    real = np.array([True, False])
    calls = {
        "own": lambda q, p, n, t, **o: nj.info_nce_loss(q, p, n[None], negative_where=real[None], temperature=t, **o),
        "shared": lambda q, p, n, t, **o: nj.info_nce_loss(q, p, n, negative_where=real, temperature=t, **o),
        "key": lambda q, p, n, t, **o: nj.info_nce_loss(
            q, jnp.concatenate([p, n]), key_where=np.array([True, True, False]), temperature=t, **o
        ),
        "candidate": lambda q, p, n, t, **o: nj.ntxent(
            q,
            np.array([5]),
            t,
            candidates=jnp.concatenate([p, n]),
            candidate_labels=np.array([5, 6, 7]),
            candidate_where=np.array([True, True, False]),
            **o,
        ),
    }
    call = calls[form]
    step = jax.value_and_grad(lambda n, t, q, p: call(q, p, n, t, block_size=block_size), argnums=(0, 1))
    return jax.jit(step)


# Cases 5 and 6 ------------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_5_anchor_without_a_positive(block_size):
    """0/0 for a class seen once; or 0 but counted in the mean, which gives 1.0972937798."""
    options = {"block_size": block_size}
    assert_states(nj.supcon_loss(X, LS, 0.5, reduction="none", **options), inputs.SUPCON_OUT_LS_ROWS)
    value, (gradient,) = value_and_grad(lambda x: nj.supcon_loss(x, LS, 0.5, **options), X)
    assert_states(value, inputs.SUPCON_OUT_LS)
    assert_finite(gradient)
    assert np.linalg.norm(gradient[5]) > 0.01, "row 5 is a negative of the others"
    assert_close(gradient, oracle.gradient(lambda x: oracle.supcon_loss(x, LS, 0.5), X), rtol=1e-8, atol=1e-9)


@each_block
@pytest.mark.parametrize("loss", [nj.ntxent, nj.supcon_loss])
def test_case_5_no_positive_at_all(loss, block_size):
    """All labels differ: 0, gradient 0, whatever the size of the labels."""
    step = jax.jit(jax.value_and_grad(lambda x, t, y: loss(x, y, t, block_size=block_size), argnums=(0, 1)))
    for labels in (np.arange(6), np.arange(6) * 400_000_007 - 1_000_000_000):
        assert_zero(step(*float32(X, 0.5), labels))


@in_float64
@each_block
def test_case_6_three_losses_under_one_name(block_size):
    """With more than one positive the denominators differ, and 'in' is at most 'out' in every row."""
    options = {"block_size": block_size}
    assert_states(nj.ntxent(X, LS, 0.5, **options), inputs.NTXENT_LS)
    assert_states(nj.ntxent(X, LS, 0.5, denominator="all", reduction="anchor_mean", **options), inputs.SUPCON_OUT_LS)
    assert_states(nj.supcon_loss(X, LS, 0.5, form="in", **options), inputs.SUPCON_IN_LS)
    outside = nj.supcon_loss(X, LS, 0.5, form="out", reduction="none", **options)
    inside = nj.supcon_loss(X, LS, 0.5, form="in", reduction="none", **options)
    assert np.all(inside <= outside + 1e-12)
    assert_states(inside.sum() / 5, inputs.SUPCON_IN_LS)


# Cases 8 and 9 ------------------------------------------------------------------------------------------------------


@each_block
def test_case_8_zero_row(block_size):
    """A dead row turns the whole gradient into NaN, or its own into hundreds."""
    (rows,) = float32(X * (np.arange(6) != 2)[:, None])
    value, (gradient,) = value_and_grad(lambda x: nj.ntxent(x, L2, 0.5, block_size=block_size), rows)
    assert_close(value, 1.3193136740, rtol=1e-6)
    assert_zero(gradient[2])
    norms = [0.3049838918, 0.3424854575, 0, 0.3104322126, 0.2470745795, 0.4360055100]
    assert_close(np.linalg.norm(gradient, axis=1), norms, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_case_9_scale_does_not_matter(dtype):
    """A floor inside the norm: ln 5 at a scale of 1e-6, and at 1e20 the square overflows."""
    loss = jax.jit(lambda x: nj.ntxent(x, L2, 0.5))
    rounded = np.asarray(jnp.asarray(X, dtype), np.float64)
    limits = jnp.finfo(dtype)
    # Powers of two scale exactly; stay where no entry of X becomes subnormal or overflows.
    low, high = int(np.log2(float(limits.smallest_normal))) + 1, int(np.log2(float(limits.max))) - 1
    scales = [2.0**e for e in np.linspace(low, high, 15).astype(int)]
    expected = oracle.ntxent(rounded, L2, 0.5)
    tolerance = 2e-6
    for scale in scales:
        assert_close(loss(jnp.asarray(rounded * scale, dtype)), expected, rtol=tolerance, name=f"scale {scale}")
    for rows in (rounded * [[1], [2], [4], [8], [16], [32]], rounded * [[scales[1]], [1], [1], [1], [1], [scales[-2]]]):
        assert_close(loss(jnp.asarray(rows, dtype)), expected, rtol=tolerance)


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e-6, 1e-4, 1e-3, 1.0, 300.0, 1e10, 1e20])
def test_case_9_stated_scales(scale):
    value = nj.ntxent(*float32(X * scale), L2, 0.5)
    assert_close(value, inputs.NTXENT_L2, rtol=1e-6)
    one_row = np.where(np.arange(6) == 3, scale, 1)[:, None]
    assert_close(nj.ntxent(*float32(X * one_row), L2, 0.5), inputs.NTXENT_L2, rtol=1e-6)
    one_to_six = np.arange(1, 7)[:, None]
    assert_close(nj.ntxent(*float32(X * one_to_six), L2, 0.5), inputs.NTXENT_L2, rtol=1e-6)


# Case 10 ------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_10_which_pairs_are_negatives(block_size):
    """SimCLR, anchors of one view only, cross-view: three numbers that libraries call by one name."""
    options = {"temperature": 0.5, "block_size": block_size}
    assert_states(nj.ntxent_views(A, B, **options), inputs.NTXENT_L2)
    assert_states(nj.info_nce_loss(A, B, **options), inputs.INFO_NCE_AB)
    symmetric = (nj.info_nce_loss(A, B, **options) + nj.info_nce_loss(B, A, **options)) / 2
    assert_states(symmetric, inputs.INFO_NCE_SYMMETRIC)
    items = np.arange(3)
    for anchors, others, value in ((A, B, 0.9486888148), (B, A, 1.2257803544)):
        one_sided = nj.ntxent(
            anchors,
            items,
            candidates=np.concatenate([anchors, others]),
            candidate_labels=np.tile(items, 2),
            ids=items,
            candidate_ids=np.arange(6),
            **options,
        )
        assert_states(one_sided, value)


# Case 11 ------------------------------------------------------------------------------------------------------------


@each_block
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (jnp.bfloat16, [1.0874215694, 0.7766639645, 1.8887571007, 3.5461806950]),
        (jnp.float16, [1.0872813167, 0.7782639934, 1.8955789520, 3.5598246319]),
    ],
    ids=["bfloat16", "float16"],
)
def test_case_11_half_precision(dtype, values, block_size):
    """A loss in steps of 1/64, and gradients that overflow, where only the inputs are half precision."""
    rows = jnp.asarray(X, dtype)
    loss = jax.jit(jax.value_and_grad(lambda x, t: nj.ntxent(x, L2, t, block_size=block_size)))
    for temperature, expected in zip((0.5, 0.07, 0.02, 0.01), values, strict=True):
        value, gradient = loss(rows, jnp.float32(temperature))
        assert value.dtype == jnp.float32
        assert gradient.dtype == dtype
        assert_close(value, expected, rtol=1e-5)
        assert_finite(gradient)


# Case 14 ------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
@pytest.mark.parametrize("filler", [100.0, np.inf, -np.inf, np.nan])
def test_case_14_gradient_through_a_masked_logsumexp(filler, block_size):
    """The gradient of a log-sum whose largest entry is masked is that of the rest."""

    def loss(candidates, real):
        return nj.ntxent(
            np.ones((1, 1)),
            np.array([0]),
            1.0,
            denominator="negatives",
            similarity=nj.dot_product,
            candidates=candidates,
            candidate_labels=np.array([0, 1, 1]),
            candidate_where=real,
            block_size=block_size,
        )

    step = jax.jit(jax.value_and_grad(loss))
    rows = np.array([[0.0], [0.0], [filler]])
    value, gradient = step(rows, np.array([True, True, False]))
    assert_zero(value)
    assert_close(gradient, [[-1], [1], [0]])
    value, gradient = step(np.array([[0.0], [filler], [filler]]), np.array([True, False, False]))
    assert_zero(value, gradient)


# Cases 15, 16 and 18 ------------------------------------------------------------------------------------------------

DUPLICATE_Q = np.array([[0.8, 0.6, 0], [1, 0, 0], [0, 0, 1]])
DUPLICATE_K = np.array([[0.96, 0.28, 0], [0.96, 0.28, 0], [0, 0.6, 0.8]])


@in_float64
@each_block
def test_case_15_the_same_document_twice(block_size):
    """A document that is its own negative: the loss cannot fall below ln 2."""
    ids = np.array([0, 0, 1])
    options = {"temperature": 0.1, "block_size": block_size}
    forward = nj.info_nce_loss(DUPLICATE_Q, DUPLICATE_K, reduction="none", **options)
    assert_states(forward, [0.6947214965, 0.6931810444, 0.0006707003])
    assert_states(nj.info_nce_loss(DUPLICATE_K, DUPLICATE_Q, **options), 0.4710898910)
    forward = nj.info_nce_loss(DUPLICATE_Q, DUPLICATE_K, ids=ids, reduction="none", **options)
    assert_states(forward, [0.0031461573, 0.0000677264, 0.0006707003])
    assert_states(nj.info_nce_loss(DUPLICATE_K, DUPLICATE_Q, ids=ids, key_ids=ids, **options), 0.0042292488)
    assert_states(nj.multiple_negatives_ranking_loss(DUPLICATE_Q, DUPLICATE_K, ids=ids, **options), 0.0012948613)
    pair_where = (ids[:, None] != ids) | np.eye(3, dtype=bool)
    assert_states(nj.info_nce_loss(DUPLICATE_Q, DUPLICATE_K, pair_where=pair_where, **options), 0.0012948613)


@in_float64
def test_case_15_duplicates_as_positives():
    """Averaging over equal positives equals the unmasked value; summing them inside the logarithm does not."""
    ids = np.array([0, 0, 1])
    options = {"candidates": DUPLICATE_K, "candidate_labels": ids}
    assert_states(nj.supcon_loss(DUPLICATE_Q, ids, 0.1, **options), 0.4628577470)
    inside = nj.supcon_loss(DUPLICATE_Q, ids, 0.1, form="in", **options)
    assert_states(inside, 0.0007596267 + 2 * np.log(2) / 3)  # "in" averages inside the logarithm: + log(positives)


@in_float64
@each_block
def test_case_16_some_rows_have_a_hard_negative(block_size):
    """A padded hard negative counts as a similarity of 0, or spoils the gradient."""
    queries, keys = X[[0, 4]], X[[1, 3]]
    options = {"temperature": 0.1, "block_size": block_size}

    def loss(hard, queries):
        where = np.array([[True], [False]])
        rows = nj.info_nce_loss(queries, keys, hard, negative_where=where, reduction="none", **options)
        return rows.mean(), rows

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    for filler in (0.0, np.inf, -np.inf, np.nan):
        (value, rows), gradients = step(np.stack([X[5:6], np.full((1, 3), filler)]), queries)
        assert_states(value, 0.0637794242)
        assert_states(rows, [0.1272234419, 0.0003354064])
        assert_finite(gradients)
        assert_zero(gradients[0][1])
    assert_states(nj.info_nce_loss(queries, keys, reduction="none", **options), [0.0003354064] * 2)


@in_float64
@each_block
def test_case_18_own_candidates(block_size):
    """A product of two and three axes broadcasts over the batch and points at the wrong document."""
    options = {"temperature": 0.1, "reduction": "none", "block_size": block_size}
    queries, groups = X[[0, 4]], np.stack([X[[1, 2]], X[[3, 5]]])
    own = nj.info_nce_loss(queries, groups[:, 0], groups[:, 1:], in_batch=False, **options)
    assert_states(own, [0.0003354064, 0.6931471806])
    everyone = nj.multiple_negatives_ranking_loss(queries, groups[:, 0], groups[:, 1:], **options)
    assert_states(everyone.mean(), 0.4105006862)


@in_float64
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("in_batch", [True, False])
def test_case_18_as_many_negatives_as_queries_or_not(k, in_batch):
    """[n, k, d] belong to their query whether k = n or not; [k, d] belong to all, k = n too."""
    queries, keys = inputs.random_rows(2, 3, 5, seed=k)
    own, shared = inputs.random_rows(3, k, 5, seed=k + 10), inputs.random_rows(k, 5, seed=k + 20)
    for negatives in (own, shared):
        options = {"temperature": 0.5, "in_batch": in_batch, "reduction": "none"}
        expected = oracle.info_nce_loss(queries, keys, negatives, **options)
        assert_close(nj.info_nce_loss(queries, keys, negatives, block_size=2, **options), expected)


@pytest.mark.parametrize("shape", [(2, 2, 5), (4, 2, 5), (1, 2, 5), (2, 4), (5,), (3, 1, 2, 5)])
@pytest.mark.parametrize("loss", [nj.info_nce_loss, nj.multiple_negatives_ranking_loss])
def test_case_18_wrong_shapes_are_refused(loss, shape):
    with pytest.raises(ValueError, match="negatives"):
        loss(np.ones((3, 5)), np.ones((3, 5)), np.ones(shape))


# Case 19 ------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_19_padded_rows(block_size):
    """Padding changes the mean (.8154259385), becomes a class of its own (1.5461000956), or leaks into a gradient."""
    step = jax.jit(
        jax.value_and_grad(lambda x, labels, where: nj.ntxent(x, labels, 0.5, where=where, block_size=block_size))
    )
    where = np.arange(8) < 6
    for filler in (7.0, 0.0, np.inf, -np.inf, np.nan):
        for label in (-1, 0, 2, 9, np.iinfo(np.int64).min, np.iinfo(np.int64).max):
            rows = np.concatenate([X, np.full((2, 3), filler)])
            value, gradient = step(rows, np.append(L2, [label, label]), where)
            assert_states(value, inputs.NTXENT_L2)
            assert_states(gradient[:6], inputs.NTXENT_L2_GRADIENT)
            assert_zero(gradient[6:])
            assert_zero(*step(rows, np.append(L2, [label, label]), np.zeros(8, bool)))


# Cases 21 to 23 -----------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_21_one_pass(block_size):
    """The value and the gradients a cached two-pass gradient must have."""

    def loss(w, temperature):
        queries, keys = jnp.tanh(LATTICE_Q @ w), jnp.tanh(LATTICE_K @ w)
        return nj.info_nce_loss(queries, keys, temperature=temperature, block_size=block_size)

    value, (gradient, slope) = value_and_grad(loss, LATTICE_W, 0.5)
    assert_states(value, 1.5858764537)
    assert_states(slope, -0.1199102643)
    expected = [
        [0.0449552110, -0.0506041500, -0.1756728422],
        [0.0427883450, -0.0460973659, -0.0475197421],
        [0.0204974517, -0.0199102704, 0.1029826351],
    ]
    assert_states(gradient, expected)


@in_float64
def test_case_22_accumulated_gradients_are_another_loss():
    """Two batches of four are not one of eight; batches of one teach nothing."""

    def accumulated(q, size):
        parts = [slice(i, i + size) for i in range(0, 8, size)]
        return sum(nj.info_nce_loss(q[part], LATTICE_K[part], temperature=0.5) for part in parts) / len(parts)

    values, gradients = zip(
        *(value_and_grad(lambda q, s=s: accumulated(q, s), LATTICE_Q) for s in (8, 4, 1)), strict=True
    )
    assert_states(values[0], 1.4508908949)
    assert_states(values[1], 0.8852267407)
    assert_zero(values[2], gradients[2])
    whole, parts = (np.ravel(g[0]) for g in gradients[:2])
    assert_close(whole @ parts / np.linalg.norm(whole) / np.linalg.norm(parts), 0.8660, atol=5e-5)
    assert_close(np.linalg.norm(parts) / np.linalg.norm(whole), 0.8475, atol=5e-5)


@in_float64
@pytest.mark.parametrize("block_size", [None, 100])
def test_case_23_memory_of_many_positives(block_size):
    """A table of positives by negatives would have 12.8 G entries."""
    rows, labels = inputs.spread_rows(), inputs.SPREAD_LABELS
    step = jax.jit(jax.value_and_grad(lambda x: nj.ntxent(x, labels, 0.5, block_size=block_size))).lower(rows).compile()
    assert_states(step(rows)[0], 5.5788068891)
    assert step.memory_analysis().temp_size_in_bytes < 12 * 512 * 512 * 8
    assert_states(nj.supcon_loss(rows, labels, 0.5, block_size=block_size), 6.2738472333)


@in_float64
def test_case_23_counts():
    stats = nj.batch_statistics(inputs.spread_rows(), inputs.SPREAD_LABELS, block_size=100)
    assert_close(stats[:3], [256, 65_280, 196_352])
    masks = nj.pair_masks(inputs.SPREAD_LABELS)
    assert (masks.positive.sum(), masks.negative.sum()) == (65_280, 196_352)


# Case 24 and the masked slots of 25 ---------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_25_queue_with_slots_never_written(block_size):
    """An unfilled slot of a MoCo queue counts as a zero vector."""
    queries, keys, queue = inputs.random_rows(3, 7, 5, seed=3)
    written = np.arange(7) < 4
    options = {"temperature": 0.5, "in_batch": False}

    def loss(queue, queries):
        return nj.info_nce_loss(queries, keys, queue, negative_where=written, block_size=block_size, **options)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for filler in (0.0, np.inf, np.nan):
        queue[~written] = filler
        value, gradients = step(queue, queries)
        assert_close(value, oracle.info_nce_loss(queries, keys, queue[:4], **options))
        assert_zero(gradients[0][4:])
        assert_finite(gradients)


# Case 27 ------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_27_decoupled(block_size):
    """An additive mask of -103 is not negative enough for a loss that may be below zero."""
    options = {"denominator": "negatives", "block_size": block_size}
    assert_states(nj.ntxent(X, L2, 0.5, **options), 0.6603607205)
    assert_states(nj.ntxent(X, L2, 0.1, **options), -0.4048947733)
    opposite = np.array([[1.0, 0], [-1, 0]])
    assert_states(nj.ntxent_views(opposite, opposite, temperature=0.01, **options), -199.3068528194)


# Cases 29 and 31 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.001, 0.07, 0.5, 1.0, 100.0, np.inf])
def test_case_29_collapse(temperature):
    """All rows equal: log(candidates) at every temperature, for every loss."""
    rows = jnp.tile(jnp.float32([0.3, -1.2, 0.7]), (8, 1))
    labels = jnp.arange(16) // 2
    temperature = jnp.float32(temperature)
    losses = case_29(rows, labels, temperature)
    assert_close(losses[:4], [np.log(15)] * 4, rtol=1e-6)
    assert_close(losses[4], np.log(8), rtol=1e-6)
    assert_close(losses[5], np.log(16), rtol=1e-6)


@jax.jit
def case_29(rows, labels, temperature):
    both = jnp.concatenate([rows, rows])
    return jnp.stack(
        [
            nj.ntxent_views(rows, rows, temperature=temperature),
            nj.ntxent(both, labels, temperature, block_size=5),
            nj.supcon_loss(both, labels, temperature),
            nj.supcon_loss(both, labels, temperature, form="in", block_size=5),
            nj.info_nce_loss(rows, rows, temperature=temperature),
            nj.multiple_negatives_ranking_loss(rows, rows, rows, temperature=temperature, block_size=5),
        ]
    )


@pytest.mark.parametrize("block_size", [None, 5])
def test_case_29_rounds_all_scores_alike(block_size):
    """Divided by a low temperature, the rounding of a positive that is computed in another way would be seen."""
    for seed in range(8):
        rows = jnp.tile(np.float32(np.random.default_rng(seed).normal(size=(1, 100))), (16, 1))
        for loss, chance in ((nj.info_nce_loss, 16), (nj.ntxent_views, 31), (nj.clip_loss, 16)):
            value = loss(rows, rows, temperature=1e-4, block_size=block_size)
            assert_close(value, np.log(chance), rtol=1e-6)


@in_float64
def test_case_29_identical_views_are_not_a_loss_of_zero():
    value = nj.ntxent_views(X, X, temperature=0.5)
    assert_close(value, oracle.ntxent_views(X, X, temperature=0.5))
    assert value > 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (6,)], ids=["scalar", "one", "per anchor"])
def test_case_31_learned_temperature(dtype, shape, x64):
    """Value and slope of a traced temperature of any shape; the sign of the slope flips between .5 and .07."""
    rows = jnp.asarray(X, dtype)
    step = jax.jit(jax.value_and_grad(lambda t: nj.ntxent(rows, L2, t)))
    for temperature, expected, slope, log_slope in (
        (0.5, inputs.NTXENT_L2, 0.7048363704, 0.3524181852),
        (0.07, 0.7787996227, -4.1879664482, -0.2931576514),
    ):
        t = jnp.full(shape, temperature, dtype)
        value, gradient = step(t)
        assert gradient.shape == shape
        assert gradient.dtype == dtype
        tolerance = STATED if dtype == "float64" else {"rtol": 2e-5, "atol": 1e-6}
        assert_close(value, expected, **tolerance)
        assert_close(gradient.sum(), slope, **tolerance)
        assert_close(gradient.sum() * temperature, log_slope, **tolerance)


# Case 34: see also test_edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1])
@each_block
def test_case_34_batch_of_one_or_none(n, block_size):
    """The last batch of an epoch: 0 with gradient 0."""
    rows = jnp.ones((n, 3))
    for loss in (
        lambda x, y: nj.info_nce_loss(x, y, block_size=block_size),
        lambda x, y: nj.ntxent_views(x, y, block_size=block_size),
        lambda x, y: nj.ntxent(x, jnp.arange(n), block_size=block_size) + 0 * y.sum(),
    ):
        value, gradients = value_and_grad(loss, rows, rows * 2)
        assert_zero(value, gradients)


# Cases 37 and 38 ----------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_37_second_derivatives(block_size):
    """A hand-written backward pass forbids jvp and hessian, or is wrong in them."""

    def loss(x):
        return nj.ntxent(x, L2, 0.5, block_size=block_size)

    v = (-1.0) ** (np.arange(6)[:, None] + np.arange(3))
    tangent = jnp.asarray(v)
    assert_states(jax.jit(lambda x: jax.jvp(loss, (x,), (tangent,))[1])(X), -0.5616561674)
    hessian = np.asarray(jax.jit(jax.hessian(loss))(X)).reshape(18, 18)
    assert_states(v.ravel() @ hessian @ v.ravel(), 10.0161528058)
    assert_states(np.trace(hessian), 4.8739613771)
    assert_states(np.linalg.norm(hessian), 2.6934713387)
    assert_close(hessian, hessian.T)
    forward_over_reverse = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (tangent,))[1])(X)
    reverse_over_reverse = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), tangent)))(X)
    assert_close(forward_over_reverse, (hessian @ v.ravel()).reshape(6, 3))
    assert_close(reverse_over_reverse, forward_over_reverse)


@in_float64
@each_block
def test_case_38_vmap(block_size):
    """Under vmap, values and gradients of each batch are its own."""
    rows, labels = jnp.stack([X, X[::-1]]), jnp.stack([L2, L2[::-1]])
    step = jax.jit(jax.vmap(jax.value_and_grad(lambda x, y: nj.ntxent(x, y, 0.5, block_size=block_size))))
    values, gradients = step(rows, labels)
    assert_states(values, [inputs.NTXENT_L2] * 2)
    assert_states(gradients, np.stack([inputs.NTXENT_L2_GRADIENT, inputs.NTXENT_L2_GRADIENT[::-1]]))


# Cases 46, 47 and 49 ------------------------------------------------------------------------------------------------


@in_float64
def test_case_46_log_scale():
    """A temperature of exp(-log_scale) is one over the scale; the forms people confuse it with give other numbers."""
    loss = jax.jit(lambda t: nj.info_nce_loss(A, B, temperature=t))
    back = jax.jit(lambda t: nj.info_nce_loss(B, A, temperature=t))
    log_scale = np.log(1 / 0.07)
    assert_states(loss(jnp.exp(-log_scale)), 0.4807495732)
    assert_states((loss(jnp.exp(-log_scale)) + back(jnp.exp(-log_scale))) / 2, 0.7444923638)
    assert_states(loss(1 / log_scale), 0.6917598550)
    assert_states((loss(1 / log_scale) + back(1 / log_scale)) / 2, 0.7017915178)
    assert_states(loss(1 / 0.07), 1.0802200313)
    assert_states(loss(1 / np.exp(0.07)), 0.8714225081)


@in_float64
@each_block
def test_case_47_the_positive_in_the_denominator(block_size):
    """InfoNCE against decoupled; a mask that multiplies by 0 leaves a phantom negative (.2940561489)."""
    options = {"reduction": "none", "block_size": block_size}
    items = dict(candidate_labels=np.arange(3), denominator="negatives", **options)
    rows = nj.info_nce_loss(A, B, temperature=0.5, **options)
    assert_states(rows, [0.6271230573, 0.8334282108, 0.7893190426])
    decoupled = nj.ntxent(A, np.arange(3), 0.5, candidates=B, **items)
    assert_states(decoupled, [-0.1367175327, 0.2632824673, 0.1839007409])
    assert_states(nj.ntxent(np.eye(3), np.arange(3), 0.01, candidates=np.eye(3), **items), [np.log(2) - 100] * 3)
    perfect = nj.info_nce_loss(np.eye(3), np.eye(3), temperature=0.01, **options)
    assert_close(perfect, [2 * np.exp(-100)] * 3, rtol=1e-12, atol=0)


@in_float64
@each_block
@pytest.mark.parametrize("loss", [nj.info_nce_loss, nj.multiple_negatives_ranking_loss])
def test_case_49_log_q_correction(loss, block_size):
    """Popular keys are over-punished as negatives; the wrong sign gives .8110896933."""
    options = {"temperature": 0.5, "block_size": block_size}
    bias = -np.log([0.5, 0.25, 0.25])
    rows = loss(A, B, key_bias=bias, reduction="none", **options)
    assert_states(rows, [1.0095745429, 0.5884498960, 0.7423887947])
    assert_states(loss(A, B, key_bias=-bias, **options), 0.8110896933)
    for constant in (0.0, 3.0, -100.0):
        assert_states(loss(A, B, key_bias=np.full(3, constant), **options), inputs.INFO_NCE_AB)


# Case 50 ------------------------------------------------------------------------------------------------------------


@each_block
def test_case_50_big_dot_products(block_size):
    """A sum's ln 3 is lost against a logit of 1e8, and a small loss against its own logits."""
    dot = {"similarity": nj.dot_product, "block_size": block_size}
    query, keys = float32([[1e4, 0]], [[1e4, 0]] * 4)
    assert_close(nj.info_nce_loss(query, keys, temperature=1.0, **dot), np.log(4), rtol=2e-7)
    for block in (1, 2):
        value = nj.info_nce_loss(
            query, keys[:1], keys[1:], temperature=1.0, similarity=nj.dot_product, block_size=block
        )
        assert_close(value, np.log(4), rtol=2e-7)
    query, keys = float32([[1000, 1]], [[1000, 1], [1000, 0]])
    assert_close(nj.info_nce_loss(query, keys, temperature=0.07, **dot), 6.2487475571e-7, rtol=1e-5, atol=0)


@pytest.mark.parametrize("block_size", [None, 1, 3])
def test_case_50_small_losses(block_size):
    """A loss of 1e-9 is not 0."""
    (rows,) = float32([[1, 0], [1, 0], [-1, 0], [-1, 0]])
    losses = jax.jit(
        lambda t: (
            nj.ntxent(rows, jnp.array([0, 0, 1, 1]), t, block_size=block_size),
            nj.supcon_loss(rows, jnp.array([0, 0, 1, 1]), t, form="in", block_size=block_size),
            nj.info_nce_loss(rows[::2], rows[1::2], -rows[::2, None], temperature=t, block_size=block_size),
        )
    )
    for temperature, value in (
        (0.2, 9.0795737467e-5),
        (0.1, 4.1223072364e-9),
        (0.07, 7.8093740864e-13),
        (0.05, 8.4967085106e-18),
    ):
        for loss in losses(jnp.float32(temperature)):
            assert_close(loss, value, rtol=5e-6, atol=0)
        assert_close(nj.loss_floor(2, temperature), value, rtol=5e-6, atol=0)


# Case 54 ------------------------------------------------------------------------------------------------------------


def distance(x, y):
    return jnp.sqrt(jnp.sum((x[:, None] - y) ** 2, -1))


@in_float64
@each_block
@pytest.mark.parametrize(
    ("similarity", "value"),
    [
        (lambda x, y: -distance(x, y), 0.7457774960),
        (distance, 1.8326284339),
        (lambda x, y: -(distance(x, y) ** 2), 0.6165560658),
        (nj.negative_euclidean_distance, 0.7457774960),
        (nj.cosine_similarity, inputs.INFO_NCE_AB),
        (nj.dot_product, inputs.INFO_NCE_AB),
    ],
    ids=["-d", "+d", "-d**2", "built-in -d", "cosine", "dot"],
)
def test_case_54_similarities_of_the_user(similarity, value, block_size):
    """A distance taken for a similarity is above chance, ln 3."""
    loss = nj.info_nce_loss(A, B, temperature=0.5, similarity=similarity, block_size=block_size)
    assert_states(loss, value)


@in_float64
def test_case_54_similarity_must_not_look_at_other_rows():
    """With a norm over the whole array the value depends on the block: the check the documentation gives finds it."""

    def whole_norm(x, y):
        x, y = jnp.broadcast_arrays(x[:, None], y)
        return jnp.sum(x * y, -1) / jnp.linalg.norm(x) / jnp.linalg.norm(y)

    def row_wise(similarity):
        return np.allclose(similarity(A[:1], B[:1]), similarity(A, B)[:1, :1])

    assert not row_wise(whole_norm)
    for similarity in (
        nj.cosine_similarity,
        nj.dot_product,
        nj.negative_euclidean_distance,
        nj.log1p_cosine_similarity,
    ):
        assert row_wise(similarity)


# Case 57 ------------------------------------------------------------------------------------------------------------


@in_float64
@each_block
def test_case_57_views_in_one_array(block_size):
    """Labels repeated instead of tiled: 1.8161234735, plausible and wrong."""
    labels, both = np.array([0, 0, 1]), np.stack([A, B], axis=1)
    options = {"block_size": block_size}
    rows = [1.8890904009, 1.4659453662, 0.9576973442, 1.4613773512, 2.0629855496, 1.1396448291]
    flat = np.concatenate([A, B])
    assert_states(nj.supcon_loss(flat, np.tile(labels, 2), 0.5, reduction="none", **options), rows)
    assert_states(nj.supcon_loss(flat, np.repeat(labels, 2), 0.5, **options), 1.8161234735)
    assert_states(nj.supcon_loss(both, labels, 0.5, **options), 1.4961234735)
    items = np.reshape(rows, (2, 3)).mean(0)
    assert_states(nj.supcon_loss(both, labels, 0.5, reduction="none", **options), items)
    assert_states(nj.ntxent(both, np.arange(3), 0.5, **options), inputs.NTXENT_L2)


@in_float64
@each_block
@pytest.mark.parametrize("views", [1, 3])
def test_case_57_arguments_belong_to_items(views, block_size):
    """where, weights and temperature hold in every view of an item."""
    rows, labels = inputs.random_rows(5, views, 3, seed=views), np.array([0, 1, 0, 1, 2])
    options = {
        "where": np.array([True, True, True, True, False]),
        "weights": np.array([1.0, 2.0, 0.5, 0.0, 1.0]),
    }
    temperature = np.array([0.5, 0.7, 1.0, 0.9, 0.3])
    for name, reduction in (("ntxent", "mean"), ("ntxent", "none"), ("supcon_loss", "none")):
        value = getattr(nj, name)(rows, labels, temperature, reduction=reduction, block_size=block_size, **options)
        assert_close(value, getattr(oracle, name)(rows, labels, temperature, reduction=reduction, **options))
