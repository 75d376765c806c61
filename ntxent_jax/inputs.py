"""From the arguments of a loss to a checked batch."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Batch, Filter, OwnCandidates
from ntxent_jax.devices import ALONE, Devices
from ntxent_jax.engine import spare_columns
from ntxent_jax.formulas import Extras
from ntxent_jax.pairs import Members, labelled, with_positions
from ntxent_jax.similarities import Similarity, is_builtin


def rows_for(similarity: Similarity, name: str, x: ArrayLike, shape: str) -> jax.Array:
    """Rows of one vector each, or of anything for a user's similarity."""
    if is_builtin(similarity):
        return checks.rows(name, x, shape)
    return checks.rows(name, x, shape.replace("d]", "...]"), ranks=None)


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
    devices: Devices = ALONE,
) -> Batch:
    """Rows whose labels say which belong together."""
    anchors, others = checks.rows("embeddings", embeddings, "[n, d]", "[n, views, d]"), None
    checks.some_views("embeddings", anchors)
    checks.together(candidates=candidates, candidate_labels=candidate_labels)
    if candidates is not None:
        others = checks.rows("candidates", candidates, "[m, d]")
        anchors, others = checks.same_rows(embeddings=anchors, candidates=others)
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
    if members.id is not None:
        members = members._replace(id=members.id.reshape(-1))
    n = anchors.shape[0]
    rows = anchors.reshape(-1, anchors.shape[-1])
    if others is None:
        members = with_positions(members, devices.positions(rows.shape[0]))
    return Batch(
        rows,
        members,
        checks.temperature(temperature, n, where),
        checks.numbers("weights", weights, (n,)),
        others,
        other_members,
    )


def view_batch(
    *views: ArrayLike,
    temperature: ArrayLike,
    where: ArrayLike | None,
    weights: ArrayLike | None,
    similarity: Similarity,
    devices: Devices,
) -> Batch:
    """Rows of several views, row ``i`` of each being item ``i``."""
    named = {f"views[{i}]": rows_for(similarity, f"views[{i}]", view, "[n, d]") for i, view in enumerate(views)}
    checks.views([view.shape for view in named.values()])
    rows = jnp.stack(checks.same_rows(**named), axis=1)
    n = rows.shape[0]
    rows = rows.reshape(-1, *rows.shape[2:])
    each = "item, for all of its views"
    members = Members(devices.positions(n), checks.mask("where", where, (n,), each=each))
    return Batch(
        rows,
        with_positions(members, devices.positions(rows.shape[0])),
        checks.temperature(temperature, n, where, each=each),
        checks.numbers("weights", weights, (n,), each=each),
    )


def query_batch(
    queries: ArrayLike,
    keys: ArrayLike,
    temperature: ArrayLike,
    *,
    ids: ArrayLike | None,
    key_ids: ArrayLike | None = None,
    pair_where: ArrayLike | None = None,
    key_where: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    where: ArrayLike | None,
    weights: ArrayLike | None,
    similarity: Similarity,
    devices: Devices,
    names: tuple[str, str] = ("queries", "keys"),
) -> Batch:
    """Rows of queries and of keys, row ``i`` of the keys being the positive of row ``i`` of the queries."""
    anchors, candidates = checks.same_rows(
        **{
            names[0]: rows_for(similarity, names[0], queries, "[n, d]"),
            names[1]: rows_for(similarity, names[1], keys, "[m, d]"),
        }
    )
    n, m = anchors.shape[0], candidates.shape[0]
    checks.paired(names, n, m)
    key_ids = ids if key_ids is None and m == n else key_ids
    checks.together(ids=ids, key_ids=key_ids)
    places = devices.positions(m)
    members = Members(places[:n], checks.mask("where", where, (n,)), checks.ids("ids", ids, (n,)))
    key_real = checks.mask("key_where", key_where, (m,))
    if members.where is not None:
        hidden = jnp.concatenate([members.where, jnp.ones(m - n, jnp.bool_)])
        key_real = hidden if key_real is None else hidden & key_real
    key_members = Members(places, key_real, checks.ids("key_ids", key_ids, (m,)))
    checks.comparable(ids=members.id, key_ids=key_members.id)
    return Batch(
        anchors,
        members,
        checks.temperature(temperature, n, where),
        checks.numbers("weights", weights, (n,)),
        candidates,
        key_members,
        checks.numbers("key_bias", key_bias, (m,)),
        checks.mask("pair_where", pair_where, (n, m * devices.number), each="pair of a query and a key"),
    )


def with_own_key_only(batch: Batch) -> Batch:
    """Each query has its own key for itself, and there are no shared candidates."""
    keys, members = _candidates(batch)
    checks.one_key_each(batch.anchors.shape[0], keys.shape[0])
    where = jnp.ones(keys.shape[0], jnp.bool_) if members.where is None else members.where
    bias = None if batch.bias is None else batch.bias[:, None]
    own = OwnCandidates(keys[:, None], where[:, None], jnp.ones_like(where)[:, None], bias)
    rows, members, bias = jax.tree.map(lambda x: x[:0], (keys, members, batch.bias))
    return batch._replace(candidates=rows, candidate_members=members, bias=bias, pair_where=None, own=own)


def with_negatives(
    batch: Batch, negatives: ArrayLike | None, negative_where: ArrayLike | None, devices: Devices
) -> Batch:
    """Add negatives ``[k, d]`` for all queries, or ``[n, k, d]`` for their own query alone."""
    if negatives is None:
        checks.only_with("negatives", negative_where=negative_where)
        return batch
    n, rank = batch.anchors.shape[0], batch.anchors.ndim
    shapes = ("[k, d]", "[n, k, d]") if rank == 2 else ("[k, ...]", "[n, k, ...]")
    rows = checks.rows("negatives", negatives, *shapes, ranks=(rank, rank + 1))
    checks.own_rows("negatives", rows, n, rank + 1)
    anchors, keys, rows = checks.same_rows(queries=batch.anchors, keys=_candidates(batch)[0], negatives=rows)
    batch = batch._replace(anchors=anchors, candidates=keys)
    if rows.ndim == rank:
        return _with_shared(batch, rows, checks.mask("negative_where", negative_where, rows.shape[:1]), devices)
    real = checks.mask("negative_where", negative_where, rows.shape[:2], each="negative of each query")
    if batch.members.where is not None:
        of_queries = jnp.broadcast_to(batch.members.where[:, None], rows.shape[:2])
        real = of_queries if real is None else of_queries & real
    return _with_own(batch, rows, real)


def with_spare_columns(batch: Batch, similarity: Similarity, devices: Devices) -> Batch:
    """Add hidden candidates if products are quicker with them, where all rows are on one device."""
    keys, _ = _candidates(batch)
    number = spare_columns(keys.shape[0])
    if number == 0 or devices.axis is not None or jax.device_count() > 1 or not is_builtin(similarity):
        return batch
    rows, where = jnp.zeros_like(keys, shape=(number, *keys.shape[1:])), jnp.zeros(number, jnp.bool_)
    return _with_shared(batch, rows, where, devices)


def with_filter(
    batch: Batch,
    margin: ArrayLike | None,
    relative_margin: bool,
    guide_queries: ArrayLike | None,
    guide_keys: ArrayLike | None,
) -> Batch:
    """Leave out negatives that are closer than the positive, less a margin."""
    checks.together(guide_queries=guide_queries, guide_keys=guide_keys)
    value = checks.scalar("margin", margin)
    if value is None:
        checks.only_with("margin", guide_queries=guide_queries, relative_margin=relative_margin or None)
        return batch
    if guide_queries is None or guide_keys is None:
        return batch._replace(filter=Filter(value))
    keys, _ = _candidates(batch)
    guides = checks.same_rows(
        guide_queries=checks.guides("guide_queries", guide_queries, batch.anchors.shape[0]),
        guide_keys=checks.guides("guide_keys", guide_keys, keys.shape[0]),
    )
    return batch._replace(filter=Filter(value, *guides))


def with_extras(
    batch: Batch, *, label_smoothing: ArrayLike = 0.0, class_prior: ArrayLike = 0.0, hardness: ArrayLike = 0.0
) -> Batch:
    """Numbers that change the loss. One known to be 0 is absent; any other is data, so a schedule does not retrace."""
    return batch._replace(
        hardness=checks.option("hardness", hardness, 0.0, float("inf")),
        extras=Extras(
            label_smoothing=checks.option("label_smoothing", label_smoothing, 0.0, 1.0),
            class_prior=checks.option("class_prior", class_prior, 0.0, 1.0),
        ),
    )


def _candidates(batch: Batch) -> tuple[jax.Array, Members]:
    assert batch.candidates is not None and batch.candidate_members is not None
    return batch.candidates, batch.candidate_members


def _with_shared(batch: Batch, rows: jax.Array, where: jax.Array | None, devices: Devices) -> Batch:
    """More candidates for all queries, behind the keys of each device: nobody's positive, of no id."""
    keys, members = _candidates(batch)
    m, k = keys.shape[0], rows.shape[0]
    if where is not None or members.where is not None:
        flags = ((members.where, m), (where, k))
        where = jnp.concatenate([jnp.ones(size, jnp.bool_) if flag is None else flag for flag, size in flags])
    places, queries = (x.label + devices.first(k) for x in (members, batch.members))
    label = jnp.concatenate([places, jnp.full(k, -1)])  # No query's place.
    new, bias, pair_where = Members(label, where), batch.bias, batch.pair_where
    if members.id is not None:
        identified = jnp.ones(m, jnp.bool_) if members.identified is None else members.identified
        new = new._replace(id=jnp.pad(members.id, (0, k)), identified=jnp.pad(identified, (0, k)))
    return batch._replace(
        members=batch.members._replace(label=queries),
        candidates=jnp.concatenate([keys, rows]),
        candidate_members=new,
        bias=None if bias is None else jnp.pad(bias, (0, k)),
        pair_where=None if pair_where is None else _beside_each(pair_where, m, k),
    )


def _beside_each(pair_where: jax.Array, m: int, k: int) -> jax.Array:
    """``k`` more columns, all True, behind every ``m``: those of each device if it keeps its own."""
    n = pair_where.shape[0]
    return jnp.pad(pair_where.reshape(n, -1, m), ((0, 0), (0, 0), (0, k)), constant_values=True).reshape(n, -1)


def _with_own(batch: Batch, rows: jax.Array, where: jax.Array | None) -> Batch:
    """More negatives of each query for itself."""
    where = jnp.ones(rows.shape[:2], jnp.bool_) if where is None else where
    bias = None if batch.bias is None else jnp.zeros(rows.shape[:2], batch.bias.dtype)
    own = OwnCandidates(rows, where, jnp.zeros_like(where), bias)
    if batch.own is not None:
        first = batch.own._replace(rows=batch.own.rows.astype(rows.dtype))
        own = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, own)
    return batch._replace(own=own)
