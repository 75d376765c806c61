"""CLIP and SigLIP: both against loops, whole and streamed, at every edge."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pairs as right
import pytest
from against_oracle import assert_right, assert_second_order, blocks, package
from assertions import assert_close, assert_finite, assert_nan, assert_no_nan, assert_states, assert_zero
from catalog import BLOCK, WEIGHTS, WHERE, Case, N, quick_jit
from jax.test_util import check_grads
from test_memory import LARGE, SMALL, bytes_of, rows, value_and_grad

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])
LOSSES = ["clip_loss", "siglip_loss"]
each_loss = pytest.mark.parametrize("loss", LOSSES)

IMAGES, TEXTS = 0.8 * inputs.random_rows(2, N, 3, seed=21)
IDS = np.array([4, -1, 4, 0, 7, -1, 4])  # Row 2 is padding: rows 0 and 6, 1 and 5 are the same thing.
TEMPERATURES = np.linspace(0.4, 1.1, N)[[3, 0, 6, 2, 5, 1, 4]]
DATA = {"ids": IDS, "where": WHERE}
ROWS = {"images": IMAGES, "texts": TEXTS}
CLIP = Case(
    "clip_loss",
    ("images", "texts"),
    {**ROWS, "temperature": TEMPERATURES, "weights": WEIGHTS, "label_smoothing": np.array(0.3)},
    DATA,
)
SIGLIP = Case(
    "siglip_loss",
    ("images", "texts"),
    {**ROWS, "temperature": np.array(0.6), "bias": np.array(-0.7), "weights": WEIGHTS},
    DATA,
)
ALL = {"clip_loss": CLIP, "siglip_loss": SIGLIP}


# Against the definition ---------------------------------------------------------------------------------------------


@in_float64
@each_loss
def test_every_block(loss):
    assert_right(ALL[loss], blocks(None, 1, BLOCK, N - 1, N))


@in_float64
@each_loss
@pytest.mark.parametrize("reduction", ["anchor_mean", "sum", "none"])
def test_every_reduction(loss, reduction):
    assert_right(ALL[loss], blocks(None, BLOCK) if reduction == "none" else blocks(BLOCK), reduction=reduction)


@in_float64
@pytest.mark.parametrize("similarity", ["dot_product", "negative_euclidean_distance", "log1p_cosine_similarity"])
def test_every_similarity(similarity):
    for case in ALL.values():
        case = case._replace(similarity=similarity)
        assert_close(case(nj, case.floats, block_size=BLOCK), case(right, case.floats))


@in_float64
@each_loss
def test_without_options(loss):
    """Defaults, called by hand: no mask, no ids, no weights."""
    for block_size in (None, BLOCK):
        assert_close(getattr(nj, loss)(IMAGES, TEXTS, block_size=block_size), getattr(right, loss)(IMAGES, TEXTS))


@in_float64
@streamed
@each_loss
def test_second_derivatives(loss, block_size):
    assert_second_order(ALL[loss], {"block_size": block_size})


@in_float64
@pytest.mark.parametrize(("loss", "block_size"), [("siglip_loss", None)])
def test_check_grads(loss, block_size):
    """Modes mixed in every order; for clip_loss test_second_derivatives does the same."""
    weights = {"weights": WEIGHTS}
    floats = {name: x for name, x in ALL[loss].floats.items() if name != "weights"}
    run = jax.jit(lambda x: package(ALL[loss], block_size=block_size)({**x, **weights}, ALL[loss].data)[0])
    check_grads(run, (floats,), order=2, modes=["fwd", "rev"], rtol=1e-4, atol=1e-4)


@in_float64
@each_loss
def test_vmap_and_jit(loss):
    """Three batches at once, each with its own rows, ids, masks and weights; and called by hand."""
    case, orders = ALL[loss], [np.roll(np.arange(N), i) for i in range(3)]
    floats = [
        {k: x[o] if np.ndim(x) == 1 else x * (1 - 0.1 * i) for k, x in case.floats.items()}
        for i, o in enumerate(orders)
    ]
    data = [{k: x[o] for k, x in case.data.items()} for o in orders]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *floats), jax.tree.map(lambda *xs: np.stack(xs), *data)
    step = jax.value_and_grad(lambda floats, data: case(nj, floats, data, block_size=BLOCK))
    values, gradients = quick_jit(jax.vmap(step))(*stacked)
    single = quick_jit(step)
    for i in range(3):
        value, gradient = single(floats[i], data[i])
        assert_close(values[i], case(right, floats[i], data[i]))
        assert_close(case(nj, floats[i], data[i], block_size=BLOCK), value)
        jax.tree.map(lambda x, y, i=i: assert_close(x[i], y, atol=1e-13), gradients, gradient)


# Cases --------------------------------------------------------------------------------------------------------------


@in_float64
@streamed
def test_case_28_divided_once(block_size):
    """Minus the sum over n^2 pairs of log-sigmoid, divided by n once."""
    block_size = block_size and 1
    images, texts = np.eye(2), np.array([[0.0, -10], [-10, 0]])
    options = {"similarity": nj.dot_product, "block_size": block_size}
    assert_states(nj.siglip_loss(images, texts, 1.0, 0.0, **options), 0.6931925795)
    assert_states(nj.siglip_loss(images, texts, 1.0, 0.0, reduction="sum", **options), 2 * 0.6931925795)


@in_float64
@streamed
def test_case_45_bias_at_a_small_batch(block_size):
    images, texts = np.eye(8, 16), np.eye(8, 16, k=8)
    step = jax.value_and_grad(lambda b: nj.siglip_loss(images, texts, bias=b, block_size=block_size))
    for bias, value, slope in (
        (-10.0, 10.0003631912, -0.9996368171),
        (-np.log(7), 3.0141612901, 0),
        (0.0, 8 * np.log(2), 3),
    ):
        assert_states(step(bias)[0], value)
        assert_states(step(bias)[1], slope)
    block_size = block_size and 1
    for bias, value in ((-10.0, 2.8117900045), (-np.log(2), 6.3846005509), (0.0, 7.3626249387)):
        assert_states(nj.siglip_loss(inputs.A, inputs.B, 0.1, bias, block_size=block_size), value)
    assert_states(nj.siglip_loss(inputs.A, inputs.B), 2.8117900045)


@in_float64
@pytest.mark.parametrize("block_size", [None, 1, 2])
def test_cases_10_15_and_46_both_directions(block_size):
    options = {"block_size": block_size}
    assert_states(nj.clip_loss(inputs.A, inputs.B, 0.5, **options), inputs.INFO_NCE_SYMMETRIC)
    log_scale = np.log(1 / 0.07)
    assert_states(nj.clip_loss(inputs.A, inputs.B, np.exp(-log_scale), **options), 0.7444923638)
    assert_states(nj.clip_loss(inputs.A, inputs.B, 1 / log_scale, **options), 0.7017915178)
    q, k = [[0.8, 0.6, 0], [1, 0, 0], [0, 0, 1]], [[0.96, 0.28, 0], [0.96, 0.28, 0], [0, 0.6, 0.8]]
    q, k, ids = np.array(q), np.array(k), np.array([0, 0, 1])
    assert_states(nj.clip_loss(q, k, 0.1, **options), (0.4628577470 + 0.4710898910) / 2)
    assert_states(nj.clip_loss(q, k, 0.1, ids=ids, **options), (0.0012948613 + 0.0042292488) / 2)


@in_float64
@pytest.mark.parametrize("form", [float, np.float64, np.asarray, lambda t: np.full(1, t)])
def test_case_31_forms_of_a_temperature(form):
    """A number, 0-d, shape (1,), traced; logits of scale 0 are at chance."""
    for loss in LOSSES:
        value = getattr(right, loss)(IMAGES, TEXTS, 0.5)
        assert_close(getattr(nj, loss)(IMAGES, TEXTS, form(0.5)), value)
    slope = jax.grad(lambda t: jnp.sum(nj.clip_loss(np.zeros((5, 3)), TEXTS[:5], t)))(jnp.asarray(form(0.5)))
    assert_zero(slope)
    assert_close(nj.clip_loss(np.zeros((5, 3)), TEXTS[:5], form(0.5)), np.log(5))
    assert_close(nj.siglip_loss(np.zeros((5, 3)), TEXTS[:5], form(0.5), form(0.5) * 0), 5 * np.log(2))


# Edges --------------------------------------------------------------------------------------------------------------


@functools.cache
def compiled(loss, block_size):
    def run(floats, data):
        return ALL[loss](nj, floats, data, block_size=block_size)

    return quick_jit(jax.value_and_grad(run))


def step(loss, block_size, *, where=WHERE, **floats):
    return compiled(loss, block_size)({**ALL[loss].floats, **floats}, {**DATA, "where": where})


def filled(row, value):
    images, texts = IMAGES.copy(), TEXTS.copy()
    images[row] = texts[row] = value
    return {"images": images, "texts": texts}


@in_float64
@streamed
@each_loss
def test_padded_rows_are_absent_whatever_they_hold(loss, block_size):
    value, gradient = step(loss, block_size)
    for filler in (0.0, 1e300, np.inf, -np.inf, np.nan):
        floats = {**filled(2, filler), "weights": np.where(WHERE, WEIGHTS, filler)}
        if loss == "clip_loss":
            floats["temperature"] = np.where(WHERE, TEMPERATURES, filler)
        got, got_gradient = step(loss, block_size, **floats)
        assert_close(got, value, rtol=1e-14)
        jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-12, atol=1e-15), got_gradient, gradient)
        assert_zero(got_gradient["images"][2], got_gradient["texts"][2], got_gradient["weights"][2])
    trimmed = {k: x[WHERE] if np.ndim(x) else x for k, x in ALL[loss].floats.items()}
    assert_close(value, ALL[loss](right, trimmed, {"ids": IDS[WHERE]}))


@in_float64
@streamed
@each_loss
def test_padding_is_not_counted_without_weights(loss, block_size):
    """The mean is over real pairs; without any option but ``where`` too."""
    trimmed = getattr(nj, loss)(IMAGES[WHERE], TEXTS[WHERE], 0.5)
    assert_close(trimmed, getattr(right, loss)(IMAGES, TEXTS, 0.5, where=WHERE))
    for reduction, factor in (("mean", 1), ("anchor_mean", 1), ("sum", WHERE.sum())):
        options = {"where": WHERE, "block_size": block_size, "reduction": reduction}
        assert_close(getattr(nj, loss)(IMAGES, TEXTS, 0.5, **options), factor * trimmed, name=reduction)


@in_float64
@streamed
@each_loss
def test_nothing_counts(loss, block_size):
    """All padded; all weights 0."""
    for filler in (1.0, np.nan):
        assert_zero(step(loss, block_size, where=np.zeros(N, bool), **filled(slice(None), filler)))
    value, gradient = step(loss, block_size, weights=np.zeros(N))
    assert_zero(value, *(x for name, x in gradient.items() if name != "weights"))
    assert_no_nan(gradient)


@in_float64
@streamed
@each_loss
def test_zero_rows(loss, block_size):
    floats = filled(3, 0.0)
    value, gradient = step(loss, block_size, **floats)
    assert_close(value, ALL[loss](right, {**ALL[loss].floats, **floats}))
    assert_finite(gradient)
    assert_zero(gradient["images"][3], gradient["texts"][3])
    assert np.linalg.norm(gradient["images"][0]) > 1e-3
    assert_finite(step(loss, block_size, **filled(slice(None), 0.0)))


@in_float64
@streamed
@each_loss
def test_nan_and_inf_in_a_real_row(loss, block_size):
    for side in ("images", "texts"):
        for row, bad in ((0, np.nan), (5, np.inf), (6, -np.inf)):
            x = dict(ROWS)[side].copy()
            x[row, 1] = bad
            assert_nan(step(loss, block_size, **{side: x})[0])
    bad = np.where(np.arange(N) == 1, -0.5, TEMPERATURES) if loss == "clip_loss" else np.array(-0.5)
    assert_nan(step(loss, block_size, temperature=bad)[0])


@each_loss
@pytest.mark.parametrize(("n", "block_size"), [(0, None), (0, 3), (1, None), (1, 3)])
def test_no_row_or_one(loss, n, block_size):
    def run(x, y, t):
        return getattr(nj, loss)(x, y, t, block_size=block_size, ids=np.arange(n), where=np.ones(n, bool))

    x, y = (jnp.asarray(rows[:n], jnp.float32) for rows in (IMAGES, TEXTS))
    value, gradients = jax.value_and_grad(run, argnums=(0, 1, 2))(x, y, 0.5)
    assert value.shape == ()
    assert getattr(nj, loss)(x, y, reduction="none", block_size=block_size).shape == (n,)
    if n == 0 or loss == "clip_loss":
        assert_zero(value, gradients)
    else:
        assert_close(value, right.siglip_loss(IMAGES[:1], TEXTS[:1], 0.5), rtol=1e-5)
        assert_finite(gradients)


@each_loss
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(loss, dtype):
    """Loss in float32, right for the rounded rows; gradients in the rows' dtype, finite at any temperature."""
    x, y = (jnp.asarray(rows, dtype) for rows in (IMAGES, TEXTS))
    run = quick_jit(
        jax.value_and_grad(lambda x, y, t: getattr(nj, loss)(x, y, t, block_size=BLOCK, ids=IDS), argnums=(0, 1, 2))
    )
    for temperature in (0.5, 0.01):
        value, gradients = run(x, y, temperature)
        exact = getattr(right, loss)(np.asarray(x, np.float64), np.asarray(y, np.float64), temperature, ids=IDS)
        assert value.dtype == jnp.float32
        assert [g.dtype for g in gradients] == [x.dtype, y.dtype, jnp.float32]
        assert_close(value, exact, rtol=1e-5)
        assert_finite(gradients)


@each_loss
@streamed
def test_low_temperature_in_float32(loss, block_size):
    """The error of a logit is at most 8 eps / T; the gradient is the float64 one."""
    x, y = (jnp.asarray(rows, jnp.float32) for rows in (IMAGES, TEXTS))
    run = quick_jit(jax.value_and_grad(lambda x, t: getattr(nj, loss)(x, y, t, block_size=block_size), argnums=(0, 1)))
    for temperature in (1e-3, 1e-2, 100.0):
        value, gradients = run(x, temperature)
        exact = getattr(right, loss)(np.asarray(x, np.float64), np.asarray(y, np.float64), temperature)
        assert abs(float(value) - exact) <= (N if loss == "siglip_loss" else 1) * (16 * 1.2e-7 / temperature + 1e-6)
        assert_finite(gradients)


@in_float64
@streamed
@pytest.mark.parametrize("smoothing", [None, 0.1])
def test_clip_at_a_similarity_of_minus_infinity(smoothing, block_size):
    """log1p of an opposite row: as a negative it vanishes, and the temperature's slope and curvature are finite."""
    x = np.array([[1.0, 0], [-1, 0], [0, 1], [0.6, 0.8]])
    options = {"similarity": nj.log1p_cosine_similarity, "block_size": block_size and 1}
    if smoothing:  # A share of the target on what cannot be.
        value, slope = jax.value_and_grad(lambda t: nj.clip_loss(x, x, t, label_smoothing=smoothing, **options))(1.0)
        assert np.isposinf(value)
        assert not np.isnan(slope)
        return
    loss = lambda t: nj.clip_loss(x, x, t, **options)  # noqa: E731
    exact = lambda t: right.clip_loss(x, x, t, similarity=right.log1p_cosine_similarity)  # noqa: E731
    rows_slope = jax.grad(lambda x: nj.clip_loss(x, x, 1.0, **options))
    value, slope, curvature, of_rows = quick_jit(
        lambda x, t: (loss(t), jax.grad(loss)(t), jax.hessian(loss)(t), rows_slope(x))
    )(x, 1.0)
    assert_close(value, exact(1.0))
    assert_close(slope, oracle.gradient(exact, 1.0), rtol=1e-8)
    assert_close(curvature, oracle.gradient(lambda t: oracle.gradient(exact, t), 1.0), rtol=1e-6)
    assert_finite(of_rows)


@in_float64
@streamed
def test_siglip_at_a_similarity_of_minus_infinity(block_size):
    x = np.array([[1.0, 0], [-1, 0], [0, 1], [0.6, 0.8]])
    options = {"similarity": nj.log1p_cosine_similarity, "block_size": block_size and 1}
    loss = lambda t, b: nj.siglip_loss(x, x, t, b, **options)  # noqa: E731
    exact = lambda t, b: right.siglip_loss(x, x, t, b, similarity=right.log1p_cosine_similarity)  # noqa: E731
    value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(1.0, -1.0)
    assert_close(value, exact(1.0, -1.0))
    assert_close(slopes[1], oracle.gradient(lambda b: exact(1.0, b), -1.0), rtol=1e-8)
    assert_close(slopes[0], oracle.gradient(lambda t: exact(t, -1.0), 1.0), rtol=1e-8)


@in_float64
@streamed
def test_siglip_of_a_positive_at_a_similarity_of_minus_infinity(block_size):
    """Its loss is infinite and has no slope there, as that of the other losses; the other row keeps its own."""
    images, texts = np.array([[1.0, 0], [0, 1]]), np.array([[-1, 0], [0.6, 0.8]])
    options = {"similarity": nj.log1p_cosine_similarity, "block_size": block_size and 1}
    rows = nj.siglip_loss(images, texts, 1.0, -1.0, reduction="none", **options)
    assert np.isposinf(rows[0])
    cosines = np.array([0.0, 0.8])
    logits = np.log1p(cosines) - 1
    assert_close(rows[1], np.log1p(np.exp(logits[0])) + np.log1p(np.exp(-logits[1])))
    value, slopes = jax.value_and_grad(lambda *x: nj.siglip_loss(*x, **options), argnums=(0, 1, 2, 3))(
        images, texts, 1.0, -1.0
    )
    assert np.isposinf(value)
    assert_no_nan(slopes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nj.clip_loss(IMAGES, TEXTS[:5]),
            ValueError,
            "images and texts must have equally many rows, got 7 and 5",
        ),
        (lambda: nj.siglip_loss(IMAGES[:5], TEXTS), ValueError, "images and texts .*equally many"),
        (lambda: nj.clip_loss(IMAGES[:5], TEXTS), ValueError, "images and texts .*equally many"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, -0.1), ValueError, "temperature"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, 0.0), ValueError, "temperature"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, np.ones(N)), ValueError, "temperature"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, 0.1, np.ones(N)), ValueError, "bias"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, ids=np.ones(N)), TypeError, "ids"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, ids=IDS[:, None]), ValueError, "ids"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, where=np.ones(N)), TypeError, "where"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, weights=np.ones((N, 1))), ValueError, "weights"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, label_smoothing=1.0), ValueError, "label_smoothing"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, label_smoothing=-0.1), ValueError, "label_smoothing"),
        (lambda: nj.clip_loss(IMAGES[:, None], TEXTS), ValueError, "images"),
        (lambda: nj.clip_loss(IMAGES, 0.1), ValueError, "temperature"),
        (lambda: nj.clip_loss(IMAGES, TEXTS, reduction="max"), ValueError, "reduction"),
        (lambda: nj.siglip_loss(IMAGES, TEXTS, block_size=0), ValueError, "block_size"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Memory -------------------------------------------------------------------------------------------------------------


@each_loss
@pytest.mark.parametrize(("make", "reduction"), [(value_and_grad, "none")])
def test_memory_is_linear(loss, make, reduction):
    function = lambda x, y, **o: getattr(nj, loss)(x, y, **o)  # noqa: E731
    small, large = (
        bytes_of(make(function, block_size=32, reduction=reduction), rows(n), rows(n)) for n in (SMALL, LARGE)
    )
    assert large < 5.5 * small, f"{small} -> {large} bytes"
    assert large < LARGE**2 * 4


@each_loss
def test_65536_rows(loss):
    x = jax.ShapeDtypeStruct((65_536, 128), jnp.float32)
    step = jax.value_and_grad(lambda x, y, t: getattr(nj, loss)(x, y, t), argnums=(0, 1, 2))
    assert bytes_of(step, x, x, jax.ShapeDtypeStruct((), jnp.float32)) <= 400e6
