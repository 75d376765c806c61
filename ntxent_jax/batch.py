"""A batch: the arrays of a loss as the user gave them, and made ready to be compared block by block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax.devices import ALONE, Devices, Tree
from ntxent_jax.formulas import Extras, Only
from ntxent_jax.numerics import Level, compute_dtype
from ntxent_jax.pairs import Members, OnlyAt, Place
from ntxent_jax.similarities import Rows, Similarity, compare_each, has_range, origin_of, prepare, prepare_both

_AT_ONCE, _BLOCK = 1 << 20, 1 << 17  # Numbers in rows that are prepared as a whole, and in a block of more than these.


class OwnCandidates(NamedTuple):
    """Candidates that each anchor has for itself.

    Attributes:
        rows: Shape ``[n, k, d]``.
        where: Boolean, shape ``[n, k]``. True for a real one.
        positive: Boolean, shape ``[n, k]``. True for a positive, False for a negative.
        bias: Added to the logits, shape ``[n, k]``, or None.
    """

    rows: jax.Array
    where: jax.Array
    positive: jax.Array
    bias: jax.Array | None = None


class Filter(NamedTuple):
    """Negatives too similar to be true are left out: those closer than the positive, less a margin.

    Attributes:
        margin: A scalar.
        anchors: Rows of a guide model, shape ``[n, e]``. None: the batch's own similarities decide.
        candidates: Rows of a guide model, shape ``[m, e]``.
    """

    margin: jax.Array
    anchors: jax.Array | None = None
    candidates: jax.Array | None = None


class Batch(NamedTuple):
    """The arrays of a loss, checked but unchanged.

    Attributes:
        anchors: Shape ``[n * views, d]``, an item's views one after another; what is said of an item holds for each.
        members: Labels and flags ``[n]`` of the items, ids ``[n * views]`` of the anchors.
        temperature: Shape ``[]`` or ``[n]``.
        weights: Shape ``[n]``, or None.
        candidates: Shape ``[m, d]``. None: the anchors choose among themselves, and have ids.
        candidate_members: Labels, flags and ids ``[m]`` of the candidates.
        bias: Added to the candidates' logits, shape ``[m]``, or None.
        pair_where: Boolean, shape ``[n, m]``. False where a candidate is not a negative of an anchor. None: all are.
        own: Candidates that each anchor has for itself, or None.
        filter: Which negatives to leave out, or None.
        hardness: Times its similarity is added to the logit of a negative; a scalar, or None.
        extras: Numbers that change the formula.
    """

    anchors: jax.Array
    members: Members
    temperature: jax.Array
    weights: jax.Array | None = None
    candidates: jax.Array | None = None
    candidate_members: Members | None = None
    bias: jax.Array | None = None
    pair_where: jax.Array | None = None
    own: OwnCandidates | None = None
    filter: Filter | None = None
    hardness: jax.Array | None = None
    extras: Extras = Extras()

    def turned(self) -> "Batch":
        """The other direction: candidates choose among anchors."""
        assert self.candidates is not None and self.candidate_members is not None
        return self._replace(
            anchors=self.candidates,
            members=self.candidate_members,
            candidates=self.anchors,
            candidate_members=self.members,
        )

    @property
    def views(self) -> int:
        """Number of anchors for each item."""
        return self.anchors.shape[0] // max(self.members.label.shape[0], 1)

    @property
    def plain(self) -> bool:
        """Whether scores are similarities to candidates that all anchors share, and nothing else."""
        return self.bias is None and self.own is None and self.filter is None and self.hardness is None

    def each_row(self) -> "Batch":
        """The same with every row an item of its own."""

        def spread(of_items: Tree) -> Tree:
            result: Tree = jax.tree.map(lambda x: jnp.repeat(x, self.views) if x.ndim else x, of_items)
            return result

        members = spread(self.members._replace(id=None))._replace(id=self.members.id)
        return self._replace(members=members, weights=spread(self.weights), temperature=spread(self.temperature))


class Anchors(NamedTuple):
    """Anchors ready to be cut into blocks: each array starts with the anchors' axis, an item's views one after another.

    Attributes:
        rows: Prepared for the similarity.
        members: Labels, flags and ids.
        where: Boolean, shape ``[n]``. True for a real anchor.
        temperature: Shape ``[n]``, NaN where it was not positive.
        weights: Shape ``[n]``, 0 for padding.
        pair_where: As in :class:`Batch`.
        plain: Rows before preparation, to be compared with ``own``, or None.
        own: As in :class:`Batch`.
        guide: Rows of a guide model, prepared, or None.
        right: Similarity to the positive that decides over negatives, shape ``[n]``. None: it is among those at hand.
        only: The positive of each, if it can have but one, and its score is a similarity that is known. None: it is to
            be looked for among the candidates.
    """

    rows: Rows
    members: Members
    where: jax.Array
    temperature: jax.Array
    weights: jax.Array
    pair_where: jax.Array | None
    plain: jax.Array | None
    own: OwnCandidates | None
    guide: Rows | None
    right: jax.Array | None = None
    only: Only | None = None


class Candidates(NamedTuple):
    """Candidates ready to be met by any block of anchors, and the numbers that all of them share.

    Attributes:
        rows: Prepared for the similarity.
        members: Labels, flags and ids.
        bias: As in :class:`Batch`.
        guide: Rows of a guide model, prepared, or None.
        guided: Boolean, shape ``[m]``. False for those that the guide does not know. None without a guide.
        margin: As in :class:`Filter`, or None.
        hardness: As in :class:`Batch`.
        extras: As in :class:`Batch`.
        level: Of their similarities to the anchors, or None.
    """

    rows: Rows
    members: Members
    bias: jax.Array | None
    guide: Rows | None
    guided: jax.Array | None
    margin: jax.Array | None
    hardness: jax.Array | None
    extras: Extras
    level: Level | None = None


def ready(
    batch: Batch, similarity: Similarity, devices: Devices = ALONE, only: OnlyAt = None
) -> tuple[Anchors, Candidates]:
    """Fill in the defaults, hide the padding, and do once per row what can be done once.

    Of several devices the candidates of all are gathered, unless they stand in a ring. An anchor's only positive, if
    its place is known, stands on the same device.
    """
    batch = batch.each_row()
    dtype, members = compute_dtype(batch.anchors), batch.members
    real, ones = (jnp.ones_like(batch.anchors, dtype=kind, shape=members.label.shape) for kind in (jnp.bool_, dtype))
    where = real if members.where is None else members.where
    weights = jnp.where(where, ones if batch.weights is None else batch.weights.astype(dtype), 0)
    temperature = jnp.where(where, batch.temperature.astype(dtype), 1)
    temperature = jnp.where(temperature > 0, temperature, jnp.nan)
    own = batch.own and batch.own._replace(rows=_visible(batch.own.rows, batch.own.where))
    candidate_members = batch.candidate_members or members
    plain = _visible(batch.anchors, members.where) if own else None
    anchor_rows, candidate_rows = _ready_rows(batch, plain, similarity, devices)
    positive = None
    if isinstance(only, Place) and batch.plain and has_range(similarity):
        positive = _only(only, similarity, anchor_rows, candidate_rows, candidate_members.where)
    guide, of_candidates, guided = _ready_guides(batch.filter, similarity, where, candidate_members, devices)
    margin = None if batch.filter is None else batch.filter.margin.astype(dtype)
    bias, hardness, extras = jax.tree.map(lambda x: x.astype(dtype), (batch.bias, batch.hardness, batch.extras))
    if bias is not None and candidate_members.where is not None:
        bias = jnp.where(candidate_members.where, bias, 0)
    gathered = devices.gathered((candidate_rows, candidate_members, bias, of_candidates, guided))
    return (
        Anchors(anchor_rows, members, where, temperature, weights, batch.pair_where, plain, own, guide, only=positive),
        Candidates(*gathered, margin, hardness, extras),
    )


def _ready_rows(batch: Batch, plain: jax.Array | None, similarity: Similarity, devices: Devices) -> tuple[Rows, Rows]:
    rows, others = (batch.anchors, batch.members.where), None
    if batch.candidates is not None and batch.candidate_members is not None:
        others = batch.candidates, batch.candidate_members.where
    origin = origin_of(similarity, _visible(*rows), _visible(*(others or rows)), devices)
    anchors = _prepared(similarity, *rows, origin) if plain is None else prepare(similarity, plain, origin)
    return anchors, _prepared(similarity, *others, origin) if others else anchors


def _prepared(similarity: Similarity, rows: jax.Array, where: jax.Array | None, origin: jax.Array | None) -> Rows:
    """Rows without what padding holds, prepared for the similarity.

    Many of them in blocks, and once more for the derivative. Else XLA would keep what that needs, as large as the rows,
    while these meet each other. Not where a jitted program may be split over devices, each of which has a run of the
    rows and would have to take part in every block.
    """

    def each(some: tuple[jax.Array, jax.Array | None]) -> Rows:
        return prepare(similarity, _visible(*some), origin)

    def one(row: tuple[jax.Array, jax.Array | None]) -> Rows:
        result: Rows = jax.tree.map(lambda x: x[0], each(jax.tree.map(lambda x: x[None], row)))
        return result

    if rows.size <= _AT_ONCE or jax.device_count() > 1:
        return each((rows, where))
    result: Rows = lax.map(jax.checkpoint(one), (rows, where), batch_size=-(-rows.shape[0] * _BLOCK // rows.size))
    return result


def _only(place: Place, similarity: Similarity, anchors: Rows, candidates: Rows, real: jax.Array | None) -> Only:
    if real is None:
        real = jnp.ones_like(candidates.values, dtype=jnp.bool_, shape=candidates.values.shape[:1])
    first, second = (jax.tree.map(lambda x, y, i=i: place.couples(x, y)[i], anchors, candidates) for i in (0, 1))
    score, exists = compare_each(similarity, first, second), place.couples(anchors.values, real)[1]
    return Only(jnp.repeat(score, place.times), jnp.repeat(exists, place.times))


def _ready_guides(
    guide: Filter | None, similarity: Similarity, where: jax.Array, candidate_members: Members, devices: Devices
) -> tuple[Rows, Rows, jax.Array] | tuple[None, None, None]:
    if guide is None or guide.anchors is None or guide.candidates is None:
        return None, None, None
    anchors, known = lax.stop_gradient((guide.anchors, guide.candidates))
    m, number = known.shape[0], candidate_members.label.shape[0]
    guided = jnp.arange(number) < m
    real = guided if candidate_members.where is None else guided & candidate_members.where
    candidates = _visible(jnp.pad(known, ((0, number - m), (0, 0))), real)
    return *prepare_both(similarity, _visible(anchors, where), candidates, devices), guided


def only_finite(rows: jax.Array) -> jax.Array:
    """An infinity becomes NaN, which no later step hides: a logit of -inf would look like an absent candidate."""
    return jnp.where(jnp.isfinite(rows), rows, jnp.nan)


def _visible(rows: jax.Array, where: jax.Array | None) -> jax.Array:
    """Padding becomes ones, harmless to any similarity."""
    rows = only_finite(rows)
    return rows if where is None else jnp.where(where.reshape(where.shape + (1,) * (rows.ndim - where.ndim)), rows, 1)
