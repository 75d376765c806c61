"""Which pairs are positive and which negative: by label, by position, by id, against loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import ntxent_jax as nj
from ntxent_jax.pairs import Members, PairMasks, at_most_two_alike, by_label, by_position, with_positions


def assert_masks(masks, right):
    assert masks.positive.dtype == masks.negative.dtype == jnp.bool_
    np.testing.assert_array_equal(masks.positive, right.positive)
    np.testing.assert_array_equal(masks.negative, right.negative)
    assert not np.any(masks.positive & masks.negative)


@pytest.mark.parametrize("seed", range(4))
def test_pair_masks_among_themselves(seed):
    rng = np.random.default_rng(seed)
    labels, where, ids = rng.integers(-1, 3, 7), rng.random(7) < 0.7, rng.integers(0, 5, 7)
    for chosen in itertools.product([None, where], [None, ids]):
        options = dict(zip(("where", "ids"), chosen, strict=True))
        assert_masks(nj.pair_masks(labels, **options), oracle.pair_masks(labels, **options))


@pytest.mark.parametrize("seed", range(4))
def test_pair_masks_with_candidates(seed):
    rng = np.random.default_rng(seed)
    labels, others = rng.integers(-1, 3, 7), rng.integers(-1, 3, 11)
    where, candidate_where = rng.random(7) < 0.7, rng.random(11) < 0.7
    ids, candidate_ids = rng.integers(0, 5, 7), rng.integers(0, 5, 11)
    for first, second, named in itertools.product([None, where], [None, candidate_where], [False, True]):
        options = {"where": first, "candidate_where": second}
        options |= {"ids": ids, "candidate_ids": candidate_ids} if named else {}
        assert_masks(nj.pair_masks(labels, others, **options), oracle.pair_masks(labels, others, **options))


def test_a_row_is_never_its_own_candidate():
    masks = nj.pair_masks(jnp.zeros(5, int))
    assert not np.any(np.diag(masks.positive))
    assert not np.any(np.diag(masks.negative))
    assert masks.positive.sum() == 20


def test_a_row_of_shared_id_is_not_its_own_candidate_either():
    """Given ids say which rows are the same thing; the row itself is always out, having its own id."""
    masks = nj.pair_masks([0, 0, 1], ids=[5, 5, 5])
    assert not np.any(masks.positive | masks.negative)


def test_candidates_have_no_self_by_position():
    """Nobody is left out by position, nor by object identity."""
    labels = jnp.array([0, 1, 0])
    masks = nj.pair_masks(labels, labels)
    np.testing.assert_array_equal(masks.positive, labels[:, None] == labels[None, :])
    np.testing.assert_array_equal(masks.negative, labels[:, None] != labels[None, :])


def test_no_label_and_no_id_is_special():
    for labels in ([-1, -1, 0], [0, 0, -1], [2**31 - 1, 2**31 - 1, -(2**31)]):
        masks = nj.pair_masks(labels)
        np.testing.assert_array_equal(masks.positive, [[0, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_labels_are_not_compared_as_floats():
    """2**24 and 2**24 + 1 are one number in float32."""
    masks = nj.pair_masks([2**24, 2**24 + 1, 2**24])
    np.testing.assert_array_equal(masks.positive, [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    ids = nj.pair_masks([0, 0, 0], ids=[2**24, 2**24 + 1, 2**24])
    np.testing.assert_array_equal(ids.positive, [[0, 1, 0], [1, 0, 1], [0, 1, 0]])


def test_pair_masks_under_jit_and_vmap():
    labels = jnp.array([[0, 0, 1], [1, 2, 1]])
    masks = jax.jit(jax.vmap(nj.pair_masks))(labels)
    for i in range(2):
        assert_masks(PairMasks(masks.positive[i], masks.negative[i]), oracle.pair_masks(labels[i]))


def test_by_label_leaves_hidden_candidates_out():
    anchors = Members(jnp.array([0, 1]), jnp.array([False, True]), jnp.array([7, 8]))
    candidates = Members(jnp.array([0, 0, 1]), jnp.array([True, False, True]), jnp.array([7, 9, 9]))
    masks = by_label(anchors, candidates)
    np.testing.assert_array_equal(masks.positive, [[0, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(masks.negative, [[0, 0, 1], [1, 0, 0]])


def test_by_position_keeps_the_own_key_whatever_its_id():
    anchors = Members(jnp.arange(2), id=jnp.array([5, 5]))
    candidates = Members(jnp.arange(3), jnp.array([True, True, True]), jnp.array([5, 5, 6]))
    masks = by_position(anchors, candidates)
    np.testing.assert_array_equal(masks.positive, [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(masks.negative, [[0, 0, 1], [0, 0, 1]])


def test_rows_without_an_id_are_nobody_elses_thing():
    """Shared negatives have no id: whatever stands in their place excludes nothing."""
    anchors = Members(jnp.arange(2), id=jnp.array([0, 5]))
    candidates = Members(jnp.array([0, 1, -1]), None, jnp.array([0, 5, 0]), jnp.array([True, True, False]))
    for rule in (by_label, by_position):
        np.testing.assert_array_equal(rule(anchors, candidates).negative[:, 2], [True, True])


def test_positions_are_the_default_ids():
    np.testing.assert_array_equal(with_positions(Members(jnp.zeros(3, int)), jnp.arange(3)).id, [0, 1, 2])
    np.testing.assert_array_equal(
        with_positions(Members(jnp.zeros(3, int), id=jnp.array([4, 4, 1])), jnp.arange(3)).id, [4, 4, 1]
    )


@pytest.mark.parametrize("value", [0, -1, 3])
def test_ids_equal_to_a_fill_value_exclude_no_shared_negative(value, x64):
    """An id of 0 is an id like any other beside negatives without ids."""
    queries, keys, negatives = np.random.default_rng(0).normal(size=(3, 4, 3))
    ids = np.array([value, 1, 2, 5])
    for given in (negatives, negatives[:, None]):
        got = nj.info_nce_loss(queries, keys, given, temperature=0.5, ids=ids, reduction="none")
        right = oracle.info_nce_loss(queries, keys, given, temperature=0.5, ids=ids, reduction="none")
        np.testing.assert_allclose(got, right, rtol=1e-10)


def test_three_alike_are_found_wherever_they_stand():
    assert at_most_two_alike(jnp.array([0, 1, 2, 0, 1, 2]))
    assert not at_most_two_alike(jnp.array([0, 1, 2, 0, 1, 2, 0]))
    assert not at_most_two_alike(jnp.array([-1, 4, -1, -1]))
    assert at_most_two_alike(jnp.array([7]))
