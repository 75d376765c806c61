"""Similarities of the user with parameters: a learned bilinear form, and late interaction over tokens."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pairs as right
import pytest
from assertions import assert_close, assert_finite, assert_zero
from catalog import BLOCK, IDS, WHERE, N, quick_jit

import ntxent_jax as nj

pytestmark = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])
FORM = np.eye(3) + 0.4 * inputs.random_rows(3, 3, seed=5)
ROWS, OTHERS = 0.8 * inputs.random_rows(2, N, 3, seed=71)
TOKENS, OTHER_TOKENS = 0.6 * inputs.random_rows(N, 4, 3, seed=72), 0.6 * inputs.random_rows(N, 2, 3, seed=73)
OWN, OWN_TOKENS = inputs.random_rows(N, 2, 3, seed=74), 0.6 * inputs.random_rows(N, 2, 2, 3, seed=75)
PAIRS = np.array([[0, 1], [2, 3], [4, 4], [0, 5]]), np.array([[0, 2], [2, 6], [0, 6], [4, 1]])


class Model:
    """A similarity that can be changed in place, and is nobody's key of a cache."""

    __hash__ = None

    def __init__(self, weight):
        self.weight = weight

    def compare(self, x, y):
        return x @ self.weight @ y.T

    def late(self, x, y):
        """Sum over the tokens of x of the best token of y: ColBERT's MaxSim, in a learned metric."""
        return jnp.einsum("ntd,de,mue->nmtu", x, self.weight, y).max(3).sum(2)

    def __call__(self, x, y):
        return self.compare(x, y) if x.ndim == 2 else self.late(x, y)


FORMS = {
    "closure": lambda w: lambda x, y: Model(w)(x, y),
    "method": lambda w: Model(w).__call__,
    "partial": lambda w: jax.tree_util.Partial(lambda weight, x, y: Model(weight)(x, y), w),
    "not hashable": Model,
}


def exact(weight):
    """The same of two items, in NumPy."""
    return lambda x, y: float(x @ weight @ y) if x.ndim == 1 else float((x @ weight @ y.T).max(1).sum())


LOSSES = {
    "info_nce": lambda lib, x, y, own, **o: lib.info_nce_loss(x, y, own, where=WHERE, ids=IDS, **o),
    "info_nce only own": lambda lib, x, y, own, **o: lib.info_nce_loss(x, y, own, in_batch=False, hardness=0.5, **o),
    "ranking": lambda lib, x, y, own, **o: lib.multiple_negatives_ranking_loss(
        x, y, own, symmetric=True, where=WHERE, label_smoothing=0.2, **o
    ),
    "clip": lambda lib, x, y, own, **o: lib.clip_loss(x, y, where=WHERE, ids=IDS, **o),
    "siglip": lambda lib, x, y, own, **o: lib.siglip_loss(x, y, bias=-1.0, where=WHERE, ids=IDS, **o),
    "views": lambda lib, x, y, own, **o: lib.ntxent_views(x, y, **o),
}
BATCHES = {"rows": (ROWS, OTHERS, OWN), "tokens": (TOKENS, OTHER_TOKENS, OWN_TOKENS)}
SAME_TOKENS = (TOKENS, TOKENS[:, ::-1] + 0.3, OWN_TOKENS)  # Views have one shape.
STEP = 1e-5  # A maximum over tokens has kinks, which differences must not cross.
MOVES = inputs.random_rows(3, 3, 3, seed=76)


def batch_of(loss, kind):
    return SAME_TOKENS if (loss, kind) == ("views", "tokens") else BATCHES[kind]


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_to_the_parameters(loss, kind):
    """Whole and streamed: the loops' value, and slopes to the weight and to the rows."""
    batch, move = batch_of(loss, kind), inputs.random_rows(*batch_of(loss, kind)[1].shape, seed=77)
    frozen = {"queries": batch[0], "keys": batch[1], "negatives": batch[2]}
    held = {"frozen": frozen} if "only own" in loss else {}

    def loops(t, s, **extra):
        # Hardness looks at the similarity as it was, so its weight is the unmoved one.
        return LOSSES[loss](
            right, batch[0], batch[1] + s * move, batch[2], temperature=2.0, similarity=exact(FORM + t), **extra
        )

    first = None
    for block_size in (None, BLOCK):
        run = lambda w, y, b=block_size: LOSSES[loss](  # noqa: E731
            nj, batch[0], y, batch[2], temperature=2.0, similarity=Model(w), block_size=b
        )
        value, (to_weight, to_rows) = quick_jit(jax.value_and_grad(run, argnums=(0, 1)))(FORM, batch[1])
        assert_close(value, loops(0, 0))
        first = first or (to_weight, to_rows)
        assert_close(to_weight, first[0])
        assert_close(to_rows, first[1])
    assert_close(
        np.vdot(to_rows, move), oracle.gradient(lambda s: loops(0, s, **held), 0.0, STEP), rtol=1e-7, atol=1e-9
    )
    if not held:
        slopes = [oracle.gradient(lambda t, m=m: loops(t * m, 0), 0.0, STEP) for m in MOVES]
        assert_close([np.vdot(to_weight, m) for m in MOVES], slopes, rtol=1e-7, atol=1e-9)


@streamed
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_function(form, block_size):
    """Gradients to what it holds are those of the dense formula, in one jitted step."""

    def run(weight):
        return nj.clip_loss(ROWS, OTHERS, 2.0, similarity=FORMS[form](weight), block_size=block_size)

    def dense(weight):
        logits = ROWS @ weight @ OTHERS.T / 2
        both = (jax.nn.logsumexp(logits, axis=axis) - jnp.diag(logits) for axis in (0, 1))
        return sum(jnp.mean(way) for way in both) / 2

    value, gradient = quick_jit(jax.value_and_grad(run))(FORM)
    assert_close(value, dense(FORM))
    assert_close(gradient, jax.grad(dense)(FORM))
    move = MOVES[0]
    if form != "closure":
        return
    curved = quick_jit(lambda w: jax.jvp(jax.grad(run), (w,), (move,))[1])(FORM)
    assert_close(curved, jax.jvp(jax.grad(dense), (FORM,), (move,))[1])


@pytest.mark.parametrize(("kind", "block_size"), [("rows", None), ("tokens", None), ("rows", BLOCK)])
def test_never_stale(kind, block_size):
    """Called by hand, the weight changed in between: one object, one bound method."""
    model = Model(FORM)
    similarity = model.compare if kind == "rows" else model
    for loss in ("clip", "ranking", "views") if block_size is None else ("clip", "info_nce"):
        batch = batch_of(loss, kind)
        for weight in (FORM, 2 * FORM):
            model.weight = weight
            got = LOSSES[loss](nj, *batch, temperature=2.0, similarity=similarity, block_size=block_size)
            assert_close(got, LOSSES[loss](right, *batch, temperature=2.0, similarity=exact(weight)), name=loss)
    if kind == "rows":
        for weight in (FORM, 2 * FORM):
            model.weight = weight
            got = nj.ntxent_pairs(ROWS, *PAIRS, temperature=2.0, similarity=model)
            assert_close(got, right.ntxent_pairs(ROWS, *PAIRS, temperature=2.0, similarity=exact(weight)))


def test_given_pairs():
    """Gradient to the weight; the pairs' rows are gathered, the function sees one row and one row."""
    run = lambda w: nj.ntxent_pairs(ROWS, *PAIRS, temperature=2.0, candidates=OTHERS, similarity=Model(w))  # noqa: E731
    loops = lambda w: right.ntxent_pairs(ROWS, *PAIRS, temperature=2.0, candidates=OTHERS, similarity=exact(w))  # noqa: E731
    value, gradient = quick_jit(jax.value_and_grad(run))(FORM)
    assert_close(value, loops(FORM))
    assert_close(gradient, oracle.gradient(loops, FORM), rtol=1e-8, atol=1e-10)


@streamed
def test_padded_tokens(block_size):
    """Items that are padding are shown as ones to a function that is NaN at a row of zeros."""

    def unguarded(x, y):
        unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)  # noqa: E731
        return jnp.einsum("ntd,mud->nmtu", unit(x), unit(y)).max(3).sum(2)

    def loops(x, y):
        return float((x @ y.T / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)).max(1).sum())

    run = lambda x, y, o: nj.multiple_negatives_ranking_loss(  # noqa: E731
        x, y, o, where=WHERE, symmetric=True, similarity=unguarded, block_size=block_size, temperature=1.0
    )
    step = quick_jit(jax.value_and_grad(run, argnums=(0, 1, 2)))
    options = {"where": WHERE, "symmetric": True, "similarity": loops, "temperature": 1.0}
    exact_value = right.multiple_negatives_ranking_loss(*BATCHES["tokens"], **options)
    for filler in (0.0, np.inf, np.nan):
        batch = [x.copy() for x in BATCHES["tokens"]]
        for x in batch:
            x[2] = filler
        value, gradients = step(*batch)
        assert_close(value, exact_value)
        assert_zero(*(g[2] for g in gradients))
        assert_finite(gradients)


@pytest.mark.parametrize("loss", LOSSES)
def test_built_in_similarities_demand_rows_of_one_vector(loss):
    with pytest.raises(ValueError, match="shape"):
        LOSSES[loss](nj, *SAME_TOKENS)


def test_a_result_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="similarity must return shape"):
        nj.clip_loss(TOKENS, OTHER_TOKENS, similarity=lambda x, y: jnp.einsum("ntd,mud->nmtu", x, y).max(3))
    with pytest.raises(ValueError, match="similarity must return shape"):
        nj.clip_loss(ROWS, OTHERS, similarity=lambda x, y: jnp.sum(x * y[:1], axis=1, keepdims=True))


@streamed
def test_both_directions_of_one_that_is_not_symmetric(block_size):
    """The texts' side of CLIP is the images' side turned over, not the similarity with its arguments exchanged."""
    options = {"similarity": Model(FORM), "block_size": block_size}
    rows, mean = (nj.clip_loss(ROWS, OTHERS, 2.0, reduction=reduction, **options) for reduction in ("none", "mean"))
    scores = np.asarray(ROWS @ FORM @ np.asarray(OTHERS).T) / 2.0
    right = sum(np.log(np.exp(s).sum(1)) - np.diag(s) for s in (scores, scores.T)) / 2
    assert_close(rows, right)
    assert_close(mean, right.mean())
