"""What must outlive a training run goes through orbax and comes back as it was: a queue, and the sampler's place."""

import itertools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ntxent_jax import EmbeddingQueue, m_per_class_batches, queue_init, queue_push

ocp = pytest.importorskip("orbax.checkpoint")

SIZE, DIM = 7, 3
LABELS = np.repeat(np.arange(6), 9)
FEATURES = inputs.random_rows(len(LABELS), DIM)


def empty_queue(dtype=jnp.float32):
    return queue_init(SIZE, DIM, dtype=dtype)


def assert_equal_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_queue_comes_back_as_it_was(tmp_path, dtype):
    """Half full and wrapped around; every field, its dtype and its type."""
    queue = empty_queue(dtype)
    with ocp.StandardCheckpointer() as checkpointer:
        for step in range(3):
            queue = queue_push(queue, FEATURES[3 * step : 3 * step + 3], labels=jnp.arange(3) + step)
            checkpointer.save(tmp_path / str(step), queue)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / str(step), empty_queue(dtype))
            assert isinstance(restored, EmbeddingQueue)
            assert_equal_trees(restored, queue)
            assert_equal_trees(queue_push(restored, FEATURES[:4]), queue_push(queue, FEATURES[:4]))


def test_a_queue_restored_without_a_template(tmp_path):
    """Orbax then gives a dict of the fields."""
    queue = queue_push(empty_queue(), FEATURES[:10])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "queue", queue)
        checkpointer.wait_until_finished()
        fields = checkpointer.restore(tmp_path / "queue")
    assert_equal_trees(EmbeddingQueue(**fields), queue)


def train(queue, place, steps):
    """Push the batches that follow a place; the queue, the place reached, and what was seen."""
    seen = []
    for epoch in itertools.count(place["epoch"]):
        batches = m_per_class_batches(LABELS, 3, 9, seed=place["seed"], epoch=epoch)
        first = place["step"] if epoch == place["epoch"] else 0
        for step, batch in enumerate(batches[first:], first):
            if len(seen) == steps:
                return queue, {**place, "epoch": epoch, "step": step}, seen
            queue = queue_push(queue, FEATURES[batch], labels=LABELS[batch].astype(np.int32))
            seen.append(batch)
    raise AssertionError


@pytest.mark.parametrize("stop", [4, 6, 8])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, stop):
    """Within an epoch of six steps, at its end, and within the next."""
    start = empty_queue(), {"seed": 5, "epoch": 0, "step": 0}
    _, _, all_batches = whole = train(*start, 13)
    queue, place, seen = train(*start, stop)
    with ocp.CheckpointManager(tmp_path) as manager:
        items = ocp.args.Composite(queue=ocp.args.StandardSave(queue), place=ocp.args.JsonSave(place))
        manager.save(stop, args=items)
        manager.wait_until_finished()
        template = ocp.args.Composite(queue=ocp.args.StandardRestore(empty_queue()), place=ocp.args.JsonRestore())
        restored = manager.restore(manager.latest_step(), args=template)
    queue, place, rest = train(restored.queue, restored.place, 13 - stop)
    np.testing.assert_array_equal(np.stack(seen + rest), np.stack(all_batches))
    assert_equal_trees((queue, place), whole[:2])
