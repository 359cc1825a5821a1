"""What a run prints: start-up and step lines, its end, the line of JSON."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import reporting
from fusion_lab.training.distributed import ALONE, World
from fusion_lab.training.files import UserError
from fusion_lab.training.reporting import (
    busy_line,
    describe_start,
    print_ending,
    print_result,
    print_settings,
    require_finite,
    shorter,
    step_line,
)
from tests.second_program import PROGRAM as SECOND

CPU = torch.device("cpu")


def test_a_step_line():
    training = SimpleNamespace(num_steps=120, batch_size=4)
    assert step_line(5, training, 1.25, 0.0125, 10.26) == (
        "Step   5/120 | Loss: 1.2500 | Speed:  320.0 samples/sec | Memory:   10.3 MB | Time:  12.5ms")
    assert "| Memory:    n/a MB |" in step_line(5, training, 1.0, 1.0, None)
    assert " 640.0 samples/sec | Memory" in step_line(5, training, 1, 0.0125, None, ranks=2)


def test_the_first_loss_that_is_not_finite_is_named_by_its_step():
    losses = [torch.tensor(value) for value in (float("nan"), 1.0, 2.0, float("inf"))]
    assert require_finite(losses[:3], 1, 10) == 3 and require_finite(losses, 4, 10) == 4
    with pytest.raises(UserError, match="loss is inf at step 14: "):
        require_finite(losses, 1, 10)


def test_the_last_line_is_shortened_from_behind(capsys):
    assert shorter(dict(a=1, b=2)) == dict(a=1) and shorter(dict(a=1)) is None is shorter(5)
    assert shorter([1, 2]) == [1] and shorter("ab") == "a" and shorter([]) is None
    headline = dict(mode="m", rows=list(range(1000)), z="last by name")
    print_result(headline, "s.json", SECOND.settings())
    line = capsys.readouterr().out
    kept = json.loads(line)["rows"]
    assert 200 < len(kept) < 260 and kept == list(range(len(kept))) and 1015 < len(line.strip()) <= 1024
    assert len(headline["rows"]) == 1000


def test_how_to_go_on(capsys):
    def said(done, saved, stopped=False, schedule="constant", unfinished=False):
        training = SimpleNamespace(save_checkpoint=saved, num_steps=10, lr_schedule=schedule,
                                   early_stopping=2)
        evaluations = SimpleNamespace(stopped=stopped, in_words=lambda: "stopped" if stopped else None,
                                      unfinished=lambda: unfinished)
        trainer = SimpleNamespace(step_number=done, training=training)
        print_ending(trainer, ["s.json", None, "m.jsonl"], evaluations)
        return capsys.readouterr().out.splitlines()

    written, go_on = "Written: s.json, m.jsonl", "Continue: the same flags and --resume 'a b.pt' --num-steps"
    assert said(10, "a b.pt") == [written, f"{go_on} 20"] and said(10, None) == [written]
    assert said(3, "a b.pt") == ["Interrupted at step 3 of 10", written, f"{go_on} 10"]
    assert said(3, None) == [
        "Interrupted at step 3 of 10; without --save-checkpoint FILE there is nothing to continue from",
        written]
    assert said(3, None, stopped=True) == ["stopped", written]
    assert said(3, "a b.pt", stopped=True) == ["stopped", written, f"{go_on} 10 --early-stopping 4"]
    assert said(10, "a b.pt", unfinished=True, schedule="linear")[2] == f"{go_on} 10"
    assert said(10, None, unfinished=True) == [
        "Interrupted in the last evaluation: it is incomplete or missing", written]
    assert said(10, "a b.pt", schedule="cosine")[1].endswith("--init-from 'a b.pt'")
    assert said(3, "a b.pt", schedule="cosine")[2] == f"{go_on} 10"


def test_a_busy_machine_is_named(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert busy_line(0.9, 2) is None and busy_line(7.19, 2).startswith("Busy machine: load 7.2 on 2 cores; ")


def started(capsys, fusion=(), training=(), **given):
    """The start-up lines of a run on a CPU."""
    own = given.pop("own", None)
    settings = SECOND.settings(**dict(fusion), **dict(training))
    trainer = SimpleNamespace(**dict(
        program=replace(SECOND, start_lines=lambda trainer: own), settings=settings, device=CPU,
        amp_dtype=None, model=torch.nn.Linear(10, 100), masters=None,
        world=ALONE) | given)
    describe_start(trainer, SimpleNamespace(describe=lambda: "numbers"))
    return capsys.readouterr().out.splitlines()


def test_start_up_lines(capsys, monkeypatch):
    monkeypatch.setattr(reporting, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(reporting.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    plain = started(capsys)
    assert plain == [
        f"Device: cpu (a CPU) | torch {torch.__version__} | dtype: float32 | seed: 42",
        "Model: 1,100 parameters", f"Data: numbers | {SECOND.sample(SECOND.settings())}",
        "Fusion Optimizations:", "   Fused ReLU: Enabled"]
    assert started(capsys, dict(enable_fused_relu=False))[4:] == ["   Fused ReLU: Disabled"]
    switches = dict(enable_fused_residual=True, enable_cuda_graphs=True)
    lines = started(
        capsys, switches, dict(use_tf32=True), amp_dtype=torch.bfloat16,
        own=dict(sizes="two sizes", last="last", remarks=dict(enable_fused_relu="by hand", other="x")),
        world=World(size=2))
    assert " | dtype: bfloat16 | " in lines[0] and lines[1:] == [
        "Ranks: 2", "Model: two sizes, 1,100 parameters", plain[2], plain[3],
        "   Fused ReLU: Enabled (by hand)", "   last",
        "Besides: --enable-cuda-graphs --enable-fused-residual",
        "Not used here: CUDA graphs need a GPU; this device has no TF32"]
    assert started(capsys, dict(enable_fused_relu=False), own=dict(remarks=dict(
        enable_fused_relu="by hand")))[4] == "   Fused ReLU: Disabled"
    monkeypatch.setattr(reporting.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert started(capsys)[5].startswith("Busy machine: load 1000.0 on ")
    there = started(capsys, dict(enable_master_weights=True), dict(use_amp=True, use_tf32=True),
                    device=torch.device("cuda", 1))
    assert there[0].startswith("Device: cuda:1 (a GPU, cuda:1) | ") and "Busy" not in "".join(there)


def test_a_warning_of_graphs_on_rocm(capsys, monkeypatch):
    monkeypatch.setattr(reporting.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    graphs = dict(enable_torch_compile=True, torch_compile_mode="reduce-overhead")
    for hip, fusion, warned in (("7.0", graphs, True), (None, graphs, False),
                                ("7.0", dict(enable_torch_compile=True), False),
                                ("7.0", dict(torch_compile_mode="reduce-overhead"), False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        said = started(capsys, fusion)[-1].startswith("Note: on ROCm, training in mode reduce-overhead was ")
        assert said == warned


def test_what_flags_come_to(capsys):
    settings = SECOND.settings(width=8)
    assert print_settings(SECOND, settings, "--retune") == 0
    assert json.loads(capsys.readouterr().out) == dict(
        mode="check_flags", asked="--retune", program="second_program.py", suffix="mlp",
        summary="performance_summary_mlp.json", **settings.as_dict(), torch=torch.__version__,
        torch_path=torch.__file__, hip=torch.version.hip, cuda=torch.version.cuda,
        gpus=torch.cuda.device_count())
