"""Gains and their intervals, by hand."""
import math

import numpy as np
import pytest

from fusion_lab.measuring.gains import Gain, gain_of_rounds, gain_of_runs, gain_over_earlier, median_interval


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 9, 12, 20, 79])
def test_an_interval_of_the_median_covers_95_percent_and_no_more_than_it_must(count):
    """By the order of values alone: the sign test. As narrow as whole values allow."""
    low, high = median_interval(np.arange(count)[::-1])
    if count < 6:
        assert (low, high) == (None, None)
        return
    assert low + high == count - 1
    missed = [2 * sum(math.comb(count, i) for i in range(outside)) / 2 ** count
              for outside in (int(low) + 1, int(low) + 2)]
    assert missed[0] <= 0.05 < missed[1]


@pytest.mark.parametrize("df, t", [(1, 12.706), (5, 2.571), (7, 2.447), (29, 2.131), (99, 2.042)])
def test_of_runs_it_is_the_geometric_mean_with_students_interval(df, t):
    """Of df + 1 ratios; where the table of t has a gap, the interval is the wider one."""
    logs = np.random.default_rng(df).normal(0.5, 0.1, df + 1)
    half = t * logs.std(ddof=1) / (df + 1) ** 0.5
    found = gain_of_runs(np.exp(logs))
    assert np.log(found) == pytest.approx([logs.mean(), logs.mean() - half, logs.mean() + half])


def test_over_an_earlier_run_it_is_the_ratio_of_medians_between_both_intervals():
    """Of seven steps all are within the median's interval, of five there is none."""
    before, after = [1.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.5], [3.8, 4.0, 4.0, 4.0, 4.0, 4.0, 5.0]
    assert gain_over_earlier(before, after) == pytest.approx((2, 3.8 / 2.5, 5.0 / 1.9))
    assert gain_over_earlier(before[1:6], after) == (2, None, None) == gain_over_earlier(before, after[:5])


def test_a_gain_says_how_sure_it_is():
    assert gain_of_runs([2.0]) == (pytest.approx(2), None, None) and gain_of_runs([]) is None
    assert gain_of_rounds([2.0, 1.0, 3.0]) == (2, None, None)
    assert Gain(1.2, 1.1, 1.3).decided and Gain(0.8, 0.7, 0.9).decided
    assert not Gain(1.2, 0.9, 1.6).decided and not Gain(2.0).decided
    assert str(Gain(1.2, 1.1, 1.3)) == "1.20x (1.10, 1.30)" and str(Gain(1.2)) == "1.20x"
    assert "1.10 to 1.30)" in Gain(1.2, 1.1, 1.3).in_words() and "too few" in Gain(1.2).in_words()
    assert "within noise" in Gain(1.2, 0.9, 1.6).in_words()
    assert Gain.read(Gain(1.2, 1.1, 1.3).as_dict()) == (1.2, 1.1, 1.3)
