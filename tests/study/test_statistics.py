"""The study's arithmetic, against values from tables and by hand."""
import numpy as np
import pytest

from fusion_lab.study import statistics as stats
from fusion_lab.study.statistics import Gain


@pytest.mark.parametrize("df, t", [(1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)])
def test_t_quantile(df, t):
    assert stats.t_quantile(df) == pytest.approx(t, abs=2e-4)


def test_ratio_interval():
    """Welch, three runs each, variances 0.01 and 0.04 of one run: df = 5^2 / (1/2 + 16/2) = 50/17."""
    above, below = np.exp([-0.1, 0, 0.1]), np.exp([-0.2, 0, 0.2])
    ratio, low, high = stats.ratio_interval(2 * above, below)
    half = stats.t_quantile(50 / 17) * np.sqrt(0.05 * np.pi / 2 / 3)
    assert ratio == pytest.approx(2) and np.log([low / 2, high / 2]) == pytest.approx([-half, half])
    # one side without any spread leaves the other's single degree of freedom
    _, low, high = stats.ratio_interval(np.exp([-0.1, 0.1]), [1.0, 1.0])
    assert np.log(high / low) / 2 == pytest.approx(12.7062 * 0.1, rel=1e-3)
    assert stats.ratio_interval([2.0, 2.0], [1.0, 1.0]) == pytest.approx((2, 2, 2))
    assert stats.ratio_interval([2.0], [1.0, 1.0]) == (pytest.approx(2), None, None)
    # geometric mean over two shapes: each of the four groups counts with a quarter of its variance
    pairs = [(2 * above, below), (8 * above, above)]
    mean, low, high = stats.mean_ratio_interval(pairs)
    shares = np.array([1, 4, 1, 1]) * 0.01
    half = stats.t_quantile(shares.sum() ** 2 / (shares ** 2 / 2).sum()) * np.sqrt(shares.sum() * np.pi / 24)
    assert mean == pytest.approx(4) and np.log([low / 4, high / 4]) == pytest.approx([-half, half])


@pytest.mark.parametrize("quiet", [0.05, 0.001])
def test_intervals_cover_under_unequal_noise(quiet):
    """About 95 times of 100, where one of two settings is noisier; pooled variances made it 47 and 51."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(300):
        above, below = (np.exp(noise * generator.standard_normal(runs))
                        for noise, runs in ((0.05, 3), (quiet, 8)))
        _, low, high = stats.ratio_interval(above, below)
        covered += low <= 1 <= high
    assert 0.93 <= covered / 300 <= 0.99


def test_gains_are_decided_where_the_interval_leaves_out_one():
    assert Gain(1.2, 1.1, 1.3).decided and Gain(0.8, 0.7, 0.9).decided
    assert not Gain(1.2, 0.9, 1.6).decided and not Gain(2.0).decided
    assert Gain(1.2, 1.1, 1.3).in_words() == "1.20× [1.10, 1.30]"
    assert Gain(1.2).in_words(".3f", "x") == "1.200x"


def test_fit_exponent():
    assert stats.fit_exponent([1, 2, 4, 8], [5, 20, 80, 320]) == pytest.approx((2, 0), abs=1e-9)
    exponent, error = stats.fit_exponent([1, np.e, np.e ** 2], [1, np.e ** 2, np.e ** 2])
    assert exponent == pytest.approx(1) and error == pytest.approx((2 / 3) ** 0.5 / 2 ** 0.5)
    assert stats.fit_exponent([1, 2], [1, 8]) == (pytest.approx(3), None)
