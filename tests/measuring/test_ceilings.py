"""What the device can do at most: which products and copies are timed, and what is made of the times."""
import numpy as np
import torch

from fusion_lab.measuring import ceilings
from tests.second_program import PROGRAM as SECOND

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Timer:
    """A PhaseTimer by which the steps of a run take what its subclass says."""
    times = [[0.01], [0.25], [0.5], [0.5], [0.5], [0.5]]  # the first is the warm-up

    def __init__(self, device):
        self.steps = 0

    def start(self):
        self.steps += 1

    def mark(self):
        pass

    def seconds(self):
        return np.array(self.times[:self.steps])


def test_the_best_time_after_a_warm_up_counts(monkeypatch):
    monkeypatch.setattr(ceilings, "PhaseTimer", Timer)
    runs = []
    assert ceilings.fastest(lambda: runs.append(1), GPU) == 0.25 and len(runs) == 6
    monkeypatch.setattr(Timer, "times", [[9.0]])  # slow ones run once on a CPU
    assert ceilings.fastest(lambda: runs.append(1), CPU) == 9.0 and len(runs) == 7
    monkeypatch.setattr(Timer, "times", [[0.9], [0.2], [0.3]])  # the first copy to new memory is slow
    assert ceilings.fastest(lambda: runs.append(1), CPU) == 0.2 and len(runs) == 9


def test_a_product_is_two_operations_an_entry_and_a_copy_reads_and_writes(monkeypatch):
    """Of the layouts that a linear layer uses one may be 20 times as fast, as in float16 on a CPU."""
    def seconds(run, device):
        if not hasattr(run, "args"):
            return 0.5
        left, right = run.args
        return 1.0 if left.is_contiguous() and right.is_contiguous() else 20.0
    monkeypatch.setattr(ceilings, "fastest", seconds)
    assert ceilings.matmul_ceiling(CPU, torch.float32) == 2 * max(ceilings.SIDES["cpu"]) ** 3
    assert ceilings.copy_ceiling(CPU) == 2 * 2 ** 26 / 0.5


def test_the_ceilings_of_a_run_are_those_of_its_precision(monkeypatch):
    speeds = {torch.float32: 1e12, torch.float16: 3e12}
    monkeypatch.setattr(ceilings, "matmul_ceiling", lambda device, dtype: speeds[dtype])
    monkeypatch.setattr(ceilings, "copy_ceiling", lambda _: 2.5e9)
    found = ceilings.measure_ceilings(CPU, SECOND.settings().training)
    assert found == dict(copy_bytes_per_s=2.5e9, dtype="float32", matmul_flops_per_s=1e12)
    half = SECOND.settings(use_amp=True, amp_dtype="float16").training
    assert ceilings.measure_ceilings(CPU, half) == dict(found, dtype="float16", matmul_flops_per_s=3e12)
    assert "copy 2.5 GB/s" in (words := ceilings.ceiling_line(found)) and "float32 1 TFLOP/s" in words
    monkeypatch.setattr(ceilings, "runs_in_tf32", lambda *_: True)
    assert ceilings.measure_ceilings(GPU, SECOND.settings().training)["dtype"] == "tf32"
