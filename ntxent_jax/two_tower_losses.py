"""Losses of two encoders, such as one of images and one of texts: CLIP and SigLIP."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Batch
from ntxent_jax.contrast import contrast, contrast_both_ways
from ntxent_jax.devices import AxisName, Devices, Gather, devices_along, on_any_mesh
from ntxent_jax.inputs import query_batch, with_extras
from ntxent_jax.pairs import AT_OWN_POSITION, by_position
from ntxent_jax.scores import Options, Reduction
from ntxent_jax.similarities import Similarity, cosine_similarity


@on_any_mesh
def clip_loss(
    images: ArrayLike,
    texts: ArrayLike,
    temperature: ArrayLike = 0.07,
    *,
    ids: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""CLIP: how surely each image picks its own text, and each text its own image.

    The mean of :func:`info_nce_loss` in both directions. With :math:`s_{ij}` the similarity of image :math:`i` and
    text :math:`j` over the temperature,

    .. math::
        \ell_i = -\frac{1}{2} \log \frac{\exp(s_{ii})}{\sum_j \exp(s_{ij})}
                 -\frac{1}{2} \log \frac{\exp(s_{ii})}{\sum_j \exp(s_{ji})} .

    Both directions come from one visit of each block of the matrix. open_clip's ``logit_scale`` is ``1 / temperature``;
    its parameter is the logarithm of that.

    Args:
        images: Rows, floating, shape ``[n, d]``.
        texts: Rows, floating, shape ``[n, d]``; row ``i`` belongs to image ``i``.
        temperature: Dimensionless, > 0. A number, or one for each pair, shape ``[n]``, which acts in both directions.
            May be traced and learned.
        ids: Integer, shape ``[n]``. Another pair of the same id is not a negative, in either direction: the same
            caption, or the same image, twice in a batch.
        label_smoothing: Share in ``[0, 1)`` of the target that is spread evenly over all candidates that count.
        where: Boolean, shape ``[n]``. False hides a pair.
        weights: Real, shape ``[n]``. Weight of each pair.
        reduction: ``"mean"`` (weighted, over real pairs), ``"anchor_mean"`` (the same here), ``"sum"`` or ``"none"``:
            one loss for each pair, half the sum of its two directions.
        similarity: As in :func:`ntxent`.
        block_size: Number of images visited at once, as in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, at least 0, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows.
        ``log(n)`` when all similarities are equal. 0 for a single pair.

    Raises:
        TypeError: Rows are not floating, ids not integers, or ``where`` is not boolean.
        ValueError: ``images`` and ``texts`` differ in length, or as in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> images = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> texts = jnp.array([[0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> print(f"{clip_loss(images, texts, temperature=0.5):.4f}")
        0.8535

        The second and third image are one picture, each a right answer to the other's caption:

        >>> print(f"{clip_loss(images, texts, temperature=0.5, ids=jnp.array([0, 1, 1])):.4f}")
        0.5003

    References:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021,
        https://arxiv.org/abs/2103.00020, figure 3.
    """
    devices = devices_along(axis_name, gather)
    options = Options(
        by_position, similarity, "pair", AT_OWN_POSITION, False, reduction, block_size, precision, devices
    )

    batch = _pairs(images, texts, temperature, ids, where, weights, similarity, devices)
    return contrast_both_ways(with_extras(batch, label_smoothing=label_smoothing), options)


@on_any_mesh
def siglip_loss(
    images: ArrayLike,
    texts: ArrayLike,
    temperature: ArrayLike = 0.1,
    bias: ArrayLike = -10.0,
    *,
    ids: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    gather: Gather = "all",
    precision: str | None = None,
) -> jax.Array:
    r"""SigLIP: for every image and every text on its own, whether they belong together.

    With :math:`s_{ij}` the similarity of image :math:`i` and text :math:`j` over the temperature, :math:`b` the bias
    and :math:`z_{ij}` 1 for a pair that belongs together and -1 for any other,

    .. math::
        \ell_i = -\sum_j \log \sigma(z_{ij} (s_{ij} + b)) .

    The mean divides the sum over all ``n * n`` pairs by ``n`` once, not twice. A negative weighs as much as a positive
    and there are ``n - 1`` times as many, so the bias must start low: the best constant one is ``-log(n - 1)``. The
    usual -10 suits 22,027 rows; at 8 rows it gives a loss of 10 where -log(7) gives 3.01. At bias 0 and similarity 0,
    as when one encoder returns zeros, the loss is ``n * log(2)``.

    Args:
        images: Rows, floating, shape ``[n, d]``.
        texts: Rows, floating, shape ``[n, d]``; row ``i`` belongs to image ``i``.
        temperature: Dimensionless, > 0, a number. May be traced and learned.
        bias: A number, added to every logit. May be traced and learned.
        ids: Integer, shape ``[n]``. Another pair of the same id is not a negative.
        where: Boolean, shape ``[n]``. False hides a pair: its row and its column.
        weights: Real, shape ``[n]``. Weight of each image's row.
        reduction: ``"mean"``: weighted mean over real images of their rows' sums; ``"anchor_mean"`` is the same;
            ``"sum"``; or ``"none"``: the rows' sums.
        similarity: As in :func:`ntxent`.
        block_size: Number of images visited at once, as in :func:`ntxent`.
        axis_name: As in :func:`ntxent`.
        gather: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, at least 0, shape ``[]``, or ``[n]`` for ``"none"``; float32, or float64 for float64 rows.

    Raises:
        TypeError: Rows are not floating, ids not integers, or ``where`` is not boolean.
        ValueError: ``images`` and ``texts`` differ in length, temperature or bias is not a scalar, or as in
            :func:`ntxent`.

    Example:
        Eight pairs whose similarities are all 0, at two starts of the bias:

        >>> import jax.numpy as jnp
        >>> images, texts = jnp.eye(8, 16), jnp.eye(8, 16, k=8)
        >>> print(f"{siglip_loss(images, texts):.4f} {siglip_loss(images, texts, bias=-jnp.log(7.0)):.4f}")
        10.0004 3.0142

    References:
        Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023, https://arxiv.org/abs/2303.15343, eq. 1.
    """
    devices, temperature = devices_along(axis_name, gather), checks.positive_number("temperature", temperature)
    batch = _pairs(images, texts, temperature, ids, where, weights, similarity, devices)
    batch = batch._replace(extras=batch.extras._replace(sigmoid_bias=checks.one_number("bias", bias)))
    options = Options(
        by_position, similarity, "sigmoid", AT_OWN_POSITION, False, reduction, block_size, precision, devices
    )
    return contrast(batch, options)


def _pairs(
    images: ArrayLike,
    texts: ArrayLike,
    temperature: ArrayLike,
    ids: ArrayLike | None,
    where: ArrayLike | None,
    weights: ArrayLike | None,
    similarity: Similarity,
    devices: Devices,
) -> Batch:
    names = ("images", "texts")
    rows, others = checks.any_rows(names[0], images), checks.any_rows(names[1], texts)
    checks.equal_lengths(names, rows.shape[0], others.shape[0])
    return query_batch(
        rows,
        others,
        temperature,
        ids=ids,
        where=where,
        weights=weights,
        similarity=similarity,
        devices=devices,
        names=names,
    )
