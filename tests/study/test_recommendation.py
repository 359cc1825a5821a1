"""A study's recommendation in words, and as it is read from a file."""

import pytest

from fusion_lab.study.design import Shape
from fusion_lab.study.recommendation import print_recommendation
from fusion_lab.study.summary import Recommendation, Recommended
from tests.study.study_parts import SHAPE, WORDS


def test_a_recommendation_in_words(capsys):
    def at(length, *passed_over, **known):
        return Recommended(Shape((2, length, 8), WORDS.axes), passed_over, **known)
    print_recommendation(Recommendation(150.0, (
        at(32, "all: broken", setting="fused", command="run it", median_ms=1.234, peak_memory_mb=100.06,
           speedup=2.345), at(64, setting="baseline", median_ms=5.0, speedup=1.0), at(96))))
    assert capsys.readouterr().out.splitlines() == [
        "", "Recommended: fastest, accurate, within 150 MB",
        "   B 2 S 32 N 8: fused, 1.23 ms, 100.1 MB, 2.35x the baseline", "      not all: broken",
        "      run it", "   B 2 S 64 N 8: baseline, 5.00 ms, n/a",
        "   B 2 S 96 N 8: none of the settings qualifies"]
    print_recommendation(Recommendation(None, (at(
        32, setting="fused", command="run it", median_ms=1.0, speedup=1.04, speedup_low=0.833,
        speedup_high=1.296),)))
    assert "1.04x the baseline (±, 0.83 to 1.30: undecided)\n" in capsys.readouterr().out
    print_recommendation(Recommendation(None, ()))
    assert capsys.readouterr().out == "\nRecommended: fastest, accurate\n"


@pytest.mark.parametrize("limit, error", [(150.0, None), (None, None), ("much", ValueError),
                                          (True, ValueError)])
def test_a_recommendation_that_was_read(limit, error):
    shape = dict(batch_size=2, seq_len=32, num_seqs=8, passed_over=["x"])
    content = dict(memory_limit_mb=limit, shapes=[shape])
    if error:
        for one in (content, [], dict(shapes={})):
            with pytest.raises(error):
                Recommendation.read(one, WORDS.axes)
    else:
        known = Recommendation(limit, (Recommended(SHAPE, ("x",)),))
        assert Recommendation.read(content, WORDS.axes) == known
