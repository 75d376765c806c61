"""The queue of embeddings against a plain list, and the losses that choose from it."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_finite, assert_states, assert_zero
from inputs import A, B, X

import ntxent_jax as nj
from ntxent_jax import EmbeddingQueue, queue_init, queue_push

in_float64 = pytest.mark.usefixtures("x64")
push = jax.jit(queue_push)
DIM = 3


class PlainQueue:
    """The queue as lists that are written slot by slot."""

    def __init__(self, size):
        self.slots = [None] * size
        self.position = 0

    def push(self, rows, labels, where):
        real = [(row, label) for row, label, flag in zip(rows, labels, where, strict=True) if flag]
        for item in real[-len(self.slots) :]:
            self.slots[self.position] = item
            self.position = (self.position + 1) % len(self.slots)


def assert_same(queue, plain):
    assert int(queue.position) == plain.position
    np.testing.assert_array_equal(queue.where, [slot is not None for slot in plain.slots])
    for row, label, slot in zip(queue.embeddings, queue.labels, plain.slots, strict=True):
        np.testing.assert_array_equal(row, np.zeros(DIM) if slot is None else slot[0])
        assert int(label) == (-1 if slot is None else slot[1])


@pytest.mark.parametrize(("size", "compiled"), [(1, True), (2, True), (5, True), (7, True), (5, False)])
def test_same_as_a_plain_list(size, compiled):
    """Batches of 0 to 11 rows, padding anywhere, with labels and without."""
    rng = np.random.default_rng(size)
    queue, plain = queue_init(size, DIM, dtype=jnp.float32), PlainQueue(size)
    for n, with_labels in [(3, True), (0, True), (1, False), (11, True), (2, False), (5, True), (4, True), (7, False)]:
        rows = rng.normal(size=(n, DIM)).astype(np.float32)
        labels = rng.integers(-5, 5, n).astype(np.int32) if with_labels else np.full(n, -1)
        where = rng.random(n) < 0.7
        given = {"labels": labels} if with_labels else {}
        queue = (push if compiled else queue_push)(queue, rows, where=where, **given)
        plain.push(rows, labels, where)
        assert_same(queue, plain)


def test_case_25_wrap_around():
    """A push that wraps around, and a batch larger than the queue."""
    queue = queue_init(4, 1, dtype=jnp.float32)
    for rows, slots, position, filled in [
        ([1, 2, 3], [1, 2, 3, 0], 3, 3),
        ([4, 5, 6], [5, 6, 3, 4], 2, 4),
        ([7, 8, 9, 10, 11], [10, 11, 8, 9], 2, 4),
    ]:
        queue = push(queue, np.array(rows, np.float32)[:, None])
        np.testing.assert_array_equal(queue.embeddings[:, 0], slots)
        assert int(queue.position) == position
        assert int(queue.where.sum()) == filled


def test_padding_takes_no_slot_whatever_it_holds():
    rows = np.array([[1.0], [np.nan], [2], [np.inf], [3]])
    where = np.array([True, False, True, False, True])
    queue = push(queue_init(4, 1, dtype=jnp.float32), rows, where=where, labels=np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(queue.embeddings[:, 0], [1, 2, 3, 0])
    np.testing.assert_array_equal(queue.labels, [0, 2, 4, -1])
    nothing = push(queue, rows, where=np.zeros(5, bool))
    jax.tree.map(np.testing.assert_array_equal, queue, nothing)


# Transforms -----------------------------------------------------------------------------------------------------------


def test_scan_is_a_loop():
    batches = inputs.random_rows(6, 5, DIM).astype(np.float32)
    labels = np.arange(30, dtype=np.int32).reshape(6, 5)
    start = queue_init(7, DIM, dtype=jnp.float32)
    scanned, _ = jax.lax.scan(lambda queue, x: (queue_push(queue, x[0], labels=x[1]), None), start, (batches, labels))
    looped = start
    for rows, own in zip(batches, labels, strict=True):
        looped = queue_push(looped, rows, labels=own)
    jax.tree.map(np.testing.assert_array_equal, scanned, looped)


def test_vmap_keeps_a_queue_for_each():
    starts = jax.vmap(lambda _: queue_init(4, DIM, dtype=jnp.float32))(jnp.arange(2))
    rows = jnp.asarray(inputs.random_rows(2, 3, DIM), jnp.float32)
    where = jnp.array([[True, True, True], [True, False, False]])
    queues = jax.vmap(lambda queue, x, real: queue_push(queue, x, where=real))(starts, rows, where)
    np.testing.assert_array_equal(queues.position, [3, 1])
    np.testing.assert_array_equal(queues.embeddings[1], np.r_[rows[1, :1], np.zeros((3, DIM))])


def test_donated_queue_is_written_in_place():
    queue = queue_init(512, DIM, dtype=jnp.float32)
    step = jax.jit(queue_push, donate_argnums=0)
    rows = jnp.ones((5, DIM))
    memory = step.lower(queue, rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * DIM
    after = step(queue, rows)
    assert queue.embeddings.is_deleted()
    assert int(after.where.sum()) == 5


def test_new_values_never_compile_again():
    step = jax.jit(lambda *rows, **options: queue_push(*rows, **options))
    queue = queue_init(5, DIM, dtype=jnp.bfloat16)
    for i in range(4):
        queue = step(queue, jnp.full((3, DIM), i / 3), labels=jnp.full(3, i), where=jnp.arange(3) < i)
    assert step._cache_size() == 1


@in_float64
def test_no_gradient_enters_a_queue():
    """Neither from the rows pushed nor from those that lay there; the queries keep theirs."""
    queue = queue_push(queue_init(7, DIM, dtype=jnp.float64), inputs.random_rows(4, DIM, seed=1))
    queries, keys, more = inputs.random_rows(3, 5, DIM, seed=2)

    def loss(queries, more, old):
        pushed = queue_push(queue._replace(embeddings=old), more)
        return nj.info_nce_loss(queries, keys, pushed.embeddings, negative_where=pushed.where, temperature=0.5)

    of_queries, of_rows, of_old = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(queries, more, queue.embeddings)
    assert_zero(of_rows, of_old)
    assert_finite(of_queries)
    assert float(jnp.abs(of_queries).min()) > 0


# Dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_are_kept_in_the_dtype_of_the_queue(dtype):
    queue = push(queue_init(4, DIM, dtype=dtype), jnp.full((2, DIM), 1 / 3, jnp.float32))
    assert queue.embeddings.dtype == dtype
    np.testing.assert_array_equal(queue.embeddings[:2], jnp.full((2, DIM), 1 / 3, dtype))
    assert queue_init(4, DIM, dtype=dtype).embeddings.dtype == dtype


def test_labels_of_other_dtypes():
    flags = np.array([True, False])
    rows = np.ones((2, DIM), np.float32)
    np.testing.assert_array_equal(push(queue_init(2, DIM, dtype=jnp.float32), rows, labels=flags).labels, [1, 0])
    hashes = np.array([2**32 - 1, 7], np.uint32)
    queue = queue_init(3, DIM, dtype=jnp.float32, label_dtype=jnp.uint32)
    np.testing.assert_array_equal(push(queue, rows, labels=hashes).labels, [2**32 - 1, 7, 0])


@in_float64
def test_int64_labels_are_exact():
    queue = queue_init(2, DIM, dtype=jnp.float32, label_dtype=jnp.int64)
    pushed = push(queue, np.ones((2, DIM)), labels=np.array([2**62 + 1, 2**62]))
    np.testing.assert_array_equal(pushed.labels, [2**62 + 1, 2**62])
    assert pushed.position.dtype == jnp.int32


def test_a_queue_of_numpy_arrays():
    """What a checkpoint may give back."""
    queue = queue_push(queue_init(4, DIM, dtype=jnp.float32), jnp.ones((3, DIM)))
    host = EmbeddingQueue(*(np.asarray(x) for x in queue))
    from_host, from_device = (queue_push(x, jnp.ones((2, DIM))) for x in (host, queue))
    jax.tree.map(np.testing.assert_array_equal, from_host, from_device)


# Losses that choose from a queue --------------------------------------------------------------------------------------


@in_float64
def test_case_25_moco_with_slots_never_written():
    """An unfilled slot is no candidate. A zero vector in its place would give .2671284095."""
    queue = queue_push(queue_init(4, 3, dtype=jnp.float64), X[4:])
    options = {"temperature": 0.2, "in_batch": False}
    loss = functools.partial(nj.info_nce_loss, A[:2], B[:2], queue.embeddings, **options)
    assert_states(loss(negative_where=queue.where), 0.2107427988)
    assert_states(loss(), 0.2671284095)
    for filler in (np.inf, np.nan):
        rows = jnp.where(queue.where[:, None], queue.embeddings, filler)
        hidden = nj.info_nce_loss(A[:2], B[:2], rows, negative_where=queue.where, **options)
        assert_states(hidden, 0.2107427988)


@in_float64
def test_moco_over_steps():
    """Loss, then push: at every step the negatives are the keys of earlier steps, the own key never among them."""
    queue, seen = queue_init(5, DIM, dtype=jnp.float64), np.zeros((0, DIM))
    for step in range(4):
        queries, keys = inputs.random_rows(2, 3, DIM, seed=step)
        loss = nj.info_nce_loss(
            queries, keys, queue.embeddings, negative_where=queue.where, temperature=0.5, in_batch=False
        )
        expected = oracle.info_nce_loss(queries, keys, seen[-5:], temperature=0.5, in_batch=False)
        assert_close(loss, expected)
        queue, seen = push(queue, keys), np.concatenate([seen, keys])


@in_float64
def test_pushing_first_makes_the_own_key_a_negative():
    """The mistake that ids, or the order, avoid: log 2 is then the least loss of a perfect model."""
    keys = np.eye(3)
    queue = queue_push(queue_init(4, 3, dtype=jnp.float64), keys, labels=np.arange(3, dtype=np.int32))
    options = {"temperature": 0.01, "key_where": jnp.concatenate([jnp.ones(3, bool), queue.where])}
    candidates = jnp.concatenate([keys, queue.embeddings])
    assert_close(nj.info_nce_loss(keys, candidates, **options), np.log(2))
    key_ids = jnp.concatenate([jnp.arange(3), queue.labels])
    assert_close(nj.info_nce_loss(keys, candidates, ids=jnp.arange(3), key_ids=key_ids, **options), 0)


@in_float64
@pytest.mark.parametrize("loss", ["supcon_loss", "ntxent"])
def test_labelled_queue_and_batch_together(loss):
    """Anchors meet the batch and the queue; a row is not its own candidate, an unfilled slot is nobody's."""
    old, old_labels = inputs.random_rows(4, DIM, seed=3), np.array([0, 1, 2, 1])
    x, labels = inputs.random_rows(5, DIM, seed=4), np.array([0, 0, 1, 2, 3])
    queue = queue_push(queue_init(7, DIM, dtype=jnp.float64), old, labels=old_labels.astype(np.int32))
    value = getattr(nj, loss)(
        x,
        labels,
        0.5,
        candidates=jnp.concatenate([x, queue.embeddings]),
        candidate_labels=jnp.concatenate([labels, queue.labels]),
        candidate_where=jnp.concatenate([jnp.ones(5, bool), queue.where]),
        ids=jnp.arange(5),
        candidate_ids=jnp.concatenate([jnp.arange(5), jnp.full(7, -1)]),
    )
    everything = np.concatenate([x, old]), np.concatenate([labels, old_labels])
    # Every row an anchor, those of the queue with weight 0.
    expected = getattr(oracle, loss)(*everything, temperature=0.5, weights=np.array([1.0] * 5 + [0] * 4))
    assert_close(value, expected)


# Errors ---------------------------------------------------------------------------------------------------------------

QUEUE = queue_init(4, DIM, dtype=jnp.float32)
ROWS = np.ones((2, DIM), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: queue_init(0, 3, dtype=jnp.float32), ValueError, "size must be at least 1, got 0"),
        (lambda: queue_init(4, 2.0, dtype=jnp.float32), TypeError, "dim must be an integer, got 2.0"),
        (lambda: queue_init(True, 3, dtype=jnp.float32), TypeError, "size must be an integer, got True"),
        (lambda: queue_init(4, 3, dtype=jnp.int32), TypeError, "dtype must be a floating dtype, got int32"),
        (lambda: queue_init(4, 3, dtype=jnp.float64), ValueError, "dtype=float64 needs .*jax_enable_x64"),
        (lambda: queue_init(4, 3, dtype=jnp.float32, label_dtype=bool), TypeError, "label_dtype must be an integer"),
        (lambda: queue_init(4, 3, dtype=jnp.float32, label_dtype=jnp.int64), ValueError, "label_dtype=int64 needs"),
        (lambda: queue_push(tuple(QUEUE), ROWS), TypeError, "queue must be an EmbeddingQueue, got tuple"),
        (lambda: queue_push(QUEUE._asdict(), ROWS), TypeError, r"got dict; .* EmbeddingQueue\(\*\*fields\)"),
        (lambda: queue_push(QUEUE, ROWS[0]), ValueError, r"embeddings must have shape \[n, dim\], got \[3\]"),
        (
            lambda: queue_push(QUEUE, ROWS[:, :1]),
            ValueError,
            r"3 features like the rows of the queue, got shape \[2, 1\]",
        ),
        (lambda: queue_push(QUEUE, ROWS.astype(int)), TypeError, "embeddings must be floating, got int"),
        (lambda: queue_push(QUEUE, ROWS, labels=np.ones(2)), TypeError, "labels must be integers, got float"),
        (lambda: queue_push(QUEUE, ROWS, labels=[1]), ValueError, r"labels must have shape \[2\].* got \[1\]"),
        (lambda: queue_push(QUEUE, ROWS, labels=["a", "b"]), TypeError, "return_inverse=True"),
        (
            lambda: queue_push(QUEUE, ROWS, labels=np.ones(2, np.uint32)),
            TypeError,
            r"labels \(uint32\) do not fit the queue's labels \(int32\); .*label_dtype=jnp.uint32",
        ),
        (
            lambda: queue_push(queue_init(2, DIM, dtype=jnp.float32, label_dtype=jnp.uint32), ROWS),
            ValueError,
            "labels must be given to a queue of uint32 labels",
        ),
        (lambda: queue_push(QUEUE, ROWS, where=np.ones(2)), TypeError, "where must be boolean"),
        (lambda: queue_push(QUEUE, ROWS, where=[True]), ValueError, r"where must have shape \[2\].* got \[1\]"),
        (
            lambda: queue_push(QUEUE._replace(where=QUEUE.where[:2]), ROWS),
            ValueError,
            r"queue.where must have shape \[4\].* got \[2\]",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
