"""Losses of queries that choose among keys: InfoNCE and multiple negatives ranking."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.contrast import contrast
from ntxent_jax.devices import AxisName, Gather, devices_along, on_any_mesh
from ntxent_jax.inputs import (
    query_batch,
    with_extras,
    with_filter,
    with_negatives,
    with_own_key_only,
    with_spare_columns,
)
from ntxent_jax.pairs import AT_OWN_POSITION, by_position
from ntxent_jax.scores import Options, Reduction
from ntxent_jax.similarities import Similarity, cosine_similarity, turned


@on_any_mesh
def info_nce_loss(
    queries: ArrayLike,
    keys: ArrayLike,
    negatives: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 0.07,
    in_batch: bool = True,
    ids: ArrayLike | None = None,
    key_ids: ArrayLike | None = None,
    pair_where: ArrayLike | None = None,
    key_where: ArrayLike | None = None,
    negative_where: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    hardness: ArrayLike = 0.0,
    class_prior: ArrayLike = 0.0,
    margin: ArrayLike | None = None,
    relative_margin: bool = False,
    guide_queries: ArrayLike | None = None,
    guide_keys: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""InfoNCE: how surely each query picks its own key among all keys and further negatives.

    Row ``i`` of ``queries`` and row ``i`` of ``keys`` belong together. All other keys, those beyond the ``n``-th too,
    and the ``negatives`` are negatives. With :math:`s_{ij}` the similarity of query :math:`i` and candidate :math:`j`
    over the temperature,

    .. math::
        \ell_i = -\log \frac{\exp(s_{ii})}{\sum_j \exp(s_{ij})} .

    One-way: queries choose keys. This is the loss of CPC (one positive and ``n - 1`` negatives) and of MoCo.
    :func:`clip_loss` averages both directions; in :func:`ntxent_views` queries are negatives of each other as well.

    Args:
        queries: Rows, floating, shape ``[n, d]``.
        keys: Rows, floating, shape ``[m, d]`` with ``m >= n``.
        negatives: Further negatives: ``[k, d]`` for all queries (a memory bank), or ``[n, k, d]``, ``k`` for each query
            alone.
        temperature: Dimensionless, > 0. A number, or one for each query, shape ``[n]``. May be traced and learned.
        in_batch: False leaves only the query's own key and ``negatives``; then ``m`` must be ``n``.
        ids: Integer, shape ``[n]``. A key that has the query's id is not a negative of it (a false negative: the same
            document twice in a batch). Its own key is always its positive.
        key_ids: Integer, shape ``[m]``. Default: ``ids``, if ``m == n``.
        pair_where: Boolean, shape ``[n, m]``. False: this key is not a negative of this query. It costs ``n * m``
            bytes; ids do not.
        key_where: Boolean, shape ``[m]``. False hides a key, and leaves a query whose own key it is without a positive.
        negative_where: Boolean, shape ``[k]`` or ``[n, k]``, like ``negatives`` without features. False hides one.
        key_bias: Real, shape ``[m]``, added to the keys' logits. For keys sampled with probabilities ``q`` pass
            ``-log(q)``, so that popular keys are not punished for being frequent.
        label_smoothing: Share in ``[0, 1)`` of the target that is spread evenly over all candidates that count.
        hardness: At least 0, times the similarity (before the temperature, without gradient) is added to the logit of
            every negative, so that hard ones weigh more. As in sentence-transformers; not the ``beta`` of Robinson et
            al., which reweights by importance.
        class_prior: Probability in ``[0, 1)`` that a negative is a positive in truth; their expected share is taken out
            of the sum over the negatives (debiased contrastive learning). Only for cosines, without ``hardness`` and
            ``label_smoothing``, since its floor is that of a cosine.
        margin: Leaves out negative ``j`` of query ``i`` if its guide similarity exceeds ``g_ii - margin``: more similar
            than the positive, less a margin, it is likely a false negative. None: all negatives count.
        relative_margin: The threshold is ``g_ii - |g_ii| * margin`` instead.
        guide_queries: Rows of another model that judge for ``margin``, shape ``[n, e]``. Default: the rows themselves,
            without gradient.
        guide_keys: Rows of that model for the keys, shape ``[m, e]``; then ``negatives`` are never left out.
        where: Boolean, shape ``[n]``. False hides query ``i``, key ``i`` and the query's own negatives.
        weights: Real, shape ``[n]``. Weight of each query.
        reduction: ``"mean"`` (weighted, over queries that have a positive), ``"anchor_mean"`` (the same here),
            ``"sum"``, or ``"none"``: one loss for each query, 0 where it does not count.
        similarity: As in :func:`ntxent`.
        block_size: Number of queries visited at once, as in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, at least 0, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows.
        ``log(number of candidates)`` when all similarities are equal; a perfect model does not reach 0, see
        :func:`loss_floor`. 0 for a single pair without negatives, which nothing can teach.

    Raises:
        TypeError: Rows are not floating, ids not integers, or a mask not boolean.
        ValueError: A shape is wrong, ``m < n``, ``in_batch=False`` without ``negatives`` or with ``m != n``, ids for
            only one side, an option is not among those listed, or as in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> queries = jnp.array([[3.0, 0.0], [0.0, 2.0]])
        >>> keys = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> print(f"{info_nce_loss(queries, keys, temperature=0.5):.4f}")
        0.1269

        That is ``log(1 + exp(-2))``. Rows ``[question, positive, negative 1, negative 2, ...]``, each question with
        negatives for itself alone:

        >>> rows = jnp.array(
        ...     [[[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], [[0.0, 2.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]]
        ... )
        >>> question, positive, own = rows[:, 0], rows[:, 1], rows[:, 2:]
        >>> print(info_nce_loss(question, positive, own, temperature=0.5, in_batch=False, reduction="none").round(4))
        [0.4604 0.2395]

        The second and third key are the same document. Their ids keep it from being its own negative:

        >>> keys = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> queries, ids = keys, jnp.array([0, 1, 1])
        >>> print(info_nce_loss(queries, keys, temperature=0.5, reduction="none").round(4))
        [0.2395 0.7586 0.7586]
        >>> print(info_nce_loss(queries, keys, temperature=0.5, ids=ids, reduction="none").round(4))
        [0.2395 0.1269 0.1269]

    References:
        van den Oord, Li and Vinyals, "Representation Learning with Contrastive Predictive Coding", 2018,
        https://arxiv.org/abs/1807.03748, eq. 4. With temperature: He et al., "Momentum Contrast for Unsupervised
        Visual Representation Learning", 2020, https://arxiv.org/abs/1911.05722, eq. 1. ``key_bias``: Yi et al.,
        "Sampling-Bias-Corrected Neural Modeling", 2019. ``class_prior``: Chuang et al., "Debiased Contrastive
        Learning", 2020, https://arxiv.org/abs/2007.00224, eq. 8. ``margin``: Solatorio, "GISTEmbed", 2024,
        https://arxiv.org/abs/2402.16829.
    """
    checks.yes_or_no(in_batch=in_batch, relative_margin=relative_margin)
    checks.prior_alone(class_prior, hardness, label_smoothing, similarity is cosine_similarity)
    devices = devices_along(axis_name, gather)
    batch = query_batch(
        queries,
        keys,
        temperature,
        ids=ids,
        key_ids=key_ids,
        pair_where=pair_where,
        key_where=key_where,
        key_bias=key_bias,
        where=where,
        weights=weights,
        similarity=similarity,
        devices=devices,
    )
    batch = with_filter(batch, margin, relative_margin, guide_queries, guide_keys)
    batch = with_extras(batch, label_smoothing=label_smoothing, class_prior=class_prior, hardness=hardness)
    if not in_batch:
        checks.something_to_choose(negatives, guide_keys)
        batch = with_own_key_only(batch)
    batch = with_negatives(batch, negatives, negative_where, devices)
    batch = with_spare_columns(batch, similarity, devices)
    options = Options(
        by_position, similarity, "pair", AT_OWN_POSITION, relative_margin, reduction, block_size, precision, devices
    )
    return contrast(batch, options)


@on_any_mesh
def multiple_negatives_ranking_loss(
    anchors: ArrayLike,
    positives: ArrayLike,
    negatives: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 0.05,
    symmetric: bool = False,
    ids: ArrayLike | None = None,
    negative_where: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    hardness: ArrayLike = 0.0,
    margin: ArrayLike | None = None,
    relative_margin: bool = False,
    guide_queries: ArrayLike | None = None,
    guide_keys: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    """Multiple negatives ranking loss of sentence-transformers: each anchor chooses among all positives and negatives.

    The cross entropy of ``similarity(anchors, concatenate(positives, negatives)) / temperature`` with the anchor's own
    positive as target. Unlike the own negatives of :func:`info_nce_loss`, the hard negatives of one anchor are
    candidates of every anchor.

    sentence-transformers' ``scale`` is ``1 / temperature``, 20 by default.

    Args:
        anchors: Rows, floating, shape ``[n, d]``.
        positives: Rows, shape ``[n, d]``; row ``i`` belongs to anchor ``i`` and is a negative of all others.
        negatives: Hard negatives, shape ``[n, k, d]`` (``k`` found for each anchor) or ``[k, d]``.
        temperature: Dimensionless, > 0. A number, or one for each anchor, shape ``[n]``.
        symmetric: Add the direction in which positives choose among anchors, which sees no hard negatives, and take
            the mean of both.
        ids: Integer, shape ``[n]``. The positive of another pair of the same id is not a negative.
        negative_where: Boolean, shape ``[n, k]`` or ``[k]``, like ``negatives`` without features. False hides one, for
            rows with fewer negatives than others.
        key_bias: Real, shape ``[n]``, added to the logits of the positives, as in :func:`info_nce_loss`.
        label_smoothing: As in :func:`info_nce_loss`.
        hardness: As in :func:`info_nce_loss`.
        margin: As in :func:`info_nce_loss`: GISTEmbed's false-negative filter.
        relative_margin: As in :func:`info_nce_loss`.
        guide_queries: Rows of the guide model for the anchors, shape ``[n, e]``.
        guide_keys: Rows of the guide model for the positives, shape ``[n, e]``.
        where: Boolean, shape ``[n]``. False hides an anchor, its positive and its negatives.
        weights: Real, shape ``[n]``. Weight of each anchor.
        reduction: As in :func:`info_nce_loss`.
        similarity: :func:`cosine_similarity` or, as for models tuned for it, :func:`dot_product`; as in :func:`ntxent`.
        block_size: As in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, as :func:`info_nce_loss` returns it. It is not 0 for a perfect model: cosines are at least -1, so
        the negatives keep a share of the softmax. :func:`loss_floor` gives the smallest value, and
        ``similarity=log1p_cosine_similarity`` has none.

    Raises:
        TypeError: Rows are not floating, ids not integers, or a mask not boolean.
        ValueError: A shape is wrong, an option is not among those listed, or as in :func:`ntxent`.

    Example:
        An anchor, its positive and two perfect negatives, at scale 1:

        >>> import jax.numpy as jnp
        >>> anchor, positive = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0]])
        >>> negatives = jnp.array([[[-1.0, 0.0], [-3.0, 0.0]]])
        >>> print(f"{multiple_negatives_ranking_loss(anchor, positive, negatives, temperature=1.0):.4f}")
        0.2395

    References:
        Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply", 2017,
        https://arxiv.org/abs/1705.00652, section 4.4. Reimers and Gurevych, "Sentence-BERT", 2019,
        https://arxiv.org/abs/1908.10084, and the sentence-transformers library.
    """
    checks.yes_or_no(symmetric=symmetric)
    named = {"anchors": anchors, "positives": positives} | ({} if negatives is None else {"negatives": negatives})
    rows, keys, *others = checks.same_rows(**{name: checks.any_rows(name, x) for name, x in named.items()})
    checks.equal_lengths(("anchors", "positives"), rows.shape[0], keys.shape[0])
    if others:
        negatives, negative_where = _for_all(rows, others[0], negative_where, where)
    one_way = partial(
        info_nce_loss,
        temperature=temperature,
        ids=ids,
        label_smoothing=label_smoothing,
        hardness=hardness,
        margin=margin,
        relative_margin=relative_margin,
        where=where,
        weights=weights,
        reduction=reduction,
        similarity=similarity,
        block_size=block_size,
        axis_name=axis_name,
        gather=gather,
        precision=precision,
    )
    loss = one_way(
        rows,
        keys,
        negatives,
        negative_where=negative_where,
        key_bias=key_bias,
        guide_queries=guide_queries,
        guide_keys=guide_keys,
    )
    if not symmetric:
        return loss
    other_way = partial(one_way, similarity=turned(similarity))
    return (loss + other_way(keys, rows, guide_queries=guide_keys, guide_keys=guide_queries)) / 2


def _for_all(
    anchors: jax.Array, negatives: jax.Array, negative_where: ArrayLike | None, where: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Negatives found for each anchor as candidates of all, those of padding hidden."""
    if negatives.ndim != anchors.ndim + 1:
        return negatives, checks.mask("negative_where", negative_where, negatives.shape[:1])
    checks.own_rows("negatives", negatives, anchors.shape[0], negatives.ndim)
    real, shape = checks.mask("where", where, anchors.shape[:1]), negatives.shape[:2]
    flags = checks.mask("negative_where", negative_where, shape, each="negative of each anchor")
    if real is not None:
        of_anchors = jnp.broadcast_to(real[:, None], shape)
        flags = of_anchors if flags is None else of_anchors & flags
    return negatives.reshape(-1, *negatives.shape[2:]), None if flags is None else flags.reshape(-1)
