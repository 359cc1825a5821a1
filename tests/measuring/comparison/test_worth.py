"""What a fusion can bring at most, where it touches all there is."""
from types import SimpleNamespace

import pytest

from fusion_lab.measuring.comparison import worth

TENTHS = {name: 0.1 for name in "abcdefghij"}  # in floating point they add up to 1 - 1.1e-16


@pytest.mark.parametrize("shares", [TENTHS, dict(a=1.0), dict(a=0.7, b=0.2, c=0.1 + 1e-12)], ids=len)
def test_a_setting_that_touches_all_has_no_ceiling(shares):
    """Sums of all shares miss 1 by a rounding: "at most 9007199254740992.00x" was the quotient."""
    found = worth.worth(list(shares), shares, 2.0)
    assert found["amdahl_ceiling"] is None
    assert (found["touched_share"], found["amdahl_reached"]) == (1.0, 0.5)


def test_one_that_leaves_a_thousandth_has_one():
    assert worth.worth(["a"], dict(a=0.999, b=0.001), 2.0)["amdahl_ceiling"] == pytest.approx(1000)


def test_shares_add_up_to_the_step(monkeypatch):
    """Medians alone would not: three steps, in which each of three sub-layers takes long once."""
    steps = [{(name, "forward"): 8.0 if name == longest else 1.0 for name in "abc"} for longest in "abc"]
    monkeypatch.setattr(worth, "amounts_in_a_step", lambda *_: steps.pop())
    shares = worth.shares_of_a_step(SimpleNamespace(device=None), None, 3)
    assert shares == pytest.approx(dict.fromkeys("abc", 1 / 3))
