"""Losses of several views of the same items: SimCLR and Contrastive-Clustering."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.contrast import contrast
from ntxent_jax.devices import AxisName, Gather, devices_along, on_any_mesh
from ntxent_jax.inputs import view_batch
from ntxent_jax.label_losses import Denominator
from ntxent_jax.numerics import divide_or_zero
from ntxent_jax.pairs import AT_OTHER_VIEW, by_label
from ntxent_jax.scores import Options, Reduction
from ntxent_jax.similarities import Similarity, cosine_similarity, dot_product


@on_any_mesh
def ntxent_views(
    *views: ArrayLike,
    temperature: ArrayLike = 0.07,
    denominator: Denominator = "pair",
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""NT-Xent of SimCLR: how surely each view of an item picks another view of the same item.

    Row ``i`` of every view is the same item. All rows of all views are anchors and candidates: with ``v`` views of
    ``n`` items each of the ``v * n`` anchors has ``v - 1`` positives and ``v * (n - 1)`` negatives. With :math:`s_{ij}`
    the similarity of rows :math:`i` and :math:`j` over the temperature, every ordered positive pair :math:`(a, p)` has
    the loss

    .. math::
        \ell_{ap} = -\log \frac{\exp(s_{ap})}{\exp(s_{ap}) + \sum_{n \in N(a)} \exp(s_{an})} .

    The same as :func:`ntxent` of all rows with the item's number as label. SimCLR's PyTorch code has this mean over
    ``2 * n`` rows; its TensorFlow code adds the means of the two views, twice this value. For one view choosing among
    the rows of the other only, use :func:`info_nce_loss`.

    Args:
        *views: Two or more arrays, floating, each of shape ``[n, d]``.
        temperature: Dimensionless, > 0. A number, or one for each item, shape ``[n]``. May be traced and learned.
        denominator: ``"pair"``, ``"all"`` or ``"negatives"``, as in :func:`ntxent`. The first two agree for two views.
        where: Boolean, shape ``[n]``. False hides all views of an item.
        weights: Real, shape ``[n]``. Weight of each item.
        reduction: As in :func:`ntxent`; ``"none"`` is the mean over the views of each item, shape ``[n]``.
        similarity: As in :func:`ntxent`.
        block_size: As in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows.
        ``log(v * (n - 1) + 1)`` when all rows are equal, at any temperature: a loss that stays there has collapsed. It
        does not reach 0 for a perfect model either, see :func:`loss_floor`. 0 for a single item.

    Raises:
        TypeError: Rows are not floating, or ``where`` is not boolean.
        ValueError: Fewer than two views, views of different shapes, or as in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> view_a = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> view_b = jnp.array([[0.8, 0.6], [0.0, 3.0]])
        >>> print(f"{ntxent_views(view_a, view_b, temperature=0.5):.4f}")
        0.5276

        Three views of each item work the same way:

        >>> print(f"{ntxent_views(view_a, view_b, view_a, temperature=0.5):.4f}")
        0.5906

        Rows that are all equal are at chance level, ``log(2 * (n - 1) + 1)``:

        >>> print(f"{ntxent_views(jnp.ones((8, 4)), jnp.ones((8, 4))):.4f}")
        2.7081

    References:
        Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020,
        https://arxiv.org/abs/2002.05709, eq. 1.
    """
    checks.choice("denominator", denominator, ("pair", "all", "negatives"))
    devices = devices_along(axis_name, gather)
    batch = view_batch(
        *views, temperature=temperature, where=where, weights=weights, similarity=similarity, devices=devices
    )
    only = AT_OTHER_VIEW if len(views) == 2 else None
    return contrast(
        batch, Options(by_label, similarity, denominator, only, False, reduction, block_size, precision, devices)
    )


def instance_loss(
    view_a: ArrayLike,
    view_b: ArrayLike,
    temperature: ArrayLike = 0.5,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = dot_product,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    """Instance loss of Contrastive-Clustering: NT-Xent of two views with dot products, rows taken as they are.

    The same as :func:`ntxent_views` with ``similarity=dot_product``. Contrastive-Clustering normalises the rows in its
    network, SimCLR's ``NT_Xent`` in the loss; on rows of unit length both are one number, on others they differ, since
    a longer row has larger logits. Normalise each row, never the whole matrix: ``l2_normalize(x)``.

    Args:
        view_a: Rows, floating, shape ``[n, d]``.
        view_b: Rows of the same items, shape ``[n, d]``.
        temperature: Dimensionless, > 0. A number, or one for each item, shape ``[n]``.
        where: Boolean, shape ``[n]``. False hides both views of an item.
        weights: Real, shape ``[n]``. Weight of each item.
        reduction: As in :func:`ntxent_views`.
        similarity: As in :func:`ntxent`.
        block_size: As in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, as :func:`ntxent_views` returns it.

    Raises:
        TypeError: Rows are not floating, or ``where`` is not boolean.
        ValueError: The views differ in shape, or as in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> import ntxent_jax as nx
        >>> view_a, view_b = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([[0.8, 0.6], [0.0, 3.0]])
        >>> print(f"{nx.instance_loss(view_a, view_b):.4f} {nx.ntxent_views(view_a, view_b, temperature=0.5):.4f}")
        0.1000 0.5276
        >>> print(f"{nx.instance_loss(nx.l2_normalize(view_a), nx.l2_normalize(view_b)):.4f}")
        0.5276

    References:
        Li et al., "Contrastive Clustering", 2021, https://arxiv.org/abs/2009.09687, eq. 2 to 4.
    """
    return ntxent_views(
        view_a,
        view_b,
        temperature=temperature,
        where=where,
        weights=weights,
        reduction=reduction,
        similarity=similarity,
        block_size=block_size,
        axis_name=axis_name,
        gather=gather,
        precision=precision,
    )


@on_any_mesh
def cluster_loss(
    assignments_a: ArrayLike,
    assignments_b: ArrayLike,
    temperature: ArrayLike = 1.0,
    *,
    where: ArrayLike | None = None,
) -> jax.Array:
    r"""Cluster loss of Contrastive-Clustering: the columns of two soft assignments are the items.

    A cluster is described by the column of its assignment probabilities, and its two views must find each other among
    the columns of all clusters, as in :func:`ntxent_views`. Minus the entropy of the mean assignment of each view,

    .. math::
        \log k + \sum_c p_c \log p_c , \qquad p_c = \frac{\sum_i y_{ic}}{\sum_{ic'} y_{ic'}} ,

    is added, 0 when all ``k`` clusters are equally full, up to ``log(k)`` when one holds everything.

    Args:
        assignments_a: Probabilities of ``k`` clusters for each row of one view, at least 0, floating, shape ``[n, k]``.
        assignments_b: The same for the other view, shape ``[n, k]``.
        temperature: Dimensionless, > 0, a number.
        where: Boolean, shape ``[n]``. False hides a row.

    Returns:
        Loss in nats, shape ``[]``; float32, or float64 for float64 assignments. An empty cluster has similarity 0 to
        all others and adds 0 to the entropy. 0 with gradient 0 if no row is real.

    Raises:
        TypeError: Assignments are not floating, or ``where`` is not boolean.
        ValueError: The assignments differ in shape, or ``temperature`` is known beforehand and not > 0.

    Example:
        >>> import jax.numpy as jnp
        >>> assignments = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        >>> print(f"{cluster_loss(assignments, assignments):.4f}")
        0.5514
        >>> print(f"{cluster_loss(assignments.at[:, 1].set(0.0), assignments):.4f}")
        1.5182

    References:
        Li et al., "Contrastive Clustering", 2021, https://arxiv.org/abs/2009.09687, eq. 5 to 7, and its repository.
    """
    views = [
        checks.rows(f"assignments_{side}", x, "[n, k]") for side, x in (("a", assignments_a), ("b", assignments_b))
    ]
    checks.equal_shapes(**{f"assignments_{side}": view for side, view in zip("ab", views, strict=True)})
    n = views[0].shape[0]
    real = checks.mask("where", where, (n,))
    real = jnp.ones(n, jnp.bool_) if real is None else real
    # A row of zeros adds nothing, and columns must have a length.
    views = [jnp.pad(jnp.where(real[:, None], view, 0), ((0, n == 0), (0, 0))) for view in views]
    loss = ntxent_views(*(view.T for view in views), temperature=checks.positive_number("temperature", temperature))
    loss += sum(_missing_entropy(view.astype(loss.dtype)) for view in views)
    return jnp.where(jnp.any(real), loss, 0)


def _missing_entropy(assignments: jax.Array) -> jax.Array:
    """Entropy that the mean assignment lacks to that of equally full clusters."""
    sizes = jnp.sum(assignments, axis=0)
    share = divide_or_zero(sizes, jnp.sum(sizes))
    some = share != 0
    return jnp.log(jnp.asarray(share.shape[0], share.dtype)) + jnp.sum(
        jnp.where(some, share * jnp.log(jnp.where(some, share, 1)), 0)
    )
