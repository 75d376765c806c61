"""The oracle against values that were derived without it, and its derivative against a known one."""

import inputs
import numpy as np
import oracle
import pytest
from assertions import assert_close, assert_states
from inputs import L2, LS, LY, A, B, X, Y


def test_anchor_values():
    assert_states(oracle.ntxent(X, L2, 0.5), inputs.NTXENT_L2)
    assert_states(oracle.ntxent(X, L2, 0.5, reduction="none"), inputs.NTXENT_L2_ROWS)
    assert_states(oracle.supcon_loss(X, L2, 0.5), inputs.NTXENT_L2)
    assert_states(oracle.supcon_loss(X, L2, 0.5, form="in"), inputs.NTXENT_L2)
    assert_states(oracle.ntxent_views(A, B, temperature=0.5), inputs.NTXENT_L2)
    assert_states(oracle.instance_loss(A, B), inputs.NTXENT_L2)
    assert_states(oracle.ntxent(X, LS, 0.5), inputs.NTXENT_LS)
    assert_states(oracle.supcon_loss(X, LS, 0.5), inputs.SUPCON_OUT_LS)
    assert_states(oracle.supcon_loss(X, LS, 0.5, reduction="none"), inputs.SUPCON_OUT_LS_ROWS)
    assert_states(oracle.supcon_loss(X, LS, 0.5, form="in"), inputs.SUPCON_IN_LS)
    assert_states(oracle.info_nce_loss(A, B, temperature=0.5), inputs.INFO_NCE_AB)
    assert_states(oracle.info_nce_loss(B, A, temperature=0.5), inputs.INFO_NCE_BA)
    assert_states(oracle.multiple_negatives_ranking_loss(A, B, temperature=0.5), inputs.INFO_NCE_AB)


def test_anchor_gradients():
    assert_close(oracle.gradient(lambda x: oracle.ntxent(x, L2, 0.5), X), inputs.NTXENT_L2_GRADIENT, atol=1e-10)
    for convert, slope in (
        (lambda t: t, 0.7048363704),
        (np.exp, 0.3524181852),
        (lambda s: 1 / s, -0.1762090926),
    ):
        at = {0.7048363704: 0.5, 0.3524181852: np.log(0.5), -0.1762090926: 2.0}[slope]
        assert_states(oracle.gradient(lambda t, convert=convert: oracle.ntxent(X, L2, convert(t)), at), slope)


@pytest.mark.parametrize("temperature", [0.02, 0.01, 0.005, 0.001])
def test_low_temperature(temperature):
    assert_states(oracle.ntxent(Y, LY, temperature), np.log(2) / 3)


def test_low_temperature_many_positives():
    assert_states(oracle.ntxent(X, LS, 0.01), 15.1732875778)
    assert_states(oracle.ntxent(X, LS, 0.001), 150.1732867951)
    assert_states(oracle.ntxent(X, L2, 0.001), 33.5643823935)
    assert_states(oracle.supcon_loss(Y, LY, 0.01, reduction="none"), [50, 50, np.log(2), 0])


@pytest.mark.parametrize(
    ("temperature", "value"),
    [(0.2, 9.0795737467e-5), (0.1, 4.1223072364e-9), (0.07, 7.8093740864e-13), (0.05, 8.4967085106e-18)],
)
def test_tiny_losses(temperature, value):
    rows, labels = [[1, 0], [1, 0], [-1, 0], [-1, 0]], [0, 0, 1, 1]
    assert_close(oracle.ntxent(rows, labels, temperature), value, rtol=1e-10, atol=0)
    assert_close(oracle.loss_floor(2, temperature), value, rtol=1e-10, atol=0)


def test_decoupled():
    assert_states(oracle.ntxent(X, L2, 0.5, denominator="negatives"), 0.6603607205)
    assert_states(oracle.ntxent(X, L2, 0.1, denominator="negatives"), -0.4048947733)
    opposite = [[1, 0], [-1, 0]]
    value = oracle.ntxent_views(opposite, opposite, temperature=0.01, denominator="negatives")
    assert_states(value, -200 + np.log(2))


def test_query_key_options():
    queries, keys = [[0.8, 0.6, 0], [1, 0, 0], [0, 0, 1]], [[0.96, 0.28, 0], [0.96, 0.28, 0], [0, 0.6, 0.8]]
    ids = [0, 0, 1]
    none = {"temperature": 0.1, "reduction": "none"}
    assert_states(oracle.info_nce_loss(queries, keys, **none), [0.6947214965, 0.6931810444, 0.0006707003])
    assert_states(oracle.info_nce_loss(queries, keys, ids=ids, **none), [0.0031461573, 0.0000677264, 0.0006707003])
    assert_states(oracle.info_nce_loss(keys, queries, ids=ids, temperature=0.1), 0.0042292488)
    bias = -np.log([0.5, 0.25, 0.25])
    assert_states(oracle.info_nce_loss(A, B, temperature=0.5, key_bias=bias), 0.7801377445)
    q, k, hard = X[[0, 4]], X[[1, 3]], X[[5, 5]][:, None]
    owned = oracle.info_nce_loss(q, k, hard, negative_where=[[True], [False]], **none)
    assert_states(owned, [0.1272234419, 0.0003354064])
    own = oracle.info_nce_loss(q, X[[1, 3]], X[[2, 5]][:, None], in_batch=False, **none)
    assert_states(own, [0.0003354064, 0.6931471806])
    ranking = oracle.multiple_negatives_ranking_loss(q, X[[1, 3]], X[[2, 5]][:, None], **none)
    assert_states(ranking, [0.1275187855, 0.6934825869])


def test_views_in_one_array():
    both = np.stack([A, B], axis=1)
    assert_states(oracle.supcon_loss(both, [0, 0, 1], 0.5), 1.4961234735)
    rows = [1.8890904009, 1.4659453662, 0.9576973442, 1.4613773512, 2.0629855496, 1.1396448291]
    none = oracle.supcon_loss(both, [0, 0, 1], 0.5, reduction="none")
    assert_states(none, np.reshape(rows, (2, 3)).mean(0))


def test_zero_row():
    rows = X * (np.arange(6) != 2)[:, None]
    assert_states(oracle.ntxent(rows, L2, 0.5), 1.3193136740)


def test_statistics():
    stats = oracle.batch_statistics(X, LS)
    assert stats[:3] == (5, 8, 22)
    assert_close(stats.positive_similarity, (0.8 + 0 + 0.6 + 0.8) / 4)
    assert_close(stats.accuracy, 0.6)
