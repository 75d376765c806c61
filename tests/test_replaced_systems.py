"""The systems this package replaces, each written again from its published definition, or called itself."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from assertions import assert_close, assert_finite, assert_zero

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, 4])


def normalized(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def cross_entropy(logits, targets):
    """Mean over rows of ``-log softmax(logits)[target]``, as torch.nn.functional.cross_entropy defines it."""
    shifted = logits - logits.max(1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return -np.mean([row[target] for row, target in zip(log_probabilities, targets, strict=True)])


# optax --------------------------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("n", [7, 13])
def test_optax_value_and_gradient(n):
    """The same call gives the same value and gradient wherever optax's are finite."""
    mine = {b: jax.jit(jax.value_and_grad(lambda x, y, b=b: nj.ntxent(x, y, 0.5, block_size=b))) for b in (None, 4)}
    theirs = jax.jit(jax.value_and_grad(lambda x, y: optax.losses.ntxent(x, y, 0.5)))
    rng = np.random.default_rng(n)
    compared = 0
    for seed in range(6):
        rows, labels = inputs.random_rows(n, 5, seed=seed), rng.integers(0, 2 + seed, n)
        expected, expected_gradient = theirs(rows, labels)
        if not np.isfinite(expected):
            continue
        compared += 1
        for step in mine.values():
            value, gradient = step(rows, labels)
            # optax takes sqrt(x^2 + y^2 + 1e-9) or the like as a norm; hence not to the last digit.
            assert_close(value, expected, rtol=1e-6)
            assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-7)
    assert compared >= 4


@in_float64
def test_optax_default_temperature():
    rows, labels = inputs.random_rows(7, 5), np.array([0, 0, 1, 1, 2, 2, 2])
    assert_close(nj.ntxent(rows, labels), optax.losses.ntxent(rows, labels), rtol=1e-5)


@streamed
@pytest.mark.parametrize("labels", [np.zeros(7, int), np.arange(7)], ids=["all equal", "all differ"])
def test_optax_where_it_is_not_finite(labels, block_size):
    rows = jnp.float32(inputs.random_rows(7, 5))
    step = jax.jit(jax.value_and_grad(lambda x: nj.ntxent(x, labels, 0.07, block_size=block_size)))
    assert_zero(step(rows))
    assert_zero(step(rows.at[2].set(0)))


@streamed
def test_optax_zero_rows(block_size):
    rows = jnp.float32(inputs.random_rows(7, 5)).at[jnp.array([2, 5])].set(0)
    labels = np.array([0, 0, 1, 1, 2, 2, 2])
    value, gradient = jax.jit(jax.value_and_grad(lambda x: nj.ntxent(x, labels, 0.07, block_size=block_size)))(rows)
    assert_close(value, optax.losses.ntxent(rows, labels, 0.07), rtol=1e-5)
    assert_finite(gradient)
    assert_zero(gradient[jnp.array([2, 5])])


# SimCLR and Contrastive-Clustering ----------------------------------------------------------------------------------


def two_view_loss(z_i, z_j, temperature, normalize):
    """NT_Xent.forward and InstanceLoss.forward: logits of 2N rows, the positive first, then 2(N-1) negatives."""
    n = len(z_i)
    z = np.concatenate([z_i, z_j])
    z = normalized(z) if normalize else z
    similarities = z @ z.T / temperature
    losses = []
    for row in range(2 * n):
        positive = (row + n) % (2 * n)
        negatives = [column for column in range(2 * n) if column not in (row, positive)]
        assert len(negatives) == 2 * (n - 1)
        losses.append(cross_entropy(similarities[row, [positive, *negatives]][None], [0]))
    return np.sum(losses) / (2 * n)


@in_float64
@streamed
def test_simclr_and_contrastive_clustering(block_size):
    n = 7
    z_i, z_j = inputs.random_rows(2, n, 5)
    options = {"temperature": 0.5, "block_size": block_size}
    simclr = two_view_loss(z_i, z_j, 0.5, normalize=True)
    clustering = two_view_loss(z_i, z_j, 0.5, normalize=False)
    assert_close(nj.ntxent_views(z_i, z_j, **options), simclr)
    assert_close(nj.ntxent(np.concatenate([z_i, z_j]), np.tile(np.arange(n), 2), **options), simclr)
    assert_close(nj.instance_loss(z_i, z_j, **options), clustering)
    assert abs(simclr - clustering) > 0.05


@in_float64
def test_simclr_equals_contrastive_clustering_on_rows_of_unit_length():
    z_i, z_j = inputs.random_rows(2, 7, 5)
    unit_i, unit_j = nj.l2_normalize(z_i), nj.l2_normalize(z_j)
    assert_close(nj.instance_loss(unit_i, unit_j), nj.ntxent_views(z_i, z_j, temperature=0.5))
    assert_close(nj.instance_loss(unit_i, unit_j), two_view_loss(z_i, z_j, 0.5, normalize=True))
    whole = np.stack([z_i, z_j]) / np.linalg.norm(np.stack([z_i, z_j]))
    assert abs(nj.instance_loss(*whole) - nj.instance_loss(unit_i, unit_j)) > 0.05, "a norm over the whole matrix"


# sentence-transformers ----------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("similarity", ["cosine_similarity", "dot_product"])
@pytest.mark.parametrize("k", [0, 2])
def test_sentence_transformers(k, similarity, block_size):
    """Cross entropy of ``scale * similarity(anchors, positives and negatives)``, targets on the diagonal."""
    anchors, positives, *negatives = inputs.random_rows(2 + k, 7, 5, seed=k)
    scale = 2.0
    candidates = np.concatenate([positives, *negatives])
    rows = (normalized(anchors), normalized(candidates)) if similarity == "cosine_similarity" else (anchors, candidates)
    expected = cross_entropy(scale * rows[0] @ rows[1].T, range(7))
    value = nj.multiple_negatives_ranking_loss(
        anchors,
        positives,
        np.stack(negatives, axis=1) if k else None,
        temperature=1 / scale,
        similarity=getattr(nj, similarity),
        block_size=block_size,
    )
    assert_close(value, expected)


@in_float64
def test_sentence_transformers_default_scale():
    anchors, positives = inputs.random_rows(2, 7, 5)
    expected = cross_entropy(20 * normalized(anchors) @ normalized(positives).T, range(7))
    assert_close(nj.multiple_negatives_ranking_loss(anchors, positives), expected)


@functools.partial(jax.jit, static_argnames="similarity")
def perfect_model(scale, negatives, similarity=nj.cosine_similarity):
    """The loss where the positive has cosine 1 and every negative -1. At most 90 negatives."""
    one, opposite, real = jnp.ones((1, 1)), jnp.full((90, 1), -1.0), jnp.arange(90) < negatives
    return nj.multiple_negatives_ranking_loss(
        one, one, opposite, negative_where=real, temperature=1 / scale, similarity=similarity
    )


def test_sentence_transformers_perfect_negatives():
    """The softmax of cosines cannot reach certainty: its floor, and how far it lies below at other scales."""
    loss = perfect_model(1.0, 2)
    assert_close(loss, 0.2395, atol=5e-5)
    positive = jnp.exp(-loss)
    assert_close([positive, (1 - positive) / 2], [0.7870, 0.1065], atol=5e-5)
    for scale, probability in ((10.0, 2.06115e-9), (20.0, 4.24835e-18), (30.0, 8.75651e-27)):
        # Through the loss: 1 minus the positive's probability, kept exact by expm1.
        assert_close(-jnp.expm1(-perfect_model(scale, 2)) / 2, probability, rtol=5e-6, atol=0)
        assert_close(perfect_model(scale, 2), nj.loss_floor(2, 1 / scale), rtol=1e-5, atol=0)


def test_sentence_transformers_many_perfect_negatives():
    stated = [0.4249, 0.2698, 0.1976, 0.1559, 0.1288, 0.1096, 0.0955, 0.0846, 0.0759]
    for count, probability in zip(range(10, 100, 10), stated, strict=True):
        assert_close(jnp.exp(-perfect_model(1.0, count)), probability, atol=5e-5)
        assert_close(perfect_model(1.0, count), nj.loss_floor(count, 1.0), rtol=1e-6)
    for count in (1, 10, 90):
        assert_zero(perfect_model(1.0, count, nj.log1p_cosine_similarity))


# pytorch-metric-learning --------------------------------------------------------------------------------------------


def all_pairs(labels, reference_labels=None):
    """get_all_pairs_indices: ordered pairs, and no row with itself unless there is a reference set."""
    others = labels if reference_labels is None else reference_labels
    pairs = [(a, c) for a in range(len(labels)) for c in range(len(others)) if reference_labels is not None or a != c]
    same = [labels[a] == others[c] for a, c in pairs]
    return [p for p, s in zip(pairs, same, strict=True) if s], [p for p, s in zip(pairs, same, strict=True) if not s]


def metric_learning_loss(rows, labels, temperature, reference=None, reference_labels=None):
    """NTXentLoss: for each positive pair, its anchor's negative pairs and itself in the denominator."""
    others = rows if reference is None else reference
    similarities = normalized(rows) @ normalized(others).T / temperature
    positives, negatives = all_pairs(labels, reference_labels)
    losses = []
    for anchor, positive in positives:
        denominator = [similarities[a, c] for a, c in negatives if a == anchor]
        losses.append(cross_entropy(np.array([[similarities[anchor, positive], *denominator]]), [0]))
    return np.mean(losses) if losses else 0.0


def test_metric_learning_pairs():
    """Labels [0, 0, 1, 1, 1]: 8 positive and 12 negative ordered pairs."""
    labels = np.array([0, 0, 1, 1, 1])
    positives, negatives = all_pairs(labels)
    assert (len(positives), len(negatives)) == (8, 12)
    masks = nj.pair_masks(labels)
    assert {tuple(pair) for pair in np.argwhere(np.asarray(masks.positive))} == set(positives)
    assert {tuple(pair) for pair in np.argwhere(np.asarray(masks.negative))} == set(negatives)
    assert nj.pair_masks(np.zeros(3, int)).positive.sum() == 6
    assert not nj.pair_masks(np.arange(4)).positive.any()


@in_float64
@streamed
@pytest.mark.parametrize(
    "labels", [[0, 0, 1, 1, 1, 2, 0], [0, 0, 0, 1, 2, 3, 4], [5, 5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5, 6]], ids=str
)
def test_metric_learning_ntxent(labels, block_size):
    rows, labels = inputs.random_rows(7, 5), np.array(labels)
    expected = metric_learning_loss(rows, labels, 0.5)
    assert_close(nj.ntxent(rows, labels, 0.5, block_size=block_size), expected)


@in_float64
@streamed
def test_metric_learning_reference_set(block_size):
    """Anchors choose among a reference set: nobody is excluded as itself, even where the rows are equal."""
    rows, labels = inputs.random_rows(7, 5), np.array([0, 0, 1, 1, 1, 2, 9])
    reference, reference_labels = np.concatenate([rows[:2], inputs.random_rows(9, 5, seed=1)]), np.arange(11) % 4
    options = {"candidates": reference, "candidate_labels": reference_labels, "block_size": block_size}
    expected = metric_learning_loss(rows, labels, 0.5, reference, reference_labels)
    assert_close(nj.ntxent(rows, labels, 0.5, **options), expected)
    same = {"candidates": rows, "candidate_labels": labels, "block_size": block_size}
    assert_close(nj.ntxent(rows, labels, 0.5, **same), metric_learning_loss(rows, labels, 0.5, rows, labels))


@in_float64
@streamed
def test_metric_learning_self_supervised(block_size):
    """SelfSupervisedLoss: symmetric gives labels arange(n) to both views; else only the first view has anchors."""
    a, b = inputs.random_rows(2, 7, 5)
    items = np.arange(7)
    symmetric = metric_learning_loss(np.concatenate([a, b]), np.tile(items, 2), 0.5)
    assert_close(nj.ntxent_views(a, b, temperature=0.5, block_size=block_size), symmetric)
    one_way = metric_learning_loss(a, items, 0.5, b, items)
    assert_close(nj.info_nce_loss(a, b, temperature=0.5, block_size=block_size), one_way)


@in_float64
@streamed
def test_metric_learning_dog_dog_cat_mouse(block_size):
    """Two losses, and the cosine of cat and mouse is in neither."""
    dog, dog2, cat, mouse = [1.0, 0, 0], [0.8, 0.6, 0], [0.6, 0, 0.8], [0.6, 0, -0.8]
    labels = np.array([0, 0, 1, 2])
    rows = np.array([dog, dog2, cat, mouse])
    losses = nj.ntxent(rows, labels, 0.5, reduction="none", block_size=block_size)
    assert np.count_nonzero(losses) == 2
    assert_close(nj.ntxent(rows, labels, 0.5, block_size=block_size), np.sum(losses) / 2)
    closer = np.array([dog, dog2, cat, cat])  # The cosine of cat and mouse was -.28 and is 1, no other changed.
    assert_close(nj.ntxent(closer, labels, 0.5, reduction="none", block_size=block_size), losses)


# Contrastive predictive coding --------------------------------------------------------------------------------------


@in_float64
@streamed
def test_cpc_in_batch(block_size):
    """One positive and N - 1 negatives: ``-log f(x, c) / sum f`` with f = exp(similarity / temperature)."""
    queries, keys = inputs.random_rows(2, 7, 5)
    logits = normalized(queries) @ normalized(keys).T / 0.5
    value = nj.info_nce_loss(queries, keys, temperature=0.5, block_size=block_size)
    assert_close(value, cross_entropy(logits, range(7)))


@in_float64
@streamed
def test_cpc_question_positive_negatives(block_size):
    """[question, positive, negative 1, negative 2, ...] per row."""
    rows = inputs.random_rows(7, 5, 3)
    question, positive, negatives = rows[:, 0], rows[:, 1], rows[:, 2:]
    losses = []
    for row in rows:
        unit = normalized(row)
        losses.append(cross_entropy((unit[1:] @ unit[0])[None] / 0.5, [0]))
    options = {"in_batch": False, "temperature": 0.5, "block_size": block_size}
    assert_close(nj.info_nce_loss(question, positive, negatives, **options), np.mean(losses))
    assert_close(nj.info_nce_loss(question, positive, negatives, reduction="none", **options), losses)
    with pytest.raises(ValueError, match="in_batch"):
        nj.info_nce_loss(question, positive, in_batch=False)
