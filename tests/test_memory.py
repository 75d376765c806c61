"""Memory grows with the rows, not with their square. Programs are compiled, not run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntxent_jax as nj

BLOCK, D = 32, 8
SMALL, LARGE = 512, 2048


def rows(*shape):
    return jax.ShapeDtypeStruct((*shape, D), jnp.float32)


def integers(n):
    return jax.ShapeDtypeStruct((n,), jnp.int32)


# Each takes the number of rows and gives a function of rows, and rows.
LOSSES = {
    "ntxent": lambda n: (lambda x, y, **o: nj.ntxent(x, y, **o), rows(n), integers(n)),
    "ntxent all": lambda n: (lambda x, y, **o: nj.ntxent(x, y, denominator="all", **o), rows(n), integers(n)),
    "supcon in": lambda n: (lambda x, y, **o: nj.supcon_loss(x, y, form="in", **o), rows(n), integers(n)),
    "candidates": lambda n: (
        lambda x, y, c, **o: nj.ntxent(x, y, candidates=c, candidate_labels=y, ids=y, candidate_ids=y, **o),
        rows(n),
        integers(n),
        rows(n),
    ),
    "three views": lambda n: (lambda *x, **o: nj.ntxent_views(*x, **o), rows(n), rows(n), rows(n)),
    "instance": lambda n: (lambda x, y, **o: nj.instance_loss(x, y, **o), rows(n), rows(n)),
    "info_nce": lambda n: (
        lambda x, y, z, i, **o: nj.info_nce_loss(x, y, z, ids=i, **o),
        *(rows(n), rows(n), rows(n, 2), integers(n)),
    ),
    "ranking": lambda n: (
        lambda x, y, z, **o: nj.multiple_negatives_ranking_loss(x, y, z, **o),
        *(rows(n), rows(n), rows(n, 2)),
    ),
}


def bytes_of(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def value_and_grad(loss, **options):
    return jax.value_and_grad(lambda x, *rest: jnp.sum(loss(x, *rest, temperature=0.5, **options)))


def tangent(loss, **options):
    def run(x, *rest):
        return jax.jvp(lambda x: jnp.sum(loss(x, *rest, temperature=0.5, **options)), (x,), (x,))

    return run


def forward_over_reverse(loss, **options):
    def run(x, *rest):
        gradient = jax.grad(lambda x: jnp.sum(loss(x, *rest, temperature=0.5, **options)))
        return jax.jvp(gradient, (x,), (x,))

    return run


def assert_linear(make, name, **options):
    """Four times the rows take about four times the memory, and far less than one matrix of similarities."""
    small, large = (
        bytes_of(make(loss, block_size=BLOCK, **options), *shapes)
        for loss, *shapes in (LOSSES[name](SMALL), LOSSES[name](LARGE))
    )
    assert large < 5.5 * small, f"{small} -> {large} bytes"
    assert large < LARGE**2 * 4, f"{large} bytes"


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name):
    assert_linear(value_and_grad, name)


@pytest.mark.parametrize("name", ["ntxent", "info_nce"])
def test_without_reduction(name):
    assert_linear(value_and_grad, name, reduction="none")


@pytest.mark.parametrize("make", [tangent, forward_over_reverse])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_forward_mode(make, reduction):
    if make is tangent or reduction == "mean":
        assert_linear(make, "supcon in", reduction=reduction)


def test_statistics():
    small, large = (
        bytes_of(lambda x, y: nj.batch_statistics(x, y, block_size=BLOCK), rows(n), integers(n)) for n in (SMALL, LARGE)
    )
    assert large < 5.5 * small
    assert large < LARGE**2


def test_whole_would_be_quadratic():
    """What the tests above would see if nothing were streamed."""
    small, large = (
        bytes_of(value_and_grad(loss, block_size=n), *shapes)
        for n in (SMALL, LARGE)
        for loss, *shapes in [LOSSES["ntxent"](n)]
    )
    assert large > 10 * small
    assert large >= LARGE**2 * 4


def test_65536_rows():
    """Two copies of the rows, of 34 MB each, and a tile; for the derivative of their norms no third."""
    x = jax.ShapeDtypeStruct((65_536, 128), jnp.float32)
    step = jax.value_and_grad(lambda x, labels: nj.ntxent(x, labels, 0.07))
    assert bytes_of(step, x, integers(65_536)) <= 80e6


def test_any_number_of_rows_is_streamed_by_default():
    """Without a block size the largest array stays at a few megabytes."""
    n = 8192
    step = jax.value_and_grad(lambda x, labels: nj.supcon_loss(x, labels))
    assert bytes_of(step, rows(n), integers(n)) < 64e6 < n * n * 4


@pytest.mark.parametrize("form", ["pair", "all", "negatives", "in"])
def test_positives_by_negatives_are_never_formed(form):
    """Case 23: 65,280 positive and 196,352 negative pairs; a table of their products has 12.8 G entries."""
    labels = np.concatenate([np.zeros(256, int), np.arange(1, 257)])

    def loss(x):
        if form == "in":
            return nj.supcon_loss(x, labels, form=form, block_size=512)
        return nj.ntxent(x, labels, denominator=form, block_size=512)

    assert bytes_of(jax.value_and_grad(loss), jax.ShapeDtypeStruct((512, 128), jnp.float32)) < 12 * 512 * 512 * 4


@pytest.mark.parametrize("loss", [nj.ntxent_views, nj.clip_loss, nj.info_nce_loss, nj.supcon_loss])
def test_no_pass_reads_an_array_of_constants(loss):
    """JAX takes what does not change out of a loop, be it an array of zeros as large as all scores of a block."""
    second = integers(LARGE) if loss is nj.supcon_loss else rows(LARGE)
    program = jax.jit(value_and_grad(loss, block_size=BLOCK)).lower(rows(LARGE), second).compile().as_text()
    loops = re.findall(r"= \((.*)\) while\(", program)
    assert loops
    for carried in loops:
        sizes = [(int(a), int(b)) for a, b in re.findall(r"\w+\[(\d+),(\d+)\]", carried)]
        assert all(b <= D or a * b <= 4 * LARGE for a, b in sizes), sizes
