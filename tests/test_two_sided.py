"""Tiles that serve both of their sides: the loss and gradient of whole matrices, for any cut and any temperature."""

import catalog
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pairs
import pytest
from assertions import assert_close

import ntxent_jax as nj
from ntxent_jax import contrast, coupled
from ntxent_jax.pairs import AT_OWN_POSITION, by_label
from ntxent_jax.scores import Options
from ntxent_jax.two_sided import among_themselves, between

pytestmark = pytest.mark.usefixtures("x64")


def one_temperature(case: catalog.Case, temperature: float = 0.6) -> catalog.Case:
    """With a temperature for each anchor rows and columns have no common level."""
    return case._replace(floats={**case.floats, "temperature": np.asarray(temperature)})


NAMES = [
    "ntxent",
    "ntxent all",
    "ntxent negatives",
    "ntxent items",
    "supcon out",
    "supcon in",
    "two views",
    "two views negatives",
    "three views",
    "instance",
]
CASES = {name: one_temperature(catalog.CASES[name]) for name in NAMES}
CASES["ntxent euclidean"] = CASES["ntxent"]._replace(similarity="negative_euclidean_distance")
CASES["supcon in dot"] = CASES["supcon in"]._replace(similarity="dot_product")
CLIP = {
    "images": np.random.default_rng(20).normal(size=(catalog.N, catalog.D)),
    "texts": np.random.default_rng(21).normal(size=(catalog.N, catalog.D)),
    "temperature": np.asarray(0.6),
    "weights": catalog.WEIGHTS,
}
CLIP_DATA = {"where": catalog.WHERE, "ids": np.array([0, 0, 1, 2, 3, 4, 5])}
CASES["clip"] = catalog.Case("clip_loss", ("images", "texts"), CLIP, CLIP_DATA)
CASES["clip smooth"] = CASES["clip"]._replace(static={"label_smoothing": 0.3})

each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def own_programs():
    """The package keeps compiled programs, in which what a test changes would not be seen."""
    contrast._compiled.clear_cache()
    yield
    contrast._compiled.clear_cache()


@pytest.fixture
def one_level(monkeypatch):
    """Let batches that need a level for each row give NaN."""
    monkeypatch.setattr(coupled, "_own_levels", _no_levels)


@pytest.fixture
def levels_of_rows(monkeypatch):
    """Let batches that one level serves give NaN."""
    monkeypatch.setattr(coupled, "_common_levels", _no_levels)


def _no_levels(*args):
    *_, sets, _ = args
    return tuple((jnp.full(met.label.shape, jnp.nan),) * 2 for met in (one.members for one in sets))


def outcome(case, block_size, reduction="mean"):
    step = jax.value_and_grad(lambda x: case(nj, x, reduction=reduction, block_size=block_size))
    return catalog.quick_jit(step)(case.floats)


def assert_same(streamed, whole, rtol=1e-11):
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=rtol, atol=1e-13), streamed, whole)


@each_case
def test_any_block(name, one_level):
    """Numbers of blocks odd and even, with and without filler; every third case down to a row each. And row by row."""
    case = CASES[name]
    whole = outcome(case, None)
    library = oracle_pairs if case.loss == "clip_loss" else oracle
    assert_close(whole[0], case(library, case.floats, reduction="mean"), rtol=1e-11, name="oracle")
    assert_same(outcome(case, 1 + list(CASES).index(name) % 3), whole)
    if case.loss != "clip_loss":  # With a temperature for each item no tile serves both of its sides.
        n = len(case.floats["weights"])
        rows = outcome(case._replace(floats={**case.floats, "temperature": np.full(n, 0.6)}), None)
        rows[1]["temperature"] = jnp.sum(rows[1]["temperature"])
        assert_same(rows, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ntxent", "supcon in", "two views", "clip"])
def test_in_parts(name, one_level, monkeypatch):
    """A block meets the others a few at a time; the last part may have nothing left to meet."""
    whole = outcome(CASES[name], None, "anchor_mean")
    for block, entries in ((2, 8), (1, 2)):
        contrast._compiled.clear_cache()
        monkeypatch.setattr(coupled, "_ENTRIES", entries)
        assert_same(outcome(CASES[name], block, "anchor_mean"), whole)


@pytest.mark.parametrize(
    "name", ["ntxent", "ntxent negatives", "supcon out", "supcon in", "three views", "clip smooth"]
)
def test_low_temperature(name, levels_of_rows):
    """Exponentials of a common level would vanish: each row's are taken from a maximum of its own."""
    case = one_temperature(CASES[name], 1e-4)
    assert_same(outcome(case, 3, "sum"), outcome(case, None, "sum"), rtol=1e-9)


@pytest.mark.parametrize("name", ["ntxent", "supcon in"])
def test_tiles_without_positives(name, one_level, monkeypatch):
    """Padding, and the same thing under another label, are no negatives there either."""
    data = {"labels": np.arange(7) // 2, "where": catalog.WHERE, "ids": np.array([0, 1, 2, 3, 4, 0, 5])}
    case = CASES[name]._replace(data=data)
    monkeypatch.setattr(coupled, "_ENTRIES", 1)  # Tiles one by one, most of which hold no positives.
    assert_same(outcome(case, 2), outcome(case, None))


def test_a_temperature_of_shape_one(levels_of_rows):
    """It is one number, not one for each anchor, which would leave the tiles unused."""
    for temperature, tiles in (([0.6], True), (np.full(catalog.N, 0.6), False)):
        assert np.isnan(outcome(one_temperature(CASES["ntxent"], temperature), 3)[0]) == tiles


@pytest.mark.parametrize("name", ["ntxent", "two views", "clip"])
@pytest.mark.parametrize("temperature", [1 / 66, 100.0])
def test_range_of_float32(name, temperature, one_level):
    """The lowest temperature at which a common level is used, in float32."""
    case = one_temperature(CASES[name], temperature)
    case = case._replace(floats=jax.tree.map(np.float32, case.floats))
    (value, gradient), (right, slopes) = outcome(case, 2), outcome(case, None)
    assert_close(value, right, rtol=8 * np.finfo(np.float32).eps * max(1, 1 / temperature))
    for name in gradient:
        assert_close(gradient[name], slopes[name], rtol=1e-3, atol=1e-4 * np.abs(slopes[name]).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("ntxent", "reverse over reverse"),
        ("supcon in", "forward over reverse"),
        ("clip", "forward over reverse"),
        ("two views", "reverse over reverse"),
    ],
)
def test_second_derivatives(name, second):
    case = CASES[name]
    moves = jax.tree.map(lambda x: np.cos(np.arange(x.size, dtype=float)).reshape(x.shape), case.floats)

    def product(block_size):
        gradient = jax.grad(lambda x: case(nj, x, block_size=block_size))
        if second == "forward over reverse":
            return catalog.quick_jit(lambda x: jax.jvp(gradient, (x,), (moves,))[1])(case.floats)
        along = lambda x: sum(jax.tree.leaves(jax.tree.map(lambda g, m: jnp.sum(g * m), gradient(x), moves)))  # noqa: E731
        return catalog.quick_jit(jax.grad(along))(case.floats)

    assert_same(product(3), product(None), rtol=1e-9)


def test_batches_of_batches():
    """Under vmap some temperatures have a common level and some have not."""
    case, temperatures = CASES["ntxent"], np.array([0.5, 1e-4, 0.8])
    run = lambda t, block: case(nj, {**case.floats, "temperature": t}, block_size=block)  # noqa: E731
    step = jax.vmap(jax.value_and_grad(run), in_axes=(0, None))
    assert_same(step(temperatures, 3), step(temperatures, None), rtol=1e-9)


def test_nan_is_not_hidden():
    rows = np.array(CASES["ntxent"].floats["embeddings"])
    rows[5, 1] = np.nan
    value, _ = outcome(CASES["ntxent"]._replace(floats={**CASES["ntxent"].floats, "embeddings": rows}), 3)
    assert np.isnan(value)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
@pytest.mark.parametrize("blocks", range(1, 10))
def test_every_pair_is_met_once(blocks, most):
    """Counted from both sides: each block needs each block, itself too, exactly once."""
    met = np.zeros((blocks, blocks), int)
    for own, start, rows, columns in zip(*among_themselves(blocks, most), strict=True):
        for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
            met[own, (start + i) % blocks] += row
            met[(start + i) % blocks, own] += column
    np.testing.assert_array_equal(met, np.ones_like(met))


@pytest.mark.parametrize("most", [1, 2, 3, 100])
@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_two_sets_meet_once(blocks, most):
    met = np.zeros((blocks, blocks), int)
    for own, start, rows, columns in zip(*between(blocks, most), strict=True):
        np.testing.assert_array_equal(rows, columns)
        for i in np.flatnonzero(rows):
            met[own, start + i] += 1
    np.testing.assert_array_equal(met, np.ones_like(met))


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("n", [1775, 1801, 4096, 8192, 10_000, 65_536])
@pytest.mark.parametrize("only", [None, AT_OWN_POSITION])
def test_little_is_met_for_nothing(n, sets, only):
    """Tiles without an option are cut such that none of them is nearly empty: blocks meet themselves, that is all."""
    block, most = coupled._cut(n, sets, Options(by_label, nj.cosine_similarity, only=only))
    blocks = -(-n // block)
    tiles = among_themselves(blocks, most) if sets == 1 else between(blocks, most)
    assert tiles.rows.size * block**2 < (1 + 2 / blocks) * n**2 / (3 - sets)
