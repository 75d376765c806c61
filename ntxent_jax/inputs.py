"""From the arguments of a loss to a checked batch."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Batch, OwnCandidates
from ntxent_jax.pairs import Members, labelled


def labelled_batch(
    embeddings: ArrayLike,
    labels: ArrayLike,
    temperature: ArrayLike,
    candidates: ArrayLike | None,
    candidate_labels: ArrayLike | None,
    candidate_where: ArrayLike | None,
    ids: ArrayLike | None,
    candidate_ids: ArrayLike | None,
    where: ArrayLike | None,
    weights: ArrayLike | None = None,
) -> Batch:
    """Rows whose labels say which belong together."""
    anchors = checks.rows("embeddings", embeddings, "[n, d]", "[n, views, d]")
    n, others = anchors.shape[0], None
    checks.together(candidates=candidates, candidate_labels=candidate_labels)
    if candidates is not None:
        anchors, others = checks.same_rows(
            embeddings=anchors, candidates=checks.rows("candidates", candidates, "[m, d]")
        )
    members, other_members = labelled(
        anchors.shape[:-1],
        labels,
        None if others is None else others.shape[:1],
        candidate_labels,
        where=where,
        candidate_where=candidate_where,
        ids=ids,
        candidate_ids=candidate_ids,
    )
    checked_weights = checks.numbers("weights", weights, (n,))
    return Batch(anchors, members, checks.temperature(temperature, n), checked_weights, others, other_members)


def view_batch(*views: ArrayLike, temperature: ArrayLike, where: ArrayLike | None, weights: ArrayLike | None) -> Batch:
    """Rows of several views, row ``i`` of each being item ``i``."""
    rows = [checks.rows(f"views[{i}]", view, "[n, d]") for i, view in enumerate(views)]
    checks.views([view.shape for view in rows])
    rows = checks.same_rows(**{f"views[{i}]": view for i, view in enumerate(rows)})
    n = rows[0].shape[0]
    return Batch(
        jnp.stack(rows, axis=1),
        Members(jnp.arange(n), checks.mask("where", where, (n,))),
        checks.temperature(temperature, n),
        checks.numbers("weights", weights, (n,)),
    )


def query_batch(
    queries: ArrayLike,
    keys: ArrayLike,
    negatives: ArrayLike | None,
    temperature: ArrayLike,
    *,
    in_batch: bool = True,
    share_negatives: bool = False,
    ids: ArrayLike | None,
    key_ids: ArrayLike | None = None,
    pair_where: ArrayLike | None = None,
    key_where: ArrayLike | None = None,
    negative_where: ArrayLike | None,
    key_bias: ArrayLike | None,
    where: ArrayLike | None,
    weights: ArrayLike | None,
    names: tuple[str, str] = ("queries", "keys"),
) -> Batch:
    """Rows of queries and of keys, row ``i`` of the keys being the positive of row ``i`` of the queries.

    With ``share_negatives``, negatives ``[n, k, d]`` are candidates of all queries, else of their own query alone.
    """
    given = {names[0]: checks.rows(names[0], queries, "[n, d]"), names[1]: checks.rows(names[1], keys, "[m, d]")}
    if negatives is not None:
        given["negatives"] = checks.rows("negatives", negatives, "[k, d]", "[n, k, d]")
    anchors, candidates, *more = checks.same_rows(**given)
    n, m = anchors.shape[0], candidates.shape[0]
    checks.paired(names, n, m, in_batch, negatives)
    key_ids = ids if key_ids is None and m == n else key_ids
    checks.together(ids=ids, key_ids=key_ids)
    members = Members(jnp.arange(n), checks.mask("where", where, (n,)), checks.ids("ids", ids, (n,)))
    key_members = Members(
        jnp.arange(m), checks.mask("key_where", key_where, (m,)), checks.ids("key_ids", key_ids, (m,))
    )
    checks.comparable(ids=members.id, key_ids=key_members.id)
    if members.where is not None:
        key_members = key_members._replace(where=_hide_first(members.where, key_members.where, m))
    batch = Batch(
        anchors,
        members,
        checks.temperature(temperature, n),
        checks.numbers("weights", weights, (n,)),
        candidates,
        key_members,
        checks.numbers("key_bias", key_bias, (m,)),
        checks.mask("pair_where", pair_where, (n, m)),
    )
    batch = batch if in_batch else _only_own_key(batch)
    if not more:
        checks.only_with("negatives", negative_where=negative_where)
        return batch
    rows = checks.own_rows("negatives", more[0], n)
    real = checks.mask("negative_where", negative_where, rows.shape[:-1])
    if rows.ndim == 3 and members.where is not None:
        real = members.where[:, None] & (jnp.ones(rows.shape[:-1], jnp.bool_) if real is None else real)
    if rows.ndim == 3 and share_negatives:
        rows, real = rows.reshape(-1, rows.shape[-1]), None if real is None else real.reshape(-1)
    return _with_shared(batch, rows, real) if rows.ndim == 2 else _with_own(batch, rows, real)


def _hide_first(where: jax.Array, key_where: jax.Array | None, m: int) -> jax.Array:
    """Flags of the keys: the first ones are hidden with their queries."""
    hidden = jnp.concatenate([where, jnp.ones(m - where.shape[0], jnp.bool_)])
    return hidden if key_where is None else hidden & key_where


def _only_own_key(batch: Batch) -> Batch:
    """Each query has its own key for itself, and there are no shared candidates."""
    keys, members = batch.candidates, batch.candidate_members
    assert keys is not None and members is not None
    where = jnp.ones(keys.shape[0], jnp.bool_) if members.where is None else members.where
    bias = None if batch.bias is None else batch.bias[:, None]
    own = OwnCandidates(keys[:, None], where[:, None], jnp.ones_like(where)[:, None], bias)
    nothing = jax.tree.map(lambda x: x[:0], (keys, members, batch.bias))
    return batch._replace(
        candidates=nothing[0], candidate_members=nothing[1], bias=nothing[2], pair_where=None, own=own
    )


def _with_shared(batch: Batch, rows: jax.Array, where: jax.Array | None) -> Batch:
    """More candidates for all queries: nobody's positive, of no id."""
    keys, members = batch.candidates, batch.candidate_members
    assert keys is not None and members is not None
    m, k = keys.shape[0], rows.shape[0]

    def extended(x: jax.Array | None, more: jax.Array) -> jax.Array | None:
        return None if x is None else jnp.concatenate([x, more], axis=-1)

    if where is None and members.where is None:
        real = None
    else:
        real = jnp.concatenate(
            [jnp.ones(size, jnp.bool_) if x is None else x for x, size in ((members.where, m), (where, k))]
        )
    members = Members(
        jnp.concatenate([members.label, jnp.full(k, -1)]),  # No query's position.
        real,
        extended(members.id, jnp.zeros(k, jnp.int32 if members.id is None else members.id.dtype)),
        None if members.id is None else jnp.arange(m + k) < m,
    )
    return batch._replace(
        candidates=jnp.concatenate([keys, rows]),
        candidate_members=members,
        bias=None if batch.bias is None else extended(batch.bias, jnp.zeros(k, batch.bias.dtype)),
        pair_where=extended(batch.pair_where, jnp.ones((batch.anchors.shape[0], k), jnp.bool_)),
    )


def _with_own(batch: Batch, rows: jax.Array, where: jax.Array | None) -> Batch:
    """More negatives of each query for itself."""
    where = jnp.ones(rows.shape[:2], jnp.bool_) if where is None else where
    bias = None if batch.bias is None else jnp.zeros(rows.shape[:2], batch.bias.dtype)
    own = OwnCandidates(rows, where, jnp.zeros_like(where), bias)
    if batch.own is not None:
        own = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), batch.own, own)
    return batch._replace(own=own)
