"""What collectives take on paper, by small numbers."""
import json
import math

import pytest

from fusion_lab.measuring.bounds import scaling
from fusion_lab.training.files import USAGE, UserError


def test_an_all_reduce_is_latency_by_levels_and_bytes_by_links():
    link = scaling.Link.fitted({100: 2.0, 4: 1.0, 8: 1.5})
    assert link == scaling.Link(1.0, 96.0)
    assert scaling.Link.fitted({4: 1.0, 100: 1.0}).bytes_per_s == pytest.approx(96e9)  # the clock's limit
    assert [link.all_reduce(96, gpus) for gpus in (1, 2, 4, 8)] == [0, 1 + 1, 2 + 1.5, 3 + 1.75]
    assert link.all_reduce(96, 16) == 4 + 1.875  # its own speed is below the network's
    assert link.all_reduce(96, 16, network=48e-9) == 4 + 3.75
    assert link.all_reduce(96, 8, network=48e-9) == 3 + 1.75  # within a host
    assert link.all_reduce(96, 9, network=48e-9) == pytest.approx(math.log2(9) + 32 / 9)
    fast = scaling.Link(1.0, 1e12)
    assert fast.all_reduce(50e9, 16) == 4 + 1.875 and fast.all_reduce(1e12, 8) == 3 + 1.75


def test_a_step_has_two_all_reduces_that_nothing_hides():
    link = scaling.Link(1.0, 8.0)
    assert scaling.step_on(2, 5.0, 16, link) == (5 + (1 + 2) + (1 + 1), 0.5)
    assert scaling.step_on(16, 5.0, 16, link, network=1e-9) == (5 + (4 + 30) + (4 + 15), 5 / 58)
    assert scaling.gpu_rows(5.0, 3, 16, link, [1, 2]) == [
        ["GPUs", "ms", "all-reduce ms", "samples/s", "of perfect"],
        ["1", "5000.000", "0.000", "0.6", "100.0%"], ["2", "10000.000", "5000.000", "0.6", "50.0%"]]


@pytest.mark.parametrize("latency, speed, words", [
    ("0.5", "0.25", None), ("0", "1", "latency and speed must be positive"),
    ("1", "0", "latency and speed must be positive"), ("1e999", "1", "latency and speed must be positive"),
    ("1", "1e999", "latency and speed must be positive"),
    ('"x"', "1", "no result of benchmarks/measure_scaling.py with a link"),
    ("1", "[]", "no result of benchmarks/measure_scaling.py with a link")])
def test_a_link_comes_from_a_result(latency, speed, words, tmp_path):
    path = tmp_path / "scaling.json"
    path.write_text(f'{{"link": {{"latency_s": {latency}, "bytes_per_s": {speed}}}}}')
    if words is None:
        assert scaling.read_link(path) == scaling.Link(float(latency), float(speed))
    else:
        with pytest.raises(UserError) as caught:
            scaling.read_link(path)
        assert str(caught.value) == f"--link {path}: {words}" and caught.value.code == USAGE
    path.write_text(json.dumps(dict(latency_s=1, bytes_per_s=1)))
    with pytest.raises(UserError, match="with a link$"):
        scaling.read_link(path)
    path.unlink()
    with pytest.raises(UserError) as caught:
        scaling.read_link(path)
    assert str(caught.value) == f"--link {path}: No such file or directory"
