"""A batch: the arrays of a loss as the user gave them, and made ready to be compared block by block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax.numerics import compute_dtype
from ntxent_jax.pairs import Members, with_positions
from ntxent_jax.similarities import Rows, Similarity, prepare


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


class Batch(NamedTuple):
    """The arrays of a loss, checked but unchanged.

    Attributes:
        anchors: Shape ``[n, d]``, or ``[n, views, d]``: what is said of an item then holds for all of its views.
        members: Labels and flags ``[n]`` of the anchors, ids ``[n]`` or ``[n, views]``.
        temperature: Shape ``[]`` or ``[n]``.
        weights: Shape ``[n]``, or None.
        candidates: Shape ``[m, d]``. None: the anchors choose among themselves.
        candidate_members: Labels, flags and ids ``[m]`` of the candidates.
        bias: Added to the candidates' logits, shape ``[m]``, or None.
        pair_where: Boolean, shape ``[n, m]``. False where a candidate is not a negative of an anchor. None: all are.
        own: Candidates that each anchor has for itself, or None.
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

    @property
    def items_and_views(self) -> tuple[int, int]:
        """Number of items, and of anchors for each of them."""
        return self.anchors.shape[0], self.anchors.shape[1] if self.anchors.ndim == 3 else 1


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
    """

    rows: Rows
    members: Members
    where: jax.Array
    temperature: jax.Array
    weights: jax.Array
    pair_where: jax.Array | None
    plain: jax.Array | None
    own: OwnCandidates | None


class Candidates(NamedTuple):
    """Candidates ready to be met by any block of anchors."""

    rows: Rows
    members: Members
    bias: jax.Array | None


def ready(batch: Batch, similarity: Similarity) -> tuple[Anchors, Candidates]:
    """Fill in the defaults, hide the padding, and do once per row what can be done once."""
    dtype, (items, views) = compute_dtype(batch.anchors), batch.items_and_views
    weights = jnp.ones(items, dtype) if batch.weights is None else batch.weights.astype(dtype)
    where = jnp.ones(items, jnp.bool_) if batch.members.where is None else batch.members.where
    temperature = jnp.where(where, batch.temperature.astype(dtype), 1)
    temperature = jnp.where(temperature > 0, temperature, jnp.nan)
    where, weights, temperature, members = jax.tree.map(
        lambda x: jnp.repeat(x, views) if x.ndim == 1 else x.reshape(-1),
        (where, jnp.where(where, weights, 0), temperature, batch.members),
    )
    rows = _visible(batch.anchors.reshape(-1, batch.anchors.shape[-1]), members.where)
    if batch.candidates is None or batch.candidate_members is None:
        members = candidate_members = with_positions(members)
        candidates = rows
    else:
        candidate_members = batch.candidate_members
        candidates = _visible(batch.candidates, candidate_members.where)
    own = batch.own and batch.own._replace(rows=_visible(batch.own.rows, batch.own.where))
    anchor_rows, candidate_rows = prepare(similarity, rows, candidates)
    plain = rows if own else None
    return (
        Anchors(anchor_rows, members, where, temperature, weights, batch.pair_where, plain, own),
        Candidates(candidate_rows, candidate_members, batch.bias),
    )


def _visible(rows: jax.Array, where: jax.Array | None) -> jax.Array:
    """Padding becomes ones, harmless to any similarity; an infinity in a real row becomes NaN, which nothing hides."""
    rows = jnp.where(jnp.isfinite(rows), rows, jnp.nan)
    return rows if where is None else jnp.where(where[..., None], rows, 1)
