"""The loss of one anchor, every form, against the oracle's terms."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_zero

from ntxent_jax.formulas import Extras, Negatives, Tile, one_term, row_terms
from ntxent_jax.numerics import LogSum
from ntxent_jax.pairs import PairMasks

pytestmark = pytest.mark.usefixtures("x64")
FORMS = ["pair", "all", "negatives", "in"]
each_form = pytest.mark.parametrize("form", FORMS)
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(6, 9))
# Rows 0 and 1: several positives; 2 and 3: one; 4: no negative; 5: no positive.
KINDS = np.array(["pppnnn---", "-p-p-nnnn", "p--nnnn--", "nnnnn--p-", "pp-------", "nnn------"])
LETTERS = np.array([list(kinds) for kinds in KINDS])
MASKS = PairMasks(jnp.asarray(LETTERS == "p"), jnp.asarray(LETTERS == "n"))
TEMPERATURE = np.array([0.3, 0.5, 0.7, 1.0, 2.0, 0.4])


def terms_of(scores, masks, temperature, form, one_positive=False):
    lowest = -1 / jnp.asarray(temperature)
    tile = Tile(jnp.asarray(scores), masks, jnp.asarray(temperature), lowest)
    return row_terms(tile, form, one_positive, Extras())


def by_loops(scores, form):
    return [
        oracle.anchor_terms(list(s[k == "p"] / t), list(s[k == "n"] / t), form)
        for s, k, t in zip(scores, LETTERS, TEMPERATURE, strict=True)
    ]


@each_form
def test_totals_and_numbers(form):
    terms = terms_of(SCORES, MASKS, TEMPERATURE, form)
    right = by_loops(SCORES, form)
    assert_close(terms.total, [sum(t) for t in right])
    assert_close(terms.number, [len(t) for t in right])


@each_form
def test_nothing_comes_from_elsewhere(form):
    """Scores of other candidates may be anything; their gradient is exactly 0."""
    elsewhere = LETTERS == "-"
    step = jax.value_and_grad(lambda s: terms_of(s, MASKS, TEMPERATURE, form).total.sum())
    value, gradient = step(SCORES)
    assert_zero(gradient[elsewhere])
    for filler in (1e300, -1e300):
        other, other_gradient = step(np.where(elsewhere, filler, SCORES))
        assert_close(other, value)
        assert_close(other_gradient, gradient)


@each_form
def test_gradient(form):
    gradient = jax.grad(lambda s: terms_of(s, MASKS, TEMPERATURE, form).total.sum())(SCORES)
    right = oracle.gradient(lambda s: sum(map(sum, by_loops(s, form))), SCORES)
    assert_close(gradient, right, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("form", ["pair", "negatives"])
def test_one_positive_is_a_shortcut(form):
    """Where the promise holds both ways agree; an anchor without a positive has none."""
    one = np.array([2, 3, 5])
    masks = PairMasks(MASKS.positive[one], MASKS.negative[one])
    arguments = SCORES[one], masks, TEMPERATURE[one], form
    quick, several = terms_of(*arguments, one_positive=True), terms_of(*arguments)
    assert_close(quick.total, several.total)
    assert_close(quick.number, [1, 1, 0])
    assert_zero(quick.total[2])


@each_form
def test_four_equal_logits_of_any_size(form):
    """Differences are taken before anything large is added: ln 4 at 1e8, and a loss of 1e-9 is not 0."""
    masks = PairMasks(jnp.array([[True, False, False, False]]), jnp.array([[False, True, True, True]]))
    right = np.log(3) if form == "negatives" else np.log(4)
    for size in (0.0, 1.0, 1e8, -1e8):
        total = terms_of(jnp.full((1, 4), size, jnp.float32), masks, jnp.ones(1, jnp.float32), form).total
        assert_close(total, [right], rtol=1e-6)
    if form != "negatives":
        far = jnp.float32([[20.0, 0, 0, 0]])
        assert_close(terms_of(far, masks, jnp.ones(1, jnp.float32), form).total, [3 * np.exp(-20)], rtol=1e-5)


def test_debiased_where_the_prior_explains_all():
    """At the very place where nothing of the negatives is left, the slopes are those of the floor."""
    one = jnp.ones(1)

    def term(positive, excess, temperature):
        negatives = Negatives(LogSum(excess, 0 * one), one, one)
        return one_term(positive, negatives, temperature, "pair", Extras(class_prior=jnp.asarray(0.5)), -one)[0]

    value, slopes = jax.value_and_grad(term, argnums=(0, 1, 2))(0 * one, np.log(0.5) * one, one)
    assert_close(value, np.log1p(np.exp(-1)))
    assert_close(slopes, [[-1 / (1 + np.e)], [0], [0]])


@each_form
def test_scores_of_minus_infinity(form):
    """All positives there: the loss is infinite. A negative there: no slope is NaN, the temperature's neither."""
    masks = PairMasks(jnp.array([[True, True, False, False]]), jnp.array([[False, False, True, True]]))
    far = np.array([[-np.inf, -np.inf, 0.1, 0.2]])
    assert np.isposinf(terms_of(far, masks, np.ones(1), form).total[0])
    beside = np.array([[0.3, 0.4, -np.inf, 0.2]])
    slope = jax.grad(lambda t: terms_of(beside, masks, t, form).total.sum())(np.ones(1))
    without = jax.grad(
        lambda t: terms_of(beside[:, [0, 1, 3]], PairMasks(*(x[:, [0, 1, 3]] for x in masks)), t, form).total.sum()
    )(np.ones(1))
    assert_close(slope, without)
