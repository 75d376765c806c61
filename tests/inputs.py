"""Small inputs that many tests share, with the values derived for them in float64."""

import numpy as np

# Unit rows with rational cosines: 01 .8 | 05 .6 | 12 .6 | 13 .36 | 15 .48 | 23 .6 | 34 .8 | 35 .64 | 45 .8 | others 0
X = np.array([[1, 0, 0], [0.8, 0.6, 0], [0, 1, 0], [0, 0.6, 0.8], [0, 0, 1], [0.6, 0, 0.8]])
L2 = np.array([0, 0, 1, 1, 2, 2])  # one positive each
LS = np.array([0, 0, 0, 1, 1, 2])  # 2, 2, 2, 1, 1, 0 positives
A, B = X[0::2], X[1::2]  # two views of three items

Y = np.array([[1.0, 0], [1, 0], [0, 1], [0, -1]])
LY = np.array([0, 0, 0, 1])

_I, _J = np.arange(8)[:, None], np.arange(3)[None, :]
LATTICE_Q = np.cos(_I + 0.7 * _J)
LATTICE_K = np.cos(1.1 * _I + 0.7 * _J + 0.3)
LATTICE_W = np.eye(3) + 0.1 * np.arange(9).reshape(3, 3)

# Values at temperature .5.
NTXENT_L2 = 1.0872345846
NTXENT_L2_ROWS = [0.8224237342, 1.0347106846, 1.0659453662, 1.5029855496, 0.9576973442, 1.1396448291]
NTXENT_L2_GRADIENT = [
    [0, -0.1457726771, 0.2326455702],
    [-0.2395781567, 0.3194375422, 0.2207015681],
    [0.2531675026, 0, -0.2768770922],
    [0.2225775126, -0.4443382859, 0.3332537144],
    [-0.1640692102, 0.2333803601, 0],
    [0.3161712197, 0.2219829324, -0.2371284148],
]
NTXENT_LS = 1.1490596199
SUPCON_OUT_LS = 1.3167525357
SUPCON_OUT_LS_ROWS = [1.6224237342, 1.2347106846, 1.6659453662, 1.1029855496, 0.9576973442, 0]
SUPCON_IN_LS = 1.2206011520
INFO_NCE_AB, INFO_NCE_BA, INFO_NCE_SYMMETRIC = 0.7499567702, 0.7604563906, 0.7552065804


def random_rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows whose cosines spread over -1 to 1, so that every term of a loss counts."""
    return np.random.default_rng(seed).normal(size=shape)


def spread_rows() -> np.ndarray:
    """512 rows of which 256 share a label: 65,280 positive and 196,352 negative ordered pairs."""
    i, j = np.arange(512)[:, None], np.arange(128)[None, :]
    return np.cos(0.37 * i * (j + 1) + 0.1 * j)


SPREAD_LABELS = np.concatenate([np.zeros(256, int), np.arange(1, 257)])
