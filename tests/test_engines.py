"""Every loss, reduction and engine gives the oracle's value and gradient, with all options on."""

import catalog
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close
from catalog import ALL_BLOCKS, BLOCK, CASES, REDUCTIONS, along, directions, expected, outcome

import ntxent_jax as nj
from ntxent_jax import batch, contrast, coupled
from ntxent_jax import inputs as arguments
from ntxent_jax.engine import map_rows, rows_per_block, spare_columns, sum_over_rows

pytestmark = pytest.mark.usefixtures("x64")


def assert_right(name, reduction, block_size):
    value, gradient = outcome(name, reduction, block_size)
    right, slopes = expected(name, reduction)
    assert value.shape == np.shape(right)
    assert_close(value, right, rtol=1e-11, name="value")
    got = [along(gradient, move) for move in directions(name, 4)]
    assert_close(got, slopes, rtol=1e-8, atol=1e-9, name="derivatives along all arguments")


def assert_same(name, reduction, block_size):
    """Streamed is whole, every entry of every gradient."""
    streamed, whole = outcome(name, reduction, block_size), outcome(name, reduction, None)
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-11, atol=1e-13), streamed, whole)


@pytest.mark.parametrize("name", CASES)
def test_whole_and_streamed(name):
    assert_right(name, "mean", None)
    assert_right(name, "mean", BLOCK)
    assert_same(name, "mean", BLOCK)


@pytest.mark.parametrize("reduction", [reduction for reduction in REDUCTIONS if reduction != "mean"])
@pytest.mark.parametrize("name", ["ntxent", "supcon in candidates", "three views all", "info_nce own"])
def test_other_reductions(name, reduction):
    assert_right(name, reduction, None)
    assert_right(name, reduction, BLOCK)
    assert_same(name, reduction, BLOCK)


@pytest.mark.parametrize("block_size", [block for block in ALL_BLOCKS if block not in (None, BLOCK)])
@pytest.mark.parametrize("name", ["three views all"])
def test_any_block(name, block_size):
    assert_right(name, "mean", block_size)
    assert_same(name, "mean", block_size)


def test_rows_without_reduction_in_blocks_of_one():
    assert_right("info_nce own", "none", 1)


@pytest.mark.parametrize("name", ["ntxent items", "supcon out candidates", "ranking own"])
def test_rows_prepared_in_blocks(name, monkeypatch):
    whole = outcome(name, "mean", BLOCK)
    monkeypatch.setattr(batch, "_AT_ONCE", 0)
    monkeypatch.setattr(batch, "_BLOCK", 2 * catalog.D)
    contrast._compiled.clear_cache()
    in_blocks = outcome.__wrapped__(name, "mean", BLOCK)
    contrast._compiled.clear_cache()
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-11, atol=1e-13), in_blocks, whole)


@pytest.mark.parametrize("name", CASES)
def test_every_argument_has_a_gradient(name):
    """No argument was forgotten: all gradients are far from 0, row by row where the row counts."""
    _, gradient = outcome(name, "mean", BLOCK)
    assert set(gradient) == set(CASES[name].floats)
    for argument, value in gradient.items():
        assert np.linalg.norm(value) > 1e-3, argument


@pytest.mark.parametrize("name", CASES)
def test_logits_are_of_order_one(name):
    """A condition of these tests: no term of a softmax is negligible."""
    assert 0.3 < np.median([x for x in np.abs(CASES[name](oracle, CASES[name].floats, reduction="none")) if x]) < 6


# The engine alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "block_size", "rows"),
    [
        (0, 5, None, 0),
        (0, 0, 3, 0),
        (7, 0, None, 7),
        (7, 11, 3, 3),
        (7, 11, 4, 4),
        (7, 11, 6, 4),  # Two blocks of nearly equal size.
        (7, 11, 7, 7),
        (7, 11, 100, 7),
        (1024, 1024, None, 1024),
        (2048, 2048, None, 683),
        (1255, 1255, None, 628),
        (300, 1 << 22, None, 100),
    ],
)
def test_rows_per_block(n, m, block_size, rows):
    assert rows_per_block(n, m, block_size) == rows


@pytest.mark.parametrize("block", [1, 2, 3, 6, 7, 8])
def test_any_row_function_summed_or_mapped(block):
    """Fillers are not real, rows come back in order, integers pass through, closed-over arrays have gradients."""
    x, numbers, shared = inputs.random_rows(7, 3), np.arange(7) * 10, inputs.random_rows(5, 3, seed=1)
    bias = jnp.asarray(0.3)

    def run(x, shared, bias):
        def row_sums(own, real, shared):
            value = jnp.tanh(own[0] @ shared.T + bias).sum(1) * jnp.where(real, 1.0, 0.0)
            return value.sum(), (own[1], value)

        def rows(own, real, shared):
            return own[1], jnp.tanh(own[0] @ shared.T + bias).sum(1)

        summed = sum_over_rows(row_sums, (x, jnp.asarray(numbers)), shared, block)
        mapped = map_rows(rows, (x, jnp.asarray(numbers)), shared, block)
        return summed[0] + (mapped[1] * catalog.FACTORS).sum(), (summed, mapped)

    def dense(x, shared, bias):
        value = jnp.tanh(x @ shared.T + bias).sum(1)
        return value.sum() + (value * catalog.FACTORS).sum()

    gradient, ((total, (passed, values)), mapped) = catalog.quick_jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(
        x, shared, bias
    )
    rows = np.tanh(x @ shared.T + 0.3).sum(1)
    assert_close(total, rows.sum())
    np.testing.assert_array_equal(passed, numbers)
    np.testing.assert_array_equal(mapped[0], numbers)
    assert_close(values, rows)
    assert_close(mapped[1], rows)
    jax.tree.map(assert_close, gradient, jax.grad(dense, argnums=(0, 1, 2))(x, shared, bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_streamed_by_itself_when_large(reduction):
    """1,800 rows make more scores than are held at once."""
    n = 1800
    assert rows_per_block(n, n, None) < n
    x, labels = np.float32(inputs.random_rows(n, 4)), np.arange(n) // 3
    step = catalog.quick_jit(
        jax.value_and_grad(lambda x, b: jnp.mean(nj.ntxent(x, labels, 0.5, reduction=reduction, block_size=b))),
        static_argnums=1,
    )
    (value, gradient), (right, right_gradient) = step(x, None), step(x, n)
    assert_close(value, right, rtol=1e-5)
    assert_close(gradient, right_gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("sizes", [(0.01, 1e5), (1e5, 0.01)])
def test_streamed_where_one_side_is_much_longer(sizes):
    """Logits of some hundreds, whose exponentials no float32 holds."""
    x, y = (np.float32(size * inputs.random_rows(7, 3, seed=i)) for i, size in enumerate(sizes))
    options = {"candidates": y, "candidate_labels": catalog.LABELS, "similarity": nj.dot_product}
    whole, streamed = (nj.ntxent(x, catalog.LABELS, 1.0, block_size=block, **options) for block in (None, BLOCK))
    assert 100 < whole < 1e4
    assert_close(streamed, whole, rtol=1e-6)


def test_streamed_where_own_negatives_are_much_longer():
    """The length of keys says nothing about them."""
    queries, keys = np.float32(inputs.random_rows(2, 7, 3))
    negatives = np.float32(300 * inputs.random_rows(7, 2, 3, seed=5))
    options = {"temperature": 1.0, "similarity": nj.dot_product}
    whole, streamed = (nj.info_nce_loss(queries, keys, negatives, block_size=b, **options) for b in (None, BLOCK))
    assert 100 < whole < 1e4
    assert_close(streamed, whole, rtol=1e-6)


@pytest.mark.parametrize("loss", ["ntxent", "supcon_loss"])
def test_several_positives_among_candidates_of_anchors_that_all_differ(loss):
    x, y = inputs.random_rows(2, 7, 3)
    options = {"candidates": y, "candidate_labels": catalog.LABELS, "temperature": 0.5}
    right = getattr(oracle, loss)(x, np.arange(7) - 1, **options)
    for block_size in (None, BLOCK):
        assert_close(getattr(nj, loss)(x, np.arange(7) - 1, block_size=block_size, **options), right)


IDS, PAIRS = np.arange(512) // 2, np.random.default_rng(7).random((512, 512)) < 0.7


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: nj.info_nce_loss(x[:504], y[:504], x[504:], temperature=0.5, label_smoothing=0.1, ids=IDS[:504]),
        lambda x, y: nj.info_nce_loss(x, x, temperature=0.5, pair_where=PAIRS, key_bias=y[:, 0], key_where=PAIRS[0]),
        lambda x, y: nj.info_nce_loss(x, y, temperature=0.5, class_prior=0.1, block_size=100, reduction="sum"),
        lambda x, y: nj.info_nce_loss(x, y, temperature=0.5, margin=0.1, guide_queries=y, guide_keys=x),
        lambda x, y: nj.clip_loss(x, y, 0.5, where=PAIRS[0], label_smoothing=0.1),
    ],
    ids=["shared", "pairs", "blocks", "guide", "clip"],
)
def test_spare_columns_are_not_seen(loss, monkeypatch):
    """512 keys get hidden ones on a CPU, since products are quicker with them."""
    assert [spare_columns(m) for m in (0, 504, 512)] == [0, 0, 16]
    x, y = inputs.random_rows(2, 512, 3)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    found, asked = step(x, y), []
    for module in (arguments, coupled):
        monkeypatch.setattr(module, "spare_columns", lambda m: asked.append(m) or 0)
    jax.clear_caches()
    right = step(x, y)
    jax.clear_caches()
    assert asked == [512]
    jax.tree.map(assert_close, found, right)
