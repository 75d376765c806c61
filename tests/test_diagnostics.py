"""The floor of a loss, and statistics of a batch, against the oracle and against models that reach them."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_nan, assert_zero
from catalog import BLOCK, CASES

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, 1, BLOCK], ids=["whole", "blocks of 1", "streamed"])


# Floor --------------------------------------------------------------------------------------------------------------


@in_float64
def test_loss_floor_against_the_oracle():
    for k in (0, 1, 2, 510, 65_535):
        for temperature in (0.01, 0.07, 0.5, 1.0, 100.0, np.inf):
            for positives in (1, 3):
                for lowest in (-1.0, -1 / 255, 0.0, 1.0):
                    options = {"num_positives": positives, "lowest_similarity": lowest}
                    got = nj.loss_floor(k, temperature, **options)
                    assert_close(got, oracle.loss_floor(k, temperature, **options), rtol=1e-13, atol=0)
    assert nj.loss_floor(0, 0.5) == 0


def test_loss_floor_is_small_not_zero():
    """1e-16 in float32, where log(1 + x) would be 0."""
    assert_close(nj.loss_floor(2, 0.05), 2 * np.exp(-40), rtol=1e-5, atol=0)


def test_loss_floor_of_arrays():
    """Broadcast, differentiable, under jit."""
    floors = nj.loss_floor(np.array([1, 10, 100]), np.array([[0.1], [0.5]]))
    assert floors.shape == (2, 3)
    assert floors.dtype == jnp.float32
    slope = jax.jit(jax.grad(lambda t: nj.loss_floor(10, t)))(0.5)
    odds = 10 * np.exp(-4)
    assert_close(slope, odds / (1 + odds) * 2 / 0.25, rtol=1e-5)


@pytest.mark.parametrize("n", [2, 4, 6])
def test_a_simplex_reaches_the_floor(n, x64):
    """The best batch of n items: views equal, items at the corners of a simplex."""
    corners = np.eye(n) - 1 / n
    bound = {"lowest_similarity": -1 / (n - 1)}
    views = nj.ntxent_views(corners, corners, temperature=0.3)
    assert_close(views, nj.loss_floor(2 * (n - 1), 0.3, **bound))
    assert_close(nj.info_nce_loss(corners, corners, temperature=0.3), nj.loss_floor(n - 1, 0.3, **bound))
    three = nj.supcon_loss(np.tile(corners, (3, 1)), np.tile(np.arange(n), 3), 0.3)
    assert_close(three, nj.loss_floor(3 * (n - 1), 0.3, num_positives=2, **bound))


# Statistics ---------------------------------------------------------------------------------------------------------


@in_float64
@streamed
@pytest.mark.parametrize("name", ["ntxent", "supcon out candidates"])
def test_statistics(name, block_size):
    """With ids, masks and candidates; a similarity other than the default."""
    case = CASES[name]
    options = {key: x for key, x in {**case.floats, **case.data}.items() if key not in ("temperature", "weights")}
    x, labels = options.pop("embeddings"), options.pop("labels")
    for similarity in ("cosine_similarity", "negative_euclidean_distance"):
        got = nj.batch_statistics(x, labels, block_size=block_size, similarity=getattr(nj, similarity), **options)
        right = oracle.batch_statistics(x, labels, similarity=getattr(oracle, similarity), **options)
        for field, value, expected in zip(got._fields, got, right, strict=True):
            assert_close(value, expected, name=field)


def test_statistics_of_views_and_under_jit():
    rows, labels = np.float32(inputs.random_rows(5, 2, 3)), jnp.array([0, 1, 2, 3, 3])
    stats = jax.jit(nj.batch_statistics)(rows, labels)
    flat = nj.batch_statistics(rows.reshape(10, 3), np.repeat(labels, 2))
    assert_close(stats, flat, rtol=1e-6)
    assert all(value.shape == () and value.dtype == jnp.float32 for value in stats)


def test_chance_loss_is_the_loss_of_a_collapse():
    labels = np.array([0, 0, 0, 1, 1, 2])
    rows = np.ones((6, 3), np.float32)
    stats = nj.batch_statistics(rows, labels)
    assert_close(stats.chance_loss, nj.ntxent(rows, labels, 0.5), rtol=1e-6)
    assert stats.accuracy == 0


def test_accuracy():
    """Ties against the model; NaN against the model; an anchor without negatives is right."""
    rows = np.float32([[1, 0], [1, 0], [0, 1], [0, 1]])
    assert nj.batch_statistics(rows, [0, 0, 1, 1]).accuracy == 1
    assert nj.batch_statistics(rows, [0, 1, 0, 1]).accuracy == 0
    assert nj.batch_statistics(rows[:2], [0, 0]).accuracy == 1
    spoilt = rows.copy()
    spoilt[1] = np.nan
    assert nj.batch_statistics(spoilt, [0, 0, 1, 1]).accuracy < 1


def test_statistics_of_nothing():
    rows = np.ones((3, 2), np.float32)
    stats = nj.batch_statistics(rows, [0, 0, 0], where=np.zeros(3, bool))
    assert_zero(stats[:3])
    assert_nan(stats[3:])
    stats = nj.batch_statistics(rows, [0, 1, 2])
    assert_close(stats[:3], [0, 0, 6])
    assert_nan(stats.positive_similarity, stats.accuracy, stats.chance_loss)
    assert_close(stats[4:6], [1, 1], rtol=1e-6)
    empty = nj.batch_statistics(np.zeros((0, 2), np.float32), np.zeros(0, int))
    assert_zero(empty[:3])
    alone = nj.batch_statistics(rows, [0, 0, 0])
    assert_finite(alone.positive_similarity, alone.accuracy, alone.chance_loss)
    assert_nan(alone.negative_similarity, alone.hardest_negative_similarity)


def test_statistics_of_padding():
    """Padded rows hold anything and change nothing."""
    rows = np.float32(inputs.random_rows(6, 3))
    labels, where = np.array([0, 0, 1, 1, 0, 1]), np.arange(6) < 4
    right = nj.batch_statistics(rows[:4], labels[:4])
    rows[4:] = np.nan, np.inf, 0
    assert_close(nj.batch_statistics(rows, labels, where=where, block_size=4), right, rtol=1e-6)
