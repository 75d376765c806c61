"""jit, vmap, scan, checkpoint, and their mixtures; and that new values never compile again."""

import catalog
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_no_nan
from catalog import BLOCK, CASES, quick_jit

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])

COMPILED = []


def _count(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_count)


@in_float64
@pytest.mark.parametrize(
    ("name", "block_size"), [("ntxent", None), ("three views all", BLOCK), ("info_nce own", BLOCK)]
)
def test_jit_is_eager(name, block_size):
    case = CASES[name]
    eager = case(nj, case.floats, block_size=block_size)
    jitted = quick_jit(lambda floats, data: case(nj, floats, data, block_size=block_size))(case.floats, case.data)
    assert_close(eager, case(oracle, case.floats))
    assert_close(jitted, eager)


@in_float64
@pytest.mark.parametrize(
    ("name", "block_size"), [("ntxent", None), ("three views all", BLOCK), ("info_nce own", BLOCK)]
)
def test_vmap_over_every_argument(name, block_size):
    """Three batches at once, each with its own rows, labels, masks, temperatures and weights."""
    case, rng = CASES[name], np.random.default_rng(3)
    orders = [np.arange(catalog.N), rng.permutation(catalog.N), rng.permutation(catalog.N)]

    def reordered(arrays, order):
        return {k: x[order] if k in ("temperature", "weights", "labels", "where") else x for k, x in arrays.items()}

    floats = [{k: x * (1 + 0.1 * i) for k, x in reordered(case.floats, o).items()} for i, o in enumerate(orders)]
    data = [reordered(case.data, order) for order in orders]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *floats), jax.tree.map(lambda *xs: np.stack(xs), *data)
    step = jax.value_and_grad(lambda floats, data: case(nj, floats, data, block_size=block_size))
    values, gradients = quick_jit(jax.vmap(step))(*stacked)
    single = quick_jit(step)
    for i in range(3):
        value, gradient = single(floats[i], data[i])
        assert_close(values[i], case(oracle, floats[i], data[i]))
        assert_close(values[i], value)
        jax.tree.map(lambda x, y, i=i: assert_close(x[i], y), gradients, gradient)


@in_float64
@streamed
@pytest.mark.parametrize("axis", ["temperature", "weights", "where"])
def test_vmap_over_one_argument(axis, block_size):
    """The rows are shared: a sweep over temperatures, of bootstrap weights, of masks."""
    rows, labels = inputs.random_rows(7, 3), catalog.LABELS
    several = {
        "temperature": np.array([0.3, 0.5, 1.0]),
        "weights": np.random.default_rng(1).uniform(0.5, 2, (3, 7)),
        "where": np.random.default_rng(2).random((3, 7)) < 0.8,
    }[axis]
    rest = {} if axis == "temperature" else {"temperature": 0.5}
    loss = quick_jit(jax.vmap(lambda v: nj.ntxent(rows, labels, block_size=block_size, **rest, **{axis: v})))
    assert_close(loss(several), [oracle.ntxent(rows, labels, **rest, **{axis: v}) for v in several])


@in_float64
@streamed
def test_scan_is_a_training_loop(block_size):
    """Ten steps under lax.scan are ten steps by hand, and the loss falls."""
    a, b = inputs.random_rows(2, 7, 3)

    def step(weight, temperature):
        value, gradient = jax.value_and_grad(
            lambda w: nj.ntxent_views(a @ w, b @ w, temperature=temperature, block_size=block_size)
        )(weight)
        return weight - 0.1 * gradient, value

    temperatures = jnp.linspace(1.0, 0.9, 10)
    weight, values = quick_jit(lambda w: jax.lax.scan(step, w, temperatures))(jnp.eye(3))
    by_hand, quick_step = jnp.eye(3), quick_jit(step)
    for temperature in temperatures:
        by_hand, _ = quick_step(by_hand, temperature)
    assert_close(weight, by_hand)
    assert values[-1] < values[0]


@in_float64
@streamed
def test_checkpoint(block_size):
    a, b = inputs.random_rows(2, 7, 3)

    def loss(weight):
        return nj.info_nce_loss(jnp.tanh(a @ weight), b @ weight, temperature=0.5, block_size=block_size)

    plain, saved = quick_jit(jax.grad(loss)), quick_jit(jax.grad(jax.checkpoint(loss)))
    assert_close(saved(np.eye(3)), plain(np.eye(3)))


@pytest.mark.slow
@in_float64
@streamed
def test_grad_inside_vmap_inside_jit(block_size):
    """Gradients of gradients of several batches: a meta-learning step."""
    rows, labels = inputs.random_rows(3, 7, 3), np.arange(7) % 3

    def adapted(x):
        inner = jax.grad(lambda y: nj.supcon_loss(y, labels, 0.5, block_size=block_size))
        return nj.supcon_loss(x - 0.3 * inner(x), labels, 0.5, block_size=block_size)

    gradients = quick_jit(jax.vmap(jax.grad(adapted)))(rows)
    move = inputs.random_rows(7, 3, seed=8)
    quick = quick_jit(adapted)
    for x, gradient in zip(rows, gradients, strict=True):
        slope = oracle.gradient(lambda t, x=x: float(quick(x + t * move)), 0.0)
        assert_close(np.vdot(gradient, move), slope, rtol=1e-7)


def test_debug_nans_sees_nothing():
    """No NaN inside, not even one that a jnp.where hides afterwards."""
    x, y = np.float32(inputs.random_rows(2, 7, 3))
    x[2] = y[2] = 0
    where = np.arange(7) != 3
    with jax.debug_nans(True):
        for similarity in (nj.cosine_similarity, nj.negative_euclidean_distance):
            options = {"temperature": 0.5, "block_size": BLOCK, "similarity": similarity, "where": where}
            step = jax.jit(jax.value_and_grad(lambda x, options=options: nj.info_nce_loss(x, y, **options)))
            assert_no_nan(step(x))


# No compilation for new values --------------------------------------------------------------------------------------


def compilations(calls):
    """Number of programs compiled by each of some calls."""
    numbers = []
    for call in calls:
        before = len(COMPILED)
        jax.block_until_ready(call())
        numbers.append(len(COMPILED) - before)
    return numbers


def batch(seed):
    return jnp.asarray(inputs.random_rows(7, 3, seed=seed), jnp.float32)


@streamed
@pytest.mark.parametrize(
    "call",
    [
        lambda seed, t, w, b: nj.ntxent(batch(seed), jnp.arange(7) // 2 + seed, t, weights=w, block_size=b),
        lambda seed, t, w, b: nj.supcon_loss(batch(seed), jnp.arange(7) // (2 + seed), t, weights=w, block_size=b),
        lambda seed, t, w, b: nj.ntxent_views(batch(seed), batch(9), temperature=t, weights=w, block_size=b),
        lambda seed, t, w, b: nj.info_nce_loss(batch(seed), batch(9), temperature=t, weights=w, block_size=b),
    ],
    ids=["ntxent", "supcon", "views", "info_nce"],
)
def test_new_values_called_by_hand(call, block_size):
    """Temperatures from a schedule, weights, labels, batches."""
    schedule = [0.5, 0.4, 0.1, 0.07]
    weights = [jnp.linspace(0.5, 1 + i, 7) for i in range(4)]
    first, *later = compilations([lambda i=i: call(i, schedule[i], weights[i], block_size) for i in range(4)])
    assert first > 0
    assert later == [0, 0, 0]


def test_new_values_in_a_jitted_step():
    """The user's own step is traced once."""
    traces = []

    @jax.jit
    def step(x, y, temperature, weights):
        traces.append(None)
        return jax.grad(lambda x: nj.info_nce_loss(x, y, temperature=temperature, weights=weights))(x)

    for seed, temperature in enumerate((0.5, 0.4, 0.07)):
        step(batch(seed), batch(9), temperature, jnp.linspace(0.5, 1 + seed, 7))
    assert len(traces) == 1


def test_similarity_of_the_user_under_jit_is_traced_once():
    traces = []

    def similarity(x, y):
        traces.append(None)
        return x @ y.T

    step = jax.jit(jax.grad(lambda x: nj.info_nce_loss(x, x[::-1], similarity=similarity, block_size=3)))
    step(batch(0))
    number = len(traces)
    step(batch(1))
    assert 0 < number == len(traces)


def test_compilations_are_counted():
    """The counter sees what it is meant to see: another shape is another program."""
    numbers = compilations([lambda n=n: nj.ntxent(jnp.ones((n, 13)), jnp.arange(n)) for n in (17, 17, 19)])
    assert numbers[0] > 0
    assert numbers[1] == 0
    assert numbers[2] > 0
