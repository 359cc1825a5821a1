"""--compare-fusion as users start it, on the Evoformer."""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import accuracy, bench, compare
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.comparison_table import compare_fusion
from fusion_lab.measuring.variants import make_variants
from tests.support import PATIENCE, ROOT, last_json, run_program
from tests.tiny import CPU, TINY, flags_of

FLAGS, SETTINGS = flags_of(), tof.PROGRAM.settings(**TINY)


def test_dropout_draws_alike_for_all_variants():
    settings = SETTINGS.having(dropout=0.5)
    batch, losses, weights = tof.PROGRAM.data(settings).batch(0), [], None
    for variant in make_variants(settings, "fused", False):
        trainer = tof.Trainer(tof.PROGRAM, variant.settings, CPU)
        accuracy.shake(trainer.model)
        weights = weights or {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(weights)
        candidate = compare.candidate_of(tof.PROGRAM, variant, CPU)
        candidate.trainer, candidate.timer = trainer, PhaseTimer(CPU)
        torch.manual_seed(len(losses))  # the generator may stand anywhere
        candidate.take_turn(1, batch)
        losses += candidate.losses
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


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
    assert compiled["first_step_time"] > 1 and len(compiled["step_times"]) == 2
    assert compiled["first_loss"] == pytest.approx(baseline["first_loss"], rel=1e-4)
    assert compiled["saved_activation_reduction_percent"] is not None
    assert "ran in a process of its own" in result.stdout


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
    assert report["variants"][2]["reason"] == compare.CUT_SHORT


def test_a_signal_before_the_first_round_leaves_no_figures(tmp_path, monkeypatch, capsys):
    def take_turn(*_):
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(bench.Candidate, "take_turn", take_turn)
    monkeypatch.setattr(bench.Candidate, "prepare", lambda self, *_: setattr(self, "trainer", self.make()))
    assert compare_fusion(tof.PROGRAM, SETTINGS.having(profile_dir=str(tmp_path)), "fused compiled") == 130
    assert "no figures" in capsys.readouterr().out and not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
