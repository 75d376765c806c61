"""Every loss that shares a batch among devices, with every option, on three rows for each of eight devices.

A ``Case`` as in the catalog. All arrays are those of the whole batch; each device takes its run of rows. Some devices
hold no real row, equal labels and equal ids lie on several devices, and there are more keys than queries.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from catalog import Case

DEVICES, N, M, K, D = 8, 24, 32, 16, 5  # Rows, keys and shared negatives of all devices together.
BLOCK = 2
ORDER_OF_KEYS = np.argsort(np.arange(M) % (M // DEVICES) >= N // DEVICES, kind="stable")  # Positives first.
OF_KEYS = ("keys", "key_bias", "key_ids", "key_where", "guide_keys")


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _rows(seed: int, *shape: int) -> np.ndarray:
    return _random(seed).normal(size=(*shape, D))


# Three real rows on the first device, none on the third, and one or two elsewhere.
WHERE = np.array([1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1], bool)
LABELS = _random(1).integers(-3, 4, N)
IDS = _random(2).integers(0, 18, N)
KEY_IDS = _random(3).integers(0, 40, M)
FACTORS = np.linspace(0.5, 2.0, N)
T = {"temperature": np.asarray(0.6)}
WEIGHTS = {"weights": _random(4).permutation(np.append(np.linspace(0.2, 2.5, N - 1), 0.0))}
EACH = {"temperature": _random(5).permutation(np.linspace(0.4, 1.1, N))}


def scores(x: Any, y: Any) -> Any:
    """A user's similarity, not symmetric."""
    return jnp.tanh(x @ y.T) + 0.1 * x[:, :1]


def _labelled(
    loss: str = "ntxent", *, floats: Any = T, data: Any = None, similarity: Any = None, **static: Any
) -> Case:
    rows = {"embeddings": _rows(6, N), **floats}
    return Case(loss, ("embeddings", "labels"), rows, {"labels": LABELS, **(data or {})}, static, similarity)


def _items(loss: str, **static: Any) -> Case:
    floats = {"embeddings": _rows(7, N, 2), **EACH, **WEIGHTS}
    return Case(loss, ("embeddings", "labels"), floats, {"labels": LABELS, "where": WHERE}, static)


def _queue(loss: str, **static: Any) -> Case:
    floats = {"embeddings": _rows(8, N), "candidates": _rows(9, M), **T, **WEIGHTS}
    data = {"labels": LABELS, "where": WHERE, "ids": IDS, "candidate_ids": KEY_IDS}
    data |= {"candidate_labels": _random(10).integers(-3, 4, M), "candidate_where": _random(11).random(M) < 0.7}
    return Case(loss, ("embeddings", "labels"), floats, data, static)


def _pairs(loss: str, a: str, b: str, *, floats: Any = T, data: Any = None, similarity: Any = None, **static: Any):
    return Case(loss, (a, b), {a: _rows(12, N), b: _rows(13, N), **floats}, data or {}, static, similarity)


def _views(number: int, *, floats: Any = T, similarity: Any = None, **static: Any) -> Case:
    rows = tuple(f"view_{i}" for i in range(number))
    rows_of = {name: _rows(14 + i, N) for i, name in enumerate(rows)}
    return Case("ntxent_views", rows, {**rows_of, **floats}, {}, static, similarity)


def _queries(negatives: str = "", *, m: int = N, floats: Any = T, data: Any = None, **static: Any) -> Case:
    arrays = {"queries": _rows(18, N), "keys": _rows(19, m), **floats}
    if negatives:
        arrays["negatives"] = _rows(20, N, 2) if negatives == "own" else _rows(21, K)
    rows = ("queries", "keys", "negatives")[: 3 if negatives else 2]
    return Case("info_nce_loss", rows, arrays, data or {}, static)


def _ranking(negatives: str, *, floats: Any = T, data: Any = None, **static: Any) -> Case:
    case = _queries(negatives, floats=floats, data=data, **static)
    names = {"queries": "anchors", "keys": "positives"}
    floats = {names.get(key, key): x for key, x in case.floats.items()}
    return case._replace(
        loss="multiple_negatives_ranking_loss", rows=("anchors", "positives", "negatives"), floats=floats
    )


def _by_user(case: Case) -> Case:
    return case._replace(static={"similarity": scores})


def _number(**options: float) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in options.items()}


SOME = {"negative_where": _random(22).random((N, 2)) < 0.6}
SOME_SHARED = {"negative_where": _random(23).random(K) < 0.6}
KEYS = {"ids": IDS, "key_ids": KEY_IDS, "key_where": _random(24).random(M) < 0.8}
PAIRS = {"pair_where": _random(25).random((N, M)) < 0.7}
GUIDES = {"guide_queries": _random(26).normal(size=(N, 4)), "guide_keys": _random(27).normal(size=(M, 4))}
GUIDED = {**GUIDES, "guide_keys": GUIDES["guide_keys"][:N]}
BIAS = {"key_bias": _random(28).normal(size=N)}
IMAGES = ("images", "texts")

CASES = {
    "ntxent": _labelled(floats=T | WEIGHTS, data={"where": WHERE}),
    "ntxent anchor_mean": _labelled(floats=T | WEIGHTS, data={"where": WHERE, "ids": IDS}, reduction="anchor_mean"),
    "ntxent sum": _labelled(floats=EACH | WEIGHTS, data={"where": WHERE}, reduction="sum"),
    "ntxent none": _labelled(floats=T | WEIGHTS, data={"where": WHERE}, reduction="none"),
    "ntxent all": _labelled(floats=EACH, denominator="all", similarity="dot_product"),
    "ntxent negatives": _labelled(data={"ids": IDS}, denominator="negatives"),
    "ntxent items": _items("ntxent"),
    "ntxent items none": _items("ntxent", reduction="none"),
    "ntxent queue": _queue("ntxent"),
    "ntxent user": _by_user(_labelled(data={"where": WHERE})),
    "supcon out": _labelled("supcon_loss", floats=T | WEIGHTS, data={"where": WHERE}),
    "supcon out mean": _labelled(
        "supcon_loss", floats=EACH, reduction="mean", similarity="negative_euclidean_distance"
    ),
    "supcon in": _labelled("supcon_loss", data={"ids": IDS}, form="in"),
    "supcon in sum": _labelled("supcon_loss", data={"where": WHERE}, form="in", reduction="sum"),
    "supcon none": _labelled("supcon_loss", floats=T | WEIGHTS, reduction="none"),
    "supcon items": _items("supcon_loss"),
    "supcon queue": _queue("supcon_loss", form="in"),
    "two views": _views(2, floats=T | WEIGHTS)._replace(data={"where": WHERE}),
    "two views cold": _views(2, floats=_number(temperature=0.005)),
    "two views none": _views(2, floats=EACH, reduction="none"),
    "three views": _views(3, similarity="negative_euclidean_distance", denominator="all", reduction="sum"),
    "instance": _pairs("instance_loss", "view_a", "view_b", floats=T | WEIGHTS, data={"where": WHERE}),
    "instance none": _pairs("instance_loss", "view_a", "view_b", reduction="none"),
    "info_nce": _queries(floats=EACH | WEIGHTS, data={"where": WHERE, "ids": IDS}),
    "info_nce none": _queries(m=M, floats=T | WEIGHTS, data={"where": WHERE}, reduction="none"),
    "info_nce sum": _queries("own", data={"where": WHERE, **SOME}, reduction="sum"),
    "info_nce keys": _queries("own", m=M, floats={**T, "key_bias": _random(29).normal(size=M)}, data=KEYS | SOME),
    "info_nce shared": _queries("shared", m=M, floats=T | WEIGHTS, data=KEYS | SOME_SHARED),
    "info_nce only own": _queries("own", floats=T | BIAS, data={"where": WHERE, **SOME}, in_batch=False),
    "info_nce only shared": _queries("shared", floats=EACH, data={"where": WHERE, **SOME_SHARED}, in_batch=False),
    "info_nce pairs": _queries("shared", m=M, data={**PAIRS, "where": WHERE}),
    "info_nce smoothed": _queries(
        "shared", floats=_number(temperature=0.6, label_smoothing=0.1), data={"where": WHERE}
    ),
    "info_nce harder": _queries("own", floats=_number(temperature=0.6, hardness=0.3), data={"where": WHERE}),
    "info_nce prior": _queries("shared", floats=_number(temperature=0.6, class_prior=0.1), data={"where": WHERE}),
    "info_nce margin": _queries("own", m=M, data={**_number(margin=0.1), "where": WHERE}),
    "info_nce guide": _queries("shared", m=M, data=_number(margin=0.1) | GUIDES, relative_margin=True),
    "info_nce user": _by_user(_queries("shared", floats=EACH, data={"where": WHERE})),
    "info_nce log1p": _queries()._replace(similarity="log1p_cosine_similarity"),
    "ranking": _ranking("own", floats=T | WEIGHTS, data={"where": WHERE, "ids": IDS, **SOME}, symmetric=True),
    "ranking shared": _ranking("shared", floats=T | BIAS, data=SOME_SHARED | _number(margin=0.1) | GUIDED),
    "ranking none": _ranking("own", floats=_number(temperature=0.6, hardness=0.3), symmetric=True, reduction="none"),
    "clip": _pairs("clip_loss", *IMAGES, floats=T | WEIGHTS, data={"where": WHERE, "ids": IDS}),
    "clip smoothed": _pairs("clip_loss", *IMAGES, floats=_number(temperature=0.6, label_smoothing=0.1)),
    "clip sum": _pairs("clip_loss", *IMAGES, floats=EACH, data={"where": WHERE}, reduction="sum"),
    "clip none": _pairs("clip_loss", *IMAGES, floats=T | WEIGHTS, reduction="none"),
    "clip user": _by_user(_pairs("clip_loss", *IMAGES, data={"where": WHERE})),
    "clip cold": _pairs("clip_loss", *IMAGES, floats=_number(temperature=0.005)),
    "siglip": _pairs(
        "siglip_loss", *IMAGES, floats=_number(temperature=0.6, bias=-1.0) | WEIGHTS, data={"where": WHERE, "ids": IDS}
    ),
    "siglip none": _pairs("siglip_loss", *IMAGES, floats=_number(temperature=0.6, bias=-1.0), reduction="none"),
}
CASES["ntxent float32"] = CASES["ntxent"]
CASES["clip float32"] = CASES["clip"]
CASES["info_nce bfloat16"] = CASES["info_nce keys"]
CASES["two views bfloat16"] = CASES["two views"]


def dtype_of(name: str) -> Any:
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}.get(name.split()[-1], jnp.float64)
