"""Pictures cost no result, and their axes say what they show."""
from types import SimpleNamespace

import pytest

from fusion_lab.measuring import plotting
from fusion_lab.profiler import plots


def test_what_goes_wrong_with_a_picture_is_a_line(capsys):
    with plotting.spared("x.png"):
        raise ValueError("two\nlines")
    with plotting.spared("y.png"):
        raise KeyError
    assert capsys.readouterr().err == "warning: no x.png: two lines\nwarning: no y.png: KeyError\n"
    with pytest.raises(KeyboardInterrupt), plotting.spared("z.png"):
        raise KeyboardInterrupt


def test_a_broken_ablation_picture_costs_nothing(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no fonts")
    monkeypatch.setattr(plots, "require_matplotlib", lambda: SimpleNamespace(subplots=broken))
    rows = [dict(name="a", measured=True, p20_batch_time=1, median_batch_time=1, p80_batch_time=1,
                 saved_activation_mb=1)]
    plots.plot_ablation("here/a.png", rows)
    assert capsys.readouterr().err == "warning: no a.png: no fonts\n"


def test_bars_of_sub_layers_say_what_they_are():
    pyplot = plotting.require_matplotlib()
    figure, axis = pyplot.subplots()
    times = [dict(name="row_attention", direction="forward", total_us=5.0)]
    plots.plot_sublayers(axis, times, "GPU time")
    pyplot.close(figure)
    assert axis.get_title() == "Time by sub-layer" and axis.get_ylabel() == "sub-layer, all blocks"
    assert axis.get_xlabel() == "ms per step (GPU time)"
