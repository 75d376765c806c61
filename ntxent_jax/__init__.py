"""Contrastive losses for JAX: pure functions, exact at every edge, in memory linear in the batch."""

from ntxent_jax.caching import gradient_cache
from ntxent_jax.diagnostics import BatchStatistics, batch_statistics, loss_floor
from ntxent_jax.geometry import alignment, uniformity
from ntxent_jax.label_losses import ntxent, supcon_loss
from ntxent_jax.pair_losses import ntxent_pairs
from ntxent_jax.pairs import PairMasks, pair_masks
from ntxent_jax.prefixes import matryoshka
from ntxent_jax.query_losses import info_nce_loss, multiple_negatives_ranking_loss
from ntxent_jax.queues import EmbeddingQueue, queue_init, queue_push
from ntxent_jax.retrieval import retrieval_metrics, top_k
from ntxent_jax.sampling import m_per_class_batches, no_duplicates_batches
from ntxent_jax.similarities import (
    cosine_similarity,
    dot_product,
    l2_normalize,
    log1p_cosine_similarity,
    negative_euclidean_distance,
)
from ntxent_jax.two_tower_losses import clip_loss, siglip_loss
from ntxent_jax.view_losses import cluster_loss, instance_loss, ntxent_views

__version__ = "0.1.0"

__all__ = [
    "BatchStatistics",
    "EmbeddingQueue",
    "PairMasks",
    "alignment",
    "batch_statistics",
    "clip_loss",
    "cluster_loss",
    "cosine_similarity",
    "dot_product",
    "gradient_cache",
    "info_nce_loss",
    "instance_loss",
    "l2_normalize",
    "log1p_cosine_similarity",
    "loss_floor",
    "m_per_class_batches",
    "matryoshka",
    "multiple_negatives_ranking_loss",
    "negative_euclidean_distance",
    "no_duplicates_batches",
    "ntxent",
    "ntxent_pairs",
    "ntxent_views",
    "pair_masks",
    "queue_init",
    "queue_push",
    "retrieval_metrics",
    "siglip_loss",
    "supcon_loss",
    "top_k",
    "uniformity",
]
