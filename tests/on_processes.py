"""One of several processes that hold a batch together, for the tests.

Arguments: its number, how many there are, and a port on this machine where they meet. Each process has two simulated
devices. It prints losses, and the gradients of an encoder's weights, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ntxent_jax as nj

N, D = 16, 5
RANDOM = np.random.default_rng(0)
ROWS = {"images": RANDOM.normal(size=(N, D)), "texts": RANDOM.normal(size=(N, D))}
DATA = {"labels": RANDOM.integers(0, 5, N), "where": RANDOM.random(N) < 0.7}
WEIGHTS = np.eye(D) + 0.1 * RANDOM.normal(size=(D, D))
LOSSES = {
    "ntxent": lambda x, y, labels, where, **o: nj.ntxent(x, labels, 0.5, where=where, **o),
    "info_nce": lambda x, y, labels, where, **o: nj.info_nce_loss(x, y, temperature=0.5, where=where, **o),
    "clip": lambda x, y, labels, where, **o: nj.clip_loss(x, y, 0.5, where=where, ids=labels, **o),
}


def main(process: int, number: int, port: int, gathers: list[str]) -> dict[str, Any]:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", number, process, initialization_timeout=60)
    assert jax.process_count() == number
    mine = slice(process * N // number, (process + 1) * N // number)
    found = {}
    for types in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(types,))
        along, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), ()))
        images, texts, labels, where = (
            jax.make_array_from_process_local_data(along, x[mine]) for x in (ROWS | DATA).values()
        )
        weights = jax.make_array_from_process_local_data(everywhere, WEIGHTS)
        for name, loss in LOSSES.items():
            ways = {"jit": plain(loss)} if types == AxisType.Explicit or name == "ntxent" else {}
            if types == AxisType.Auto:
                ways |= {f"axis_name {gather}": _mapped(loss, mesh, gather) for gather in gathers}
            for way, step in ways.items():
                value, gradient = jax.jit(step)(weights, images, texts, labels, where)
                result = np.asarray(value.addressable_data(0)), np.asarray(gradient.addressable_data(0))
                found[f"{name}, {way}, {types.name}"] = [x.tolist() for x in result]
    return found


def plain(loss: Any) -> Any:
    """A step with the whole batch."""
    return jax.value_and_grad(lambda w, x, y, *data: loss(jnp.tanh(x @ w), jnp.tanh(y @ w), *data))


def _mapped(loss: Any, mesh: Any, gather: str) -> Any:
    options = {"axis_name": "batch", "gather": gather}

    def step(weights: Any, *shares: Any) -> Any:
        def total(w: Any) -> Any:
            images, texts, *data = shares
            return loss(jnp.tanh(images @ w), jnp.tanh(texts @ w), *data, **options)

        value, gradient = jax.value_and_grad(total)(weights)
        return value, lax.pmean(gradient, "batch")

    rows = (PartitionSpec("batch"),) * 4
    return jax.shard_map(step, mesh=mesh, in_specs=(PartitionSpec(), *rows), out_specs=PartitionSpec())


if __name__ == "__main__":
    results = main(*map(int, sys.argv[1:4]), sys.argv[4:])
    sys.stdout.write(json.dumps(results))
