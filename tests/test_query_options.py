"""Options of the query losses: smoothing, hardness, class prior, margin with and without a guide, both directions.

``hardness`` and ``margin`` look at similarities without gradient, so the oracle's differences hold those fixed.
"""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle_pairs as right
import pytest
from against_oracle import STREAMED, assert_right
from assertions import assert_close, assert_finite, assert_nan, assert_no_nan, assert_states, assert_zero
from catalog import BLOCK, CASES, WHERE, K, N, quick_jit
from test_transforms import compilations

import ntxent_jax as nj

in_float64 = pytest.mark.usefixtures("x64")
streamed = pytest.mark.parametrize("block_size", [None, BLOCK], ids=["whole", "streamed"])
SMOOTH, HARD, PRIOR = (
    {name: np.array(x)} for name, x in (("label_smoothing", 0.3), ("hardness", 0.9), ("class_prior", 0.1))
)
SOME_FILTERED = 0.15


def query_case(negatives, *, guides=False, floats=None, **options):
    """The catalogue's case with key_bias, ids, masks, weights and a temperature for each query."""
    case = CASES[f"info_nce {negatives}"]
    floats, data = {**case.floats, **(floats or {})}, dict(case.data)
    if guides:
        data["guide_queries"] = inputs.random_rows(N, 4, seed=41)
        data["guide_keys"] = inputs.random_rows(len(floats["keys"]), 4, seed=42)
    data |= {name: options.pop(name) for name in ("margin",) if name in options}
    return case._replace(floats=floats, data=data, static={**case.static, **options})


def ranking_case(negatives, *, guides=False, floats=None, **options):
    case = CASES[f"ranking {negatives}"]
    data = {**case.data, "margin": options.pop("margin", None)}
    if guides:
        data |= {name: inputs.random_rows(N, 4, seed=s) for name, s in (("guide_queries", 43), ("guide_keys", 44))}
    data = {name: x for name, x in data.items() if x is not None}
    return case._replace(floats={**case.floats, **(floats or {})}, data=data, static={**case.static, **options})


OPTIONS = {
    "smoothing": query_case("own", floats=SMOOTH),
    "hardness": query_case("shared", floats=HARD),
    "prior": query_case("own", floats=PRIOR),
    "margin": query_case("own", margin=SOME_FILTERED),
    "relative margin": query_case("shared", margin=0.4, relative_margin=True),
    "guides": query_case("own", margin=0.1, guides=True),
    "relative guides": query_case("shared", margin=0.2, relative_margin=True, guides=True),
    "together": query_case("own", margin=SOME_FILTERED, floats={**SMOOTH, **HARD}),
    "own only": query_case("only own", margin=SOME_FILTERED, floats={**SMOOTH, **HARD}),
    "shared only": query_case("only shared", floats=PRIOR, margin=SOME_FILTERED),
    "ranking": ranking_case("own", symmetric=True, margin=SOME_FILTERED, floats={**SMOOTH, **HARD}),
    "ranking guides": ranking_case("shared", symmetric=True, margin=0.3, relative_margin=True, guides=True),
}


@in_float64
@pytest.mark.parametrize("name", OPTIONS)
def test_against_loops(name):
    """Derivatives to rows, negatives, temperatures, weights, key_bias and the options; whole, one of each formula."""
    whole_too = name in ("together", "prior", "relative guides", "ranking")
    assert_right(OPTIONS[name], STREAMED if whole_too else STREAMED[1:], frozen=True)


@in_float64
@pytest.mark.parametrize(("name", "reduction"), [("together", "none"), ("ranking", "none"), ("ranking", "sum")])
def test_other_reductions(name, reduction):
    assert_right(OPTIONS[name], STREAMED[1:], frozen=True, reduction=reduction)


@in_float64
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_matters(name):
    """A condition of these tests: without each option on its own, the value is another."""
    case = OPTIONS[name]
    value = case(right, case.floats)
    for option in (
        "label_smoothing",
        "hardness",
        "class_prior",
        "margin",
        "guide_queries",
        "relative_margin",
        "symmetric",
    ):
        floats, data, static = (
            {k: v for k, v in part.items() if k != option} for part in (case.floats, case.data, case.static)
        )
        if option == "guide_queries":
            data.pop("guide_keys", None)
        if option == "margin":
            data = {k: v for k, v in data.items() if not k.startswith("guide")}
        if (floats, data, static) == (case.floats, case.data, case.static):
            continue
        assert abs(case._replace(static=static)(right, floats, data) - value) > 1e-3, option


# Values -------------------------------------------------------------------------------------------------------------

A, B = inputs.A, inputs.B


@in_float64
@pytest.mark.parametrize("block_size", [None, 2])
def test_debiased_values(block_size):
    """Chuang et al. at T = .5, p = .1: both views of X as queries, and one way."""
    both, turned, ids = np.concatenate([A, B]), np.concatenate([B, A]), np.tile(np.arange(3), 2)
    options = {"temperature": 0.5, "class_prior": 0.1, "block_size": block_size}
    assert_states(nj.info_nce_loss(both, turned, ids=ids, **options), 1.0029394636)
    assert_states(nj.info_nce_loss(A, B, **options), 0.7017212196)
    assert_states(right.info_nce_loss(A, B, temperature=0.5, class_prior=0.1), 0.7017212196)
    assert_states(nj.info_nce_loss(A, B, temperature=0.5, block_size=block_size), inputs.INFO_NCE_AB)


@in_float64
@pytest.mark.parametrize("prior", [0.02, 0.3, 0.9, 0.999])
def test_debiased_at_its_floor(prior):
    """Where the expected share exceeds the sum, the floor of a cosine stands; never NaN, no negatives give 0."""
    queries, keys = inputs.random_rows(2, N, 3, seed=51)
    keys[0] = queries[0]
    step = jax.value_and_grad(lambda q, t: nj.info_nce_loss(q, keys, temperature=t, class_prior=prior), argnums=(0, 1))
    for temperature in (1.0, 0.1, 0.01):
        value, gradients = step(queries, temperature)
        assert_close(value, right.info_nce_loss(queries, keys, temperature=temperature, class_prior=prior))
        assert_no_nan(gradients)
    assert_zero(nj.info_nce_loss(queries, keys, ids=np.zeros(N, int), class_prior=prior))
    assert_nan(nj.info_nce_loss(queries, np.where(np.arange(N)[:, None] == 4, np.nan, keys), class_prior=prior))


@in_float64
def test_case_32_relative_margin_of_a_negative_similarity():
    """Positive -.5, candidates -.49 and -.8, relative margin .05: -.49 is dropped, -.8 stays. p (1 - m) keeps -.49."""
    row = lambda c: [c, np.sqrt(1 - c * c)]  # noqa: E731
    query, key, own = np.array([[1.0, 0]]), np.array([row(-0.5)]), np.array([[row(-0.49), row(-0.8)]])
    options = {"temperature": 0.5, "margin": 0.05, "relative_margin": True}
    kept = np.log1p(np.exp((-0.8 + 0.5) / 0.5))
    both = np.log1p(np.exp((-0.8 + 0.5) / 0.5) + np.exp(0.01 / 0.5))
    assert_close(nj.info_nce_loss(query, key, own, in_batch=False, **options), kept)
    assert_close(nj.info_nce_loss(query, key, own[0], **options), kept)
    assert_close(nj.info_nce_loss(query, np.concatenate([key, own[0]]), **options), kept)
    assert_close(nj.multiple_negatives_ranking_loss(query, key, own, **options), kept)
    # The absolute threshold -.5 - m: .05 and 0 drop -.49, -.02 keeps it, .3001 drops both.
    for margin, value in ((0.05, kept), (0.0, kept), (-0.02, both), (0.3001, 0.0)):
        assert_close(nj.info_nce_loss(query, key, own, temperature=0.5, margin=margin), value, atol=1e-15)
    assert_close(nj.info_nce_loss(query, key, own, temperature=0.5), both)


@in_float64
@streamed
def test_negatives_are_kept_with_guides(block_size):
    """A guide judges keys alone: negatives equal to the positive stay, those in the batch are judged by the guide."""
    queries, keys = inputs.random_rows(2, N, 3, seed=52)
    options = {"temperature": 0.5, "margin": 0.1, "block_size": block_size}
    guides = {"guide_queries": np.ones((N, 1)), "guide_keys": np.ones((N, 1))}  # All are false negatives.
    own_logits = 2 * np.array([right.cosine_similarity(q, k) for q, k in zip(queries, keys, strict=True)])
    for negatives in (keys[:, None], queries[:, None], 2 * keys[:1]):
        rows = np.broadcast_to(negatives if negatives.ndim == 3 else negatives[None], (N, 1, 3))
        logits = 2 * np.array([right.cosine_similarity(q, r[0]) for q, r in zip(queries, rows, strict=True)])
        exact = np.mean(np.logaddexp(0, logits - own_logits))
        assert_close(nj.info_nce_loss(queries, keys, negatives, **options, **guides), exact)
    assert_zero(nj.info_nce_loss(queries, keys, **options, **guides))


@in_float64
@streamed
def test_what_hardness_and_margin_look_at_has_no_gradient(block_size):
    """The gradient is the softmax's over the harder logits: d/dq of the loss with fixed extra logits as pair biases."""
    queries, keys = inputs.random_rows(2, N, 3, seed=53)

    def ours(q):
        return nj.info_nce_loss(q, keys, temperature=0.5, hardness=2.0, block_size=block_size)

    def plain(q):
        cosines = nj.cosine_similarity(q, keys)
        logits = cosines / 0.5 + 2.0 * jax.lax.stop_gradient(cosines) * (1 - np.eye(N))
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits))

    assert_close(ours(queries), plain(queries))
    assert_close(quick_jit(jax.grad(ours))(queries), quick_jit(jax.grad(plain))(queries))
    slope = jax.grad(lambda g: nj.info_nce_loss(queries, keys, margin=0.1, guide_queries=g, guide_keys=keys))(queries)
    assert_zero(slope)


@in_float64
@streamed
def test_padded_guides_may_hold_anything(block_size):
    """As if absent, hidden keys too."""
    queries, keys, guide, guide_keys = (inputs.random_rows(N, 3, seed=60 + i) for i in range(4))
    options = {"temperature": 0.5, "margin": 0.1, "block_size": block_size, "where": WHERE}
    value = nj.info_nce_loss(queries, keys, guide_queries=guide, guide_keys=guide_keys, **options)
    assert value > 0.1
    for filler in (0.0, np.inf, np.nan):
        filled = [np.where(WHERE[:, None], x, filler) for x in (queries, keys, guide, guide_keys)]
        step = jax.value_and_grad(
            lambda q, k, filled=filled: nj.info_nce_loss(
                q, k, guide_queries=filled[2], guide_keys=filled[3], **options
            ),
            argnums=(0, 1),
        )
        got, gradients = step(*filled[:2])
        assert_close(got, value)
        assert_no_nan(gradients)
        assert_zero(*(g[2] for g in gradients))


@streamed
def test_nan_in_a_negative_is_not_hidden_by_a_prior(block_size):
    queries, keys, negatives = (np.float32(inputs.random_rows(N, 3, seed=60 + i)) for i in range(3))
    negatives[4, 1] = np.nan
    assert_nan(nj.info_nce_loss(queries, keys, negatives, class_prior=0.1, block_size=block_size))


@pytest.mark.parametrize("side", ["guide_queries", "guide_keys"])
def test_infinity_in_a_real_row_of_a_guide_is_no_verdict(side):
    """Its dot products would be infinite, not NaN."""
    queries, keys = (np.float32(inputs.random_rows(N, 3, seed=60 + i)) for i in range(2))
    guides = {name: np.ones((N, 1), np.float32) for name in ("guide_queries", "guide_keys")}
    guides[side][4] = np.inf
    assert_nan(nj.info_nce_loss(queries, keys, margin=0.1, similarity=nj.dot_product, **guides))


@streamed
def test_nan_in_a_guide_of_a_key_that_is_only_a_negative(block_size):
    queries, keys = (np.float32(inputs.random_rows(n, 3, seed=60 + n)) for n in (N, N + 1))
    guides = {"guide_queries": queries, "guide_keys": keys.copy()}
    guides["guide_keys"][N, 1] = np.nan
    rows = nj.info_nce_loss(queries, keys, margin=0.1, reduction="none", block_size=block_size, **guides)
    assert_nan(rows)


@in_float64
@streamed
def test_a_negative_as_close_as_the_positive_stays_at_margin_0(block_size):
    """Only those that are closer are left out."""
    rows = np.ones((N, 2))
    assert_close(nj.info_nce_loss(rows, rows, margin=0.0, block_size=block_size), np.log(N))
    assert_zero(nj.info_nce_loss(rows, rows, margin=1e-6, block_size=block_size))


@pytest.mark.parametrize("side", ["guide_queries", "guide_keys"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_a_real_row_of_a_guide_is_not_hidden(side, bad):
    queries, keys, *guides = (np.float32(inputs.random_rows(N, 3, seed=60 + i)) for i in range(4))
    guides = dict(zip(("guide_queries", "guide_keys"), guides, strict=True))
    guides[side][4, 1] = bad
    assert_nan(nj.info_nce_loss(queries, keys, temperature=0.5, margin=0.1, **guides))


@in_float64
@streamed
@pytest.mark.parametrize("option", [{"key_bias": np.zeros(4)}, {"hardness": 0.5}], ids=["key_bias", "hardness"])
def test_added_logits_beside_a_similarity_of_minus_infinity(option, block_size):
    """log1p of an opposite row vanishes with them as without: values and slopes to temperature and option."""
    x = np.array([[1.0, 0], [-1, 0], [0, 1], [0.6, 0.8]])
    (name, number), block_size = *option.items(), block_size and 1

    def loss(t, number):
        options = {name: number, "similarity": nj.log1p_cosine_similarity, "block_size": block_size}
        return nj.info_nce_loss(x, x, temperature=t, **options)

    value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(1.0, jnp.asarray(number))
    exact = right.info_nce_loss(x, x, temperature=1.0, similarity=right.log1p_cosine_similarity, **option)
    assert_close(value, exact)
    assert_no_nan(slopes)


# 0 and None are absent, other numbers are data ----------------------------------------------------------------------


@in_float64
def test_nothing_is_absent():
    queries, keys = inputs.random_rows(2, N, 3, seed=54)
    block_size = BLOCK
    plain = nj.info_nce_loss(queries, keys, block_size=block_size)
    for zero in (0, 0.0, np.float32(0)):
        nothing = {"label_smoothing": zero, "hardness": zero, "class_prior": zero, "margin": None}
        assert nj.info_nce_loss(queries, keys, block_size=block_size, **nothing) == plain
    # A prior or smoothing of 0 beside another similarity, or beside each other, is no combination.
    nj.info_nce_loss(queries, keys, class_prior=0.0, hardness=0.5, label_smoothing=0.1)
    nj.info_nce_loss(queries, keys, class_prior=0, similarity=nj.dot_product)
    nj.info_nce_loss(queries, keys, class_prior=0.1, hardness=0, label_smoothing=0.0)


@in_float64
@pytest.mark.parametrize("option", ["label_smoothing", "hardness", "class_prior"])
def test_a_schedule_may_pass_through_0(option):
    queries, keys = inputs.random_rows(2, N, 3, seed=54)
    loss = lambda q, x: nj.info_nce_loss(q, keys, block_size=BLOCK, **{option: x})  # noqa: E731
    value, (gradient, slope) = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(queries, 0.0)
    assert_close(value, nj.info_nce_loss(queries, keys))
    assert_close(gradient, jax.grad(lambda q: nj.info_nce_loss(q, keys))(queries))
    assert_finite(slope)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("label_smoothing", (-0.1, 1.0)),
        ("class_prior", (-0.1, 1.0)),
        ("hardness", (-0.1, np.inf)),
        ("margin", (np.nan,)),
    ],
)
def test_a_traced_option_out_of_range_is_nan(option, values):
    queries, keys = np.float32(inputs.random_rows(2, N, 3, seed=54))
    loss = jax.jit(lambda x: nj.info_nce_loss(queries, keys, **{option: x}))
    for value in values:
        assert_nan(loss(value))


@streamed
@pytest.mark.parametrize("option", ["label_smoothing", "hardness", "class_prior", "margin"])
def test_a_schedule_does_not_compile_again(option, block_size):
    queries, keys = (jnp.asarray(x, jnp.float32) for x in inputs.random_rows(2, N, 5, seed=55))
    loss = nj.info_nce_loss if option == "class_prior" else nj.multiple_negatives_ranking_loss
    calls = [lambda x=x: loss(queries, keys, block_size=block_size, **{option: x}) for x in (0.5, 0.4, 0.05, 0.3)]
    first, *later = compilations(calls)
    assert first > 0
    assert later == [0, 0, 0]


QUERIES, KEYS, OWN = inputs.random_rows(N, 3), inputs.random_rows(N, 3, seed=1), inputs.random_rows(N, K, 3, seed=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_prior": 0.1, "hardness": 0.5}, "class_prior .*hardness"),
        ({"class_prior": 0.1, "label_smoothing": 0.5}, "class_prior .*label_smoothing"),
        ({"class_prior": 0.1, "similarity": nj.dot_product}, "class_prior .*similarity"),
        ({"class_prior": 0.1, "similarity": lambda x, y: x @ y.T}, "class_prior .*similarity"),
        ({"class_prior": 1.0}, "class_prior must be at least 0 and below 1"),
        ({"class_prior": -0.1}, "class_prior must be at least 0 and below 1"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
        ({"hardness": -1.0}, "hardness must be at least 0"),
        ({"label_smoothing": [1.5]}, "label_smoothing must be at least 0 and below 1"),
        ({"hardness": np.array(-1.0)}, "hardness must be at least 0"),
        ({"hardness": np.ones(N)}, r"hardness must be a single number, got shape \[7\]"),
        ({"margin": np.ones(N)}, r"margin must be a single number, got shape \[7\]"),
        ({"relative_margin": True}, "relative_margin given without margin"),
        ({"margin": 0.1, "guide_queries": QUERIES}, "guide_queries given without guide_keys"),
        ({"margin": 0.1, "guide_keys": KEYS}, "guide_keys given without guide_queries"),
        ({"guide_queries": QUERIES, "guide_keys": KEYS}, "without margin"),
        ({"margin": 0.1, "guide_queries": QUERIES[:5], "guide_keys": KEYS}, "guide_queries must have a row for each"),
        ({"margin": 0.1, "guide_queries": QUERIES, "guide_keys": KEYS[:, :2]}, "equally many features"),
        ({"margin": 0.1, "guide_queries": QUERIES, "guide_keys": KEYS, "in_batch": False, "negatives": OWN}, "guide"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nj.info_nce_loss(QUERIES, KEYS, **options)


def test_ranking_has_no_class_prior():
    with pytest.raises(TypeError, match="class_prior"):
        nj.multiple_negatives_ranking_loss(QUERIES, KEYS, class_prior=0.1)
