"""Answers on eight simulated devices, for the tests: a line of JSON with a question in, a line of JSON out.

The number of devices is fixed before JAX starts, so this is a process of its own. A question names a function of this
file and its arguments; the answer is what it returns, mostly how far a result is from that of one device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import device_cases
import device_steps
import jax
import jax.numpy as jnp
import numpy as np
from catalog import quick_jit
from device_cases import CASES, DEVICES, FACTORS, OF_KEYS, ORDER_OF_KEYS, M
from inputs import LATTICE_K as K
from inputs import LATTICE_Q as Q
from inputs import LATTICE_W as W
from inputs import X
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ntxent_jax as nj
from ntxent_jax import batch, contrast
from ntxent_jax.devices import Devices

ROWS = {name for case in CASES.values() for name, x in case.floats.items() if x.ndim > 1}


class Way(NamedTuple):
    """How a loss is mapped over devices.

    Attributes:
        map: "checked" and "unchecked" are ``jax.shard_map`` with ``check_vma`` on and off over a mesh of one axis, "two
            axes" is over both axes of a mesh, "one of two" over one while the other holds copies; "pmap"; "vmap".
        inside: Whether parameters are differentiated inside of the map, and their gradients averaged, or outside of it.
        block_size: Of the loss.
        gather: Of the loss.
        devices: How many share the rows.
    """

    map: str
    inside: bool
    block_size: int | None = None
    gather: str = "all"
    devices: int = DEVICES

    @property
    def axis(self) -> Any:
        return {"two axes": ("host", "chip"), "one of two": "host"}.get(self.map, "batch")

    @property
    def mesh(self) -> Any:
        devices = np.array(jax.devices())
        if self.map in ("two axes", "one of two"):
            return jax.sharding.Mesh(devices.reshape(4, 2), ("host", "chip"))
        return jax.sharding.Mesh(devices[: self.devices], "batch")

    def options(self) -> dict[str, Any]:
        return {"axis_name": self.axis, "block_size": self.block_size, "gather": self.gather}

    def __call__(self, f: Callable[..., Any], same: bool = False) -> Callable[..., Any]:
        """``f(copies, rows)`` of one device's rows as a function of the rows of all; copies and numbers are not split.

        Its results are rows, or, with ``same``, alike on all devices.
        """

        def run(*args: Any) -> Any:
            copies, rows = jax.tree.map(lambda x: False, args[0]), jax.tree.map(lambda x: jnp.ndim(x) > 0, args[1])
            if self.map in ("pmap", "vmap"):
                axes = jax.tree.map(lambda split: 0 if split else None, (copies, rows))
                shape = (self.devices, -1)
                stacked = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]) if jnp.ndim(x) else x, args[1])
                mapped = (jax.pmap if self.map == "pmap" else jax.vmap)(f, axis_name=self.axis, in_axes=axes)
                return jax.tree.map(lambda x: x[0] if same else x.reshape(-1, *x.shape[2:]), mapped(args[0], stacked))
            along = PartitionSpec(self.axis)
            specs = jax.tree.map(lambda split: along if split else PartitionSpec(), (copies, rows))
            out, check = PartitionSpec() if same else along, self.map != "unchecked"
            return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=check)(*args)

        return run

    def compiled(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f``, which calls a mapped function."""
        return f if self.map == "pmap" else quick_jit(f)

    def share(self, x: jax.Array) -> jax.Array:
        """This device's rows, inside of the map."""
        if not jnp.ndim(x):
            return x
        rows = x.shape[0] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * rows, rows)


def floats_and_data(name: str) -> tuple[Any, Any]:
    case, dtype = CASES[name], device_cases.dtype_of(name)
    of_numbers = jnp.promote_types(dtype, jnp.float32)
    floats = {key: jnp.asarray(x, dtype if key in ROWS else of_numbers) for key, x in case.floats.items()}
    return floats, jax.tree.map(jnp.asarray, case.data)


def in_one_order(name: str, arrays: dict[str, Any], back: bool = False) -> dict[str, Any]:
    """On one device the first keys are the positives; on several the first of each device are. And back again."""
    if "keys" not in CASES[name].floats or len(CASES[name].floats["keys"]) != M:
        return arrays
    order = np.argsort(ORDER_OF_KEYS) if back else ORDER_OF_KEYS
    arrays = {key: x[order] if key in OF_KEYS else x for key, x in arrays.items()}
    return {key: x[:, order] if key == "pair_where" else x for key, x in arrays.items()}


@functools.cache
def on_one_device(name: str) -> Any:
    """Value and gradient."""
    case = CASES[name]
    floats, data = (in_one_order(name, arrays) for arrays in floats_and_data(name))
    step = quick_jit(jax.value_and_grad(lambda x, y: _total(case(nj, x, y)), has_aux=True))
    (_, value), gradient = step(floats, data)
    return jax.device_get((value, gradient))


def _total(value: jax.Array, factors: Any = FACTORS) -> tuple[jax.Array, jax.Array]:
    """One number to be differentiated, and the value."""
    return jnp.sum(value * factors) if value.ndim else value, value


def on_all_devices(name: str, way: Way) -> Any:
    """Value and gradient; if taken inside, those of each device, along one more axis."""
    case, rows = CASES[name], CASES[name].static.get("reduction") == "none"
    floats, data = floats_and_data(name)

    def loss(_: Any, arguments: Any) -> jax.Array:
        return case(nj, arguments, {}, **way.options())

    def outside(floats: Any) -> Any:
        return _total(way(loss, same=not rows)({}, {**floats, **data}))

    def inside(parameters: Any, arguments: Any) -> Any:
        factors = arguments.pop("factors")

        def total(parameters: Any) -> Any:
            total, value = _total(loss({}, jax.tree.map(way.share, parameters) | arguments), factors)
            return lax.psum(total, way.axis) if rows else total, value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(parameters)
        of_each = jax.tree.map(lambda x: x[None], (value, lax.pmean(gradient, way.axis)))
        return (value, of_each[1]) if rows else of_each

    if way.inside:
        return jax.device_get(way.compiled(way(inside))(floats, {**data, "factors": FACTORS}))
    (_, value), gradient = way.compiled(jax.value_and_grad(outside, has_aux=True))(floats)
    return jax.device_get((value, gradient))


def difference(actual: Any, expected: Any) -> dict[str, float]:
    """The largest relative error of the value, of the direction of a gradient (1 - cosine), and of its length."""
    value, gradient = actual
    right, slopes = expected
    value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
    found = {"value": np.max(np.abs(value - right)) / np.max(np.abs(right)), "direction": 0.0, "length": 0.0}
    for key, slope in slopes.items():
        slope = np.asarray(slope, np.float64).ravel()
        for x in np.asarray(gradient[key], np.float64).reshape(-1, slope.size):
            lengths = np.linalg.norm(x), np.linalg.norm(slope)
            found["direction"] = max(found["direction"], 1 - x @ slope / np.prod(lengths))
            found["length"] = max(found["length"], abs(lengths[0] / lengths[1] - 1))
    return {key: float(x) for key, x in found.items()}


def compared(name: str, ways: list[Any]) -> list[dict[str, float]]:
    value, gradient = on_one_device(name)
    right = value, in_one_order(name, gradient, back=True)
    return [difference(on_all_devices(name, Way(*way)), right) for way in ways]


def on_mesh(name: str, kind: str, block_size: int | None, how: str) -> dict[str, float]:
    """Plain ``jax.jit``, or no ``jit`` at all, of rows that lie on all devices of a mesh of Auto or Explicit axes."""
    case, types = CASES[name], (AxisType.Auto if kind == "Auto" else AxisType.Explicit,)
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=types)

    def on_devices(x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch") if x.ndim else PartitionSpec()))

    floats, data = (jax.tree.map(on_devices, in_one_order(name, arrays)) for arrays in floats_and_data(name))
    factors = on_devices(jnp.asarray(FACTORS))
    step = jax.value_and_grad(lambda x, y, z: _total(case(nj, x, y, block_size=block_size), z), has_aux=True)
    with contextlib.nullcontext() if how == "jit" else jax.set_mesh(mesh):
        (_, value), gradient = (step if how == "no jit" else quick_jit(step))(floats, data, factors)
    return difference(jax.device_get((value, gradient)), on_one_device(name))


def statistics(block_size: int | None, map_: str) -> float:
    """Largest relative error of the statistics of a batch."""
    floats, data = floats_and_data("ntxent")
    arguments, way = {"embeddings": floats["embeddings"], **data, "ids": device_cases.IDS}, Way(map_, False)

    def of_each(_: Any, rows: Any) -> Any:
        return nj.batch_statistics(**rows, block_size=block_size, axis_name=way.axis)

    found, right = way.compiled(way(of_each, same=True))({}, arguments), nj.batch_statistics(**arguments)
    return float(max(abs(x / y - 1) for x, y in zip(found, right, strict=True)))


def step(name: str, way: list[Any]) -> dict[str, float]:
    """A step of training inside of a map."""
    way = Way(*way)

    def inside(weights: Any, rows: Any) -> Any:
        result = device_steps.on_each(name, way.axis, weights, *rows, **way.options())
        return jax.tree.map(lambda x: x[None], result)

    rows = jax.tree.map(jnp.asarray, (device_steps.ROWS, device_steps.queues(DEVICES)))
    value, weights = jax.device_get(way.compiled(way(inside))(device_steps.WEIGHTS, rows))
    right, expected = jax.device_get(device_steps.on_one(name))
    return difference((value, {"weights": weights}), (right, {"weights": expected}))


def rows_inside(name: str, way: list[Any]) -> dict[str, float]:
    """The gradient of each device's own rows, taken inside of the map: nothing sums it."""
    case, way = CASES[name], Way(*way)
    floats, data = floats_and_data(name)

    def inside(_: Any, arguments: Any) -> Any:
        floats, data = arguments
        value, gradient = jax.value_and_grad(lambda x: case(nj, {**floats, **x}, data, **way.options()))(
            {key: x for key, x in floats.items() if key in ROWS}
        )
        return value[None], gradient

    value, slopes = on_one_device(name)
    slopes = {key: x for key, x in in_one_order(name, slopes, back=True).items() if key in ROWS}
    return difference(jax.device_get(way.compiled(way(inside))({}, (floats, data))), (value, slopes))


PROGRAMS = {
    "labels": lambda x, y, z, **options: nj.ntxent(x, z, 0.1, **options),
    "views": lambda x, y, z, **options: nj.ntxent_views(x, y, temperature=0.1, **options),
    "clip": lambda x, y, z, **options: nj.clip_loss(x, y, 0.1, **options),
    "queries": lambda x, y, z, **options: nj.info_nce_loss(x, y, temperature=0.1, **options),
}


def program(name: str, kind: str, gather: str, devices: int, n: int, d: int, blocks: int | None) -> dict[str, float]:
    """Numbers of the compiled program of a loss and its gradient, for each device; it is not run.

    Args:
        name: Of the loss.
        kind: "axis_name" under ``jax.shard_map``, or the axes of a mesh under plain ``jax.jit``.
        gather: With an axis name.
        devices: How many.
        n: Rows of all devices.
        d: Features.
        blocks: Into how many blocks the anchors are cut. Operations of a loop are counted once, so that only programs
            with equally many blocks can be compared. None: the default.
    """
    mapped = kind == "axis_name"
    mesh = jax.make_mesh(
        (devices,),
        ("batch",),
        axis_types=(AxisType.Auto if kind == "Auto" else AxisType.Explicit,),
        devices=jax.devices()[:devices],
    )
    options = {"block_size": None if blocks is None else n // (devices if mapped else 1) // blocks}
    if mapped:
        options |= {"axis_name": "batch", "gather": gather}
    loss = functools.partial(PROGRAMS[name], **options)
    if mapped:
        loss = jax.shard_map(loss, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec())
    along = NamedSharding(mesh, PartitionSpec("batch"))
    rows = jax.ShapeDtypeStruct((n, d), jnp.float32, sharding=along)
    labels = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=along)
    step = jax.jit(jax.value_and_grad(loss, 0 if name == "labels" else (0, 1)))
    compiled = step.lower(rows, rows, labels).compile()
    exchanged = re.findall(r"= \(?\w+\[([\d,]*)\].* (?:all-\w+|collective-permute|reduce-scatter)", compiled.as_text())
    return {
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
        "operations": compiled.cost_analysis()["flops"],
        "exchanged": max(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in exchanged),
    }


FIXED = {  # Loss of two sets of rows, and the rows.
    "one way": (lambda q, k, **o: nj.info_nce_loss(q, k, temperature=0.5, **o), (Q, K)),
    "two views": (lambda q, k, **o: nj.ntxent_views(q, k, temperature=0.5, **o), (Q, K)),
    "hard negatives": (
        lambda q, k, **o: nj.multiple_negatives_ranking_loss(q, k[:, 0], k[:, 1:], temperature=0.1, **o),
        (X[[0, 4]], np.stack([X[[1, 3]], X[[2, 5]]], axis=1)),
    ),
    "halves": (lambda q, k, **o: nj.info_nce_loss(q, k, temperature=0.5, **o), (Q[:4], K[:4]), (Q[4:], K[4:])),
}


def fixed(name: str, way: list[Any], encoded: bool) -> Any:
    """Loss and gradient of an encoder's weights, or of the first set of rows; averaged over batches, if several."""
    (loss, *batches), way = FIXED[name], Way(*way)
    results = [_fixed(loss, batch, way, encoded) for batch in batches]
    value = np.mean([value for value, _ in results])
    slopes = [slope for _, slope in results]
    return float(value), (np.mean(slopes, axis=0) if encoded else np.concatenate(slopes) / len(slopes)).tolist()


def _fixed(loss: Any, batch: Any, way: Way, encoded: bool) -> Any:
    def of_each(weights: Any, rows: Any) -> Any:
        q, k = (nj.l2_normalize(x @ weights) for x in rows)
        return loss(q, k, **way.options())

    def inside(weights: Any, rows: Any) -> Any:
        value, slope = jax.value_and_grad(of_each)(weights, rows)
        return value[None], lax.pmean(slope, way.axis)[None]

    def outside(x: Any) -> Any:
        weights, rows = (x, batch) if encoded else (jnp.eye(len(W)), (x, batch[1]))
        return way(of_each, same=True)(weights, rows)

    if not way.inside:
        return jax.device_get(way.compiled(jax.value_and_grad(outside))(W if encoded else batch[0]))
    assert encoded
    value, slope = jax.device_get(way.compiled(way(inside))(W, batch))
    assert all(np.allclose(x, x[0], rtol=1e-12) for x in (value, slope)), "devices differ"
    return value[0], slope[0]


def _all_gather_without_gradient(right: Any) -> Any:
    def gather(x: jax.Array, axis: Any, **options: Any) -> jax.Array:
        rows = lax.stop_gradient(right(x, axis, **options))
        return lax.dynamic_update_slice_in_dim(rows, x, lax.axis_index(axis) * len(x), 0)

    return gather


def _candidates_without_gradient(right: Any) -> Any:
    def prepare(*arguments: Any) -> Any:
        anchors, candidates = right(*arguments)
        return anchors, lax.stop_gradient(candidates)

    return prepare


def _count_averaged(right: Any) -> Any:
    def summed(self: Devices, tree: Any) -> Any:
        total, count = right(self, tree)
        return total, count / self.number

    return summed


def _passed_on(steps_of: Any) -> Any:
    def wrong(right: Any) -> Any:
        return lambda self, tree, steps=1: right(self, tree, steps_of(steps))

    return wrong


MISTAKES = {
    # What is added up for visitors stays where they were last; or some devices never meet.
    "never home": (Devices, "passed_on", _passed_on(lambda steps: max(steps, 0))),
    "wrong neighbour": (Devices, "passed_on", _passed_on(lambda steps: 2 * steps)),
    # The rows of other devices get no gradient, or no key does.
    "foreign keys": (lax, "all_gather", _all_gather_without_gradient),
    "all keys": (batch, "_ready_rows", _candidates_without_gradient),
    # A loss is the sum over all devices, divided by what counts on one of them.
    "count": (Devices, "summed", _count_averaged),
    # Gradients are summed instead of averaged, or left as they are.
    "sum": (lax, "pmean", lambda right: lax.psum),
    "own": (lax, "pmean", lambda right: lambda x, axis: x),
}


def with_mistake(mistake: str, function: str, *arguments: Any) -> Any:
    """The answer to another question if one function did something else."""
    owner, name, wrong = MISTAKES[mistake]
    right = getattr(owner, name)
    contrast._compiled.clear_cache()
    setattr(owner, name, wrong(right))
    try:
        return globals()[function](*arguments)
    finally:
        setattr(owner, name, right)
        contrast._compiled.clear_cache()


def answer(question: str) -> Any:
    function, arguments = json.loads(question)
    try:
        return globals()[function](*arguments)
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    gc.set_threshold(100_000, 50, 50)  # As for all tests.
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()
