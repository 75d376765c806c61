"""NT-Xent of given pairs, for those who know which rows belong together without labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import only_finite
from ntxent_jax.devices import on_any_mesh
from ntxent_jax.numerics import LogSum, compute_dtype, divide_or_zero, segment_log_sum, softplus
from ntxent_jax.scores import Reduction, matmul_precision
from ntxent_jax.similarities import Similarity, compare_own, cosine_similarity, is_builtin

# Pairs whose rows are gathered at once: a few megabytes of rows.
_PAIRS = 1 << 14


@on_any_mesh
def ntxent_pairs(
    embeddings: ArrayLike,
    positives: ArrayLike,
    negatives: ArrayLike,
    *,
    temperature: ArrayLike = 0.07,
    candidates: ArrayLike | None = None,
    reduction: Reduction = "mean",
    similarity: Similarity = cosine_similarity,
    precision: str | None = None,
) -> jax.Array:
    r"""NT-Xent of given positive and negative pairs, no labels needed.

    Every positive pair :math:`(a, p)` stands against the negatives that are given for its anchor. With :math:`s_{ij}`
    the similarity of rows :math:`i` and :math:`j` over the temperature,

    .. math::
        \ell_{ap} = -\log \frac{\exp(s_{ap})}{\exp(s_{ap}) + \sum_{(a, n)} \exp(s_{an})} .

    Pairs are taken as given: one given twice counts twice, and a row may be paired with itself. Equal to
    pytorch-metric-learning's ``NTXentLoss`` with ``indices_tuple=(a1, p, a2, n)``. Work and memory grow with the number
    of pairs, not with the square of the number of rows.

    Args:
        embeddings: Rows of the anchors, floating, shape ``[n, d]``.
        positives: Integer, shape ``[p, 2]``, each row ``(anchor, candidate)``. A row that holds -1 is unused, so that
            lists of different lengths can share one compiled shape.
        negatives: Integer, shape ``[q, 2]``, likewise.
        temperature: Dimensionless, > 0. A number, or one for each anchor, shape ``[n]``. May be traced and learned.
        candidates: Rows that the second index refers to, shape ``[m, d]``. Default: ``embeddings``.
        reduction: ``"mean"`` over positive pairs, ``"anchor_mean"`` over anchors that have one, of the mean over their
            pairs, ``"sum"`` over pairs, or ``"none"``: the mean of each anchor's pairs, shape ``[n]``, 0 without any.
        similarity: As in :func:`ntxent`.
        precision: As in :func:`ntxent`.

    Returns:
        Loss in nats, at least 0; float32, or float64 for float64 rows. An anchor without negatives has the loss 0, and
        so has a batch without positive pairs. An index out of range gives NaN.

    Raises:
        TypeError: Rows are not floating, or indices not integers.
        ValueError: Indices are not of shape ``[p, 2]``, or as in :func:`ntxent`.

    Example:
        >>> import jax.numpy as jnp
        >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> positives = jnp.array([[0, 1], [2, 3]])
        >>> negatives = jnp.array([[0, 2], [0, 3]])
        >>> print(ntxent_pairs(embeddings, positives, negatives, temperature=0.5, reduction="none").round(4))
        [0.6271 0.     0.     0.    ]

        The third row was given no negative, so it has nothing to learn. Unused slots change nothing:

        >>> padded = jnp.array([[0, 1], [2, 3], [-1, -1]])
        >>> print(ntxent_pairs(embeddings, padded, negatives, temperature=0.5, reduction="none").round(4))
        [0.6271 0.     0.     0.    ]

    References:
        Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020,
        https://arxiv.org/abs/2002.05709, eq. 1.
    """
    anchors = checks.rows("embeddings", embeddings, "[n, d]")
    others = anchors if candidates is None else checks.rows("candidates", candidates, "[m, d]")
    anchors, others = checks.same_rows(embeddings=anchors, candidates=others)
    checks.options(reduction, similarity, None, precision)
    arrays = (
        only_finite(anchors),
        only_finite(others),
        checks.pair_list("positives", positives),
        checks.pair_list("negatives", negatives),
        checks.temperature(temperature, anchors.shape[0]),
    )
    return (_compiled if is_builtin(similarity) else _evaluate)(*arrays, reduction, similarity, precision)


def _evaluate(
    anchors: jax.Array,
    others: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    temperature: jax.Array,
    reduction: Reduction,
    similarity: Similarity,
    precision: str | None,
) -> jax.Array:
    n, dtype = anchors.shape[0], compute_dtype(anchors)
    exist = _in_range(positives, n, others.shape[0]) & _in_range(negatives, n, others.shape[0])
    wrong = jnp.where(exist, 0, jnp.nan).astype(dtype)
    if 0 in (n, others.shape[0]):
        return jnp.zeros((n,) if reduction == "none" else (), dtype) + wrong
    temperature = jnp.broadcast_to(jnp.where(temperature > 0, temperature.astype(dtype), jnp.nan) + wrong, (n,))
    with jax.default_matmul_precision(matmul_precision(precision, anchors)):
        rival_scores, rival_used = _pair_scores(anchors, others, negatives, similarity)
        scores, used = _pair_scores(anchors, others, positives, similarity)
    rivals = segment_log_sum(rival_scores, rival_used, negatives[:, 0], temperature)
    of_pair = positives[:, 0]
    excess = LogSum(*(part[of_pair] for part in rivals)).over(scores, temperature[of_pair])
    terms = jnp.where(used, softplus(jnp.where(used, excess, 0)), 0)
    number = used.astype(dtype)
    if reduction in ("sum", "mean"):
        total = jnp.sum(terms)
        return wrong + (total if reduction == "sum" else divide_or_zero(total, jnp.sum(number)))
    total, numbers = (jax.ops.segment_sum(x, of_pair, n) for x in (terms, number))
    rows = divide_or_zero(total, numbers)
    return wrong + (rows if reduction == "none" else divide_or_zero(jnp.sum(rows), jnp.sum(numbers > 0).astype(dtype)))


_compiled = jax.jit(_evaluate, static_argnums=(5, 6, 7))


def _pair_scores(
    anchors: jax.Array, others: jax.Array, pairs: jax.Array, similarity: Similarity
) -> tuple[jax.Array, jax.Array]:
    """Similarity of every pair, and which slots are used. Rows are gathered in blocks, again in reverse mode."""
    used = jnp.all(pairs != -1, axis=1)

    @jax.checkpoint
    def scores_of(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        pair, use = block
        first, second = anchors[jnp.where(use, pair[0], 0)], others[jnp.where(use, pair[1], 0)]
        return compare_own(similarity, first[None], second[None, None])[0, 0]

    scores = lax.map(scores_of, (pairs, used), batch_size=_PAIRS)
    return scores, used


def _in_range(pairs: jax.Array, n: int, m: int) -> jax.Array:
    """Whether every pair that is used names rows that exist; an index is never moved to the nearest row."""
    limits = jnp.array([n, m], pairs.dtype)
    return jnp.all(jnp.any(pairs == -1, axis=1) | jnp.all((pairs >= 0) & (pairs < limits), axis=1))
