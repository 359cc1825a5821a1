"""Pictures cost no result."""
from fusion_lab.measuring import plotting


def test_a_picture_that_cannot_be_drawn_is_a_line(tmp_path, capsys):
    path = str(tmp_path / "x.png")
    assert plotting.drawn(path, lambda axis, y: axis.plot(y), [1, 2]) == path
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert plotting.drawn(str(tmp_path / "y.png"), lambda axis: axis.no_such_thing) is None
    error = capsys.readouterr().err
    assert error.startswith("warning: no y.png: ") and error.count("\n") == 1
