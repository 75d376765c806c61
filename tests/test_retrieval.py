"""Nearest keys and retrieval metrics: against loops written from the definitions, and at every edge."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle_retrieval
import pytest
from assertions import assert_close, assert_nan, assert_states, assert_zero
from conftest import double_precision
from inputs import LS, A, B, X
from jax.test_util import check_grads

from ntxent_jax import negative_euclidean_distance, retrieval
from ntxent_jax.retrieval import retrieval_metrics, top_k
from ntxent_jax.similarities import cosine_similarity, dot_product, log1p_cosine_similarity

in_float64 = pytest.mark.usefixtures("x64")
N, M, D = 11, 13, 3
BLOCKS = [None, 4]  # Divides neither 11 nor 13.
KS = (1, 2, 5, 30)


def rows(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, D))


def labels_of(seed: int, n: int = N, number: int = 4) -> np.ndarray:
    """Small integers, negative ones too; the last one is alone with its label."""
    labels = np.random.default_rng(seed).integers(-1, number - 1, n)
    labels[-1:] = 99
    return labels


def grid_rows(seed: int, n: int) -> np.ndarray:
    """Rows with few different dot products, all exact: many ties."""
    return np.random.default_rng(seed).integers(-1, 2, (n, D)).astype(np.float64)


def dot(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.dot(x, y))


def shown(x: np.ndarray, where: np.ndarray | None, hidden: float = np.nan) -> np.ndarray:
    return x if where is None else np.where(where[:, None], x, hidden)


def assert_metrics(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected), "names, in this order"
    for name, value in expected.items():
        assert np.shape(actual[name]) == ()
        assert_close(actual[name], value, rtol=1e-6, name=name)


# Case 51 --------------------------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
def test_case_51_leave_one_out(block):
    metrics = retrieval_metrics(X, labels=LS, ks=(1, 2), block_size=block)
    expected = {"recall@1": 0.6, "recall@2": 1.0, "mrr": 0.8, "median_rank": 1.0}
    for name, value in (expected | {"r_precision": 0.6, "map@r": 0.55}).items():
        assert_states(metrics[name], value)


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
def test_case_51_own_row_kept(block):
    metrics = retrieval_metrics(X, X, labels=LS, key_labels=LS, ks=(1,), block_size=block)
    for name in ("recall@1", "mrr", "median_rank", "precision@1"):
        assert_states(metrics[name], 1)
    own_row_out = retrieval_metrics(X, X, labels=LS, key_labels=LS, ids=np.arange(6), block_size=block)
    assert_metrics(own_row_out, {name: float(v) for name, v in retrieval_metrics(X, labels=LS).items()})


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
def test_case_51_equal_rows(block):
    c = np.array([[1, 0, 0], [1, 0, 0], [0.8, 0.6, 0], [0, 1, 0]])
    metrics = retrieval_metrics(c, labels=[0, 1, 0, 1], ks=(1,), block_size=block)
    assert_states(metrics["recall@1"], 0)
    assert_states(metrics["mrr"], 0.4166666667)
    assert_states(metrics["median_rank"], 2.5)
    metrics = retrieval_metrics(c, labels=[0, 0, 1, 1], ks=(1,), block_size=block)
    assert_states(metrics["recall@1"], 0.75)
    assert_states(metrics["mrr"], 0.8333333333)


@pytest.mark.parametrize("block", BLOCKS)
def test_case_51_collapse(block):
    ones = np.ones((16, 3), np.float32)
    metrics = retrieval_metrics(ones, ones, block_size=block)
    assert_zero(metrics["recall@1"], metrics["recall@10"])
    assert_states(metrics["mrr"], 1 / 16)
    assert_states(metrics["median_rank"], 16)


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("hidden", [0.0, np.nan, np.inf])
def test_case_51_fillers(block, hidden):
    filler = np.full((2, 3), hidden)
    real = np.array([True, True, True, False, False])
    keys = np.concatenate([B, filler])
    for metrics in [
        retrieval_metrics(A, B, ks=(1, 2), block_size=block),
        retrieval_metrics(A, keys, key_where=real, ks=(1, 2), block_size=block),
        retrieval_metrics(np.concatenate([A, filler]), keys, where=real, ks=(1, 2), block_size=block),
    ]:
        assert_metrics(metrics, {"recall@1": 1 / 3, "recall@2": 1, "mrr": 2 / 3, "median_rank": 2})


# Against the oracle ---------------------------------------------------------------------------------------------------

FLAGS = list(itertools.product([False, True], repeat=3))


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("labelled", "with_ids", "padded"), FLAGS)
def test_keys_of_their_own(block, ties, labelled, with_ids, padded):
    make = grid_rows if ties else rows
    queries, keys, options = make(0, N), make(1, M), {}
    if labelled:
        options |= {"labels": labels_of(2), "key_labels": labels_of(3, M)}
    if with_ids:
        options |= {"ids": labels_of(4, N, 6), "key_ids": labels_of(5, M, 6)}
    if padded:
        options |= {"where": np.arange(N) % 4 != 1, "key_where": np.arange(M) % 5 != 2}
    expected = oracle_retrieval.retrieval_metrics(queries, keys, ks=KS, similarity=dot, **options)
    queries = shown(queries, options.get("where"))
    keys = shown(keys, options.get("key_where"), np.inf)
    actual = retrieval_metrics(queries, keys, ks=KS, similarity=dot_product, block_size=block, **options)
    assert_metrics(actual, expected)


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("with_ids", "padded"), [(False, False), (False, True), (True, False), (True, True)])
def test_leave_one_out(block, ties, with_ids, padded):
    queries, options = (grid_rows if ties else rows)(6, N), {"labels": labels_of(7)}
    if with_ids:
        options["ids"] = labels_of(8, N, 6)
    if padded:
        options["where"] = np.arange(N) % 4 != 1
    expected = oracle_retrieval.retrieval_metrics(queries, ks=KS, similarity=dot, **options)
    queries = shown(queries, options.get("where"))
    actual = retrieval_metrics(queries, ks=KS, similarity=dot_product, block_size=block, **options)
    assert_metrics(actual, expected)


@in_float64
@pytest.mark.parametrize("places", [1, 3])
def test_queries_with_few_and_with_many_right_keys(monkeypatch, places):
    """However many of the nearest keys are looked at, it is the same number."""
    monkeypatch.setattr(retrieval, "_PLACES", places)

    @jax.jit
    def metrics(x, labels):  # A function of the user's is no part of a cache, so the number patched is seen.
        return retrieval_metrics(x, ks=(1, 2), similarity=lambda x, y: x @ y.T, labels=labels, block_size=6)

    for make in (rows, grid_rows):
        x = make(9, 41)
        for labels in [
            np.arange(41) // 3,
            np.arange(41) % 2,
            np.zeros(41, int),
            np.repeat([0, 1, 2, 3], [1, 2, 10, 28]),
        ]:
            expected = oracle_retrieval.retrieval_metrics(x, ks=(1, 2), similarity=dot, labels=labels)
            actual = metrics(x, labels)
            assert_metrics({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("similarity", [cosine_similarity, negative_euclidean_distance, log1p_cosine_similarity])
def test_in_float32_with_every_similarity(similarity):
    x, labels = rows(10, 29), labels_of(11, 29)

    def of_two(a, b):
        with double_precision():
            return float(similarity(a[None], b[None])[0, 0])

    expected = oracle_retrieval.retrieval_metrics(x, labels=labels, similarity=of_two)
    actual = retrieval_metrics(jnp.float32(x), labels=labels, similarity=similarity, block_size=4)
    assert_metrics(actual, expected)
    assert {value.dtype for value in actual.values()} == {jnp.dtype(jnp.float32)}


@in_float64
def test_where_of_pairs_hides_query_and_key():
    """As in info_nce_loss: padding of a pair is nobody's key."""
    where = np.array([True, False, True])
    assert_metrics(
        retrieval_metrics(shown(A, where), shown(B, where), where=where, ks=(1,)),
        {name: float(v) for name, v in retrieval_metrics(A[where], B[where], ks=(1,)).items()},
    )


# NaN ------------------------------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("negative", [False, True])
def test_nan_counts_against_the_model(block, negative):
    bad = -np.nan if negative else np.nan
    x, labels = rows(12), labels_of(13)
    for broken in ([2], [2, 5], list(range(N))):
        y = x.copy()
        y[broken] = bad
        expected = oracle_retrieval.retrieval_metrics(y, labels=labels, ks=KS, similarity=dot)
        actual = retrieval_metrics(y, labels=labels, ks=KS, similarity=dot_product, block_size=block)
        assert_metrics(actual, expected)
        healthy = oracle_retrieval.retrieval_metrics(x, labels=labels, ks=KS, similarity=dot)
        assert actual["mrr"] < healthy["mrr"]


@in_float64
def test_nan_and_infinities_by_hand():
    scores = jnp.array([[np.nan, 1, 3, np.nan], [-np.inf, -np.inf, 0, 0], [np.inf, 2, np.inf, 2], [1, 2, 3, 4]])

    def given(x, y):
        return scores[x[:, 0].astype(int)][:, y[:, 0].astype(int)]

    rows = np.arange(4.0)[:, None]
    metrics = functools.partial(retrieval_metrics, rows, rows, ks=(1, 4), similarity=given)
    # Own key NaN: last. Own -inf: behind the other -inf and the zeros. Own inf, tied: second. Own 4: first.
    assert_close(metrics()["mrr"], (1 / 4 + 1 / 4 + 1 / 2 + 1) / 4)
    labelled = metrics(labels=[0, 0, 1, 1], key_labels=[0, 0, 1, 1])
    # places of the right keys: [1 wrong NaN, 3, then 1, NaN] = 3, 4; [0, 0, -inf, -inf] = 3, 4;
    # [inf, inf, 2, 2], wrong before right = 2, 4; [4, 3, 2, 1] = 1, 2
    assert_close(labelled["mrr"], (1 / 3 + 1 / 3 + 1 / 2 + 1) / 4)
    assert_close(labelled["r_precision"], (0 + 0 + 1 / 2 + 1) / 4)
    assert_close(labelled["map@r"], (0 + 0 + (1 / 2) / 2 + 1) / 4)
    assert_close(labelled["precision@4"], 1 / 2)


# Nothing to find ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("block", [None, 1])
def test_no_query_counts(n, block):
    x = jnp.ones((n, 2))
    for metrics in [
        retrieval_metrics(x, labels=np.arange(n), block_size=block),
        retrieval_metrics(x, labels=np.zeros(n, int), where=np.zeros(n, bool), block_size=block),
        retrieval_metrics(x, x, where=np.zeros(n, bool), block_size=block),
        retrieval_metrics(x, x, key_where=np.zeros(n, bool), block_size=block),
        retrieval_metrics(x, x[:0], labels=np.arange(n), key_labels=[], block_size=block),
        retrieval_metrics(x, x, labels=np.arange(n), key_labels=np.arange(n) - 9, block_size=block),
    ]:
        assert_nan(*metrics.values())


def test_one_of_each():
    assert_metrics(
        retrieval_metrics(jnp.ones((1, 2)), jnp.ones((1, 2)), ks=(1, 3)),
        {"recall@1": 1, "recall@3": 1, "mrr": 1, "median_rank": 1},
    )
    metrics = retrieval_metrics(jnp.ones((1, 2)), -jnp.ones((1, 2)), labels=[5], key_labels=[5], ks=(1, 4))
    assert_metrics(
        metrics,
        {"recall@1": 1, "recall@4": 1, "mrr": 1, "median_rank": 1, "precision@1": 1, "precision@4": 0.25}
        | {"r_precision": 1, "map@r": 1},
    )
    assert list(retrieval_metrics(X, labels=LS, ks=())) == ["mrr", "median_rank", "r_precision", "map@r"]


# top_k ----------------------------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("k", [1, 4, M])
@pytest.mark.parametrize("padded", [False, True])
def test_top_k(block, k, padded):
    queries, keys = rows(14), rows(15, M)
    real = np.arange(M) % 5 != 2 if padded else None
    scores, indices = oracle_retrieval.top_k(queries, keys, k, real)
    found = top_k(queries, shown(keys, real), k, key_where=real, block_size=block)
    assert found[1].dtype == jnp.int32
    assert_close(found[1], indices)
    assert_close(np.nan_to_num(found[0], neginf=-9), np.nan_to_num(scores, neginf=-9))


@pytest.mark.parametrize("block", BLOCKS)
def test_top_k_at_the_edges(block):
    ones = jnp.ones((3, 2))
    _, indices = top_k(ones, jnp.ones((5, 2)), 3, block_size=block)
    assert_close(indices, np.tile([0, 1, 2], (3, 1)), name="ties: the first first")
    keys = jnp.ones((4, 2)).at[2].set(jnp.nan)
    for bad in (keys, -keys):
        scores, indices = top_k(ones, bad, 2, block_size=block)
        assert_close(indices[:, 0], 2, name="NaN comes first")
        assert_nan(scores[:, 0])
    # Arithmetic makes NaN of either sign, and JAX sorts by the sign.
    _, indices = top_k(ones, keys, 2, similarity=lambda x, y: jnp.zeros((len(x), 4)).at[:, 3].set(-jnp.nan))
    assert_close(indices[:, 0], 3)
    scores, indices = top_k(ones, keys, 2, key_where=jnp.zeros(4, bool), block_size=block)
    assert_close(indices, -1)
    assert np.all(np.isneginf(scores))
    # A real key of similarity -inf comes before a hidden one.
    keys, real = jnp.array([[1.0, 0.0], [-1.0, 0.0]]), jnp.array([False, True])
    scores, indices = top_k(
        jnp.tile(keys[:1], (3, 1)), keys, 2, key_where=real, similarity=log1p_cosine_similarity, block_size=block
    )
    assert_close(indices, np.tile([1, -1], (3, 1)))
    assert top_k(ones[:0], ones, 2, block_size=block)[1].shape == (0, 2)


@in_float64
@pytest.mark.parametrize("block", [None, 3])
def test_gradient_of_top_k(block):
    keys = rows(17, M)
    check_grads(lambda x: top_k(x, keys, 3, block_size=block)[0], (rows(16),), order=1, modes=["fwd", "rev"])


def test_top_k_agrees_with_recall():
    queries, keys = (jnp.asarray(rows(seed, 40), jnp.float32) for seed in (18, 19))
    _, indices = top_k(queries, keys, 5)
    hits = jnp.mean(jnp.any(indices == jnp.arange(40)[:, None], axis=1))
    assert_close(retrieval_metrics(queries, keys)["recall@5"], hits)


# How it runs ----------------------------------------------------------------------------------------------------------


@in_float64
def test_transformations():
    x, labels = np.stack([rows(20), rows(21)]), labels_of(22)
    one_by_one = [retrieval_metrics(each, labels=labels, block_size=3) for each in x]
    together = jax.vmap(lambda x: retrieval_metrics(x, labels=labels, block_size=3))(x)
    for name, value in together.items():
        assert_close(value, [metrics[name] for metrics in one_by_one], name=name)
    jitted = jax.jit(lambda x, labels: retrieval_metrics(x, labels=labels, block_size=3))(x[0], labels)
    assert_metrics({name: jitted[name] for name in one_by_one[0]}, {n: float(v) for n, v in one_by_one[0].items()})
    found = jax.jit(top_k, static_argnums=2, static_argnames="block_size")(x[0], x[1], 3, block_size=4)
    assert_close(found[1], top_k(x[0], x[1], 3)[1])


def test_new_values_do_not_compile_again():
    for compiled in (retrieval._compiled_metrics, retrieval._compiled_top_k):
        compiled.clear_cache()
    for seed in range(3):
        x = jnp.asarray(rows(seed), jnp.float32)
        retrieval_metrics(x, labels=labels_of(seed, number=seed + 2))
        top_k(x, x, 3)
    assert retrieval._compiled_metrics._cache_size() == retrieval._compiled_top_k._cache_size() == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x, labels: retrieval_metrics(x, labels=labels, block_size=16),
        lambda x, labels: retrieval_metrics(x, x, block_size=16),
        lambda x, labels: top_k(x, x, 5, key_where=labels > 0, block_size=16),
    ],
)
def test_memory_is_linear_in_the_rows(call):
    def temporaries(n):
        shapes = jax.ShapeDtypeStruct((n, 8), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
        return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 6 * temporaries(1024)


@in_float64
@pytest.mark.parametrize("block", [None, 3])
def test_rows_of_several_vectors(block):
    """Late interaction: each vector of a query takes its best vector of a key."""

    def late_interaction(x, y):
        return jnp.einsum("iad,jbd->ijab", x, y).max(axis=-1).sum(axis=-1)

    x = np.random.default_rng(23).normal(size=(N, 4, D))
    labels = labels_of(24)
    expected = oracle_retrieval.retrieval_metrics(
        x, labels=labels, similarity=lambda a, b: float((a @ b.T).max(axis=1).sum())
    )
    actual = retrieval_metrics(x, labels=labels, similarity=late_interaction, block_size=block)
    assert_metrics(actual, expected)
    scores = late_interaction(x, x)
    found = top_k(x, x, N, similarity=late_interaction, block_size=block)
    assert_close(found[1], jnp.argsort(-scores, axis=1))
    assert_close(found[0], -jnp.sort(-scores, axis=1))


def test_changed_weights_are_seen():
    """A user's method is no key of a compilation cache."""

    class Bilinear:
        weight = jnp.eye(3)

        def __call__(self, x, y):
            return x @ self.weight @ y.T

    similarity = Bilinear()
    first = retrieval_metrics(jnp.float32(A), jnp.float32(B), similarity=similarity)
    similarity.weight = -jnp.eye(3)
    second = retrieval_metrics(jnp.float32(A), jnp.float32(B), similarity=similarity)
    assert not math.isclose(first["mrr"], second["mrr"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: retrieval_metrics(X), ValueError, "own row is left out; pass labels"),
        (lambda: retrieval_metrics(X[0], X), ValueError, r"queries must have shape \[n, d\]"),
        (lambda: retrieval_metrics(X, X[:, :2]), ValueError, "queries and keys must have equally many features"),
        (lambda: retrieval_metrics(X, X[:2]), ValueError, "keys must have a row for each of the 6 rows of queries"),
        (lambda: retrieval_metrics(X, labels=LS[:1]), ValueError, r"labels must have shape \[6\]"),
        (lambda: retrieval_metrics(X, labels=LS / 2), TypeError, "labels must be integers"),
        (lambda: retrieval_metrics(X, labels=list("abcdef")), TypeError, "labels must hold numbers.*np.unique"),
        (lambda: retrieval_metrics(X, labels=LS, key_labels=LS), ValueError, "key_labels given without keys"),
        (lambda: retrieval_metrics(X, labels=LS, key_where=LS > 0), ValueError, "key_where given without keys"),
        (lambda: retrieval_metrics(X, X, labels=LS), ValueError, "labels given without key_labels"),
        (lambda: retrieval_metrics(X, X, key_labels=LS), ValueError, "key_labels given without labels"),
        (lambda: retrieval_metrics(A, X, ids=LS[:3]), ValueError, "ids given without key_ids"),
        (
            lambda: retrieval_metrics(A, X, labels=LS[:3], key_labels=LS, key_ids=LS),
            ValueError,
            "key_ids given without ids",
        ),
        (lambda: retrieval_metrics(X, X, key_where=LS), TypeError, "key_where must be boolean"),
        (lambda: retrieval_metrics(X, X, ks=(1, 0)), ValueError, "each of ks must be at least 1, got 0"),
        (lambda: retrieval_metrics(X, X, ks=(1.0,)), TypeError, "each of ks must be an integer, got 1.0"),
        (lambda: retrieval_metrics(X, X, ks=5), TypeError, r"ks must be a sequence of ints, got 5.*ks=\(5,\)"),
        (lambda: retrieval_metrics(X, X, block_size=0), ValueError, "block_size must be a positive int"),
        (lambda: retrieval_metrics(X, X, similarity="cosine"), TypeError, "similarity must be a function"),
        (lambda: top_k(X, X, 7), ValueError, "k must be at most the number of keys, 6, got 7"),
        (lambda: top_k(X, X, 0), ValueError, "k must be at least 1, got 0"),
        (lambda: top_k(X, X, 2.0), TypeError, "k must be an integer, got 2.0"),
        (lambda: top_k(X, X, True), TypeError, "k must be an integer, got True"),
        (lambda: top_k(X, X, 1, key_where=[True]), ValueError, r"key_where must have shape \[6\]"),
        (lambda: jax.jit(top_k)(X, X, 2), TypeError, "under jit it must be static"),
    ],
)
def test_errors(call, error, message):
    with double_precision(), pytest.raises(error, match=message):
        call()
