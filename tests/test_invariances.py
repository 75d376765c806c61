"""What must not change a loss, and what must change it in a known way. Several random batches each."""

import catalog
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_zero
from catalog import BLOCK, CASES, quick_jit

import ntxent_jax as nj

pytestmark = pytest.mark.usefixtures("x64")
# The harder way; that whole is the same is shown in test_engines.
streamed = pytest.mark.parametrize("block_size", [BLOCK], ids=["streamed"])
SEEDS = range(5)
N, D = catalog.N, catalog.D


def random_batch(seed, *names):
    """A random batch of labelled rows, with everything per row that was asked for."""
    rng = np.random.default_rng(seed)
    arrays = {
        "embeddings": rng.normal(size=(N, D)),
        "labels": rng.integers(-2, 2, N),
        "temperature": rng.uniform(0.3, 1, N),
        "weights": rng.uniform(0.1, 2, N),
        "where": rng.random(N) < 0.8,
        "ids": rng.integers(0, 5, N),
    }
    return {name: arrays[name] for name in ("embeddings", "labels", *names)}


COSINE_CASES = ["ntxent", "ntxent all", "supcon in candidates", "three views", "info_nce own", "ranking own"]


@streamed
@pytest.mark.parametrize("name", COSINE_CASES)
def test_length_of_a_row_does_not_matter(name, block_size):
    """Any positive factor for any row; and so every gradient is orthogonal to its row."""
    case = CASES[name]
    step = quick_jit(jax.value_and_grad(lambda floats: case(nj, floats, block_size=block_size)))
    value, gradient = step(case.floats)
    rng = np.random.default_rng(0)
    for _ in SEEDS:
        factors = {k: np.exp(3 * rng.normal(size=(*x.shape[:-1], 1))) for k, x in case.floats.items()}
        rows = {k: x for k, x in case.floats.items() if x.shape[-1] == D and x.ndim > 1}
        scaled, new = step({**case.floats, **{k: x * factors[k] for k, x in rows.items()}})
        assert_close(scaled, value, rtol=1e-12)
        for k, x in rows.items():
            assert_close(new[k] * factors[k], gradient[k], atol=1e-13)
            assert_close(np.sum(np.asarray(gradient[k]) * x, axis=-1), np.zeros(x.shape[:-1]), atol=1e-14)


@streamed
@pytest.mark.parametrize("loss", [nj.ntxent, nj.supcon_loss])
def test_order_and_names_do_not_matter(loss, block_size):
    """Rows in another order, labels and ids by other names, in another dtype."""
    names = ("temperature", "weights", "where", "ids")
    step = quick_jit(lambda arrays: loss(**arrays, block_size=block_size))
    for seed in SEEDS:
        arrays = random_batch(seed, *names)
        order = np.random.default_rng(seed).permutation(N)
        value = step(arrays)
        assert_close(step({k: x[order] for k, x in arrays.items()}), value)
        named = np.array([-(2**62), 2**53, 2**53 + 1, 0])[arrays["labels"]]
        assert_close(step({**arrays, "labels": named, "ids": 7 - 3 * arrays["ids"]}), value)


@pytest.mark.parametrize("name", ["info_nce", "info_nce own", "ranking own"])
def test_order_of_queries_and_of_negatives(name):
    """Queries and keys move together; negatives in any order."""
    case = CASES[name]
    order, value = np.array([3, 0, 6, 2, 5, 1, 4]), case(nj, case.floats)
    m = case.floats.get("keys", case.floats.get("positives")).shape[0]
    both = np.concatenate([order, np.arange(N, m)])
    by = {"keys": both, "positives": both, "key_bias": both, "key_where": both, "key_ids": both}
    move = lambda arrays: {k: x[by.get(k, order)] for k, x in arrays.items()}  # noqa: E731
    floats, data = move(case.floats), move(case.data)
    if "pair_where" in data:
        data["pair_where"] = data["pair_where"][:, both]
    assert_close(case(nj, floats, data), value)
    if "negatives" in floats:
        floats["negatives"], data["negative_where"] = floats["negatives"][:, ::-1], data["negative_where"][:, ::-1]
        assert_close(case(nj, floats, data), value)


def hidden_parts(case):
    """What of a case's numbers belongs to rows that are not real."""
    where = case.data["where"]
    hidden = dict.fromkeys((*case.rows, "temperature", "weights", "key_bias"), ~where)
    if "key_where" in case.data:
        m = len(case.floats["keys"])
        hidden["keys"] = hidden["key_bias"] = ~case.data["key_where"] | np.pad(~where, (0, m - N))
    if "negative_where" in case.data:
        flags = ~case.data["negative_where"]
        hidden["negatives"] = flags | ~where[:, None] if flags.ndim == 2 else flags
    if "candidate_where" in case.data:
        hidden["candidates"] = ~case.data["candidate_where"]
    return {key: hidden[key] for key in case.floats}


@pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "name",
    [
        "ntxent candidates",
        "supcon out candidates",
        "info_nce",
        "info_nce own",
        "info_nce shared",
        "info_nce only own",
        "ranking own",
        "ranking shared",
    ],
)
def test_what_is_hidden_may_hold_anything(name, block_size):
    """Rows, biases, weights and temperatures of padding, of whatever kind: no number, no gradient."""
    case, hidden = CASES[name], hidden_parts(CASES[name])
    assert any(flags.any() for flags in hidden.values())
    step = quick_jit(jax.value_and_grad(lambda floats: case(nj, floats, block_size=block_size)))
    right, slopes = step(case.floats)
    for filler in (0.3, np.inf, -np.inf, np.nan):
        floats = {key: np.array(x, float) for key, x in case.floats.items()}
        for key, x in floats.items():
            x[hidden[key]] = filler
        value, gradient = step(floats)
        assert_close(value, right)
        for key, slope in gradient.items():
            assert_close(slope, slopes[key], name=key)
            assert_zero(slope[hidden[key]])


@streamed
def test_a_padded_row_changes_nothing(block_size):
    """A row more with ``where=False``, whatever its label, id, weight and temperature, not even a number."""

    def loss(floats, data):
        return nj.ntxent(**floats, **data, block_size=block_size)

    step = quick_jit(jax.value_and_grad(loss))
    per_row = np.array([[0.1, 9.0], [np.nan, 1.0], [0.0, np.nan], [-1.0, np.inf], [np.inf, -np.inf]])
    for seed in SEEDS:
        arrays = random_batch(seed, "temperature", "weights", "where", "ids")
        temperature, weight = per_row[seed]
        extra = {"embeddings": weight, "labels": -1, "temperature": temperature, "weights": weight, "where": False}
        padded = {k: np.insert(x, 2, extra.get(k, 0), axis=0) for k, x in arrays.items()}
        split = lambda a: [{k: x for k, x in a.items() if (x.dtype == float) is floats} for floats in (True, False)]  # noqa: E731
        (value, gradient), (right, right_gradient) = step(*split(padded)), step(*split(arrays))
        assert_close(value, right)
        for k, x in gradient.items():
            assert_zero(x[2])
            assert_close(np.delete(x, 2, axis=0), right_gradient[k])


@streamed
def test_a_duplicate_of_equal_id_is_nobody_to_its_original(block_size):
    """An anchor does not see a copy of itself: neither as a positive nor as a negative."""
    for seed in SEEDS:
        rows = random_batch(seed)["embeddings"]
        labels, ids = np.append(np.arange(N) // 2, 0), np.append(np.arange(N), 0)
        twice = np.concatenate([rows, rows[:1]])
        losses = nj.ntxent(twice, labels, 0.5, ids=ids, reduction="none", block_size=block_size)
        assert_close(losses[0], nj.ntxent(rows, labels[:-1], 0.5, reduction="none")[0])
        assert_close(losses[-1], losses[0])


def test_equal_labels_as_ids_leave_one_key():
    """With one id for all, a query has no negatives but its own and the shared ones."""
    queries, keys, negatives = inputs.random_rows(3, N, D)
    for given in (negatives, negatives[:, None]):
        alone = nj.info_nce_loss(queries, keys, given, temperature=0.5, in_batch=False)
        assert_close(nj.info_nce_loss(queries, keys, given, temperature=0.5, ids=np.zeros(N, int)), alone)


@streamed
def test_in_is_never_above_out(block_size):
    """Row by row, by Jensen's inequality, and equal for one positive."""
    pair = quick_jit(
        lambda x, y: [
            nj.supcon_loss(x, y, 0.5, form=form, reduction="none", block_size=block_size) for form in ("in", "out")
        ]
    )
    for seed in SEEDS:
        arrays = random_batch(seed)
        inside, outside = pair(arrays["embeddings"], arrays["labels"])
        assert np.all(inside <= outside + 1e-12)
        inside, outside = pair(arrays["embeddings"], np.arange(N) // 2)
        assert_close(inside, outside)


@streamed
def test_denominators_of_one_positive(block_size):
    """``pair`` and ``all`` agree; ``negatives`` is log(exp(pair) - 1); all three grow with their denominator."""
    for seed in SEEDS:
        arrays = random_batch(seed)
        x, labels = arrays["embeddings"], arrays["labels"]
        losses = lambda y, x=x: [  # noqa: E731
            np.asarray(nj.ntxent(x, y, 0.5, denominator=d, reduction="none", block_size=block_size))
            for d in ("pair", "all", "negatives")
        ]
        pair, everyone, negatives = losses(np.arange(N) // 2)
        assert_close(pair, everyone)
        assert_close(negatives[:-1], np.log(np.expm1(pair[:-1])))
        pair, everyone, negatives = losses(labels)
        assert np.all(everyone >= pair - 1e-12)
        assert np.all(pair >= negatives - 1e-12)


@streamed
@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("denominator", ["pair", "all", "negatives"])
def test_views_are_tiled_labels(views, denominator, block_size):
    """``ntxent_views`` is ``ntxent`` with the item's number as label, per-item arguments tiled."""
    rows, where = inputs.random_rows(views, N, D), catalog.WHERE
    weights, temperature = catalog.WEIGHTS, catalog.TEMPERATURES
    options = {"denominator": denominator, "block_size": block_size}
    value = nj.ntxent_views(*rows, temperature=temperature, where=where, weights=weights, **options)
    per_row = {"where": np.tile(where, views), "weights": np.tile(weights, views)}
    flat = nj.ntxent(
        rows.reshape(-1, D), np.tile(np.arange(N), views), np.tile(temperature, views), **per_row, **options
    )
    assert_close(value, flat)
    stacked = nj.ntxent(rows.swapaxes(0, 1), np.arange(N), temperature, where=where, weights=weights, **options)
    assert_close(value, stacked)


def test_ids_of_views():
    """Ids belong to rows ``[n, views]``: equal ones of two items are the same thing."""
    rows, labels = inputs.random_rows(5, 2, D), np.array([0, 0, 1, 1, 2])
    ids = np.array([[0, 1], [0, 2], [3, 4], [5, 4], [6, 7]])
    value = nj.ntxent(rows, labels, 0.5, ids=ids, block_size=BLOCK)
    assert_close(value, oracle.ntxent(rows.reshape(-1, D), np.repeat(labels, 2), 0.5, ids=ids.reshape(-1)))


def test_candidates_that_are_the_anchors():
    """With positions as ids it is the loss without candidates; without ids nobody is left out as self."""
    arrays = random_batch(1)
    x, labels, ids = arrays["embeddings"], arrays["labels"], np.arange(N)
    same = {"candidates": x, "candidate_labels": labels}
    assert_close(nj.ntxent(x, labels, 0.5, **same, ids=ids, candidate_ids=ids), nj.ntxent(x, labels, 0.5))
    with_self = nj.ntxent(x, labels, 0.5, **same)
    assert_close(with_self, oracle.ntxent(x, labels, 0.5, **same))
    assert abs(with_self - nj.ntxent(x, labels, 0.5)) > 0.1


def test_sums_are_additive_over_anchors():
    """``sum`` and ``none`` of ``info_nce_loss`` by halves of the queries, all keys staying."""
    queries, keys = inputs.random_rows(2, N, D)
    rows = nj.info_nce_loss(queries, keys, temperature=0.5, reduction="none")
    total = nj.info_nce_loss(queries, keys, temperature=0.5, reduction="sum")
    assert_close(total, rows.sum())
    first = nj.info_nce_loss(queries[:3], keys, temperature=0.5, reduction="sum", block_size=2)
    assert_close(first, rows[:3].sum())


def test_weights():
    """All of one size change no mean; integers repeat a row's term; 0 leaves a row as candidate only."""
    arrays = random_batch(3)
    x, labels = arrays["embeddings"], arrays["labels"]
    for reduction in ("mean", "anchor_mean"):
        options = {"temperature": 0.5, "reduction": reduction}
        assert_close(nj.ntxent(x, labels, weights=np.full(N, 3.7), **options), nj.ntxent(x, labels, **options))
    rows, weights = nj.ntxent(x, labels, 0.5, reduction="none"), np.array([0, 1, 2, 3, 0, 1, 1])
    assert_close(nj.ntxent(x, labels, 0.5, weights=weights, reduction="none"), weights * rows)
    counted = np.array([np.sum(labels == label) > 1 for label in labels])
    mean = nj.ntxent(x, labels, 0.5, weights=weights, reduction="anchor_mean")
    assert_close(mean, np.sum(weights * rows) / np.sum(weights[counted]))


@streamed
def test_a_weight_of_zero_silences_an_infinite_loss_not_nan(block_size):
    """A positive at cosine -1 has loss inf under log1p; its anchor can be left out."""
    queries, keys = inputs.random_rows(2, N, D)
    queries[3], keys[3], weights = [2, 0, 0], [-1, 0, 0], np.where(np.arange(N) == 3, 0.0, 1.0)
    options = {"temperature": 0.5, "block_size": block_size}
    loss = lambda q, w: nj.info_nce_loss(q, keys, weights=w, similarity=nj.log1p_cosine_similarity, **options)  # noqa: E731
    assert np.isinf(loss(queries, np.ones(N)))
    finite = lambda x, y: max(oracle.log1p_cosine_similarity(x, y), -1e3)  # noqa: E731
    rows = oracle.info_nce_loss(queries, keys, temperature=0.5, similarity=finite, reduction="none")
    assert_close(loss(queries, weights), np.mean(rows[np.arange(N) != 3]))
    assert np.all(np.isfinite(jax.grad(loss)(queries, weights)))
    queries[3] = np.nan
    assert np.isnan(loss(queries, weights))


@streamed
def test_a_shift_of_all_dot_products_does_not_matter(block_size):
    """One number added to all logits of an anchor: a feature that is constant over the candidates."""
    queries, keys = inputs.random_rows(2, N, D)
    longer = lambda x, y: np.concatenate([x, np.full((N, 1), y)], axis=1)  # noqa: E731
    options = {"temperature": 0.5, "similarity": nj.dot_product, "block_size": block_size}
    value = nj.info_nce_loss(queries, keys, **options)
    assert_close(nj.info_nce_loss(longer(queries, 5.0), longer(keys, 11.0), **options), value, rtol=1e-10)
    biased = nj.info_nce_loss(queries, keys, key_bias=np.full(N, 4.0), **options)
    assert_close(biased, value, rtol=1e-10)


@streamed
def test_distances_are_those_of_moved_rows(block_size):
    """Euclidean: all rows moved together, and turned together; the gradient stays, and sums to 0."""
    x, labels = inputs.random_rows(N, D), catalog.LABELS
    loss = quick_jit(
        jax.value_and_grad(
            lambda x: nj.ntxent(x, labels, 1.0, similarity=nj.negative_euclidean_distance, block_size=block_size)
        )
    )
    value, gradient = loss(x)
    moved, moved_gradient = loss(x + np.array([100.0, -50.0, 7.0]))
    assert_close(moved, value, rtol=1e-9)
    assert_close(moved_gradient, gradient, rtol=1e-8, atol=1e-10)
    assert_close(gradient.sum(0), np.zeros(D))
    turn = np.linalg.qr(inputs.random_rows(D, D, seed=4))[0]
    turned, turned_gradient = loss(x @ turn)
    assert_close(turned, value)
    assert_close(turned_gradient, gradient @ turn)


def test_nobody_counts():
    x = jnp.asarray(inputs.random_rows(N, D))
    for options in ({"where": np.zeros(N, bool)}, {"weights": np.zeros(N)}):
        for reduction in ("anchor_mean", "none"):
            loss = lambda x, o=options, r=reduction: nj.supcon_loss(x, catalog.LABELS, reduction=r, **o).sum()  # noqa: E731
            assert_zero(loss(x))
    assert_zero(jax.grad(loss)(x))
    nan = np.full((3, D), np.nan)
    hidden = {"where": np.zeros(N, bool), "candidates": nan, "candidate_labels": [3, -1, 8]}
    for reduction in ("mean", "sum"):
        assert_zero(nj.supcon_loss(x, catalog.LABELS, reduction=reduction, **hidden))
