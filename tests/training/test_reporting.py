"""What a run prints: start-up and step lines, its end, the line of JSON."""
import json
from types import SimpleNamespace

import numpy as np
import torch

from fusion_lab.training import reporting
from fusion_lab.training.distributed import ALONE, World
from fusion_lab.training.reporting import (
    describe_start,
    print_ending,
    print_result,
    step_line,
)
from tests.second_program import PROGRAM as SECOND
from tiny_openfold_v2 import Trainer

CPU = torch.device("cpu")


def test_a_step_line():
    settings = SECOND.settings(num_steps=120, batch_size=4, log_every=2)
    trainer = SimpleNamespace(device=CPU, settings=settings, step_number=5, world=World(size=2))
    timer = SimpleNamespace(seconds=lambda last: np.array(
        [[9.0, 9.0], [0.005, 0.0075], [0.0025, 0.01]])[-last:])
    assert step_line(trainer, 1.25, timer, 10.26) == (
        "Step   5/120 | Loss: 1.2500 | Speed:  640.0 samples/sec | Memory:   10.3 MB | Time:  12.5ms")
    assert "| Memory:    n/a MB |" in step_line(trainer, 1.0, timer, None)


def test_the_last_line_is_shortened_from_behind(capsys):
    headline = dict(mode="m", rows=list(range(1000)), z="last by name")
    print_result(headline, "s.json", SECOND.settings())
    line = capsys.readouterr().out
    kept = json.loads(line)["rows"]
    assert 200 < len(kept) < 260 and kept == list(range(len(kept))) and 1015 < len(line.strip()) <= 1024
    assert len(headline["rows"]) == 1000


def test_how_to_go_on(capsys):
    def said(done, saved, stopped=None, schedule="constant"):
        settings = SECOND.settings(save_checkpoint=saved, num_steps=10, lr_schedule=schedule)
        trainer = SimpleNamespace(step_number=done, settings=settings,
                                  best=dict(score=None, step=None, since=2))
        print_ending(trainer, ["s.json", None, "m.jsonl"], stopped)
        return capsys.readouterr().out

    assert "s.json, m.jsonl" in said(10, None) and "--resume" not in said(10, None)
    assert "--resume 'a b.pt' --num-steps 20" in said(10, "a b.pt")
    assert "--resume 'a b.pt' --num-steps 10" in said(3, "a b.pt", stopped=2)
    assert "nothing to continue from" in said(3, None, stopped=2)
    assert "--init-from 'a b.pt'" in said(10, "a b.pt", schedule="cosine")


def started(capsys, own, world=ALONE, **values):
    """The start-up lines of a run on a CPU, whose model says this of itself."""
    settings = SECOND.settings(**values)
    trainer = Trainer(SECOND, settings, CPU, world)
    trainer.model.in_words = lambda dtype: own
    describe_start(trainer, SECOND.data(settings))
    return capsys.readouterr().out.splitlines()


def test_start_up_lines(capsys, monkeypatch):
    monkeypatch.setattr(reporting.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    lines = started(capsys, {})
    assert " | dtype: float32 | seed: 42" in lines[0] and lines[-1].startswith("Busy machine: load 1000.0")
    assert lines[3:-1] == ["Fusion Optimizations:", "   Fused ReLU: Enabled", "   Torch Compile: Disabled"]
    monkeypatch.setattr(reporting.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    remarks = dict(enable_fused_relu="by hand", enable_torch_compile="no remark on what is off")
    lines = started(capsys, dict(sizes="two sizes", last="last", remarks=remarks), World(size=2),
                    use_tf32=True, enable_fused_residual=True, enable_cuda_graphs=True)
    assert lines[1] == "Ranks: 2" and lines[2].startswith("Model: two sizes, ")
    assert lines[5:] == ["   Fused ReLU: Enabled (by hand)", "   Torch Compile: Disabled",
                         "   Fused Residual: Enabled", "   last",
                         "In a comparison: --variants fused-relu+fused-residual",
                         "Not used here: CUDA graphs need a GPU; this device has no TF32"]
