"""What captions promise is there: standard errors of fits."""
from types import SimpleNamespace

import pytest

from fusion_lab.study.report import scaling_section
from fusion_lab.study.summary import standard_errors, summarise
from tests.study.study_parts import row_of, study_of


@pytest.mark.parametrize("lengths", [(32, 64), (32, 64, 128)])
def test_standard_errors_are_promised_where_there_are_some(lengths):
    study = study_of((2,), lengths, (8,), settings=("baseline",), num_runs=1)
    summary = summarise(study, [row_of(p, 0.01 * p.shape["seq_len"]) for p in study.points()])
    page = scaling_section(summary)
    assert "Fitted exponents" in page and "has none" not in page
    assert ("standard error" in page) is (len(lengths) > 2) is ("±" in page)


def test_of_fits_some_of_which_have_errors_both_is_said():
    fits = [SimpleNamespace(standard_error=error) for error in (None, 0.1)]
    assert standard_errors(fits) == "; ± is the standard error of the fit; a fit through two points has none"
    assert standard_errors(fits[:1]) == standard_errors([]) == ""
