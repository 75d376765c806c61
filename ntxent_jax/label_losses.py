"""Losses of labelled rows: NT-Xent and supervised contrastive."""

from __future__ import annotations

from typing import Literal

import jax
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.contrast import contrast
from ntxent_jax.devices import AxisName, Gather, devices_along, on_any_mesh
from ntxent_jax.inputs import labelled_batch
from ntxent_jax.pairs import by_label
from ntxent_jax.scores import Options, Reduction
from ntxent_jax.similarities import Similarity, cosine_similarity

Denominator = Literal["pair", "all", "negatives"]


@on_any_mesh
def ntxent(
    embeddings: ArrayLike,
    labels: ArrayLike,
    temperature: ArrayLike = 0.07,
    *,
    denominator: Denominator = "pair",
    candidates: ArrayLike | None = None,
    candidate_labels: ArrayLike | None = None,
    candidate_where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""NT-Xent: how surely each row picks a row of its own label among rows of other labels.

    Rows of equal label are positives, rows of different labels negatives, and a row is never its own candidate. With
    :math:`s_{ij}` the similarity of rows :math:`i` and :math:`j` over the temperature, every ordered positive pair
    :math:`(a, p)` has the loss

    .. math::
        \ell_{ap} = -\log \frac{\exp(s_{ap})}{\exp(s_{ap}) + \sum_{n \in N(a)} \exp(s_{an})} .

    ``denominator`` chooses the sum below the line; with one positive per anchor ``"pair"`` and ``"all"`` agree.

    Same value as ``optax.losses.ntxent`` and pytorch-metric-learning's ``NTXentLoss`` where those are finite.
    :func:`ntxent_views` takes the views of an item instead of labels; :func:`supcon_loss` averages over anchors.

    Args:
        embeddings: Rows, floating, shape ``[n, d]``, or ``[n, views, d]`` with one label for all views of an item.
        labels: Integer or boolean, shape ``[n]``. Any values; only equality counts.
        temperature: Dimensionless, > 0, divides the similarities. A number, or one for each anchor, shape ``[n]``.
            May be traced and learned. ``inf`` gives chance level.
        denominator: ``"pair"``: that positive and the negatives. ``"all"``: every candidate, the other positives too
            (supervised contrastive). ``"negatives"``: negatives only (decoupled contrastive learning), which may be
            below 0.
        candidates: Rows that the anchors choose among instead of among themselves (a queue, a reference set), shape
            ``[m, d]``. Nobody is left out as "self" then, unless ids say so.
        candidate_labels: Labels of the candidates, shape ``[m]``.
        candidate_where: Boolean, shape ``[m]``. False hides a candidate.
        ids: Integer, shape ``[n]`` (``[n, views]`` for rows with views). Rows of equal id are the same thing, neither
            positive nor negative. Default: the position, or, with ``candidates``, no two rows are the same.
        candidate_ids: Integer, shape ``[m]``. Needed if ``ids`` and ``candidates`` are given.
        where: Boolean, shape ``[n]``. False hides a row: no loss, no gradient, nobody's candidate.
        weights: Real, shape ``[n]``. Weight of each anchor; one of weight 0 stays a candidate of others.
        reduction: ``"mean"`` over positive pairs, :math:`\sum w_a \ell_{ap} / \sum w_a P_a` with :math:`P_a` the number
            of positives of anchor :math:`a`; ``"anchor_mean"`` over anchors that have a positive, of the mean over
            their positives; ``"sum"`` over pairs; ``"none"``: the mean over the positives of each anchor (and over the
            views of an item), times its weight, 0 for anchors that do not count.
        similarity: A function ``(x [n, d], y [m, d]) -> [n, m]`` in which each row of the result depends on one row of
            ``x`` alone, each column on one row of ``y``.
        block_size: Number of anchors visited at once. Default: all while the matrix of similarities is small, then
            as many as fit in a few megabytes. Same result up to rounding.
        axis_name: Name of the axis, or names of the axes, of a surrounding ``jax.shard_map``, ``jax.pmap`` or
            ``jax.vmap`` along which the batch is split. Then every array with rows is this device's share, given ids
            and labels are global, anchors choose among the rows of all devices, and every device returns the loss of
            the whole batch (``"none"``: of its own anchors). Average the gradients of parameters with
            ``jax.lax.pmean``; see the page on many devices. Leave it out under plain ``jax.jit``.
        gather: ``"all"``: the candidates of all devices are gathered on each. ``"ring"``: they pass by, one device's
            at a time, which needs memory for a few shares only. Same result. With ``"none"``, or a similarity of yours,
            the backward pass keeps what passed by.
        precision: Precision of matrix products, as in ``jax.default_matmul_precision``. Default: ``"highest"``, or the
            backend's own for bfloat16 rows.

    Returns:
        Loss in nats, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows. At least 0 (except
        for ``"negatives"``); ``log(1 + number of negatives)`` when all similarities are equal. 0 with gradient 0 if no
        anchor counts: all labels differ, all are padding, ``n`` is 0 or 1. Without negatives ``"pair"`` gives 0.

    Raises:
        TypeError: Rows are not floating, labels or ids not integers, or a mask not boolean.
        ValueError: A shape is wrong, one of a pair of arguments is missing, an option is not among those listed, a
            temperature known beforehand is not > 0 (a traced one gives NaN), or integers do not fit JAX's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 2.0]])
        >>> labels = jnp.array([0, 0, 1, 1])
        >>> print(f"{ntxent(embeddings, labels, temperature=0.5):.4f}")
        0.5276

        Every anchor has one positive and two negatives; here is the loss of each:

        >>> print(ntxent(embeddings, labels, temperature=0.5, reduction="none").round(4))
        [0.3392 0.8504 0.4604 0.4604]

        A label that occurs once has no positive; its row is a negative of the others and nothing else:

        >>> print(ntxent(embeddings, jnp.array([0, 0, 1, 2]), temperature=0.5, reduction="none").round(4))
        [0.3392 0.8504 0.     0.    ]

    References:
        Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020,
        https://arxiv.org/abs/2002.05709, eq. 1. ``"negatives"``: Yeh et al., "Decoupled Contrastive Learning", 2021,
        https://arxiv.org/abs/2110.06848, eq. 5.
    """
    checks.choice("denominator", denominator, ("pair", "all", "negatives"))
    devices = devices_along(axis_name, gather)
    options = Options(by_label, similarity, denominator, None, False, reduction, block_size, precision, devices)
    batch = labelled_batch(
        embeddings,
        labels,
        temperature,
        candidates,
        candidate_labels,
        candidate_where,
        ids,
        candidate_ids,
        where,
        weights,
        devices,
    )
    return contrast(batch, options)


@on_any_mesh
def supcon_loss(
    embeddings: ArrayLike,
    labels: ArrayLike,
    temperature: ArrayLike = 0.1,
    *,
    form: Literal["out", "in"] = "out",
    candidates: ArrayLike | None = None,
    candidate_labels: ArrayLike | None = None,
    candidate_where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "anchor_mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""Supervised contrastive loss: all rows of a label attract each other, among all other rows.

    With :math:`s_{ij}` the similarity of rows :math:`i` and :math:`j` over the temperature, :math:`P(a)` the positives
    of anchor :math:`a`, :math:`A(a)` all of its candidates and :math:`q_{ap} = \exp(s_{ap}) / \sum_{c \in A(a)}
    \exp(s_{ac})`,

    .. math::
        \ell^{\text{out}}_a = \frac{1}{|P(a)|} \sum_{p \in P(a)} -\log q_{ap} , \qquad
        \ell^{\text{in}}_a = -\log \frac{1}{|P(a)|} \sum_{p \in P(a)} q_{ap} .

    The other positives stand in the denominator, so the loss of a perfect model is ``log(number of positives)``, not 0.
    :func:`ntxent` leaves them out by default; with one positive per anchor all three are the same number. ``"in"`` is
    never above ``"out"``.

    Equal to the reference implementation SupContrast at ``temperature == base_temperature``, which stays finite here
    for anchors without a positive, and to pytorch-metric-learning's ``SupConLoss``, which divides by the number of
    anchors that have a positive, as here.

    Args:
        embeddings: Rows, floating, shape ``[n, d]``, or ``[n, views, d]`` with one label for all views of an item.
        labels: Integer or boolean, shape ``[n]``.
        temperature: Dimensionless, > 0, as in :func:`ntxent`.
        form: ``"out"``: the logarithm inside the mean over positives, eq. 2. ``"in"``: outside of it, eq. 3.
        candidates: Rows that the anchors choose among instead of among themselves, shape ``[m, d]``.
        candidate_labels: Labels of the candidates, shape ``[m]``.
        candidate_where: Boolean, shape ``[m]``. False hides a candidate.
        ids: Rows of equal id are the same thing, neither positive nor negative, as in :func:`ntxent`.
        candidate_ids: Integer, shape ``[m]``. Needed if ``ids`` and ``candidates`` are given.
        where: Boolean, shape ``[n]``. False hides a row.
        weights: Real, shape ``[n]``. Weight of each anchor.
        reduction: ``"anchor_mean"`` over anchors that have a positive, ``"mean"`` over positive pairs, ``"sum"`` or
            ``"none"``, as in :func:`ntxent`. ``"in"`` has one term per anchor.
        similarity: As in :func:`ntxent`.
        block_size: As in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows. At least 0;
        ``log(number of candidates)`` when all similarities are equal. 0 with gradient 0 if no anchor has a positive.
        If all labels are equal the loss is not 0, since the positives compete with each other.

    Raises:
        TypeError: Rows are not floating, labels or ids not integers, or a mask not boolean.
        ValueError: As in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> labels = jnp.array([0, 0, 0, 1])
        >>> print(supcon_loss(embeddings, labels, temperature=0.5, reduction="none").round(4))
        [0.8271 0.9543 1.1543 0.    ]
        >>> losses = supcon_loss(embeddings, labels, temperature=0.5, form="in", reduction="none")
        >>> print([f"{loss:.4f}" for loss in losses])
        ['0.8073', '0.9416', '1.0909', '0.0000']

    References:
        Khosla et al., "Supervised Contrastive Learning", 2020, https://arxiv.org/abs/2004.11362, eq. 2 and 3.
    """
    checks.choice("form", form, ("out", "in"))
    devices = devices_along(axis_name, gather)
    options = Options(
        by_label, similarity, "in" if form == "in" else "all", None, False, reduction, block_size, precision, devices
    )
    batch = labelled_batch(
        embeddings,
        labels,
        temperature,
        candidates,
        candidate_labels,
        candidate_where,
        ids,
        candidate_ids,
        where,
        weights,
        devices,
    )
    return contrast(batch, options)
