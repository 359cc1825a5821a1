"""Pictures cost no result, and their axes say what they show."""

import pytest

from fusion_lab.measuring import plotting


def test_what_goes_wrong_with_a_picture_is_a_line(capsys):
    with plotting.spared("x.png"):
        raise ValueError("two\nlines")
    with plotting.spared("y.png"):
        raise KeyError
    assert capsys.readouterr().err == "warning: no x.png: two lines\nwarning: no y.png: KeyError\n"
    with pytest.raises(KeyboardInterrupt), plotting.spared("z.png"):
        raise KeyboardInterrupt
