"""The loss and the gradient of one batch are the same on any number of devices, whatever maps the loss over them."""

import jax
import numpy as np
import pytest
from assertions import assert_close, assert_nan, assert_states, assert_zero
from device_cases import BLOCK, CASES
from device_steps import STEPS
from inputs import X
from test_cases import LATTICE_GRADIENT, LATTICE_LOSS

import ntxent_jax as nj

GATHERS = ("all", "ring")
# The maps of the cases, one after the other.
IN_TURN = [
    ("checked", False, BLOCK),
    ("unchecked", True, None),
    ("two axes", True, None),
    ("unchecked", False, BLOCK),
    ("checked", True, BLOCK),
    ("unchecked", False, None),
    ("two axes", False, None),
    ("unchecked", True, BLOCK),
]
OTHERS = [
    *[
        (name, inside, block)
        for name in ("checked", "unchecked")
        for inside in (True, False)
        for block in (None, BLOCK)
    ],
    *[("pmap", True, BLOCK), ("pmap", False, None), ("vmap", True, None), ("vmap", False, BLOCK)],
]
CHECKED_OR_NOT = [(name, inside) for name in ("checked", "unchecked", "pmap", "vmap") for inside in (True, False)]


def assert_same(found, tolerance=1e-9):
    """The value, the direction and the length of a gradient; one of them alone misses a mistake or another."""
    assert found["value"] < tolerance, f"value: {found}"
    assert found["direction"] < tolerance, f"direction: {found}"
    assert found["length"] < tolerance, f"length: {found}"


def tolerance_of(name):
    return {"float32": 1e-5, "bfloat16": 5e-3}.get(name.split()[-1], 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name, eight_devices):
    """The ring in another map than the rest, so that every case is met both checked and not.

    Reductions are the same for both, so they take turns.
    """
    turn = list(CASES).index(name)
    gathers = GATHERS[:1] if name.endswith(("32", "16")) else GATHERS
    if name.endswith(("sum", "mean")):
        gathers = GATHERS[turn % 2 :][:1]
    ways = [(*IN_TURN[(turn + i) % 8], gather) for i, gather in enumerate(gathers)]
    for found in eight_devices("compared", name, ways):
        assert_same(found, tolerance_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHERS)
def test_every_map(way, eight_devices):
    name = ("ntxent", "two views none")[OTHERS.index(way) % 2]
    assert_same(eight_devices("compared", name, [(*way, "all")])[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), list(zip(["info_nce", "clip", "clip", "info_nce"], OTHERS[-4:], strict=True)))
def test_rings_of_other_maps(name, way, eight_devices):
    assert_same(eight_devices("compared", name, [(*way, "ring")])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("info_nce", 1), ("clip", 1), ("two views", 2), ("info_nce", 2), ("clip", 2)]
)
def test_small_rings(name, devices, eight_devices):
    """Alone, and with a neighbour who is both the next and the last."""
    assert_same(eight_devices("compared", name, [("checked", False, BLOCK, "ring", devices)])[0])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("loss", "gather"), [("ntxent_views", "ring"), ("info_nce_loss", "ring"), ("clip_loss", "all")]
)
def test_second_derivatives(loss, gather):
    """Forward over reverse and reverse over reverse on three devices: an odd circle, in which no two are opposite."""
    x, y = (np.cos(np.arange(24.0).reshape(3, 4, 2) * step) for step in (1.1, 2.3))

    def of_all(x):
        def of_each(x, y):
            return getattr(nj, loss)(x, y, temperature=0.5, axis_name="batch", gather=gather, block_size=3)

        return jax.vmap(of_each, axis_name="batch")(x, y)[0]

    def of_one(x):
        return getattr(nj, loss)(x.reshape(12, 2), y.reshape(12, 2), temperature=0.5)

    def products(f):
        direction = np.sin(x)
        slope = jax.grad(f)
        forward = jax.jvp(slope, (x,), (direction,))[1]
        return forward, jax.grad(lambda x: (slope(x) * direction).sum())(x)

    for found, right in zip(jax.jit(lambda: products(of_all))(), jax.jit(lambda: products(of_one))(), strict=True):
        assert_close(found, right)


@pytest.mark.parametrize(
    ("name", "inside", "gather"),
    [("ntxent", True, "all"), ("two views", False, "ring"), ("info_nce", True, "ring"), ("clip", False, "all")],
)
def test_copies_along_another_axis(name, inside, gather, eight_devices):
    """Rows are split along one axis of a mesh; the devices along the other axis, say parts of a model, hold copies."""
    assert_same(eight_devices("compared", name, [("one of two", inside, BLOCK, gather, 4)])[0])


@pytest.mark.parametrize(("name", "block_size"), [("checked", BLOCK), ("unchecked", None), ("pmap", None), ("vmap", 1)])
def test_statistics(name, block_size, eight_devices):
    assert eight_devices("statistics", block_size, name) < 1e-12


@pytest.mark.parametrize(
    ("name", "gather", "map_", "times"),
    [
        ("info_nce keys", "all", "checked", 1),
        ("clip", "ring", "checked", 1),
        ("ntxent", "all", "unchecked", 8),
        ("clip", "ring", "unchecked", 8),
        ("info_nce keys", "all", "pmap", 8),
        ("ntxent", "all", "vmap", 8),
    ],
)
def test_gradient_of_own_rows_inside(name, map_, times, gather, eight_devices):
    """Nothing averages the gradient of rows: where the map does not check, each device's loss counts once more."""
    found = eight_devices("rows_inside", name, (map_, True, BLOCK, gather))
    assert found["value"] < 1e-9
    assert found["direction"] < 1e-9
    assert_close(found["length"] + 1, times)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gather"), [*((name, "all") for name in STEPS), ("gradient cache", "ring"), ("descent", "ring")]
)
def test_steps_of_training(name, gather, eight_devices):
    """A queue, a cached gradient, prefixes, rematerialisation, and steps in a loop, all inside of a map."""
    map_ = "checked" if gather == "ring" else ("unchecked", "vmap", "checked")[list(STEPS).index(name) % 3]
    assert_same(eight_devices("step", name, (map_, True, BLOCK, gather)))


# Cases with their values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("map_", "inside", "gather"),
    [*((*way, "all") for way in CHECKED_OR_NOT), ("checked", True, "ring"), ("unchecked", False, "ring")],
)
def test_cases_2_and_38_gradient_of_parameters(map_, inside, gather, eight_devices):
    """Neither the number of devices times too large, nor too small; the positives are not those of the first device."""
    value, gradient = eight_devices("fixed", "one way", (map_, inside, 1 if inside else None, gather, 4), True)
    assert_states(value, LATTICE_LOSS)
    assert_states(gradient, LATTICE_GRADIENT)


@pytest.mark.parametrize(
    ("mistake", "cosine", "length"), [("foreign keys", 0.9746, 1.0018), ("all keys", -0.3876, 1.925)]
)
@pytest.mark.parametrize(("map_", "inside"), [("checked", True), ("vmap", False)])
def test_case_3_keys_without_gradient_show(mistake, cosine, length, map_, inside, eight_devices):
    """The value is right, and where only the keys of other devices have no gradient even its length nearly is."""
    value, gradient = eight_devices("with_mistake", mistake, "fixed", "one way", (map_, inside, None, "all", 4), True)
    wrong, right = np.ravel(gradient), np.ravel(LATTICE_GRADIENT)
    lengths = np.linalg.norm(wrong), np.linalg.norm(right)
    assert_states(value, LATTICE_LOSS)
    assert_close(wrong @ right / np.prod(lengths), cosine, atol=5e-5)
    assert_close(lengths[0] / lengths[1], length, atol=5e-4)


@pytest.mark.parametrize(
    ("name", "devices", "right"),
    [("one way", 4, 1.4508908949), ("two views", 4, 1.9462923238), ("hard negatives", 2, 0.4105006862)],
)
@pytest.mark.parametrize(("map_", "gather"), [("checked", "ring"), ("vmap", "all")])
def test_case_7_positions_of_positives(name, devices, right, map_, gather, eight_devices):
    """Without the offset of a device its positives would be those of the first, or of the other view."""
    value, _ = eight_devices("fixed", name, (map_, False, None, gather, devices), False)
    assert_states(value, right)


@pytest.mark.parametrize(("map_", "gather"), [("checked", "ring"), ("vmap", "all")])
def test_case_22_two_batches_are_not_one(map_, gather, eight_devices):
    """On four devices, too, the mean over two batches of four rows is another loss than one batch of eight."""
    one, slope = eight_devices("fixed", "one way", (map_, False, None, gather, 4), False)
    two, other = eight_devices("fixed", "halves", (map_, False, None, gather, 4), False)
    assert_states(one, 1.4508908949)
    assert_states(two, 0.8852267407)
    slope, other = np.ravel(slope), np.ravel(other)
    lengths = np.linalg.norm(slope), np.linalg.norm(other)
    assert_close(slope @ other / np.prod(lengths), 0.8660, atol=5e-5)
    assert_close(lengths[1] / lengths[0], 0.8475, atol=5e-5)


# Batches without a loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "gather"),
    [
        *((loss, "all") for loss in ("ntxent", "clip_loss", "siglip_loss")),
        ("ntxent", "ring"),
        ("info_nce_loss", "ring"),
    ],
)
def test_nothing_counts_and_nan_is_everywhere(loss, gather):
    """Padding only: a loss of 0, and no gradient. NaN in a row of one device is NaN on all of them."""

    def of_each(x, y, where):
        second = np.zeros(2, int) if loss == "ntxent" else y
        return getattr(nj, loss)(x, second, temperature=0.5, where=where, axis_name="batch", gather=gather)

    step = jax.jit(jax.value_and_grad(lambda *args: jax.vmap(of_each, axis_name="batch")(*args).sum()))
    rows, where = X.reshape(3, 2, 3), np.zeros((3, 2), bool)
    assert_zero(*step(rows, rows, where))
    broken = rows + np.where(np.arange(3) == 1, np.nan, 0)[:, None, None]
    assert_nan(step(broken, rows, ~where)[0])
    assert_zero(*step(broken, broken, where))


# Mistakes that the comparison must see -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("ntxent", ("checked", False, BLOCK)),
        ("two views none", ("unchecked", True, None)),
        ("info_nce keys", ("checked", True, None)),
        ("clip", ("unchecked", False, BLOCK)),
    ],
)
def test_foreign_keys_without_gradient_are_seen(name, way, eight_devices):
    (found,) = eight_devices("with_mistake", "foreign keys", "compared", name, [way])
    assert found["value"] < 1e-9
    with pytest.raises(AssertionError, match="direction"):
        assert_same(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "name"),
    [("never home", "two views"), *[("wrong neighbour", name) for name in ("two views", "clip", "info_nce")]],
)
def test_mistakes_of_a_ring_are_seen(name, mistake, eight_devices):
    (found,) = eight_devices("with_mistake", mistake, "compared", name, [("unchecked", False, BLOCK, "ring")])
    with pytest.raises(AssertionError):
        assert_same(found)


@pytest.mark.parametrize(("name", "map_"), [("ntxent", "checked"), ("clip", "unchecked"), ("two views none", "vmap")])
def test_gradients_summed_instead_of_averaged_are_seen(name, map_, eight_devices):
    """Their direction is right, and so is the loss."""
    (found,) = eight_devices("with_mistake", "sum", "compared", name, [(map_, True, None)])
    assert_close(found["length"] + 1, 8)
    with pytest.raises(AssertionError, match="length"):
        assert_same(found)


@pytest.mark.parametrize("name", ["ntxent", "clip"])
def test_gradients_not_averaged_are_seen(name, eight_devices):
    (found,) = eight_devices("with_mistake", "own", "compared", name, [("unchecked", True, None)])
    assert found["value"] < 1e-9
    with pytest.raises(AssertionError, match="direction"):
        assert_same(found)


@pytest.mark.parametrize(("name", "map_"), [("ntxent", "unchecked"), ("clip", "checked"), ("info_nce keys", "vmap")])
def test_a_loss_times_the_number_of_devices_is_seen(name, map_, eight_devices):
    (found,) = eight_devices("with_mistake", "count", "compared", name, [(map_, False, None)])
    assert_close(found["value"] + 1, 8)
    with pytest.raises(AssertionError, match="value"):
        assert_same(found)


# Bad input ---------------------------------------------------------------------------------------------------------


LOSSES = {
    "ntxent": lambda **options: nj.ntxent(X, np.arange(6), **options),
    "ntxent_views": lambda **options: nj.ntxent_views(X, X, **options),
    "supcon_loss": lambda **options: nj.supcon_loss(X, np.arange(6), **options),
    "instance_loss": lambda **options: nj.instance_loss(X, X, **options),
    "info_nce_loss": lambda **options: nj.info_nce_loss(X, X, **options),
    "multiple_negatives_ranking_loss": lambda **options: nj.multiple_negatives_ranking_loss(X, X, **options),
    "clip_loss": lambda **options: nj.clip_loss(X, X, **options),
    "siglip_loss": lambda **options: nj.siglip_loss(X, X, **options),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@each_loss
@pytest.mark.parametrize("axis_name", ["batch", ("host", "chip")])
def test_axis_name_must_be_an_axis(loss, axis_name):
    with pytest.raises(ValueError, match=r"axis_name=.* is not an axis here; call the loss inside jax\.shard_map"):
        loss(axis_name=axis_name)
    with pytest.raises(ValueError, match=r"axis_name=.* is not an axis here"):
        jax.jit(lambda: loss(axis_name=axis_name))()
    with pytest.raises(TypeError, match="axis_name must be the name of an axis, or several names, got 3"):
        loss(axis_name=3)


def test_statistics_need_an_axis():
    with pytest.raises(ValueError, match="axis_name='batch' is not an axis here"):
        nj.batch_statistics(X, np.arange(6), axis_name="batch")


@each_loss
def test_ring_needs_an_axis(loss):
    with pytest.raises(ValueError, match="gather='ring' given without axis_name"):
        loss(gather="ring")


@each_loss
def test_unknown_gather(loss):
    with pytest.raises(ValueError, match=r"gather.*half"):
        loss(gather="half")


def test_pairs_are_those_of_all_devices():
    """One device's queries, and the keys of all: local pairs would be a square."""

    def loss(queries, keys, pair_where):
        return nj.info_nce_loss(queries, keys, pair_where=pair_where, axis_name="batch")

    rows = X.reshape(3, 2, 3)
    step = jax.vmap(loss, axis_name="batch")
    assert step(rows, rows, np.ones((3, 2, 6), bool)).shape == (3,)
    with pytest.raises(ValueError, match=r"pair_where must have shape \[2, 6\].*got \[2, 2\]"):
        step(rows, rows, np.ones((3, 2, 2), bool))


def test_per_item_arguments_are_local():
    rows, labels = X.reshape(3, 2, 3), np.zeros((3, 2), int)
    step = jax.vmap(
        lambda x, y, w: nj.ntxent(x, y, weights=w, axis_name="batch"), axis_name="batch", in_axes=(0, 0, None)
    )
    with pytest.raises(ValueError, match=r"weights must have shape \[2\].*got \[6\]"):
        step(rows, labels, np.ones(6))
