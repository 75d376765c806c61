"""Similarities: values, gradients at the bad points, scales, and what the engine does with a user's function."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_zero

import ntxent_jax as nj
from ntxent_jax.similarities import compare, compare_own, has_range, is_builtin, prepare_both, score_range

in_float64 = pytest.mark.usefixtures("x64")
BUILT_IN = ["cosine_similarity", "dot_product", "log1p_cosine_similarity", "negative_euclidean_distance"]
each_similarity = pytest.mark.parametrize("name", BUILT_IN)


def reference(name, x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.array([[getattr(oracle, name)(row, column) for column in y] for row in x]).reshape(len(x), len(y))


@in_float64
@each_similarity
def test_values_and_gradients(name):
    x, y = inputs.random_rows(5, 3), inputs.random_rows(7, 3, seed=1)
    assert_close(getattr(nj, name)(x, y), reference(name, x, y))
    cotangent = inputs.random_rows(5, 7, seed=2)
    gradients = jax.jit(jax.grad(lambda x, y: jnp.vdot(getattr(nj, name)(x, y), cotangent), argnums=(0, 1)))(x, y)
    right_x = oracle.gradient(lambda x: np.vdot(reference(name, x, y), cotangent), x, step=1e-3)
    right_y = oracle.gradient(lambda y: np.vdot(reference(name, x, y), cotangent), y, step=1e-3)
    assert_close(gradients[0], right_x, rtol=1e-8, atol=1e-9)
    assert_close(gradients[1], right_y, rtol=1e-8, atol=1e-9)


@each_similarity
@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_few_rows(name, n, m):
    result = getattr(nj, name)(np.ones((n, 2), np.float32), np.ones((m, 2), np.float32))
    assert result.shape == (n, m)
    assert_finite(result)


@each_similarity
def test_nan_is_not_hidden(name):
    x = np.float32(inputs.random_rows(4, 3))
    x[1, 2] = np.nan
    result = np.asarray(getattr(nj, name)(x, np.ones((2, 3), np.float32)))
    assert_nan(result[1])
    assert_finite(result[[0, 2, 3]])


# Cosine -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cosine_similarity", "log1p_cosine_similarity"])
def test_zero_row(name):
    x, y = np.float32([[0, 0], [3, 4]]), np.float32([[1, 0], [0, 0]])
    result = getattr(nj, name)(x, y)
    right = reference(name, x, y)
    assert_close(result, right, rtol=1e-6)
    assert_zero(result[0], result[:, 1])
    to_x, to_y = jax.grad(lambda x, y: getattr(nj, name)(x, y).sum(), argnums=(0, 1))(x, y)
    assert_zero(to_x[0], to_y[1])
    assert_finite(to_x, to_y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cosine_over_the_whole_range_of_a_dtype(dtype):
    """The gradient too, wherever the dtype can hold it."""
    limits = jnp.finfo(dtype)
    signs = np.sign(inputs.random_rows(5, 8))
    right = reference("cosine_similarity", signs, signs)
    smallest, largest = float(limits.smallest_normal), float(limits.max)
    slope = jax.jit(jax.grad(lambda x: nj.cosine_similarity(x, jnp.asarray(signs, dtype))[0, 1]))
    for size in (largest, largest / 8, 1.0, smallest * 8, smallest):
        x = jnp.asarray(signs * size, dtype)
        assert_close(nj.cosine_similarity(x, x), right, atol=5e-7, name=f"{size}")
        assert not np.any(np.isnan(np.asarray(slope(x), np.float64))), size
    ends = jnp.asarray(signs * largest, dtype), jnp.asarray(signs * smallest, dtype)
    assert_close(nj.cosine_similarity(*ends), right, atol=5e-7)


def test_tiny_and_huge_features_beside_each_other():
    """A row of 1e-30 and 1e30 points along the latter; one of 1e-37 only is no zero row."""
    x = np.float32([[1e-30, 1e30], [1e-37, 0], [1e-37, 1e-37]])
    right = np.array([[0, 1], [1, 0], [np.sqrt(0.5), np.sqrt(0.5)]])
    assert_close(nj.cosine_similarity(x, np.eye(2, dtype=np.float32)), right, rtol=1e-6)


def test_no_epsilon_in_a_norm(x64):
    """The cosine of a row of 1e-9 is exact, and its gradient is the unit row's times 1e9."""
    x, y = inputs.random_rows(3, 4), inputs.random_rows(3, 4, seed=1)
    gradient = jax.jit(jax.grad(lambda x: nj.cosine_similarity(x, y).sum()))
    for scale in (1e-9, 1e-150, 1e150):
        assert_close(nj.cosine_similarity(x * scale, y), nj.cosine_similarity(x, y), rtol=1e-13)
        assert_close(gradient(x * scale) * scale, gradient(x), atol=1e-13)
        assert_close(jnp.linalg.norm(nj.l2_normalize(x * scale), axis=1), np.ones(3), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_cosine_is_not_normalised_first(dtype):
    """Error 5e-7 of the rounded rows' cosine; normalised in half precision it would be 1e-3."""
    x, y = (jnp.asarray(rows, dtype) for rows in inputs.random_rows(2, 31, 129))
    result = nj.cosine_similarity(x, y)
    assert result.dtype == jnp.float32
    assert_close(result, reference("cosine_similarity", x, y), rtol=0, atol=5e-7)


def test_half_precision_rows_are_multiplied_raw():
    """Before the norms are divided out: no rounding is left to a fast matrix unit."""
    x = jnp.asarray(inputs.random_rows(5, 3), "bfloat16")
    rows, _ = prepare_both(nj.cosine_similarity, x, x)
    exact = jnp.frexp(rows.values.astype(jnp.float32) / x.astype(jnp.float32))[0]
    assert_close(exact, np.full((5, 3), 0.5))


def test_cosine_is_symmetric_and_one_of_itself():
    x = np.float32(inputs.random_rows(9, 5))
    result = np.asarray(nj.cosine_similarity(x, x))
    assert_close(np.diag(result), np.ones(9), rtol=3e-7)
    assert np.abs(result).max() <= 1 + 3e-7


# log(1 + cosine) ----------------------------------------------------------------------------------------------------


def test_log1p_at_minus_one():
    """-inf with gradient 0, for rounding below -1 too; NaN stays."""
    x = jnp.float32([[1, 0], [2, 0], [1.0, 1.0], [jnp.nan, 0]])
    y = -x[:3]
    result = np.asarray(nj.log1p_cosine_similarity(x, y))
    assert np.all(np.isneginf(np.diag(result)[:2]))
    assert_nan(result[3])
    gradient = jax.grad(lambda y: jnp.sum(jnp.where(jnp.eye(2, dtype=bool), nj.log1p_cosine_similarity(x[:2], y), 0)))(
        y[:2]
    )
    assert_zero(gradient)
    unit_rows = np.float32(inputs.random_rows(200, 7))
    opposite = np.diag(np.asarray(nj.log1p_cosine_similarity(unit_rows, -unit_rows)))
    assert not np.any(np.isnan(opposite))
    assert np.all(opposite < -10)


@pytest.mark.parametrize("bias", [None, np.zeros(3)], ids=["plain", "biased"])
@pytest.mark.parametrize("jitted", [False, True])
def test_log1p_with_a_learned_temperature(jitted, bias, x64):
    """A perfect negative has no share in the slope either, whether beside another one or alone."""
    query = jnp.asarray([[1.0, 0.0]])
    # With one key at cosine 1 and one at 0 the loss is log(1 + 2 ** (-1 / t)).
    slope_at_half = 4 * np.log(2) * 0.25 / 1.25
    for keys, right in ((((2, 0), (-1, 0), (0, 1)), slope_at_half), (((2, 0), (-1, 0), (-2, 0)), 0.0)):
        loss = lambda t, keys=keys: nj.info_nce_loss(  # noqa: E731
            query, jnp.asarray(keys, float), temperature=t, key_bias=bias, similarity=nj.log1p_cosine_similarity
        )
        slope = jax.grad(loss)
        assert_close((jax.jit(slope) if jitted else slope)(0.5), right)
        assert_finite(jax.jit(jax.hessian(loss))(0.5))


def test_log1p_softmax_is_proportional_to_one_plus_cosine(x64):
    x, y = inputs.random_rows(5, 3), inputs.random_rows(7, 3, seed=1)
    for temperature in (1.0, 0.25):
        odds = (1 + reference("cosine_similarity", x, y)) ** (1 / temperature)
        softmax = jax.nn.softmax(nj.log1p_cosine_similarity(x, y) / temperature, axis=1)
        assert_close(softmax, odds / odds.sum(1, keepdims=True))


# Distance -----------------------------------------------------------------------------------------------------------


@in_float64
def test_distance_of_equal_rows():
    """0 with gradient 0, first and second order, not NaN."""
    x = inputs.random_rows(4, 3)
    y = np.concatenate([x[:2], inputs.random_rows(2, 3, seed=1)])
    result = nj.negative_euclidean_distance(x, y)
    assert_close(np.diag(result)[:2], np.zeros(2), atol=3e-8)
    same = jnp.asarray([[1.0, 2.0]])
    assert_zero(nj.negative_euclidean_distance(same, same))
    loss = lambda x, y: nj.negative_euclidean_distance(x, y).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    assert_zero(gradient(same, same))
    assert_zero(jax.jit(jax.hessian(loss))(same, same))
    assert_finite(gradient(x, y))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_distance_with_a_large_common_offset(offset):
    """Exact as for rows around 0: the mean of the candidates is taken from both sides first."""
    x, y = np.float32(inputs.random_rows(5, 3)), np.float32(inputs.random_rows(7, 3, seed=1))
    moved_x, moved_y = x + np.float32(offset), y + np.float32(offset)  # Rounded here, before any distance.
    right = reference("negative_euclidean_distance", moved_x, moved_y)
    assert_close(nj.negative_euclidean_distance(moved_x, moved_y), right, rtol=1e-5, atol=1e-5)
    cotangent = np.float32(inputs.random_rows(5, 7, seed=2))
    gradient = jax.grad(lambda x: jnp.vdot(nj.negative_euclidean_distance(x, moved_y), cotangent))(moved_x)
    exact = jax.grad(lambda x: -jnp.vdot(jnp.linalg.norm(x[:, None] - np.float32(moved_y)[None], axis=-1), cotangent))(
        jnp.asarray(moved_x)
    )
    assert_close(gradient, exact, rtol=1e-4, atol=1e-4)


def test_documented_error_of_a_distance():
    """At most 4 eps r^2 / distance, and 2 sqrt(eps) r for rows that nearly coincide."""
    rng, eps = np.random.default_rng(0), np.finfo(np.float32).eps
    y = np.float32(rng.normal(size=(50, 16)))
    for gap in (1.0, 1e-2, 1e-3, 1e-5, 0.0):
        x = np.float32(y + gap * rng.normal(size=y.shape))
        exact = -np.diag(reference("negative_euclidean_distance", x, y))
        got = -np.diag(np.asarray(nj.negative_euclidean_distance(x, y)))
        center = y.mean(0)
        radius = np.maximum(np.linalg.norm(x - center, axis=1), np.linalg.norm(y - center, axis=1))
        with np.errstate(divide="ignore"):
            bound = np.minimum(4 * eps * radius**2 / exact, 2 * np.sqrt(eps) * radius)
        assert np.all(np.abs(got - exact) <= bound), gap


@in_float64
def test_distance_does_not_depend_on_the_centre():
    """The centre is a constant: the gradient to the candidates is the plain formula's, and jvp agrees."""
    x, y = inputs.random_rows(5, 3), inputs.random_rows(7, 3, seed=1)
    cotangent = inputs.random_rows(5, 7, seed=2)
    ours = lambda x, y: jnp.vdot(nj.negative_euclidean_distance(x, y), cotangent)  # noqa: E731
    plain = lambda x, y: -jnp.vdot(jnp.linalg.norm(x[:, None] - y[None], axis=-1), cotangent)  # noqa: E731
    for argument in (0, 1):
        gradients = jax.jit(lambda x, y, a=argument: (jax.grad(ours, a)(x, y), jax.grad(plain, a)(x, y)))
        assert_close(*gradients(x, y), rtol=1e-9, atol=1e-10)


def test_the_centre_of_distances_carries_no_derivative():
    """One candidate is its own centre: what is left of it after the subtraction still has a gradient."""
    x, y = jnp.float32([[3.0, 4.0]]), jnp.float32([[0.0, 0.0]])
    _, columns = prepare_both(nj.negative_euclidean_distance, x, y)
    assert_close(columns.values, np.zeros((1, 2)))

    def of_columns(y):
        return prepare_both(nj.negative_euclidean_distance, x, y)[1].values

    moved = jax.jvp(of_columns, (y,), (jnp.ones((1, 2)),))[1]
    assert_close(moved, np.ones((1, 2)))
    assert_close(jax.grad(lambda y: nj.negative_euclidean_distance(x, y)[0, 0])(y), [[0.6, 0.8]], rtol=1e-6)


# Steps --------------------------------------------------------------------------------------------------------------


@in_float64
@each_similarity
def test_blocks_are_parts_of_the_whole(name):
    """Prepared once, compared in pieces; own candidates one by one."""
    similarity, x, y = getattr(nj, name), inputs.random_rows(5, 3), inputs.random_rows(7, 3, seed=1)
    rows, columns = prepare_both(similarity, x, y)
    whole = compare(similarity, rows, columns)
    part = compare(similarity, jax.tree.map(lambda a: a[2:4], rows), columns)
    assert_close(part, whole[2:4])
    own = inputs.random_rows(5, 2, 3, seed=3)
    right = np.stack([reference(name, x[i : i + 1], own[i])[0] for i in range(5)])
    assert_close(compare_own(similarity, x, own), right)


@in_float64
@each_similarity
def test_range_of_similarities(name):
    """Nothing lies outside, whichever side is the longer one, and rows of opposite and of equal direction reach it."""
    similarity, x = getattr(nj, name), inputs.random_rows(5, 3)
    if not has_range(similarity):
        assert name == "log1p_cosine_similarity"
        return
    for sizes in ((0.1, 3.0), (3.0, 0.1)):
        rows, columns = prepare_both(similarity, *(size * np.concatenate([x, -x]) for size in sizes))
        low, high = score_range(similarity, rows, columns)
        scores = compare(similarity, rows, columns)
        assert_close(scores.min(), low)
        assert_close(scores.max(), high) if name != "negative_euclidean_distance" else assert_zero(high)


def test_what_is_built_in():
    assert all(is_builtin(getattr(nj, name)) for name in BUILT_IN)
    assert not is_builtin(lambda x, y: x @ y.T)
    assert not is_builtin([])


def test_a_function_of_the_user_sees_its_rows_as_they_are():
    """Half-precision rows stay so; its result is taken to float32; padding comes as ones."""
    seen = []

    def similarity(x, y):
        seen.append((x.dtype, y.dtype))
        return x @ y.T

    rows = jnp.asarray(inputs.random_rows(5, 3), "bfloat16")
    padded = rows.at[1].set(jnp.nan)
    where = np.arange(5) != 1
    loss = nj.info_nce_loss(padded, padded, temperature=0.5, similarity=similarity, where=where, block_size=2)
    assert set(seen) == {(rows.dtype, rows.dtype)}
    assert loss.dtype == jnp.float32
    assert_finite(loss)


@pytest.mark.parametrize("block_size", [None, 2])
def test_padding_is_harmless_to_a_function_of_the_user(block_size, x64):
    """A cosine without a guard is NaN at a zero row. Padding is shown to it as ones, a filled block as copies."""

    def unguarded(x, y):
        unit = lambda rows: rows / jnp.linalg.norm(rows, axis=1, keepdims=True)  # noqa: E731
        return unit(x) @ unit(y).T

    queries, keys, own = inputs.random_rows(5, 3), inputs.random_rows(5, 3, seed=1), inputs.random_rows(5, 2, 3, seed=2)
    where = np.arange(5) != 3
    queries[3] = keys[3] = own[3] = 0
    right = oracle.info_nce_loss(queries, keys, own, temperature=0.5, where=where)

    def loss(queries, keys, own):
        options = {"temperature": 0.5, "where": where, "block_size": block_size, "similarity": unguarded}
        return nj.info_nce_loss(queries, keys, own, **options)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(queries, keys, own)
    assert_close(value, right)
    assert_finite(gradients)
    assert_zero(*(gradient[3] for gradient in gradients))


# Normalisation ------------------------------------------------------------------------------------------------------


def test_l2_normalize_shapes_and_dtypes():
    x = inputs.random_rows(2, 3, 4)
    for axis in (-1, 0, 1):
        result = nj.l2_normalize(np.float32(x), axis=axis)
        assert_close(result, x / np.linalg.norm(x, axis=axis, keepdims=True), rtol=1e-6)
    for dtype in ("float16", "bfloat16", "float32"):
        assert jax.eval_shape(nj.l2_normalize, jnp.ones(3, dtype)).dtype == dtype
    assert nj.l2_normalize(jnp.zeros((0, 3))).shape == (0, 3)
    assert_close(nj.l2_normalize(jnp.asarray([3e4, 4e4], "float16")), [0.6, 0.8], rtol=1e-3)


def test_l2_normalize_of_zero():
    x = jnp.zeros((2, 3))
    assert_zero(nj.l2_normalize(x))
    assert_zero(jax.jit(jax.grad(lambda x: nj.l2_normalize(x).sum()))(x))
    assert_zero(jax.jit(jax.hessian(lambda x: nj.l2_normalize(x).sum()))(x))
