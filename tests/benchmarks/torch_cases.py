"""The PyTorch systems, written from their published formulas. Imported only where torch is installed."""

from typing import Any

import cases
import torch
from cases import Rival
from torch.nn.functional import cross_entropy, normalize


def simclr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """NT-Xent of SimCLR: each of the 2n rows picks its other view among all rows but itself."""
    x = normalize(torch.cat([a, b]))
    s = ((x @ x.T).float() / cases.TEMPERATURE).fill_diagonal_(-torch.inf)
    rows = torch.arange(len(x), device=x.device)
    return cross_entropy(s, (rows + len(a)) % len(x))


def open_clip(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """open_clip's ClipLoss on one device: two products, two cross entropies."""
    images, texts = normalize(images), normalize(texts)
    scale = 1 / cases.TEMPERATURE
    per_image = (scale * images @ texts.T).float()
    per_text = (scale * texts @ images.T).float()
    rows = torch.arange(len(images), device=images.device)
    return (cross_entropy(per_image, rows) + cross_entropy(per_text, rows)) / 2


def metric_learning(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from pytorch_metric_learning.losses import NTXentLoss

    loss: torch.Tensor = NTXentLoss(temperature=cases.TEMPERATURE)(x, labels)
    return loss


def torch_rivals(dense_rows: int, metric_learning_rows: int) -> dict[str, Rival]:
    rivals = {
        "simclr": Rival("SimCLR in PyTorch", "torch", {"views": dense_rows}, {"views": simclr}),
        "open_clip": Rival("open_clip in PyTorch", "torch", {"clip": dense_rows}, {"clip": open_clip}),
    }
    if metric_learning_rows:
        # It forms tables of positive by negative pairs: 4.3 GB each at 1,024 rows in pairs, 1.5 at 256 in ten classes.
        limits = {"pairs": metric_learning_rows, "classes": metric_learning_rows // 4}
        formulas: dict[str, Any] = dict.fromkeys(limits, metric_learning)
        rivals["metric_learning"] = Rival("pytorch-metric-learning NTXentLoss", "torch", limits, formulas)
    return rivals
