"""Which candidates are positives and which are negatives of an anchor.

A batch is described by short vectors - a label, an id, a flag for each row - and the ``[n, m]`` masks are made from
them for one block at a time. Two rules cover all losses: :func:`by_label` and :func:`by_position`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks


class PairMasks(NamedTuple):
    """Which candidates belong to which anchor.

    A pair that is neither positive nor negative takes no part: a row with itself, rows of equal id, padding.

    Attributes:
        positive: Boolean, shape ``[n, m]``. True where candidate ``j`` is a positive of anchor ``i``.
        negative: Boolean, shape ``[n, m]``. True where candidate ``j`` is a negative of anchor ``i``.
    """

    positive: jax.Array
    negative: jax.Array


class Members(NamedTuple):
    """What decides over pairs, for each row of a batch.

    Attributes:
        label: Integer, shape ``[n]``. Equal labels belong together. Where row ``i`` of one array belongs to row ``i``
            of another, the label is the position.
        where: Boolean, shape ``[n]``. True for a real row. None: all are real.
        id: Integer, shape ``[n]``. Equal ids are the same thing. None: no two rows are.
        identified: Boolean, shape ``[n]``. True for a row that has an id. None: all have.
    """

    label: jax.Array
    where: jax.Array | None = None
    id: jax.Array | None = None
    identified: jax.Array | None = None


class Rule(Protocol):
    """Decides over all pairs of some anchors and some candidates. That an anchor is real is decided once per row."""

    def __call__(self, anchors: Members, candidates: Members) -> PairMasks:
        """Masks ``[n, m]``."""
        ...


def by_label(anchors: Members, candidates: Members) -> PairMasks:
    """Equal labels are positives, different labels negatives, equal ids neither."""
    belongs = anchors.label[:, None] == candidates.label[None, :]
    others = _real(candidates) & ~_same_thing(anchors, candidates)
    return PairMasks(belongs & others, ~belongs & others)


def only_negatives(anchors: Members, candidates: Members) -> PairMasks:
    """As :func:`by_label` where no labels are equal."""
    others = _real(candidates) & ~_same_thing(anchors, candidates)
    return PairMasks(jnp.zeros_like(others), others)


def by_position(anchors: Members, candidates: Members) -> PairMasks:
    """The candidate at the anchor's position is its positive, whatever its id; the others are negatives by id."""
    belongs = anchors.label[:, None] == candidates.label[None, :]
    others = ~belongs & ~_same_thing(anchors, candidates)
    return PairMasks(belongs & _real(candidates), others & _real(candidates))


class Place(NamedTuple):
    """Where the only positive of each anchor stands.

    Attributes:
        among: From anchors to the positions ``[n]`` of their positives among all candidates.
        couples: From arrays of the anchors ``[n, ...]`` and of the candidates to two whose rows belong together.
        times: How many anchors each of these couples stands for, one behind the other.
    """

    among: Callable[[Members], jax.Array]
    couples: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    times: int


# Where the only positive of an anchor stands; None where there may be several.
OnlyAt = Place | Literal["somewhere"] | None


def _own_position(anchors: Members) -> jax.Array:
    return anchors.label


def _same_position(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, y[: x.shape[0]]


def _other_view(anchors: Members) -> jax.Array:
    assert anchors.id is not None
    return anchors.id ^ 1


def _two_views(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[0::2], y[1::2]


# The anchor's own position, and that of the other of two views that stand next to each other.
AT_OWN_POSITION, AT_OTHER_VIEW = Place(_own_position, _same_position, 1), Place(_other_view, _two_views, 2)


def at_most_two_alike(labels: jax.Array) -> jax.Array:
    """Whether no label ``[n]`` occurs three times: then a row has at most one positive among the others."""
    labels = jnp.sort(labels)
    return ~jnp.any(labels[2:] == labels[:-2])


def _real(candidates: Members) -> jax.Array:
    return jnp.ones((1, 1), jnp.bool_) if candidates.where is None else candidates.where[None, :]


def _same_thing(anchors: Members, candidates: Members) -> jax.Array:
    if anchors.id is None or candidates.id is None:
        return jnp.zeros((1, 1), jnp.bool_)
    same = anchors.id[:, None] == candidates.id[None, :]
    return same if candidates.identified is None else same & candidates.identified[None, :]


def pair_masks(
    labels: ArrayLike,
    candidate_labels: ArrayLike | None = None,
    *,
    where: ArrayLike | None = None,
    candidate_where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
) -> PairMasks:
    """Positives and negatives of a labelled batch, as :func:`ntxent_jax.ntxent` and its relatives see them.

    Made for looking at a batch: the losses never form these ``[n, m]`` arrays.

    Args:
        labels: Integer or boolean labels of the anchors, shape ``[n]``. Equal labels belong together.
        candidate_labels: Labels of the candidates, shape ``[m]``. Default: the anchors are each other's candidates.
        where: Boolean, shape ``[n]``, True for a real anchor. Without candidates, padding is nobody's candidate either.
        candidate_where: Boolean, shape ``[m]``, True for a real candidate.
        ids: Integer, shape ``[n]``. Anchors and candidates of equal id are the same thing: neither positive nor
            negative. Without candidates they default to the position, so that a row is never its own candidate.
        candidate_ids: Integer, shape ``[m]``, needed if ``ids`` and candidates are given.

    Returns:
        Two boolean masks of shape ``[n, m]``.

    Raises:
        TypeError: Labels or ids are not integers, or a mask is not boolean.
        ValueError: A shape is wrong, or one of a pair of arguments is missing.

    Example:
        Two rows of one label and three of another make 8 ordered positive pairs and 12 negative ones:

        >>> import jax.numpy as jnp
        >>> masks = pair_masks(jnp.array([0, 0, 1, 1, 1]))
        >>> print(int(masks.positive.sum()), int(masks.negative.sum()))
        8 12
        >>> print(masks.positive.astype(int))
        [[0 1 0 0 0]
         [1 0 0 0 0]
         [0 0 0 1 1]
         [0 0 1 0 1]
         [0 0 1 1 0]]
    """
    shape = checks.vector_shape("labels", labels)
    candidate_shape = None if candidate_labels is None else checks.vector_shape("candidate_labels", candidate_labels)
    anchors, candidates = labelled(
        shape,
        labels,
        candidate_shape,
        candidate_labels,
        where=where,
        candidate_where=candidate_where,
        ids=ids,
        candidate_ids=candidate_ids,
    )
    if candidates is None:
        anchors = candidates = with_positions(anchors, jnp.arange(shape[0]))
    masks = by_label(anchors, candidates)
    real = jnp.ones(shape, jnp.bool_) if anchors.where is None else anchors.where
    return PairMasks(masks.positive & real[:, None], masks.negative & real[:, None])


def labelled(
    shape: tuple[int, ...],
    labels: ArrayLike,
    candidate_shape: tuple[int, ...] | None,
    candidate_labels: ArrayLike | None,
    *,
    where: ArrayLike | None,
    candidate_where: ArrayLike | None,
    ids: ArrayLike | None,
    candidate_ids: ArrayLike | None,
    candidate: str = "candidate",
) -> tuple[Members, Members | None]:
    """Check what describes anchors ``[n]`` or ``[n, views]``, and candidates ``[m]`` if there are any but the anchors.

    Labels and flags belong to items, ids to rows: two views of an item are not the same thing. ``candidate`` is what
    the caller's arguments call one.
    """
    names = {field: f"{candidate}_{field}" for field in ("labels", "where", "ids")}
    anchors = Members(
        checks.integers("labels", labels, shape[:1]),
        checks.mask("where", where, shape[:1]),
        checks.ids("ids", ids, shape),
    )
    if candidate_shape is None or candidate_labels is None:
        checks.only_with(f"{candidate}s", **{names["where"]: candidate_where, names["ids"]: candidate_ids})
        return anchors, None
    checks.together(**{"ids": ids, names["ids"]: candidate_ids})
    candidates = Members(
        checks.integers(names["labels"], candidate_labels, candidate_shape),
        checks.mask(names["where"], candidate_where, candidate_shape),
        checks.ids(names["ids"], candidate_ids, candidate_shape),
    )
    checks.comparable(**{"labels": anchors.label, names["labels"]: candidates.label})
    checks.comparable(**{"ids": anchors.id, names["ids"]: candidates.id})
    return anchors, candidates


def with_positions(rows: Members, positions: jax.Array) -> Members:
    """Rows that choose among themselves: the id of a row defaults to its position."""
    return rows if rows.id is not None else rows._replace(id=positions)
