"""Queue, gradient cache and search on eight simulated devices, compared with one device.

The number of devices is fixed before JAX starts, so this is a process of its own. It writes a line of JSON: of every
check whose name it is given what went wrong, or null.
"""

import functools
import json
import sys
import traceback

import inputs
import jax
import jax.numpy as jnp
import numpy as np
from assertions import assert_close
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ntxent_jax as nj

DEVICES, N, DIM, SIZE = 8, 48, 5, 64
ALONG, EVERYWHERE = P("batch"), P()
SPLIT_QUEUE = nj.EmbeddingQueue(ALONG, ALONG, ALONG, EVERYWHERE)
X, Y = inputs.random_rows(2, N, DIM)
WEIGHTS = inputs.random_rows(DIM, DIM, seed=1)
LABELS = np.random.default_rng(2).integers(0, 7, N).astype(np.int32)
REAL = np.random.default_rng(3).random(N) < 0.7


def mesh_of(kind):
    return jax.make_mesh((DEVICES,), ("batch",), axis_types=(getattr(AxisType, kind),))


def laid_out(mesh, tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def on_shares(f, in_specs, out_specs, check_vma):
    return jax.jit(jax.shard_map(f, mesh=mesh_of("Auto"), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def assert_same(actual, expected):
    jax.tree.map(lambda x, y: assert_close(np.asarray(x), np.asarray(y)), actual, expected)


def queue_of(rows):
    queue = nj.queue_init(SIZE, DIM, dtype=jnp.float64)
    return nj.queue_push(queue, inputs.random_rows(rows, DIM, seed=4), labels=jnp.arange(rows, dtype=jnp.int32))


# Plain jit over a mesh of either kind ---------------------------------------------------------------------------------


def under_jit(kind, f, arguments, specs):
    expected = f(*arguments)
    given = laid_out(mesh_of(kind), arguments, specs)
    for run in (jax.jit(f), f):
        result = run(*given)
        assert_same(result, expected)
    return result


def top_k(kind):
    for block_size in (None, 7):
        f = functools.partial(nj.top_k, block_size=block_size)
        given, specs = (X, Y, REAL), (ALONG, ALONG, ALONG)
        scores, _ = under_jit(kind, lambda x, y, real, f=f: f(x, y, 4, key_where=real), given, specs)
        if kind == "Explicit":
            assert scores.sharding.spec[0] == "batch"
    under_jit(kind, lambda x, y: nj.top_k(x, y, 4), (X, Y), (EVERYWHERE, ALONG))


def metrics(kind):
    under_jit(kind, lambda x, y: nj.retrieval_metrics(x, y, block_size=7), (X, Y), (ALONG, ALONG))
    leave_one_out = functools.partial(nj.retrieval_metrics, ks=(1, 3))
    under_jit(kind, lambda x, y, real: leave_one_out(x, labels=y, where=real), (X, LABELS, REAL), (ALONG,) * 3)


def queue(kind):
    for specs in (SPLIT_QUEUE, nj.EmbeddingQueue(*(EVERYWHERE,) * 4)):
        given = queue_of(SIZE - 5), X, LABELS, REAL
        pushed = under_jit(
            kind,
            lambda queue, x, y, real: nj.queue_push(queue, x, labels=y, where=real),
            given,
            (specs, ALONG, ALONG, ALONG),
        )
        assert [any(x.sharding.spec) for x in pushed] == [any(spec) for spec in specs]
        under_jit(kind, lambda queue, x: nj.queue_push(queue, x), given[:2], (specs, ALONG))


def cached_loss(weights, x, y, block_size, **options):
    encode = nj.gradient_cache(lambda rows: jnp.tanh(rows @ weights), block_size=block_size)
    return nj.info_nce_loss(encode(x), encode(y), temperature=0.5, **options)


def plain_step(*arguments):
    return jax.value_and_grad(lambda weights, x, y: cached_loss(weights, x, y, N))(*arguments)


def gradient_cache(kind):
    for block_size in (16, N) if kind == "Explicit" else (16, 13, N):
        step = jax.jit(jax.value_and_grad(functools.partial(cached_loss, block_size=block_size), (0, 1, 2)))
        expected = step(WEIGHTS, X, Y)
        given = laid_out(mesh_of(kind), (WEIGHTS, X, Y), (EVERYWHERE, ALONG, ALONG))
        assert_same(step(*given), expected)
        assert_same((expected[0], expected[1][0]), plain_step(WEIGHTS, X, Y))


# Inside shard_map -----------------------------------------------------------------------------------------------------


def search_of_a_share(check_vma):
    """Queries of one device in keys that are the same everywhere, and the other way round."""
    keys, labels = Y[:20], LABELS[:20]
    for block_size in (None, 4):
        f = functools.partial(nj.top_k, k=3, block_size=block_size)
        expected = nj.top_k(X, keys, 3)
        assert_same(on_shares(f, (ALONG, EVERYWHERE), ALONG, check_vma)(X, keys), expected)

        def of_share(keys, x, y, real, block_size=block_size):
            found = nj.top_k(keys, x, 3, key_where=real, block_size=block_size)[0]
            judged = nj.retrieval_metrics(keys, x, labels=labels, key_labels=y, key_where=real, block_size=block_size)
            return jax.tree.map(lambda x: x[None], (found, judged))

        shares = [np.split(each, DEVICES) for each in (X, LABELS, REAL)]
        one_by_one = [of_share(keys, *share) for share in zip(*shares, strict=True)]
        expected = jax.tree.map(lambda *parts: jnp.concatenate(parts), *one_by_one)
        specs = (EVERYWHERE, ALONG, ALONG, ALONG)
        assert_same(on_shares(of_share, specs, ALONG, check_vma)(keys, X, LABELS, REAL), expected)


def queue_of_a_share(check_vma):
    """Every device pushes its rows into its slots."""
    start = queue_of(SIZE)
    for where in (None, REAL):
        # A position for each device, since they push unequal numbers of rows.
        before = start._replace(position=jnp.zeros(DEVICES, jnp.int32))

        def push(queue, x, y, *real):
            queue = queue._replace(position=queue.position[0])
            queue = nj.queue_push(queue, x, labels=y, where=real[0] if real else None)
            return queue._replace(position=queue.position[None])

        rows = [X, LABELS] if where is None else [X, LABELS, where]
        pushed = on_shares(push, ALONG, ALONG, check_vma)(before, *rows)
        shares = [jax.tree.map(lambda x, i=i: jnp.split(x, DEVICES)[i], (before, *rows)) for i in range(DEVICES)]
        expected = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(push(*share) for share in shares))
        assert_same(pushed, expected)


def steps_with_a_queue(check_vma):
    """A momentum queue on all devices is one queue on one device, whatever slots the rows are in."""

    def step(weights, queue, x, y, **across):
        keys = lax.stop_gradient(jnp.tanh(y @ weights))

        def loss(weights):
            rows = jnp.tanh(x @ weights), keys, queue.embeddings
            return nj.info_nce_loss(*rows, negative_where=queue.where, temperature=0.5, in_batch=False, **across)

        value, gradient = jax.value_and_grad(loss)(weights)
        gradient = lax.pmean(gradient, "batch") if across else gradient
        return value, weights - 0.1 * gradient, nj.queue_push(queue, keys)

    shared_step = on_shares(
        functools.partial(step, axis_name="batch"),
        (EVERYWHERE, SPLIT_QUEUE, ALONG, ALONG),
        (EVERYWHERE, EVERYWHERE, SPLIT_QUEUE),
        check_vma,
    )
    # The size is a multiple of the batch: then the oldest rows are the same wherever they are kept.
    together = alone = WEIGHTS, nj.queue_init(2 * N, DIM, dtype=jnp.float64)
    for i in range(4):
        value, *together = shared_step(*together, X, Y + i)
        expected, *alone = step(*alone, X, Y + i)
        assert_same((value, together[0]), (expected, alone[0]))
        order = [np.lexsort(np.asarray(queue.embeddings).T) for _, queue in (together, alone)]
        assert_close(together[1].embeddings[order[0]], alone[1].embeddings[order[1]])


def gradient_cache_of_a_share(check_vma):
    def step(weights, x, y, block_size):
        loss = functools.partial(cached_loss, block_size=block_size, axis_name="batch")
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        return value, lax.pmean(gradient, "batch")

    for block_size in (2, 4, 6):
        step_of_share = functools.partial(step, block_size=block_size)
        run = on_shares(step_of_share, (EVERYWHERE, ALONG, ALONG), EVERYWHERE, check_vma)
        assert_same(run(WEIGHTS, X, Y), plain_step(WEIGHTS, X, Y))


def dropout_of_a_share(check_vma):
    """Keys are split with the rows."""
    keys = jax.random.split(jax.random.key(0), N)

    def loss(weights, x, keys, block_size, **options):
        def encode(rows, keys):
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (DIM,)))(keys)
            return jnp.tanh(rows @ weights) * keep

        return nj.ntxent_views(nj.gradient_cache(encode, block_size=block_size)(x, keys), x, temperature=0.5, **options)

    def step(*arguments):
        cached = functools.partial(loss, block_size=4, axis_name="batch")
        value, gradient = jax.value_and_grad(cached)(*arguments)
        return value, lax.pmean(gradient, "batch")

    expected = jax.value_and_grad(functools.partial(loss, block_size=N))(WEIGHTS, X, keys)
    assert_same(on_shares(step, (EVERYWHERE, ALONG, ALONG), EVERYWHERE, check_vma)(WEIGHTS, X, keys), expected)


def prefixes_of_a_share(check_vma):
    loss = nj.matryoshka(nj.ntxent_views, (2, 4))
    shared = on_shares(functools.partial(loss, axis_name="batch", block_size=5), ALONG, EVERYWHERE, check_vma)
    assert_close(shared(X, Y), loss(X, Y))


ON_MESHES = [top_k, metrics, queue, gradient_cache]
ON_SHARES = [
    search_of_a_share,
    queue_of_a_share,
    steps_with_a_queue,
    gradient_cache_of_a_share,
    dropout_of_a_share,
    prefixes_of_a_share,
]
CHECKS = {f"{check.__name__} {kind}": (check, kind) for check in ON_MESHES for kind in ("Auto", "Explicit")}
CHECKS |= {f"{check.__name__} {flag}": (check, flag) for check in ON_SHARES for flag in (True, False)}


def failure_of(name):
    check, option = CHECKS[name]
    try:
        check(option)
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    sys.stdout.write(json.dumps({name: failure_of(name) for name in sys.argv[1:]}))
