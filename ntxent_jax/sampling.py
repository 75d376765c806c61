"""Which rows of a data set make up each batch of an epoch: on the host, in NumPy, before any array is on a device.

An epoch is an array of row indices with one line for each batch. It can be iterated, has a length and is indexed, which
is what a plain loop, ``grain.MapDataset.source`` and the ``batch_sampler`` of a torch ``DataLoader`` ask for; and to go
on in the middle of an epoch is a slice, ``batches[step:]``.

Every process computes the whole epoch from the same seed and keeps its own share, so that processes agree without
talking to each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ntxent_jax import checks

Indices = npt.NDArray[np.int64]


def m_per_class_batches(
    labels: npt.ArrayLike,
    m: int,
    batch_size: int,
    *,
    seed: int,
    epoch: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Indices:
    """One epoch of batches in which every class that occurs has exactly ``m`` rows, so that every row has a positive.

    A batch holds ``batch_size / m`` different classes. Classes take turns: all come up, in random order, before one
    comes up again, so rare classes are seen as often as frequent ones. Within a class rows take turns in the same way.

    Args:
        labels: Label of each row of the data set, shape ``[n]``: integers, booleans or strings.
        m: Rows of each class in a batch, at least 1. 2 or more gives every row a positive.
        batch_size: Rows in a batch of this process, a multiple of ``m``.
        seed: Not negative. The same seed and epoch give the same batches.
        epoch: Number of the epoch, not negative. Each has an order of its own.
        process_index: Number of this process, as in ``jax.process_index()``.
        process_count: Number of processes that train together, as in ``jax.process_count()``. All must pass the same
            labels, seed and epoch. Every epoch deals the rows to the processes anew.

    Returns:
        Row indices, int64, shape ``[steps, batch_size]`` with ``steps = max(1, n // (batch_size * process_count))``,
        the same for every process. The ``m`` rows of a class stand next to each other. Over the epoch, all processes
        together,

        * the numbers of turns of any two classes differ by at most 1;
        * all rows of a class are used before one of them is used again;
        * no row is twice in a step, that is in the batches that the processes take at the same time, unless its class
          has fewer rows than the step takes of it. Then its rows repeat, and a row would be its own positive: pass the
          indices to the loss as ``ids``. As long as there are ``process_count * batch_size / m`` classes, a step
          takes ``m`` rows of a class, so this happens to classes of fewer than ``m`` rows only.

        A class that has more rows than its turns take is not used up in one epoch, as ``m`` rows for each turn of the
        rare ones leave no place; the next epoch draws from it anew.

    Raises:
        TypeError: ``labels`` are neither integers, booleans nor strings, or a number is not an integer.
        ValueError: ``labels`` is not a vector or is empty, ``batch_size`` is not a multiple of ``m``, there are too few
            classes for a batch, or a number is out of range.

    Example:
        >>> labels = ["cat", "cat", "cat", "dog", "dog", "eel", "eel", "eel", "eel", "fox"]
        >>> batches = m_per_class_batches(labels, 2, 4, seed=0)
        >>> for batch in batches:
        ...     print([labels[i] for i in batch])
        ['eel', 'eel', 'cat', 'cat']
        ['dog', 'dog', 'fox', 'fox']

        The class of a single row fills its two places with that row twice:

        >>> print(batches.tolist())
        [[6, 5, 1, 0], [4, 3, 9, 9]]

    References:
        Hermans, Beyer and Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017,
        https://arxiv.org/abs/1703.07737 (batches of P classes with K rows each). pytorch-metric-learning's
        ``MPerClassSampler`` yields single indices, and on classes of unequal size leaves some out of an epoch while
        it repeats rows of others.
    """
    _check_processes(seed, epoch, process_index, process_count)
    checks.whole_number("m", m)
    checks.whole_number("batch_size", batch_size)
    rows, sizes = _groups("labels", labels)
    if batch_size % m:
        raise ValueError(
            f"batch_size must be a multiple of m = {m}, got {batch_size}; take {max(batch_size - batch_size % m, m)}"
        )
    turns, classes = batch_size // m, len(sizes)
    if classes < turns:
        raise ValueError(
            f"a batch of {batch_size} with m = {m} needs {turns} classes, labels has {classes}; "
            f"lower batch_size to {classes * m} or raise m"
        )
    rng = np.random.default_rng([seed, epoch])
    steps = max(1, len(rows) // (batch_size * process_count))
    a_step = turns * process_count
    taken = _turns(rng, classes, steps * a_step, a_step if a_step <= classes else turns)
    turn = _times_before(taken, classes)
    # A class goes through one order of its rows again and again until a turn ends where the order does, then takes a
    # new one: so no turn lies across two orders. If a class can have two turns in a step, neither may a step.
    period = np.lcm(sizes, m) if a_step <= classes else np.full(classes, max(1, turn.max() + 1) * m)
    starts, orders = _orders(rng, rows, sizes, -(-(np.bincount(taken, minlength=classes) * m) // period))
    own = np.s_[:, process_index]
    taken, turn = (x.reshape(steps, process_count, turns)[own] for x in (taken, turn))
    number, within = np.divmod(turn * m, period[taken])
    start = starts[taken] + number * sizes[taken]
    places = (within[..., None] + np.arange(m)) % sizes[taken][..., None]
    return orders[start[..., None] + places].reshape(steps, batch_size)


def no_duplicates_batches(
    ids: npt.ArrayLike,
    batch_size: int,
    *,
    seed: int,
    epoch: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Indices:
    """One epoch of batches in which no id comes twice, so that no row is a negative of its own duplicate.

    Args:
        ids: What each row of the data set is, shape ``[n]``: integers, booleans or strings. Rows of equal id are the
            same thing: several captions of an image, answers to a question, copies of a text.
        batch_size: Rows in a batch of this process.
        seed: As in :func:`m_per_class_batches`.
        epoch: As in :func:`m_per_class_batches`.
        process_index: As in :func:`m_per_class_batches`.
        process_count: As in :func:`m_per_class_batches`.

    Returns:
        Row indices, int64, shape ``[steps, batch_size]``, the same ``steps`` for every process. Batches are full, no
        row is used twice in an epoch, and no id comes twice in a step, that is in the batches that the processes take
        at the same time. ``steps`` is the largest number with which that can be:
        ``n // (batch_size * process_count)``, unless some ids have more rows than there are steps. Which rows are left
        out is drawn anew each epoch.

    Raises:
        TypeError: ``ids`` are neither integers, booleans nor strings, or a number is not an integer.
        ValueError: ``ids`` is not a vector or is empty, there are fewer different ids than rows in a step, or a number
            is out of range.

    Example:
        >>> ids = [7, 7, 7, 8, 8, 9, 10, 11]
        >>> for batch in no_duplicates_batches(ids, 3, seed=0):
        ...     print(batch, [ids[i] for i in batch])
        [4 1 7] [8, 7, 11]
        [3 5 2] [8, 9, 7]
    """
    _check_processes(seed, epoch, process_index, process_count)
    checks.whole_number("batch_size", batch_size)
    rows, sizes = _groups("ids", ids)
    a_step = batch_size * process_count
    if len(sizes) < a_step:
        raise ValueError(
            f"a step of {process_count} x {batch_size} rows needs {a_step} different ids, there are {len(sizes)}; "
            "lower batch_size or process_count"
        )
    rng = np.random.default_rng([seed, epoch])
    steps = _most_steps(sizes, a_step)
    # At most one row of an id for each step; of these as many as fill the steps. Ids in random order.
    _, rows = _orders(rng, rows, sizes, np.ones_like(sizes))
    group = np.repeat(np.arange(len(sizes)), sizes)
    usable = np.flatnonzero(_positions(sizes) < steps)
    kept = np.sort(rng.permutation(usable)[: steps * a_step])
    kept = kept[np.argsort(rng.permutation(len(sizes))[group[kept]], kind="stable")]
    # Dealt out one to each step, round by round: neighbours of equal id meet in no step within a round, and where they
    # lie across two rounds, the order of steps in the second keeps those of the first for later.
    group = group[kept]
    edges = np.arange(1, a_step) * steps
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    place = np.searchsorted(first, edges, side="right") - 1
    before, after = edges - first[place], np.append(first[1:], len(group))[place] - edges
    before, after = (np.append(0, np.where(group[edges - 1] == group[edges], x, 0)) for x in (before, after))
    order = _shuffles(rng, steps, before, after)
    epoch_rows = np.empty((steps, a_step), np.int64)
    epoch_rows[order, np.arange(a_step)[:, None]] = rows[kept].reshape(a_step, steps)
    return rng.permuted(epoch_rows, axis=1).reshape(steps, process_count, batch_size)[:, process_index]


def _check_processes(seed: int, epoch: int, process_index: int, process_count: int) -> None:
    checks.whole_number("seed", seed, 0)
    checks.whole_number("epoch", epoch, 0)
    checks.whole_number("process_count", process_count)
    checks.whole_number("process_index", process_index, 0, process_count - 1)


def _groups(name: str, values: npt.ArrayLike) -> tuple[Indices, Indices]:
    """Row indices ordered by value, and how many rows each value has."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must have shape [n], one entry per row, with n > 0, got {list(array.shape)}")
    if array.dtype == object and all(isinstance(value, str) for value in array.tolist()):
        array = array.astype(np.str_)  # A column of a pandas table.
    if array.dtype.kind not in "biuUST":
        raise TypeError(
            f"{name} must be integers, booleans or strings, got {array.dtype}; turn other values into integers with "
            f"np.unique({name}, return_inverse=True)[1]"
        )
    rows = np.argsort(array, kind="stable")
    ordered = array[rows]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return rows, np.diff(np.append(first, len(rows)))


def _positions(sizes: Indices) -> Indices:
    """``0, 1, ..., size - 1`` for each size, one after another."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _orders(rng: np.random.Generator, rows: Indices, sizes: Indices, number: Indices) -> tuple[Indices, Indices]:
    """Shuffled rows of every group, ``number`` times anew, one after another; and where each group begins there."""
    starts = np.cumsum(sizes) - sizes
    each = np.repeat(sizes, number)
    members = np.repeat(np.repeat(starts, number), each) + _positions(each)
    shuffled = np.lexsort((rng.random(len(members)), np.repeat(np.arange(len(each)), each)))
    return np.cumsum(sizes * number) - sizes * number, rows[members[shuffled]]


def _turns(rng: np.random.Generator, classes: int, number: int, width: int) -> Indices:
    """``number`` classes one after another: all before one comes again, and different ones in each run of ``width``."""
    before = np.arange(-(-number // classes)) * classes % width  # Turns of an unfinished run, when a new round begins.
    return _shuffles(rng, classes, before, -before % width).reshape(-1)[:number]


def _shuffles(rng: np.random.Generator, size: int, before: Indices, after: Indices) -> Indices:
    """``range(size)`` in as many random orders as there are entries in ``after``.

    The first ``after[i]`` of order ``i`` are none of the last ``before[i]`` of the one above it.
    """
    orders = rng.permuted(np.tile(np.arange(size), (len(after), 1)), axis=1)
    free = np.ones(size, np.bool_)
    for i in np.flatnonzero((after > 0) & (before > 0)):
        late = orders[i - 1, size - before[i] :]
        free[late] = False
        first = orders[i][free[orders[i]]][: after[i]]
        free[late] = True
        free[first] = False
        orders[i] = np.concatenate([first, rng.permutation(np.flatnonzero(free))])
        free[first] = True
    return orders


def _times_before(values: Indices, number: int) -> Indices:
    """How often each entry of ``values``, which are below ``number``, stands before it."""
    order = np.argsort(values, kind="stable")
    result = np.empty_like(values)
    result[order] = _positions(np.bincount(values, minlength=number))
    return result


def _most_steps(sizes: Indices, a_step: int) -> int:
    """Largest number of steps that can be filled, if each takes at most one row of an id."""
    low, high = 1, int(sizes.sum()) // a_step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() >= middle * a_step else (low, middle - 1)
    return low
