"""A loss over prefixes of the features is the sum of the losses of arrays cut by hand."""

import functools
import types

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_states, assert_zero
from catalog import CASES, SOME_CASES, directions, moved
from inputs import L2, A, B, X

import ntxent_jax as nj
from ntxent_jax import matryoshka, queue_init, queue_push

in_float64 = pytest.mark.usefixtures("x64")
DIMS, WEIGHTS = (3, 2), (0.5, 2.0)
ROWS = (
    "embeddings",
    "candidates",
    "view_a",
    "view_b",
    "view_c",
    "queries",
    "keys",
    "negatives",
    "anchors",
    "positives",
)


def by_hand(case, floats):
    """The oracle's loss of the rows cut by hand."""
    total = 0.0
    for dim, weight in zip(DIMS, WEIGHTS, strict=True):
        cut = {name: x[..., :dim] if name in ROWS else x for name, x in floats.items()}
        total += weight * float(np.sum(case(oracle, cut)))
    return total


@in_float64
@pytest.mark.parametrize("name", SOME_CASES)
def test_same_as_arrays_cut_by_hand(name):
    """Rows passed by position and by keyword, every option; value, and slope with all floats moving at once."""
    case, (move,) = CASES[name], directions(name, 1)
    loss = matryoshka(getattr(nj, case.loss), DIMS, WEIGHTS)
    library = types.SimpleNamespace(**{**vars(nj), case.loss: loss})
    value, slope = jax.jit(jax.value_and_grad(lambda t: case(library, moved(case.floats, (t, move)))))(0.0)
    assert_close(value, by_hand(case, case.floats), rtol=1e-9)
    assert_close(slope, oracle.gradient(lambda t: by_hand(case, moved(case.floats, (float(t), move))), 0.0), rtol=1e-6)


@in_float64
def test_each_prefix_is_normalised_anew():
    """Rows of two features as they are, and with a third that the prefix does not see."""
    rows = X[:, [0, 1, 2]] @ np.array([[1, 0.2, 0], [0.3, 1, 0], [0.5, -1, 0]])
    padded = rows + np.array([0, 0, 1]) * np.arange(6)[:, None]
    prefix = matryoshka(nj.ntxent, [2])
    assert_close(prefix(padded, L2, 0.5), oracle.ntxent(rows[:, :2], L2, 0.5))
    assert_close(prefix(padded * np.arange(1, 7)[:, None], L2, 0.5), prefix(rows, L2, 0.5))
    assert_zero(jax.grad(prefix)(jnp.asarray(padded), L2, 0.5)[:, 2])


@in_float64
def test_full_length_alone_is_the_loss():
    assert_states(matryoshka(nj.ntxent, [3])(X, L2, 0.5), inputs.NTXENT_L2)
    assert_states(matryoshka(nj.ntxent, (3, 3))(X, L2, 0.5), 2 * inputs.NTXENT_L2)
    assert_states(matryoshka(nj.ntxent_views, np.array([3]))(A, B, temperature=0.5), inputs.NTXENT_L2)
    rows = matryoshka(nj.ntxent, [3], weights=[2.0])(X, L2, 0.5, reduction="none")
    assert_states(rows, 2 * np.array(inputs.NTXENT_L2_ROWS))


@in_float64
def test_every_argument_by_keyword():
    """The first argument of the loss is its embeddings, wherever it stands in the call."""
    loss = matryoshka(functools.partial(nj.ntxent, temperature=0.5), [2, 1])
    by_keyword = loss(labels=L2, embeddings=X + 0.1)
    assert_close(by_keyword, sum(oracle.ntxent(X[:, :dim] + 0.1, L2, 0.5) for dim in (2, 1)))


@in_float64
def test_a_queue_is_cut_too():
    """Its embeddings, not its labels and flags, though those are as many as a row has features."""
    queue = queue_push(queue_init(3, 3, dtype=jnp.float64), X[4:], labels=np.arange(2, dtype=np.int32))
    loss = matryoshka(nj.info_nce_loss, DIMS, WEIGHTS)
    value = loss(A, B, negatives=queue.embeddings, negative_where=queue.where, temperature=0.5)
    expected = [
        w * oracle.info_nce_loss(A[:, :d], B[:, :d], X[4:, :d], temperature=0.5)
        for d, w in zip(DIMS, WEIGHTS, strict=True)
    ]
    assert_close(value, sum(expected))


@in_float64
def test_arrays_of_other_kinds_are_left_alone():
    """Integers, flags, vectors, and floats of another width, though their axes are as long as the rows."""
    seen = []

    def loss(x, *others, **options):
        seen.append([np.shape(value) for value in (x, *others, *options.values())])
        return jnp.sum(x)

    others = [
        np.ones((2, 3), int),
        np.ones((2, 3), bool),
        np.ones(3),
        np.ones((3, 4)),
        np.ones((5, 2, 3)),
        "text",
        None,
    ]
    matryoshka(loss, [2])(np.ones((4, 3)), *others, option=np.ones((3, 3)), number=0.5)
    assert seen == [[(4, 2), (2, 3), (2, 3), (3,), (3, 4), (5, 2, 2), (), (), (3, 2), ()]]


def test_weights_may_be_traced_and_keep_the_dtype():
    x = jnp.asarray(X, jnp.bfloat16)
    losses = [nj.ntxent(x[:, :dim], L2, 0.5) for dim in DIMS]

    def total(weights):
        return matryoshka(nj.ntxent, DIMS, weights)(x, L2, 0.5)

    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.array(WEIGHTS))
    assert value.dtype == jnp.float32
    assert_close(value, WEIGHTS[0] * losses[0] + WEIGHTS[1] * losses[1], rtol=1e-6)
    assert_close(gradient, jnp.stack(losses), rtol=1e-6)
    of_rows = jax.grad(lambda x: matryoshka(nj.ntxent, DIMS)(x, L2, 0.5))(x)
    assert of_rows.dtype == jnp.bfloat16
    assert_finite(of_rows)


@in_float64
def test_dtype_of_the_loss_is_kept_in_float64_mode():
    x = jnp.asarray(X, jnp.float32)
    assert matryoshka(nj.ntxent, DIMS, WEIGHTS)(x, L2, 0.5).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: matryoshka(X, [2]), TypeError, "loss must be a function of embeddings"),
        (lambda: matryoshka(nj.ntxent, 2), TypeError, r"dims must be a sequence of ints.* pass \[2\]"),
        (lambda: matryoshka(nj.ntxent, []), ValueError, "dims must hold at least one length"),
        (lambda: matryoshka(nj.ntxent, [2.0]), TypeError, r"dims must be ints.* got \[2.0\]"),
        (lambda: matryoshka(nj.ntxent, [True]), TypeError, r"dims must be ints.* got \[True\]"),
        (lambda: matryoshka(nj.ntxent, [2, 0]), ValueError, r"dims must be at least 1, got \[2, 0\]"),
        (lambda: matryoshka(nj.ntxent, [2, 3], [1.0]), ValueError, r"weights must have shape \[2\].* got \[1\]"),
        (lambda: matryoshka(nj.ntxent, [2], 1.0), ValueError, r"weights must have shape \[1\].* got \[\]"),
        (lambda: matryoshka(nj.ntxent, [2], ["a"]), TypeError, "weights must hold numbers"),
        (
            lambda: matryoshka(nj.ntxent, [2, 4])(X, L2),
            ValueError,
            "dims must be at most 3, the number of features of embeddings, got 4",
        ),
        (lambda: matryoshka(nj.ntxent, [2])(X[0], L2), ValueError, "embeddings must have rank 2 or more"),
        (lambda: matryoshka(nj.ntxent, [2])(L2[:, None], L2), TypeError, "embeddings must be floating"),
        (lambda: matryoshka(nj.ntxent, [2])(labels=L2), ValueError, r"needs its embeddings \(embeddings\)"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
