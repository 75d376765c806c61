"""Batches of an epoch: what they promise, for every seed, epoch and process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntxent_jax
from ntxent_jax.sampling import m_per_class_batches, no_duplicates_batches

CASE_39 = np.concatenate([np.arange(5), np.repeat(np.arange(5, 10), 20)])


def of_all_processes(sample: Any, *arguments: Any, process_count: int = 1, **options: Any) -> np.ndarray:
    """Batches of an epoch, shape ``[steps, processes, batch_size]``."""
    shares = [
        sample(*arguments, process_index=index, process_count=process_count, **options)
        for index in range(process_count)
    ]
    return np.stack(shares, axis=1)


def assert_classes_and_rows_take_turns(labels: Any, m: int, batches: np.ndarray) -> None:
    """The promises of ``m_per_class_batches``, counted out batch by batch in the order in which they are dealt."""
    labels = np.asarray(labels)
    size = Counter(labels.tolist())
    steps, process_count, batch_size = batches.shape
    assert steps == max(1, len(labels) // (batch_size * process_count))
    turns: Counter[Any] = Counter(dict.fromkeys(size, 0))
    used: Counter[int] = Counter(range(len(labels)))
    used.subtract(range(len(labels)))
    for batch in batches.reshape(-1, batch_size):
        classes = Counter(labels[batch].tolist())
        assert len(classes) == batch_size // m, "wrong number of classes"
        assert set(classes.values()) == {m}, "wrong number of rows of a class"
        turns.update(classes.keys())
        for label in classes:
            mine = batch[labels[batch] == label]
            if size[label] >= m:
                assert len(set(mine.tolist())) == m, "a row twice in a batch"
            for row in mine.tolist():
                used[row] += 1
                members = np.flatnonzero(labels == label).tolist()
                counts = [used[member] for member in members]
                assert max(counts) - min(counts) <= 1, "a row again before all of its class"
    assert max(turns.values()) - min(turns.values()) <= 1, "classes are not used equally"


def assert_steps_share_no_row(labels: Any, batches: np.ndarray) -> None:
    """No row twice in a step, unless its class has fewer rows than the step takes of it."""
    labels = np.asarray(labels)
    size = Counter(labels.tolist())
    for step in batches:
        rows = Counter(step.reshape(-1).tolist())
        taken = Counter(labels[step.reshape(-1)].tolist())
        twice = {labels[row] for row, count in rows.items() if count > 1}
        assert all(size[label] < taken[label] for label in twice)


CONFIGURATIONS = [
    # labels, m, batch size, processes
    (CASE_39, 4, 16, 1),
    (CASE_39, 4, 16, 2),
    (CASE_39, 3, 9, 2),
    (CASE_39, 2, 10, 4),  # Fewer classes than a step takes.
    (np.repeat(np.arange(2), [5, 60]), 2, 4, 2),  # The same, and orders of rows that end within a step.
    (np.repeat(np.arange(4), 50), 4, 16, 2),
    (np.repeat(np.arange(3), [5, 7, 11]), 3, 6, 1),  # No size is a multiple of m, classes no multiple of a batch's.
    (np.repeat(np.arange(3), [5, 7, 11]), 2, 2, 3),
    (np.arange(17) % 7, 1, 5, 1),
    (np.array([0, 0, 1]), 1, 2, 1),
    (np.array([3, 3, 3, 3]), 2, 2, 1),
    (np.array([0]), 4, 4, 1),
    (np.random.default_rng(0).integers(0, 23, 301), 3, 33, 1),
    (np.random.default_rng(1).integers(0, 23, 301) - 11, 5, 10, 5),
]


@pytest.mark.parametrize(("labels", "m", "batch_size", "process_count"), CONFIGURATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_m_per_class(labels, m, batch_size, process_count, seed):
    for epoch in range(2):
        batches = of_all_processes(
            m_per_class_batches, labels, m, batch_size, seed=seed, epoch=epoch, process_count=process_count
        )
        assert batches.dtype == np.int64
        assert_classes_and_rows_take_turns(labels, m, batches)
        assert_steps_share_no_row(labels, batches)


def test_case_39():
    batches = m_per_class_batches(CASE_39, 4, 16, seed=0)
    assert batches.shape == (6, 16)
    assert len(np.unique(CASE_39[batches])) == 10
    lone = batches[CASE_39[batches] < 5].reshape(-1, 4)
    assert np.all(lone == lone[:, :1]), "the only row of a class stands in all of its places"
    assert m_per_class_batches([0, 0, 1], 1, 2, seed=0).shape == (1, 2)
    with pytest.raises(ValueError, match=r"needs 4 classes, labels has 2; lower batch_size to 8 or raise m"):
        m_per_class_batches([0, 0, 1, 1], 4, 16, seed=0)


def test_repeated_rows_are_not_their_own_positives():
    """As the docstring says: the indices, passed as ids, take a repeated row out of its own positives."""
    batch = m_per_class_batches(["a", "b", "b", "b"], 2, 4, seed=0)[0]
    labels = np.array([0, 1, 1, 1])[batch]
    assert int(ntxent_jax.pair_masks(labels).positive.sum()) == 4
    assert int(ntxent_jax.pair_masks(labels, ids=batch).positive.sum()) == 2


@pytest.mark.parametrize(
    ("sample", "arguments"), [(m_per_class_batches, (CASE_39, 4, 16)), (no_duplicates_batches, (CASE_39, 4))]
)
def test_order_depends_on_seed_and_epoch_only(sample, arguments):
    first = sample(*arguments, seed=3, epoch=5)
    assert np.array_equal(first, sample(*arguments, seed=3, epoch=5))
    assert np.array_equal(first, sample(*arguments, seed=np.int64(3), epoch=np.int32(5)))
    others = [
        sample(*arguments, seed=3, epoch=6),
        sample(*arguments, seed=5, epoch=3),
        sample(*arguments, seed=4, epoch=5),
    ]
    assert not any(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    "sample",
    [lambda *a, **o: m_per_class_batches(a[0], 2, 8, **o), lambda *a, **o: no_duplicates_batches(a[0], 8, **o)],
)
def test_rows_change_between_processes(sample):
    ids = np.repeat(np.arange(200), 2)
    epochs = [of_all_processes(sample, ids, seed=0, epoch=epoch, process_count=4) for epoch in range(2)]
    for batches in epochs:
        of_process = [set(batches[:, index].reshape(-1).tolist()) for index in range(4)]
        assert sum(len(rows) for rows in of_process) == len(set.union(*of_process)) > 350, "processes share rows"
    first, second = (set(batches[:, 0].reshape(-1).tolist()) for batches in epochs)
    assert len(first & second) < 0.6 * len(first), "a process gets the same rows every epoch"


def test_any_label_that_can_be_sorted():
    numbers = m_per_class_batches(CASE_39, 4, 16, seed=1)
    strings = np.array([f"class {label}" for label in CASE_39])
    for labels in [
        strings,
        strings.tolist(),
        strings.astype(object),
        strings.astype("S"),
        CASE_39.tolist(),
        CASE_39.astype(np.uint8),
        CASE_39 - 5,
        CASE_39 + 2**62,
        jnp.asarray(CASE_39),
    ]:
        assert np.array_equal(m_per_class_batches(labels, 4, 16, seed=1), numbers)
    booleans = m_per_class_batches(CASE_39 > 5, 4, 8, seed=1)
    assert_classes_and_rows_take_turns(CASE_39 > 5, 4, booleans[:, None])


def test_every_row_is_equally_likely_and_classes_mix():
    """Over many epochs: each row of a class as often as the others, each class with each other one."""
    labels = np.repeat(np.arange(7), [1, 2, 3, 5, 8, 13, 5])
    uses, meets = np.zeros(len(labels)), np.zeros((7, 7))
    for epoch in range(600):
        for batch in m_per_class_batches(labels, 2, 6, seed=0, epoch=epoch):
            np.add.at(uses, batch, 1)
            classes = np.unique(labels[batch])
            meets[np.ix_(classes, classes)] += 1
    for label in range(7):
        mine = uses[labels == label]
        assert np.all(np.abs(mine / mine.mean() - 1) < 0.15), label
    others = meets[~np.eye(7, dtype=bool)]
    assert np.all(np.abs(others / others.mean() - 1) < 0.1)


def test_rows_of_a_class_meet_all_others():
    labels = np.repeat(np.arange(2), [6, 60])
    batches = m_per_class_batches(labels, 2, 4, seed=0).reshape(-1, 2)
    met = {frozenset(rows) for rows in batches.tolist() if labels[rows[0]] == 0}
    assert len(met) > 6, "in 16 turns of 2 rows, more than the 3 pairs of a single order of 6"


# No duplicates --------------------------------------------------------------------------------------------------------


def most_steps(ids: Any, a_step: int) -> int:
    """The largest number of steps, tried one by one."""
    counts = list(Counter(np.asarray(ids).tolist()).values())
    fits = [s for s in range(1, len(ids) // a_step + 1) if sum(min(c, s) for c in counts) >= s * a_step]
    return max(fits)


DUPLICATES = [
    # ids, batch size, processes
    (np.arange(64), 8, 1),
    (np.arange(61), 7, 2),
    ([7, 7, 7, 8, 8, 9, 10, 11], 3, 1),
    (np.repeat(np.arange(5), [1, 2, 3, 50, 50]), 2, 1),
    (np.repeat(np.arange(6), 10), 3, 2),  # Every id in every step.
    (np.repeat(np.arange(7), 10), 3, 2),
    (np.repeat(np.arange(30), np.arange(30) % 5 + 1), 11, 1),
    (np.random.default_rng(2).zipf(1.5, 211), 9, 1),
    (np.random.default_rng(3).integers(0, 40, 211), 5, 3),
    ([4], 1, 1),
    (["a", "b", "a", "c"], 2, 1),
]


@pytest.mark.parametrize(("ids", "batch_size", "process_count"), DUPLICATES)
@pytest.mark.parametrize("seed", range(6))
def test_no_duplicates(ids, batch_size, process_count, seed):
    batches = of_all_processes(no_duplicates_batches, ids, batch_size, seed=seed, process_count=process_count)
    assert batches.dtype == np.int64
    assert batches.shape == (most_steps(ids, batch_size * process_count), process_count, batch_size)
    rows = batches.reshape(-1)
    assert len(set(rows.tolist())) == len(rows), "a row twice in the epoch"
    for step in np.asarray(ids)[batches]:
        assert len(set(step.reshape(-1).tolist())) == step.size, "an id twice in a step"


def test_every_row_gets_its_chance():
    ids = np.repeat(np.arange(13), np.arange(13) % 4 + 1)
    uses = np.zeros(len(ids))
    for epoch in range(1500):
        for batch in no_duplicates_batches(ids, 4, seed=0, epoch=epoch):
            np.add.at(uses, batch, 1)
    assert np.all(np.abs(uses / uses.mean() - 1) < 0.1)


def test_every_two_ids_meet():
    meets = np.zeros((12, 12))
    for epoch in range(1000):
        for batch in no_duplicates_batches(np.arange(12), 4, seed=0, epoch=epoch):
            meets[np.ix_(batch, batch)] += 1
    others = meets[~np.eye(12, dtype=bool)]
    assert np.all(np.abs(others / others.mean() - 1) < 0.2)


# How they are used ----------------------------------------------------------------------------------------------------


def test_continued_after_a_checkpoint():
    batches = m_per_class_batches(CASE_39, 4, 16, seed=0, epoch=2)
    rest = m_per_class_batches(CASE_39, 4, 16, seed=0, epoch=2)[4:]
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in list(batches)[4:]]


class LoaderOfTorch:
    """What ``torch.utils.data.DataLoader(dataset, batch_sampler=...)`` does with a batch sampler."""

    def __init__(self, dataset: Any, batch_sampler: Any) -> None:
        assert batch_sampler is not None
        self.dataset, self.batch_sampler = dataset, batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[np.ndarray]:
        indices = iter(self.batch_sampler)
        for _ in range(len(self)):
            yield np.stack([self.dataset[index] for index in next(indices)])


def test_as_a_batch_sampler_of_torch():
    images = [np.full((2, 2), i) for i in range(len(CASE_39))]
    batches = m_per_class_batches(CASE_39, 4, 16, seed=0)
    loader = LoaderOfTorch(images, batches)
    assert len(loader) == 6
    assert np.array_equal(np.stack(list(loader))[..., 0, 0], batches)


def test_as_a_data_loader_of_torch():
    data = pytest.importorskip("torch.utils.data")
    batches = m_per_class_batches(CASE_39, 4, 16, seed=0)
    loader = data.DataLoader(CASE_39, batch_sampler=batches)
    assert np.array_equal(np.stack([batch.numpy() for batch in loader]), CASE_39[batches])


def test_as_a_source_of_grain():
    grain = pytest.importorskip("grain")
    images = np.arange(len(CASE_39)) * 10
    batches = m_per_class_batches(CASE_39, 4, 16, seed=0)
    dataset = grain.MapDataset.source(batches).map(lambda indices: images[indices])
    assert len(dataset) == 6
    assert np.array_equal(np.stack(list(dataset)), images[batches])


def test_indices_go_into_a_jitted_step():
    batch = m_per_class_batches(CASE_39, 4, 16, seed=0)[0]
    rows = jax.jit(lambda x, i: x[i])(jnp.arange(len(CASE_39)), batch)
    assert np.array_equal(rows, batch)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: m_per_class_batches(CASE_39, 4, 15, seed=0), ValueError, "multiple of m = 4, got 15; take 12"),
        (lambda: m_per_class_batches(CASE_39, 4, 3, seed=0), ValueError, "multiple of m = 4, got 3; take 4"),
        (lambda: m_per_class_batches(CASE_39, 0, 4, seed=0), ValueError, "m must be at least 1, got 0"),
        (lambda: m_per_class_batches(CASE_39, 1, 0, seed=0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: m_per_class_batches(CASE_39, 2.0, 4, seed=0), TypeError, "m must be an integer, got 2.0"),
        (lambda: m_per_class_batches([], 1, 1, seed=0), ValueError, r"labels must have shape \[n\].*got \[0\]"),
        (lambda: m_per_class_batches(CASE_39[None], 1, 1, seed=0), ValueError, r"labels must have shape \[n\]"),
        (lambda: m_per_class_batches(CASE_39 / 2, 1, 1, seed=0), TypeError, "labels must be .*got float64; turn"),
        (lambda: m_per_class_batches([None, "a"], 1, 1, seed=0), TypeError, "labels must be .*got object"),
        (lambda: m_per_class_batches(CASE_39, 1, 1, seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda: m_per_class_batches(CASE_39, 1, 1, seed=None), TypeError, "seed must be an integer, got None"),
        (lambda: m_per_class_batches(CASE_39, 1, 1, seed=0, epoch=-1), ValueError, "epoch must be at least 0"),
        (lambda: no_duplicates_batches([1, 1, 2], 3, seed=0), ValueError, "needs 3 different ids, there are 2; lower"),
        (
            lambda: no_duplicates_batches([1, 2, 3], 2, seed=0, process_count=2),
            ValueError,
            "2 x 2 rows needs 4 different ids, there are 3; lower batch_size or process_count",
        ),
        (lambda: no_duplicates_batches([0.5], 1, seed=0), TypeError, "ids must be integers"),
        (lambda: no_duplicates_batches([1], 0, seed=0), ValueError, "batch_size must be at least 1"),
        (
            lambda: no_duplicates_batches([1], 1, seed=0, process_index=1),
            ValueError,
            "process_index must be from 0 to 0, got 1",
        ),
        (
            lambda: no_duplicates_batches([1], 1, seed=0, process_count=0),
            ValueError,
            "process_count must be at least 1",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
