"""Contrastive losses for JAX: pure functions, exact at every edge, in memory linear in the batch."""

from ntxent_jax.diagnostics import BatchStatistics, batch_statistics, loss_floor
from ntxent_jax.label_losses import ntxent, supcon_loss
from ntxent_jax.pair_losses import ntxent_pairs
from ntxent_jax.pairs import PairMasks, pair_masks
from ntxent_jax.query_losses import info_nce_loss, multiple_negatives_ranking_loss
from ntxent_jax.similarities import (
    cosine_similarity,
    dot_product,
    l2_normalize,
    log1p_cosine_similarity,
    negative_euclidean_distance,
)
from ntxent_jax.two_tower_losses import clip_loss, siglip_loss
from ntxent_jax.view_losses import cluster_loss, instance_loss, ntxent_views

__all__ = [
    "BatchStatistics",
    "PairMasks",
    "batch_statistics",
    "clip_loss",
    "cluster_loss",
    "cosine_similarity",
    "dot_product",
    "info_nce_loss",
    "instance_loss",
    "l2_normalize",
    "log1p_cosine_similarity",
    "loss_floor",
    "multiple_negatives_ranking_loss",
    "negative_euclidean_distance",
    "ntxent",
    "ntxent_pairs",
    "ntxent_views",
    "pair_masks",
    "siglip_loss",
    "supcon_loss",
]
