"""Errors: each names the argument, what came, what was expected, and the cure."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close

import ntxent_jax as nj
from ntxent_jax import checks

N, D = 7, 5
ROWS = np.ones((N, D), np.float32)
OWN = np.ones((N, 2, D), np.float32)
IDS = np.arange(N, dtype=np.int32)
LABELS = IDS // 2
FLAGS = np.ones(N, bool)
CANDIDATES = {"candidates": ROWS, "candidate_labels": IDS}
# A call of each loss that is right; each test spoils one argument.
LOSSES = {
    "ntxent": lambda **o: nj.ntxent(o.pop("rows", ROWS), o.pop("labels", LABELS), **o),
    "supcon": lambda **o: nj.supcon_loss(o.pop("rows", ROWS), o.pop("labels", LABELS), **o),
    "views": lambda **o: nj.ntxent_views(ROWS, o.pop("rows", ROWS), **o),
    "instance": lambda **o: nj.instance_loss(ROWS, o.pop("rows", ROWS), **o),
    "info_nce": lambda **o: nj.info_nce_loss(o.pop("rows", ROWS), o.pop("keys", ROWS), o.pop("negatives", None), **o),
    "ranking": lambda **o: nj.multiple_negatives_ranking_loss(
        o.pop("rows", ROWS), o.pop("keys", ROWS), o.pop("negatives", None), **o
    ),
}
LABELLED, QUERIES = ["ntxent", "supcon"], ["info_nce", "ranking"]
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
each_labelled = pytest.mark.parametrize("loss", [LOSSES[name] for name in LABELLED], ids=LABELLED)
each_query_loss = pytest.mark.parametrize("loss", [LOSSES[name] for name in QUERIES], ids=QUERIES)


def each(loss):
    """What a message says that there is one entry of."""
    return "item, for all of its views" if loss in (LOSSES["views"], LOSSES["instance"]) else "row"


def refused(call, error, *parts):
    """The message has all of the parts, in this order."""
    with pytest.raises(error, match=".*".join(map(re.escape, parts))) as caught:
        call()
    assert caught.type is error, "not a subclass"


def test_the_right_calls_are_right():
    for loss in LOSSES.values():
        assert loss() > 0


# Options that all losses share --------------------------------------------------------------------------------------


@each_loss
def test_reduction(loss):
    for value in ("average", "Mean", "", None, 0, ["mean"], np.array(["mean", "sum"])):
        refused(
            lambda value=value: loss(reduction=value),
            ValueError,
            f"reduction must be one of 'mean', 'anchor_mean', 'sum', 'none', got {value!r}",
        )


@each_loss
def test_block_size(loss):
    for value in (0, -3, 2.0, "3", True, np.float32(4)):
        refused(
            lambda value=value: loss(block_size=value),
            ValueError,
            f"block_size must be a positive int or None (chosen automatically), got {value!r}",
        )


@each_loss
def test_precision(loss):
    for value in ("fastest", 3):
        message = "precision must be one of 'default',"
        refused(lambda value=value: loss(precision=value), ValueError, message, repr(value))


@each_loss
def test_similarity(loss):
    for value in ("cosine", None, 3):
        refused(
            lambda value=value: loss(similarity=value),
            TypeError,
            f"similarity must be a function (x [n, d], y [m, d]) -> [n, m], got {value!r}",
            "ntxent_jax.cosine_similarity",
        )


@each_loss
@pytest.mark.parametrize("block_size", [None, 3])
def test_result_of_a_similarity(loss, block_size):
    refused(
        lambda: loss(similarity=lambda x, y: jnp.sum(x @ y.T, axis=1), block_size=block_size),
        ValueError,
        "similarity must return shape [n, m] = [",
        "] for n anchors and m candidates, got [",
    )
    refused(
        lambda: loss(similarity=lambda x, y: x @ y.T > 0, block_size=block_size),
        TypeError,
        "the result of similarity must be floating, got bool",
    )


@each_loss
@pytest.mark.parametrize(
    "temperature",
    [0, 0.0, -0.0, -0.5, float("nan"), -float("inf"), np.float32(-1), np.array(0.0), np.full(N, -1.0), [-0.5]],
    ids=repr,
)
def test_temperature_known_beforehand(loss, temperature):
    refused(
        lambda: loss(temperature=temperature),
        ValueError,
        f"temperature must be > 0, got {temperature}; it divides the similarities",
    )


def test_one_bad_temperature_of_many():
    refused(lambda: nj.ntxent(ROWS, IDS, np.array([1, 1, 0, 1, 1, 1, 1.0])), ValueError, "temperature must be > 0")
    refused(lambda: nj.ntxent(ROWS, IDS, [1, 1, 0, 1, 1, 1, 1.0]), ValueError, "temperature must be > 0")
    refused(lambda: nj.loss_floor(3, [0.5, -0.5]), ValueError, "temperature must be > 0, got [0.5, -0.5]")
    refused(lambda: nj.loss_floor([3, -1], 0.5), ValueError, "num_negatives must be at least 0, got [3, -1]")
    refused(lambda: nj.loss_floor(3, 0), ValueError, "temperature must be > 0, got 0")
    refused(lambda: nj.loss_floor(3, float("nan")), ValueError, "temperature must be > 0, got nan")
    refused(lambda: nj.loss_floor(-1, 0.5), ValueError, "num_negatives must be at least 0, got -1")
    refused(lambda: nj.loss_floor(3, 0.5, lowest_similarity=2), ValueError, "lowest_similarity must be from -1 to 1")


@each_loss
def test_temperature_of_padding_is_not_looked_at(loss):
    """On the host as under jit, where it cannot be looked at."""
    real = np.arange(N) != 3
    temperature = np.where(real, 0.5, 0.0)
    refused(lambda: loss(temperature=temperature), ValueError, "temperature must be > 0")
    refused(lambda: loss(temperature=np.zeros(N), where=real), ValueError, "temperature must be > 0")
    right = loss(temperature=np.full(N, 0.5), where=real)
    assert loss(temperature=temperature, where=real) == loss(temperature=temperature, where=list(real)) == right


@each_loss
def test_none_where_something_is_needed(loss):
    refused(lambda: loss(temperature=None), TypeError, "temperature must be a number, got None")
    refused(lambda: loss(rows=None), TypeError, "must be an array of numbers, got None")


@each_loss
@pytest.mark.parametrize("shape", [(3,), (N, 1), (1, 1), (0,), (N + 1,)], ids=str)
def test_shape_of_temperature(loss, shape):
    refused(
        lambda: loss(temperature=jnp.ones(shape)),
        ValueError,
        f"temperature must have shape [] or [1] or [{N}], one entry per {each(loss)}, got {list(shape)}",
    )


@each_loss
def test_dtype_of_temperature(loss):
    refused(lambda: loss(temperature=jnp.asarray(True)), TypeError, "temperature must hold real numbers, got bool")
    refused(lambda: loss(temperature=jnp.asarray(1j)), TypeError, "temperature must hold real numbers, got complex64")
    refused(lambda: loss(temperature="cold"), TypeError, "temperature must hold numbers, got strings (<U4)")


@each_loss
@pytest.mark.parametrize("shape", [(1,), (), (3,), (N, 1), (N + 1,)], ids=str)
def test_shapes_of_what_is_said_of_rows(loss, shape):
    """Also where one entry would broadcast without a word."""
    of_where, of_weights = (
        f"{name} must have shape [{N}], one entry per {each(loss)}, got {list(shape)}" for name in ("where", "weights")
    )
    refused(lambda: loss(where=np.ones(shape, bool)), ValueError, of_where)
    refused(lambda: loss(weights=np.ones(shape)), ValueError, of_weights)
    chex.disable_asserts()
    try:
        refused(lambda: loss(where=np.ones(shape, bool)), ValueError, of_where)
        refused(lambda: loss(weights=np.ones(shape)), ValueError, of_weights)
        refused(lambda: loss(temperature=np.ones((N, 1))), ValueError, "temperature must have shape")
    finally:
        chex.enable_asserts()


@each_loss
def test_dtypes_of_what_is_said_of_rows(loss):
    for dtype in (np.int32, np.float32):
        refused(
            lambda dtype=dtype: loss(where=np.ones(N, dtype)),
            TypeError,
            f"where must be boolean (True = real), got {np.dtype(dtype)}; convert it with .astype(bool)",
        )
    refused(lambda: loss(weights=FLAGS), TypeError, "weights must hold real numbers, got bool")
    refused(lambda: loss(weights=np.array(list("abcdefg"))), TypeError, "weights must hold numbers, got strings (<U1)")


@each_loss
def test_rows_must_be_floating(loss):
    for dtype in (np.int32, bool, np.complex64):
        refused(
            lambda dtype=dtype: loss(rows=ROWS.astype(dtype)),
            TypeError,
            f"must be floating, got {np.dtype(dtype)}; convert it with .astype(jnp.float32)",
        )
    refused(lambda: loss(rows=np.full((N, D), "a")), TypeError, "must hold numbers, got strings (<U1)")
    refused(lambda: loss(rows=[[None] * D] * N), TypeError, "must be an array of numbers, got a list")


@each_loss
def test_rank_of_rows(loss):
    refused(lambda: loss(rows=ROWS[0]), ValueError, "must have shape [n, ", f"got [{D}]")
    refused(lambda: loss(rows=ROWS.reshape(N, 1, 1, D)), ValueError, "must have shape [", f", got [{N}, 1, 1, {D}]")
    refused(lambda: loss(rows=0.1), ValueError, "must have rank 2", "; did you mean temperature=0.1?")
    refused(lambda: loss(rows=ROWS[:, :0]), ValueError, f"must have at least one feature, got shape [{N}, 0]")


@each_labelled
def test_items_have_views(loss):
    refused(lambda: loss(rows=np.ones((N, 0, D))), ValueError, "embeddings must have at least one view of each item")


# Labels and ids -----------------------------------------------------------------------------------------------------


@each_labelled
def test_labels(loss):
    cure = "np.unique(labels, return_inverse=True)[1]"
    refused(lambda: loss(labels=IDS * 1.0), TypeError, "labels must be integers, got float", cure)
    refused(lambda: loss(labels=list("abcdefg")), TypeError, "labels must hold numbers, got strings (<U1); turn", cure)
    refused(lambda: loss(labels=np.array([b"a"] * N)), TypeError, "labels must hold numbers, got strings (|S1)", cure)
    objects = np.array(list("abcdefg"), dtype=object)  # As pandas holds them.
    refused(lambda: loss(labels=objects), TypeError, "labels must hold numbers, got strings (object); turn", cure)
    one_hot = np.eye(N, 3, dtype=int)
    refused(lambda: loss(labels=one_hot), ValueError, "got [7, 3]; pass labels.argmax(-1) of one-hot rows")
    refused(lambda: loss(labels=ROWS), ValueError, "got [7, 5]; pass", "or call ntxent_views if these are rows of a")
    refused(lambda: loss(labels=IDS[:, None]), ValueError, "got [7, 1]", "pass labels[..., 0]")
    hashes = np.arange(N, dtype=np.int64) + 2**40
    for values in (hashes, hashes.tolist(), -hashes, hashes.astype(np.uint64)):
        refused(
            lambda values=values: loss(labels=values),
            ValueError,
            "labels holds integers that do not fit",
            cure,
            "jax.config.update('jax_enable_x64', True)",
        )
    for shape in ((1,), (3,), (N, 1), ()):
        refused(
            lambda shape=shape: loss(labels=np.zeros(shape, int)),
            ValueError,
            f"labels must have shape [{N}], one entry per row, got {list(shape)}",
        )


@each_labelled
def test_ids_of_rows(loss):
    refused(lambda: loss(ids=IDS * 1.0), TypeError, "ids must be integers, got float", "np.unique(ids")
    refused(lambda: loss(ids=IDS[:1]), ValueError, f"ids must have shape [{N}], one entry per row, got [1]")
    views = ROWS[:, None].repeat(2, axis=1)
    refused(lambda: loss(rows=views, ids=IDS), ValueError, f"ids must have shape [{N}, 2]", f"got [{N}]")
    refused(lambda: loss(rows=views, labels=np.arange(2 * N)), ValueError, f"labels must have shape [{N}]")


@each_query_loss
def test_ids_of_queries(loss):
    refused(lambda: loss(ids=np.array(list("abcdefg"))), TypeError, "ids must hold numbers", "np.unique(ids")
    refused(lambda: loss(ids=IDS[:1]), ValueError, f"ids must have shape [{N}], one entry per row, got [1]")


# Candidates ---------------------------------------------------------------------------------------------------------


@each_labelled
@pytest.mark.parametrize(
    ("options", "given", "missing"),
    [
        ({"candidates": ROWS}, "candidates", "candidate_labels"),
        ({"candidate_labels": IDS}, "candidate_labels", "candidates"),
        ({"candidate_where": FLAGS}, "candidate_where", "candidates"),
        ({"candidate_ids": IDS}, "candidate_ids", "candidates"),
        ({"candidate_ids": IDS, "ids": IDS}, "candidate_ids", "candidates"),
        ({**CANDIDATES, "ids": IDS}, "ids", "candidate_ids"),
        ({**CANDIDATES, "candidate_ids": IDS}, "candidate_ids", "ids"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_that_belong_together(loss, options, given, missing):
    refused(lambda: loss(**options), ValueError, f"{given} given without {missing}; pass both or neither")


@each_labelled
def test_candidates(loss):
    refused(
        lambda: loss(candidates=ROWS[:, :3], candidate_labels=IDS),
        ValueError,
        "embeddings and candidates must have equally many features, got {'embeddings': 5, 'candidates': 3}",
    )
    refused(lambda: loss(candidates=ROWS[0], candidate_labels=IDS), ValueError, "candidates must have shape [m, d]")
    refused(lambda: loss(candidates=0.1, candidate_labels=IDS), ValueError, "candidates must have rank 2")
    for shape in ((1,), (N + 1,)):
        wrong = f"must have shape [{N}], one entry per row, got {list(shape)}"
        for spoilt in (
            {"candidates": ROWS, "candidate_labels": np.zeros(shape, int)},
            {**CANDIDATES, "candidate_where": np.ones(shape, bool)},
            {**CANDIDATES, "ids": IDS, "candidate_ids": np.zeros(shape, int)},
        ):
            refused(lambda spoilt=spoilt: loss(**spoilt), ValueError, f"{list(spoilt)[-1]} {wrong}")
    refused(lambda: loss(**CANDIDATES, candidate_where=IDS), TypeError, "candidate_where must be boolean")
    unsigned = IDS.astype(np.uint32)
    refused(
        lambda: loss(candidates=ROWS, candidate_labels=unsigned),
        TypeError,
        "labels (int32) and candidate_labels (uint32) cannot be compared exactly; convert both to one dtype",
    )
    refused(
        lambda: loss(**CANDIDATES, ids=IDS, candidate_ids=unsigned),
        TypeError,
        "ids (int32) and candidate_ids (uint32) cannot be compared exactly",
    )


# Queries, keys, negatives -------------------------------------------------------------------------------------------


@each_query_loss
def test_negatives(loss):
    refused(lambda: loss(negatives=0.1), ValueError, "negatives must have rank 2 or 3; did you mean temperature=0.1?")
    traced = jax.jit(lambda t: loss(negatives=t))
    refused(lambda: traced(0.1), ValueError, "negatives must have rank 2 or 3; did you mean temperature=...?")
    queue = nj.queue_init(3, D, dtype=np.float32)
    refused(
        lambda: loss(negatives=queue),
        TypeError,
        "negatives must be an array of numbers, got a EmbeddingQueue; did you mean negatives.embeddings or",
    )
    refused(lambda: loss(negatives=ROWS[0]), ValueError, "negatives must have shape [", f", got [{D}]")
    refused(
        lambda: loss(negatives=OWN[:3]),
        ValueError,
        f"negatives of shape [n, k, d] must have n = {N}, some for each row, got [3, 2, {D}]",
    )
    columns = np.swapaxes(OWN, 0, 1)
    refused(lambda: loss(negatives=columns), ValueError, "got [2, 7, 5]; turn them with negatives.swapaxes(0, 1)")
    for several in (list(columns), tuple(columns), [jnp.asarray(x) for x in columns], [ROWS] * N):
        refused(
            lambda several=several: loss(negatives=several),
            TypeError,
            f"negatives must be one array, got a {type(several).__name__} of arrays; pass jnp.stack(negatives, axis=1) "
            "if each row has several, jnp.concatenate(negatives) if these are more rows",
        )
    refused(lambda: loss(negatives=OWN[:1]), ValueError, f"must have n = {N}", "got [1, 2, 5]")
    refused(lambda: loss(negatives=OWN[:, :, :3]), ValueError, "must have equally many features", "'negatives': 3")
    refused(lambda: loss(negatives=OWN.astype(int)), TypeError, "negatives must be floating")
    for shape in ((N,), (1, 2), (N, 1), (1,)):
        refused(
            lambda shape=shape: loss(negatives=OWN, negative_where=np.ones(shape, bool)),
            ValueError,
            f"negative_where must have shape [{N}, 2], one entry per negative of each "
            f"{'anchor' if loss is LOSSES['ranking'] else 'query'}, got {list(shape)}",
        )
    refused(lambda: loss(negatives=ROWS, negative_where=FLAGS[:1]), ValueError, f"negative_where must have shape [{N}]")
    refused(lambda: loss(negatives=ROWS, negative_where=IDS), TypeError, "negative_where must be boolean")
    refused(
        lambda: loss(negative_where=FLAGS), ValueError, "negative_where given without negatives; pass both or neither"
    )


@each_query_loss
def test_keys(loss):
    refused(lambda: loss(keys=ROWS[: N - 1]), ValueError, " must have ", str(N), f" {N - 1}")
    refused(lambda: loss(keys=ROWS[:, :3]), ValueError, "must have equally many features")
    refused(lambda: loss(keys=ROWS[0]), ValueError, "must have shape [", f", got [{D}]")
    for shape in ((1,), (3,), ()):
        refused(
            lambda shape=shape: loss(key_bias=np.ones(shape)),
            ValueError,
            f"key_bias must have shape [{N}], one entry per row, got {list(shape)}",
        )
    refused(lambda: loss(key_bias=FLAGS), TypeError, "key_bias must hold real numbers, got bool")
    for answer in ("no", 1, None, np.array([True]), jnp.asarray(True)):
        refused(
            lambda answer=answer: loss(margin=0.1, relative_margin=answer),
            TypeError,
            f"relative_margin must be True or False, known beforehand, got {answer!r}",
        )


def test_info_nce():
    loss = LOSSES["info_nce"]
    refused(lambda: loss(in_batch="no"), TypeError, "in_batch must be True or False, known beforehand, got 'no'")
    refused(lambda: loss(in_batch=False), ValueError, "in_batch=False leaves no negatives; pass negatives of shape")
    more = np.ones((N + 2, D), np.float32)
    refused(
        lambda: loss(in_batch=False, keys=more, negatives=OWN),
        ValueError,
        f"in_batch=False uses one key for each query, got {N + 2} for {N}; pass the others as negatives",
    )
    refused(lambda: loss(key_ids=IDS), ValueError, "key_ids given without ids; pass both or neither")
    refused(lambda: loss(keys=more, ids=IDS), ValueError, "ids given without key_ids; pass both or neither")
    refused(
        lambda: loss(ids=IDS, key_ids=IDS.astype(np.uint32)),
        TypeError,
        "ids (int32) and key_ids (uint32) cannot be compared exactly",
    )
    for shape in ((N, 1), (1, N), (1, 1), (N,)):
        refused(
            lambda shape=shape: loss(pair_where=np.ones(shape, bool)),
            ValueError,
            f"pair_where must have shape [{N}, {N}], one entry per pair of a query and a key, got {list(shape)}",
        )
    refused(lambda: loss(pair_where=np.ones((N, N))), TypeError, "pair_where must be boolean")
    refused(lambda: loss(key_where=FLAGS[:1]), ValueError, f"key_where must have shape [{N}]", "got [1]")
    refused(lambda: loss(key_where=IDS), TypeError, "key_where must be boolean")
    refused(lambda: loss(ids=IDS, key_ids=IDS[:1]), ValueError, f"key_ids must have shape [{N}]", "got [1]")


def test_ranking_speaks_of_anchors_and_positives():
    loss = LOSSES["ranking"]
    refused(lambda: loss(symmetric="no"), TypeError, "symmetric must be True or False, known beforehand, got 'no'")
    refused(lambda: loss(rows=ROWS[0]), ValueError, "anchors must have shape [n, ", f"got [{D}]")
    for positives in (ROWS[:3], np.concatenate([ROWS, ROWS])):
        refused(
            lambda positives=positives: loss(keys=positives),
            ValueError,
            f"anchors and positives must have equally many rows, got {N} and {len(positives)}",
        )
    for argument, name, rows in (("keys", "positives", ROWS[:, :3]), ("negatives", "negatives", OWN[:, :, :3])):
        refused(
            lambda argument=argument, rows=rows: loss(**{argument: rows}),
            ValueError,
            "anchors and positives",
            "must have equally many features, got {'anchors': 5",
            f"'{name}': 3",
        )


# Views, choices, pairs ----------------------------------------------------------------------------------------------


def test_views():
    refused(lambda: nj.ntxent_views(), ValueError, "ntxent_views needs two or more views, got 0")
    refused(lambda: nj.ntxent_views(ROWS), ValueError, "ntxent_views needs two or more views, got 1", "call ntxent")
    refused(
        lambda: nj.ntxent_views(ROWS, ROWS, ROWS[:3]),
        ValueError,
        f"views must all have the same shape [n, d], got [[{N}, {D}], [{N}, {D}], [3, {D}]]",
    )
    refused(lambda: nj.instance_loss(ROWS, ROWS[:1]), ValueError, "must all have the same shape [n, d]")
    refused(lambda: nj.ntxent_views(ROWS, ROWS[:, :1]), ValueError, "must all have the same shape [n, d]")
    refused(lambda: nj.ntxent_views(ROWS, ROWS, 0.1), ValueError, "views[2]", "did you mean temperature=0.1?")
    refused(lambda: nj.ntxent_views(ROWS, OWN), ValueError, "views[1] must have shape [n, d], got [7, 2, 5]")
    refused(
        lambda: nj.ntxent_views(np.stack([ROWS, ROWS])),
        ValueError,
        "one by one, ntxent_views(*x), or ntxent_views(*jnp.unstack(x, axis=1)) if they are x[:, 0], x[:, 1], ...",
    )
    refused(lambda: nj.ntxent_views([ROWS, ROWS]), TypeError, "a list of arrays; pass them one by one, ntxent_views(*v")
    refused(lambda: nj.ntxent_views(ROWS, ROWS, np.ones(N)), ValueError, "views[2]", "did you mean temperature=...?")


def test_closed_choices():
    for loss in (LOSSES["ntxent"], LOSSES["views"]):
        refused(
            lambda loss=loss: loss(denominator="some"),
            ValueError,
            "denominator must be one of 'pair', 'all', 'negatives', got 'some'",
        )
    message = "form must be one of 'out', 'in', got 'inside'"
    refused(lambda: nj.supcon_loss(ROWS, IDS, form="inside"), ValueError, message)


def test_pair_masks():
    refused(lambda: nj.pair_masks(np.zeros((3, 2), int)), ValueError, "labels must have shape [n]", "got [3, 2]")
    refused(lambda: nj.pair_masks(IDS, 3), ValueError, "candidate_labels must have shape [n]", "got []")
    refused(lambda: nj.pair_masks(IDS * 1.0), TypeError, "labels must be integers, got float")
    refused(lambda: nj.pair_masks(IDS, where=FLAGS[:1]), ValueError, "where must have shape [7]", "got [1]")
    refused(lambda: nj.pair_masks(IDS, candidate_where=FLAGS), ValueError, "candidate_where given without candidates")
    refused(lambda: nj.pair_masks(IDS, IDS, ids=IDS), ValueError, "ids given without candidate_ids")
    refused(lambda: nj.pair_masks(list("ab")), TypeError, "labels must hold numbers")


def test_batch_statistics():
    call = lambda **o: nj.batch_statistics(o.pop("rows", ROWS), o.pop("labels", IDS), **o)  # noqa: E731
    refused(lambda: call(similarity="cosine"), TypeError, "similarity must be a function")
    refused(lambda: call(block_size=0), ValueError, "block_size must be a positive int")
    refused(lambda: call(where=FLAGS[:1]), ValueError, "where must have shape [7]")
    refused(lambda: call(labels=IDS * 1.0), TypeError, "labels must be integers")
    refused(lambda: call(candidates=ROWS), ValueError, "candidates given without candidate_labels")


@pytest.mark.parametrize(
    "similarity",
    [nj.cosine_similarity, nj.dot_product, nj.log1p_cosine_similarity, nj.negative_euclidean_distance],
)
def test_similarities(similarity):
    refused(lambda: similarity(ROWS, ROWS[:, :3]), ValueError, "x and y must have equally many features")
    refused(lambda: similarity(ROWS[0], ROWS), ValueError, "x must have shape [n, d], got [5]")
    refused(lambda: similarity(ROWS, OWN), ValueError, "y must have shape [m, d], got [7, 2, 5]")
    refused(lambda: similarity(ROWS.astype(int), ROWS), TypeError, "x must be floating")
    refused(lambda: nj.l2_normalize(IDS), TypeError, "x must be floating")


# Where checks happen ------------------------------------------------------------------------------------------------


@each_loss
def test_the_same_errors_under_jit(loss):
    refused(lambda: jax.jit(lambda w: loss(weights=w))(np.ones(1)), ValueError, "weights must have shape [7]")
    refused(lambda: jax.jit(lambda w: loss(where=w))(np.ones(N)), TypeError, "where must be boolean")
    refused(lambda: jax.jit(lambda t: loss(temperature=t))(np.ones(2)), ValueError, "temperature must have shape")
    assert np.isnan(jax.jit(lambda t: loss(temperature=t))(-1.0)), "a traced one cannot be seen"


def test_a_dimension_too_much_under_vmap_is_seen():
    refused(
        lambda: jax.vmap(lambda w: nj.ntxent(ROWS, IDS, weights=w))(np.ones((3, 1))),
        ValueError,
        "weights must have shape [7]",
    )


def test_what_is_welcome():
    """Lists, NumPy scalars, empty lists, integers as weights, a parameter object with ``__jax_array__``."""

    class Parameter:
        def __jax_array__(self):
            return jnp.asarray(0.5)

    rows = np.float32(np.random.default_rng(0).normal(size=(4, 3)))
    value = nj.ntxent(rows, np.array([0, 0, 1, 1]), 0.5)
    for call in (
        lambda: nj.ntxent(rows.tolist(), [0, 0, 1, 1], 0.5),
        lambda: nj.ntxent(rows, (False, False, True, True), np.float32(0.5)),
        lambda: nj.ntxent(rows, np.array([0, 0, 1, 1], np.uint8), Parameter()),
        lambda: nj.ntxent(rows, [0, 0, 1, 1], 0.5, weights=[2, 2, 2, 2], where=[True] * 4),
        lambda: nj.ntxent(jnp.asarray(rows), jnp.asarray([0, 0, 1, 1]), [0.5]),
    ):
        assert_close(call(), value, rtol=1e-6)
    assert nj.ntxent(np.zeros((0, 3)), []) == 0
    assert nj.pair_masks([]).positive.shape == (0, 0)
    assert np.isfinite(nj.ntxent(rows, [0, 0, 1, 1], 1)), "an integer temperature"


def test_disabled_asserts_never_give_a_number():
    """chex may be switched off: what would broadcast or wrap is refused without it."""
    chex.disable_asserts()
    try:
        refused(lambda: nj.ntxent(ROWS, IDS[:1]), ValueError, "labels must have shape")
        refused(lambda: nj.ntxent(ROWS, IDS, ids=IDS[:1]), ValueError, "ids must have shape")
        refused(lambda: nj.info_nce_loss(ROWS, ROWS, key_bias=np.ones(1)), ValueError, "key_bias must have shape")
        refused(lambda: nj.info_nce_loss(ROWS, ROWS[:1]), ValueError, "keys must have a row")
        refused(lambda: nj.info_nce_loss(ROWS, ROWS, pair_where=np.ones((N, 1), bool)), ValueError, "pair_where must")
        refused(lambda: nj.ntxent(ROWS, np.arange(N) + 2**40), ValueError, "labels holds integers")
        refused(lambda: nj.ntxent(ROWS, IDS * 1.0), TypeError, "labels must be integers")
        refused(lambda: nj.ntxent_views(ROWS, ROWS[:1]), ValueError, "views must all have the same shape")
        refused(lambda: nj.ntxent(ROWS[:, :0], IDS), ValueError, "at least one feature")
        for rows in (ROWS[0], OWN[None]):
            with pytest.raises((ValueError, TypeError, IndexError)):
                nj.ntxent(rows, IDS)
    finally:
        chex.enable_asserts()


def test_integers_are_compared_exactly_or_not_at_all():
    """Which pairs of dtypes have a common integer dtype without 64 bits."""
    allowed = [("int32", "int8"), ("uint16", "int32"), ("bool", "int32"), ("uint32", "uint8"), ("bool", "uint32")]
    for first, second in allowed:
        checks.comparable(a=jnp.zeros(1, first), b=jnp.zeros(1, second))
    for first, second in (("int32", "uint32"), ("int8", "uint32")):
        refused(
            lambda first=first, second=second: checks.comparable(a=jnp.zeros(1, first), b=jnp.zeros(1, second)),
            TypeError,
            f"a ({first}) and b ({second}) cannot be compared exactly",
        )
    checks.comparable(a=None, b=None)
    checks.comparable(a=jnp.zeros(1, "uint32"), b=None)
