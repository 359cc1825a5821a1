"""What a row of the comparison saves, and what share of a step it touches, by hand."""
from types import SimpleNamespace

from fusion_lab.measuring.comparison import rows as comparison_rows
from fusion_lab.measuring.comparison import worth


def test_what_a_row_saves():
    before = dict(peak_memory_mb=100.0, saved_activation_mb=None, launches_per_step=40,
                  flops_per_step=800)
    row = dict(peak_memory_mb=25.0, saved_activation_mb=10.0, launches_per_step=50, flops_per_step=600,
               median_batch_time=2.0)
    comparison_rows.add_savings(row, before, 1200.0)
    assert {key: value for key, value in row.items() if key == "mfu" or "reduction" in key} == dict(
        mfu=0.25, peak_memory_reduction_percent=75.0, saved_activation_reduction_percent=None,
        launch_reduction_percent=-25.0, flop_reduction_percent=25.0)


def test_shares_of_a_step_are_medians(monkeypatch):
    """Forward and backward of "a" together; where a step has none of "b", its share is 0."""
    steps = [{("a", "forward"): 1.0, ("a", "backward"): 2.0, ("b", "forward"): 1.0},
             {("a", "forward"): 1.0, ("b", "backward"): 1.0}, {("a", "forward"): 4.0}]
    monkeypatch.setattr(worth, "amounts_in_a_step", lambda trainer, batch, clock: steps.pop(0))
    assert worth.shares_of_a_step(SimpleNamespace(device=None), None, 3) == {"a": 0.75, "b": 0.25}
