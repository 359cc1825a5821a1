"""--compare-fusion as users start it, on the Evoformer."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import tiny_openfold_v2 as tof
from fusion_lab.kernels.library import attention_choice as attention
from fusion_lab.measuring import compare
from fusion_lab.measuring import probe as probing
from fusion_lab.measuring.comparison_table import compare_fusion
from fusion_lab.measuring.variants import make_variants
from tests.support import PATIENCE, ROOT, last_json, run_program

CPU = torch.device("cpu")
TINY = dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, outer_product_dim=4, num_blocks=1, num_seqs=6,
            seq_len=16, batch_size=2, warmup_steps=1)
FLAGS = [word for name, value in TINY.items() for word in ("--" + name.replace("_", "-"), str(value))]
FLAGS += ["--device", "cpu"]
SETTINGS = tof.PROGRAM.settings(**TINY, device="cpu")


def attention_that_must_compile(q, k, v, bias):
    """In place of FlexAttention, which runs on a GPU alone: in eager code it compiles itself, and PyTorch
    refuses that within a dispatch mode."""
    if modes := torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        raise NotImplementedError(f"no rule for flex_attention and mode {modes[-1]}")
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores if bias is None else scores + bias[:, None]).softmax(dim=-1) @ v


def test_a_gpus_path_counts_without_a_mode_round_what_compiles_itself(monkeypatch):
    """At 908ff9d the rows of fused attention were lost on every GPU and on no CPU."""
    choose = attention.chosen
    monkeypatch.setattr(attention, "chosen", lambda requested, q, biased: (
        choose(requested, q, biased) if requested != "auto" or isinstance(q, FakeTensor) else "flex"))
    monkeypatch.setattr(attention, "flex_attend", attention_that_must_compile)
    monkeypatch.setattr(probing, "operations_are_seen", lambda trainer: False)
    found = make_variants(SETTINGS, "only-flash-attention fused", False)
    batch = tof.PROGRAM.data(SETTINGS).batch(0)
    candidates = compare.candidates_of(tof.PROGRAM, found, CPU, batch, lambda text: None)
    assert [v.reason for v in found] == [None] * 3 and all(c.counts.launches is None for c in candidates)


@pytest.mark.parametrize("values", [{}, dict(use_amp=True, amp_dtype="float16"), dict(
    use_amp=True, enable_master_weights=True), dict(enable_activation_checkpointing=True, dropout=0.1)])
def test_a_first_step_counts_as_much_as_the_third(values):
    """Nothing that only the first step makes is in its count, and nothing of the count stays."""
    settings = SETTINGS.having(**values)
    trainer = tof.Trainer(tof.PROGRAM, settings, CPU)
    batch = tof.PROGRAM.data(settings).batch(0)
    weights = [p.clone() for p in trainer.weights.tensors]
    with trainer.preserved():
        first = probing.probe(trainer, batch)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.weights.tensors, strict=True))
    assert not any(t.any() for state in trainer.optimizer.state.values() for t in state.values())
    for _ in range(2):
        trainer.step(batch)
    third = probing.probe(trainer, batch)
    assert first.launches > 400 and first.saved_mb > 0.2
    assert dataclasses.replace(first, timeline=None) == dataclasses.replace(third, timeline=None)


@pytest.mark.slow
def test_compare_fusion_from_the_command_line(tmp_path):
    names = ["baseline", "only-qkv-fusion-msa", "only-flash-attention", "only-triangle-fusion", "fused"]
    flags = [*FLAGS, "--compare-fusion", "--variants", " ".join(names), "--num-steps", 2,
             "--profile-dir", tmp_path / "p"]
    result = run_program("tiny_openfold_v2.py", *flags)
    assert result.returncode == 0, result.stderr
    report = last_json(result)
    assert report == json.loads((tmp_path / "p/fusion_comparison_v2.json").read_text())
    assert [entry["name"] for entry in report["variants"]] == names
    for entry in report["variants"]:
        assert entry["measured"] and entry["rounds"] == len(entry["step_times"]) == 2
        parts = sum(entry[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer"))
        assert parts == pytest.approx(entry["median_batch_time"], rel=0.5)
    launches = [entry["launches_per_step"] for entry in report["variants"]
                if not entry["fusion_config"]["enable_flash_attention"]]
    assert launches[0] == max(launches) and len(set(launches)) > 1
    lines = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert lines[-5:-1] == ["Training speed", "Memory reduction", "Batch time improvement",
                            "Kernel reduction"]


@pytest.mark.parametrize("names", ["al", "only-opm"])
def test_a_wrong_name_moves_no_earlier_results(names, tmp_path):
    (tmp_path / "earlier").touch()
    done = run_program("tiny_openfold_v2.py", *FLAGS, "--compare-fusion", "--variants", names,
                       "--profile-dir", tmp_path, "--force")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].count("--variants") == 1
    assert os.listdir(tmp_path) == ["earlier"] and "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.slow
def test_a_compiled_row_comes_from_a_process_of_its_own(tmp_path):
    """Its baseline took turns with it there. Of the second program, which compiles soon."""
    flags = ["--compare-fusion", "--variants", "fused compiled", "--num-steps", 2,
             "--profile-dir", tmp_path / "p"]
    result = run_program("tests/second_program.py", "--width", 8, "--depth", 1, "--device", "cpu", *flags,
                         env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new")})
    assert result.returncode == 0, result.stderr
    baseline, _, compiled = last_json(result)["variants"]
    assert compiled["measured"] and compiled["baseline_step_times"] != baseline["step_times"], compiled
    assert compiled["first_step_time"] > 1 and compiled["rounds"] == 2
    assert compiled["first_loss"] == pytest.approx(baseline["first_loss"], rel=1e-4)
    assert compiled["saved_activation_reduction_percent"] is not None
    assert "ran in a process of its own" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("names", ["compiled", "fused compiled"])
def test_a_variant_that_does_not_compile_is_a_reason_in_its_row(names, tmp_path):
    flags = [*FLAGS, "--compare-fusion", "--variants", names, "--num-steps", 2, "--profile-dir", tmp_path]
    result = run_program("tiny_openfold_v2.py", *flags, env={
        "CXX": "/nonexistent/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new")})
    assert result.returncode == 0, result.stderr
    compiled = last_json(result)["variants"][-1]
    assert not compiled["measured"] and compiled["reason"], compiled


@pytest.mark.slow
def test_rows_are_kept_when_a_signal_ends_the_comparison(tmp_path):
    """SIGTERM while a row compiles: what is known is in the file, later rows say why they are not."""
    command = [sys.executable, str(ROOT / "tiny_openfold_v2.py"), *FLAGS, "--compare-fusion", "--num-steps",
               "2", "--variants", "fused compiled", "--profile-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "which compiles" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    report = json.loads((tmp_path / "fusion_comparison_v2.json").read_text())
    assert report == last_json(out)
    assert [row["measured"] for row in report["variants"]] == [True, True, False]
    assert report["variants"][2]["reason"] == compare.INTERRUPTED


def test_a_signal_before_the_first_round_leaves_no_figures(tmp_path, monkeypatch, capsys):
    def take_turn(*_):
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(compare.Candidate, "take_turn", take_turn)
    monkeypatch.setattr(compare.Candidate, "count", lambda self, *_: setattr(
        self, "trainer", tof.PROGRAM.trainer(tof.PROGRAM, self.variant.settings, CPU)))
    assert compare_fusion(tof.PROGRAM, SETTINGS.having(profile_dir=str(tmp_path)), "fused compiled") == 130
    assert "no figures" in capsys.readouterr().out and not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
