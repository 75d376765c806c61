"""An encoder run in blocks is the encoder: same rows, same derivatives, the activations of one block."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close, assert_finite, assert_states, assert_zero
from inputs import LATTICE_K, LATTICE_Q, LATTICE_W
from jax.test_util import check_grads

import ntxent_jax as nj
from ntxent_jax import gradient_cache

in_float64 = pytest.mark.usefixtures("x64")
each_block = pytest.mark.parametrize("block_size", [1, 2, 3, 5, 6, 7, 8])
N = 7


def rows_of(x, w):
    return jnp.tanh(x @ w)


def keep_row(key):
    return jax.random.bernoulli(key, 0.8, (3,)) / 0.8


def encode_with_dropout(w, x, keys):
    return rows_of(x * jax.vmap(keep_row)(keys), w)


# Case 21 --------------------------------------------------------------------------------------------------------------


@in_float64
@pytest.mark.parametrize("block_size", [1, 3, 5, 8])
def test_case_21_cached_gradients(block_size):
    """Two-pass gradients silently wrong: loss, gradient of the weights, of the temperature."""

    def loss(w, temperature):
        encode = gradient_cache(lambda x: rows_of(x, w), block_size=block_size)
        return nj.info_nce_loss(encode(LATTICE_Q), encode(LATTICE_K), temperature=temperature)

    value, (of_w, of_temperature) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(LATTICE_W, 0.5)
    assert_states(value, 1.5858764537)
    assert_states(of_temperature, -0.1199102643)
    assert_states(
        of_w,
        [
            [0.0449552110, -0.0506041500, -0.1756728422],
            [0.0427883450, -0.0460973659, -0.0475197421],
            [0.0204974517, -0.0199102704, 0.1029826351],
        ],
    )
    assert_states(jnp.linalg.norm(of_w), 0.2303879804)
    assert_close(jax.jit(loss)(LATTICE_W, 0.5), value)


@in_float64
@pytest.mark.parametrize(
    ("block_size", "make_key"), [(1, jax.random.key), (3, jax.random.key), (3, jax.random.PRNGKey)]
)
def test_case_21_with_dropout(block_size, make_key):
    """The same keys give the same loss and gradients as one pass; a factor outside scales them."""

    def loss(w, temperature, keys, factor, block_size):
        encode = gradient_cache(functools.partial(encode_with_dropout, w), block_size=block_size)
        queries, answers = encode(LATTICE_Q, keys[:8]), encode(LATTICE_K, keys[8:])
        return factor * nj.info_nce_loss(queries, answers, temperature=temperature)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=4)
    keys = jax.random.split(make_key(0), 16)
    whole = step(LATTICE_W, 0.5, keys, 1.0, 8)
    jax.tree.map(assert_close, step(LATTICE_W, 0.5, keys, 1.0, block_size), whole)
    tripled = jax.tree.map(lambda x: 3 * x, whole)
    jax.tree.map(assert_close, step(LATTICE_W, 0.5, keys, 3.0, block_size), tripled)
    other_keys = step(LATTICE_W, 0.5, keys[::-1], 1.0, block_size)
    assert abs(other_keys[0] - whole[0]) > 0.01  # Or dropout did nothing.


# Same result, same derivatives ----------------------------------------------------------------------------------------


def whole_and_cached(block_size):
    """A loss of two inputs, parameters and a scale, with the encoder in one pass and in blocks."""
    weights = inputs.random_rows(N, 4, seed=5)

    def loss(parameters, x, y, *, cached):
        def encode(batch, scale):
            hidden = jnp.tanh(batch["x"] @ parameters["w"] + parameters["b"])
            return {"rows": hidden * scale[:, None], "norms": jnp.sum(hidden**2, axis=1)}

        encode = gradient_cache(encode, block_size=block_size) if cached else encode
        rows = encode({"x": x}, y)
        return jnp.sum(jnp.sin(rows["rows"] * weights)) + jnp.sum(rows["norms"] ** 2)

    return functools.partial(loss, cached=False), functools.partial(loss, cached=True)


def arguments():
    parameters = {"w": inputs.random_rows(3, 4, seed=1), "b": inputs.random_rows(4, seed=2)}
    return parameters, inputs.random_rows(N, 3, seed=3), inputs.random_rows(N, seed=4)


@in_float64
@each_block
def test_value_and_gradients_to_everything(block_size):
    """Pytrees in and out; parameters closed over, and the batch itself."""
    whole, cached = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2))) for f in whole_and_cached(block_size))
    jax.tree.map(assert_close, cached(*arguments()), whole(*arguments()))


@in_float64
def test_forward_mode_and_second_derivatives():
    whole, cached = whole_and_cached(3)
    directions = jax.tree.map(lambda x: np.cos(np.arange(x.size)).reshape(x.shape), arguments())
    everything = (0, 1, 2)
    for derivative in (
        lambda loss: lambda *x: jax.jvp(loss, x, directions),
        lambda loss: lambda *x: jax.jvp(jax.grad(loss, everything), x, directions),
        lambda loss: jax.grad(lambda p, *x: jnp.vdot(jax.grad(loss)(p, *x)["w"], p["w"])),
        lambda loss: jax.hessian(loss),
    ):
        of_cached, of_whole = (jax.jit(derivative(loss))(*arguments()) for loss in (cached, whole))
        jax.tree.map(functools.partial(assert_close, atol=1e-10), of_cached, of_whole)
    check_grads(cached, arguments(), order=1, modes=("fwd", "rev"), rtol=1e-6)


@in_float64
def test_vmap_over_parameters_and_over_batches():
    whole, cached = whole_and_cached(3)
    parameters, x, y = arguments()
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), parameters)
    both = [jax.jit(jax.vmap(jax.grad(f), in_axes=(0, None, None)))(stacked, x, y) for f in (cached, whole)]
    jax.tree.map(assert_close, *both)
    both = [
        jax.jit(jax.vmap(jax.grad(f), in_axes=(None, 0, 0)))(parameters, *map(jnp.stack, ([x, -x], [y, y])))
        for f in (cached, whole)
    ]
    jax.tree.map(assert_close, *both)


@in_float64
def test_inside_scan_and_checkpoint():
    whole, cached = whole_and_cached(2)
    parameters, x, y = arguments()

    def several(f):
        def body(p, _):
            return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(jax.checkpoint(f))(p, x, y)), None

        return jax.jit(lambda p: jax.lax.scan(body, p, None, length=3)[0])(parameters)

    jax.tree.map(assert_close, several(cached), several(whole))


@pytest.mark.parametrize("n", [0, 1])
def test_tiny_batches(n):
    encode = gradient_cache(lambda x: x * 2.0, block_size=3)
    assert encode(jnp.ones((n, 3))).shape == (n, 3)


@in_float64
def test_filled_up_rows_are_copies():
    """A row of zeros has no direction: as filling it would make the gradient NaN."""

    def loss(w, block_size):
        def encode(x):
            rows = x @ w
            return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)

        return jnp.sum(gradient_cache(encode, block_size=block_size)(inputs.random_rows(N, 3))[:, 0])

    gradient = jax.grad(loss)(LATTICE_W, 3)
    assert_finite(gradient)
    assert_close(gradient, jax.grad(loss)(LATTICE_W, N))


@in_float64
def test_padded_rows_keep_their_zero_gradient():
    """Rows hidden by ``where`` in the loss get no gradient through the encoder either."""
    where = np.arange(8) < 5

    def loss(x, block_size):
        encode = gradient_cache(lambda rows: rows_of(rows, LATTICE_W), block_size=block_size)
        return nj.info_nce_loss(encode(x), LATTICE_K, where=where, temperature=0.5)

    cached, whole = (jax.grad(loss)(jnp.asarray(LATTICE_Q), block_size) for block_size in (3, 8))
    assert_close(cached, whole)
    assert_zero(cached[5:])


def test_integers_and_nothing_in_the_batch():
    """Token ids of any integer dtype, and None in the place of an optional input."""
    table = jnp.asarray(inputs.random_rows(11, 4), jnp.float32)
    tokens = np.arange(N * 2, dtype=np.uint8).reshape(N, 2) % 11

    def total(table, block_size):
        encode = gradient_cache(lambda ids, mask: table[ids].sum(axis=1), block_size=block_size)
        return jnp.sum(encode(tokens, None) ** 2)

    cached, whole = (jax.jit(jax.grad(total), static_argnums=1)(table, block_size) for block_size in (3, N))
    assert_close(cached, whole, rtol=1e-6)


# Networks -------------------------------------------------------------------------------------------------------------


def test_flax_nnx_with_dropout():
    """A module closed over inside ``nnx.jit`` and ``nnx.value_and_grad``, one dropout key for each row."""
    nnx = pytest.importorskip("flax.nnx")

    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)
            self.second = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, row, key):
            return self.second(self.dropout(nnx.relu(self.first(row)), rngs=nnx.Rngs(dropout=key)))

    @functools.partial(nnx.jit, static_argnames="block_size")
    def step(model, x, keys, block_size):
        def loss(model):
            encode = gradient_cache(jax.vmap(model), block_size=block_size)
            return jnp.mean(jnp.sin(encode(x, keys)))

        return nnx.value_and_grad(loss)(model)

    model, keys = Encoder(nnx.Rngs(0)), jax.random.split(jax.random.key(1), N)
    x = jnp.asarray(inputs.random_rows(N, 3), jnp.float32)
    whole, cached = (step(model, x, keys, block_size=block_size) for block_size in (N, 3))
    jax.tree.map(functools.partial(assert_close, rtol=1e-5, atol=1e-7), cached, whole)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(cached[1])) > 1e-3
    model.second.kernel[...] = 2 * model.second.kernel[...]
    changed = step(model, x, keys, block_size=3)
    assert_close(changed[0], step(model, x, keys, block_size=N)[0], rtol=1e-5)
    assert abs(changed[0] - cached[0]) > 1e-3


# Memory and precision -------------------------------------------------------------------------------------------------


def megabytes(n, depth, block_size):
    """Temporaries of the gradient of ``depth`` layers of 256 features, and the embeddings of ``n`` rows."""

    def loss(layers, x):
        def encode(rows):
            for w in layers:
                rows = jnp.tanh(rows @ w)
            return rows

        return jnp.sum(jnp.sin(gradient_cache(encode, block_size=block_size)(x)))

    layers, x = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * depth, jax.ShapeDtypeStruct((n, 256), jnp.float32)
    memory = jax.jit(jax.value_and_grad(loss)).lower(layers, x).compile().memory_analysis()
    return memory.temp_size_in_bytes / 2**20, n * 256 * 4 / 2**20


def test_activations_of_one_block_only():
    """Memory is a few arrays of the batch's size, whatever the depth; in one pass it grows with the depth."""
    for n in (4096, 16384):
        cached, rows = megabytes(n, 16, 256)
        assert cached < 5 * rows + 16
        assert (
            cached - megabytes(n, 4, 256)[0] < 6
        )  # 12 more layers: their gradients, 3 MB, and activations of a block.
        whole, _ = megabytes(n, 16, n)
        assert whole > 15 * rows


def test_gradient_of_half_precision_parameters_is_summed_in_float32():
    """Added up over 512 blocks in bfloat16 it would be off by four times as much as in one pass."""
    x = jnp.asarray(inputs.random_rows(4096, 16), jnp.bfloat16)
    w = jnp.asarray(inputs.random_rows(16, 16, seed=1) / 4, jnp.bfloat16)

    def gradient(w, x, block_size):
        def total(w):
            rows = gradient_cache(lambda x: rows_of(x, w), block_size=block_size)(x).astype(jnp.float32)
            return jnp.sum(rows + jnp.sin(rows))

        return jax.jit(jax.grad(total))(w)

    exact = gradient(w.astype(jnp.float32), x.astype(jnp.float32), 4096)
    whole, cached = (gradient(w, x, block_size) for block_size in (4096, 8))
    assert cached.dtype == jnp.bfloat16
    error_whole, error_cached = (float(jnp.linalg.norm(g.astype(jnp.float32) - exact)) for g in (whole, cached))
    assert error_cached < 1.5 * error_whole


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gradient_cache(jnp.ones(3), block_size=2), TypeError, "encode must be a function of the batch"),
        (lambda: gradient_cache(jnp.tanh, block_size=0), ValueError, "block_size must be at least 1, got 0"),
        (lambda: gradient_cache(jnp.tanh, block_size=None), ValueError, "integer, got None; choose"),
        (lambda: gradient_cache(jnp.tanh, block_size=2.0), TypeError, "block_size must be an integer, got 2.0"),
        (lambda: gradient_cache(jnp.tanh, block_size=2)(), ValueError, "needs a batch"),
        (
            lambda: gradient_cache(jnp.add, block_size=2)(jnp.ones((3, 2)), jnp.ones((4, 2))),
            ValueError,
            r"same number of rows on axis 0, got {'batch\[0\]': 3, 'batch\[1\]': 4}",
        ),
        (
            lambda: gradient_cache(jnp.multiply, block_size=2)(jnp.ones((3, 2)), 0.1),
            ValueError,
            r"'batch\[1\]': None.*close over what does not belong to rows",
        ),
        *(
            (lambda n=n, f=f: gradient_cache(f, block_size=3)(jnp.ones((n, 2))), ValueError, "one row for each row")
            for n in (3, 7)
            for f in (jnp.sum, lambda x: x[:1], lambda x: (x, jnp.mean(x, axis=0)))
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
