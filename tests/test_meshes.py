"""Plain ``jax.jit`` of a batch that lies on the devices of a mesh, and what a program needs on each device."""

import jax
import pytest
from device_cases import BLOCK, CASES
from test_devices import GATHERS, assert_same, tolerance_of

SOME_CASES = ("ntxent", "two views none", "info_nce keys", "clip")
# Of the cases those that differ in the arrays that come in, or in how they meet.
ALIKE = ("mean", "sum", "in", "cold", "smoothed", "float32", "harder", "none")
EXPLICIT = [name for name in CASES if not name.endswith(ALIKE)]
WAYS = [
    (name, kind, block_size, how)
    for name in SOME_CASES
    for kind, block_size, how in [
        ("Auto", BLOCK, "jit"),
        ("Auto", None, "mesh set"),
        ("Explicit", None, "mesh set"),
        ("Explicit", BLOCK, "no jit"),
    ]
]
PROGRAMS = ("labels", "views", "clip", "queries")
KINDS = [*(("axis_name", gather) for gather in GATHERS), ("Auto", "all"), ("Explicit", "all")]


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes(name, eight_devices):
    """The default of ``jax.make_mesh``: types of arrays say how they are split, and most operations would object."""
    block_size = (None, BLOCK)[EXPLICIT.index(name) % 2]
    assert_same(eight_devices("on_mesh", name, "Explicit", block_size, "jit"), tolerance_of(name))


@pytest.mark.parametrize(("name", "kind", "block_size", "how"), WAYS)
def test_every_way(name, kind, block_size, how, eight_devices):
    if how == "no jit" and jax.__version_info__ < (0, 8, 2):
        pytest.skip("JAX itself fails there: what it keeps for the gradient has the type of another mesh")
    assert_same(eight_devices("on_mesh", name, kind, block_size, how))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gather"), KINDS[:-1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_of_a_large_batch(name, kind, gather, eight_devices):
    """16,384 rows on eight devices; all scores would take 134 MB on each. No device sends more than rows."""
    n, d = 16384, 128
    found = eight_devices("program", name, kind, gather, 8, n // 2 if name == "views" else n, d, None)
    assert found["bytes"] < 80e6
    assert found["exchanged"] <= 2 * n * d


@pytest.mark.slow
@pytest.mark.parametrize("name", ["views", "clip"])
def test_a_ring_holds_no_scores_but_a_tile(name, eight_devices):
    """Of 65,536 rows each device has 8,192; their scores would take 268 MB, and two sets of 32 features 2 MB."""
    n = 65536
    assert (
        eight_devices("program", name, "axis_name", "ring", 8, n // 2 if name == "views" else n, 32, None)["bytes"]
        < 6e7
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "gather"),
    [("labels", *KINDS[0]), ("clip", *KINDS[1]), ("queries", *KINDS[2])],
)
def test_memory_and_work_fall_with_the_number_of_devices(name, kind, gather, eight_devices):
    two, eight = (eight_devices("program", name, kind, gather, devices, 4096, 32, 8) for devices in (2, 8))
    assert eight["bytes"] < two["bytes"] / 2
    assert eight["operations"] < two["operations"] / 3
