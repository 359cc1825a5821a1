"""--compare-fusion: which rows there are, that they are fair, and that they come as they are known."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import tiny_openfold_v2 as tof
from fusion_lab.kernels.library import attention_choice as attention
from fusion_lab.measuring import clocks
from fusion_lab.measuring import probe as probing
from fusion_lab.measuring.comparison import compare as comparison
from fusion_lab.measuring.comparison import worth
from fusion_lab.measuring.comparison.table import cells, print_details
from fusion_lab.measuring.comparison.variants import (
    Variant,
    comparison_variants,
    pick,
    refuse_idle,
    usual_rows,
    with_fusion,
)
from fusion_lab.measuring.probe import probe
from fusion_lab.training.files import UserError
from fusion_lab.training.options import COMPILE_MODES
from tests.support import PATIENCE, ROOT, last_json, run_program

CPU = torch.device("cpu")
TINY = dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, outer_product_dim=4, num_blocks=1, num_seqs=6,
            seq_len=16, batch_size=2, warmup_steps=1)
FLAGS = [word for name, value in TINY.items() for word in ("--" + name.replace("_", "-"), str(value))]
FLAGS += ["--device", "cpu"]
PLAIN, EVERYTHING = tof.FusionConfig.preset(False), tof.FusionConfig.preset(True)
SETTINGS = tof.PROGRAM.settings(**TINY, device="cpu", num_steps=4)


def rows_for(fusion, **values):
    return comparison_variants(tof.PROGRAM, with_fusion(tof.PROGRAM.settings(**values), fusion), on_gpu=False)


NEVER_ALONE = ("torch_compile", "triton_adamw", "triton_weight_gradients")


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
    for module in (comparison, probing):  # as on a GPU: a first step, then what it saves, then its kernels
        monkeypatch.setattr(module, "counts_its_first_step", lambda trainer: False)
    rows = [v for v in rows_for(tof.FusionConfig(), **TINY, num_steps=1)
            if v.name in ("baseline", "flash_attention alone", "all")]
    comparison.measure(tof.PROGRAM, rows, CPU, tof.PROGRAM.data(SETTINGS))
    assert [v.reason for v in rows] == [None] * 3 and all(v.losses for v in rows)
    assert set(worth.touched(rows[1].operations, rows[0].operations)) == {
        name for name in tof.SUBLAYERS if "attention" in name or "attn" in name}


def test_variants_come_from_the_config_and_the_baseline_is_first():
    variants = rows_for(tof.FusionConfig())
    names = [v.name for v in variants]
    assert names[0] == "baseline" and {"qkv_msa alone", "all", "all + torch.compile"} <= set(names)
    fusions = [v.settings.fusion for v in variants]
    assert len(set(fusions)) == len(variants)
    alone = [f for f, name in zip(fusions, names, strict=True) if name.endswith("alone")]
    rungs = [f for f, name in zip(fusions, names, strict=True) if name.startswith("+") or name == "all"]
    for switch in tof.FusionConfig.names():
        assert switch.removeprefix("enable_") in NEVER_ALONE or any(
            getattr(f, switch) for f in alone), switch
        assert any(getattr(f, switch) for f in rungs), switch
    top = fusions[names.index("+ transition")]  # what cannot run on CPU is left out
    assert top.enable_projection_fusion and top.enable_torch_compile
    assert not top.enable_cuda_graphs and not top.enable_master_weights
    for given in (tof.FusionConfig(enable_flash_attention=False),
                  *(tof.FusionConfig(enable_torch_compile=True, torch_compile_mode=mode)
                    for mode in COMPILE_MODES)):
        variants = rows_for(given)
        assert any(v.settings.fusion == given for v in variants)
        assert not any(v.settings.idle(False) for v in variants if v.name == "+ projection")
    as_given = [v for v in rows_for(EVERYTHING) if v.name == "as given"]  # partly idle, measured all the same
    assert [v.settings.fusion for v in as_given] == [EVERYTHING]


def test_rows_are_picked_by_name_and_the_baseline_is_always_there():
    variants = rows_for(tof.FusionConfig())
    picked = [v.name for v in pick(variants, "all flash_attention")]
    assert picked == ["baseline", "flash_attention alone", "all"]
    assert not any(v.compiled for v in pick(variants, "baseline projection"))
    assert [v.name for v in pick(variants, "torch.compile,projection")] == [
        "baseline", "projection alone", "all + torch.compile"]
    sums = "triton_weight_gradients"  # of which there is no row alone
    for words in (f"+projection {sums}", f"+ projection, + {sums}"):
        assert [v.name for v in pick(variants, words)] == ["baseline", "+ projection", f"+ {sums}"]
    for words in ("opm-alone", "opm_alone"):
        assert [v.name for v in pick(variants, words)] == ["baseline", "opm alone"]
    for words in ("--enable-opm-fusion", "enable_opm_fusion", "opm-fusion", "opm"):
        assert "opm alone" in [v.name for v in pick(variants, words)]
    for wrong in ("al", "", "all  baselines"):
        with pytest.raises(UserError, match="is no row; there are baseline qkv_msa"):
            pick(variants, wrong)


def test_on_a_cpu_one_row_compiles_by_default():
    """With all that --enable-all-fusion turns on and that runs there; and the user's own settings."""
    def compiled(fusion):
        return [v for v in usual_rows(rows_for(fusion), tof.PROGRAM, False) if v.compiled]
    top, = compiled(tof.FusionConfig())
    assert top.settings.fusion.enable_projection_fusion and not top.settings.idle(False)
    assert not top.settings.fusion.enable_activation_checkpointing  # which saves memory and costs time
    assert [v.name for v in compiled(EVERYTHING)] == [top.name, "as given"]
    rows = rows_for(tof.FusionConfig())
    eager = [v.name for v in rows if not v.compiled]
    assert [v.name for v in usual_rows(rows, tof.PROGRAM, False)] == [*eager, top.name]


@pytest.mark.parametrize("given, more", [
    (tof.FusionConfig(), []), (EVERYTHING, []),
    (tof.FusionConfig(enable_torch_compile=True, enable_opm_fusion=False), ["as given"])])
def test_on_a_gpu_torch_compile_and_the_presets_compile_by_default(given, more):
    half = tof.PROGRAM.settings(use_amp=True, amp_dtype="bfloat16")
    kind, variants = tof.FusionConfig, comparison_variants(tof.PROGRAM, with_fusion(half, given), True)
    usual = {v.name: v.settings.fusion for v in usual_rows(variants, tof.PROGRAM, True) if v.compiled}
    assert [*usual] == ["all + torch.compile", "everything", "ultra", *more]
    assert (usual["everything"], usual["ultra"]) == (kind.preset(True), kind.ultra())
    assert {v.name for v in variants if v.compiled} > {*usual, "+ cuda_graphs", "+ triton_attention"}
    for asked in ("ultra", "+projection", "everything"):  # the last two are one row by two names
        assert [v.name for v in pick(variants, asked)] == ["baseline", asked.replace("+", "+ ")]


def test_idle_switches_are_named_and_only_the_users_own_are_measured():
    masters = tof.FusionConfig(enable_opm_fusion=False, enable_master_weights=True)
    assert set(masters.beside()) == {"--enable-master-weights", "--disable-opm-fusion"}
    for name, refused in (("as given", False), ("+ master_weights", True)):
        variant = Variant(name, with_fusion(SETTINGS, masters))
        assert refuse_idle(variant, CPU) is refused
        assert variant.reason == ("master weights need --use-amp" if refused else None)


class SlowTrainer(tof.Trainer):
    """By its own clock a step takes 1 s, with the triangle fusion 1.25 s; it notes whose turn it is."""
    turns, clock = [], 0.0

    def step(self, batch, mark=lambda: None):
        SlowTrainer.turns.append(self.settings.fusion)
        SlowTrainer.clock += 1.25 if self.settings.fusion.enable_triangle_fusion else 1.0
        return super().step(batch, mark)

    @staticmethod
    def perf_counter():
        """Real time passes too, a millionth of it, for what is measured without a step."""
        return SlowTrainer.clock + 1e-6 * time.perf_counter()


SLOW = dataclasses.replace(tof.PROGRAM, trainer=SlowTrainer)


def some_variants():
    fusions = dict(baseline=PLAIN, all=tof.FusionConfig(), broken=tof.FusionConfig(attention_backend="sdpa"))
    return [Variant(name, with_fusion(SETTINGS, fusion)) for name, fusion in fusions.items()]


def test_comparison_is_interleaved_restored_and_shows_a_slowdown(monkeypatch, capsys):
    real_probe = comparison.probe

    def failing_probe(trainer, *args, **kwargs):
        if trainer.settings.fusion.attention_backend == "sdpa":
            raise RuntimeError("no such kernel here\nsecond line")
        return real_probe(trainer, *args, **kwargs)

    monkeypatch.setattr(comparison, "probe", failing_probe)
    monkeypatch.setattr(clocks, "time", SlowTrainer)
    variants = some_variants()
    result = comparison.compare(SLOW, SETTINGS.having(num_steps=6), variants=variants)
    baseline, fused, broken = result["variants"]
    assert broken["reason"] == "RuntimeError: no such kernel here" and not broken["measured"]
    assert fused["speedup"] == pytest.approx(0.8, rel=1e-3)
    assert fused["batch_time_reduction_percent"] == pytest.approx(-25, rel=1e-3)
    turns = SlowTrainer.turns[:-2]  # the last two, as they are long, are the baseline's, timed by sub-layer
    last = [f.enable_triangle_fusion for f in turns[-8:]]
    assert last == [False, True, True, False, False, True, True, False]
    fresh = tof.Trainer(tof.PROGRAM, with_fusion(SETTINGS, PLAIN), CPU).model.state_dict()
    for variant in variants[:2]:
        state = variant.trainer.model.state_dict()
        assert all(torch.equal(state[name], fresh[name]) for name in fresh)
    assert baseline["first_loss"] == pytest.approx(fused["first_loss"], rel=1e-5)
    assert baseline["touched_share"] is None and 0 < fused["touched_share"] < 1
    assert {"msa_row_attention", "triangle_mult_outgoing"} < set(fused["touched_sublayers"])
    assert not {"rest", "outer_product_mean", "pair_transition"} & set(fused["touched_sublayers"])
    assert fused["amdahl_reached"] == pytest.approx(-0.25 / fused["touched_share"], rel=1e-3)
    assert cells(broken, baseline)[1].startswith("not measured: RuntimeError")
    print_details(result)
    out = capsys.readouterr().out
    assert "(a slowdown)" in out and "nominal 80.0%" in out
    assert [line.split(":")[0] for line in out.splitlines()[-4:]] == [
        "Training speed", "Memory reduction", "Batch time improvement", "Kernel reduction"]


@pytest.mark.parametrize("values", [{}, dict(use_amp=True, amp_dtype="float16"), dict(
    use_amp=True, enable_master_weights=True), dict(enable_activation_checkpointing=True, dropout=0.1)])
def test_a_first_step_counts_as_much_as_the_third(values):
    """Nothing that only the first step makes is in its count, and nothing of the count stays."""
    settings = SETTINGS.having(**values)
    trainer = tof.Trainer(tof.PROGRAM, settings, CPU)
    batch = tof.PROGRAM.data(settings).batch(0)
    weights = [p.clone() for p in trainer.updated]
    with trainer.preserved():
        first = probe(trainer, batch)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.updated, strict=True))
    assert not any(t.any() for state in trainer.optimizer.state.values() for t in state.values())
    for _ in range(2):
        trainer.step(batch)
    third = probe(trainer, batch)
    assert first.launches > 400 and first.saved_mb > 0.2
    assert dataclasses.replace(first, timeline=None) == dataclasses.replace(third, timeline=None)


ROW_KEYS = {"name", "measured", "reason", "fusion_config", "median_batch_time", "p20_batch_time",
            "p80_batch_time", "median_forward_time", "median_backward_time", "median_optimizer_time",
            "samples_per_second", "speedup", "speedup_p20", "speedup_p80", "peak_memory_mb",
            "peak_memory_reduction_percent", "saved_activation_mb", "saved_activation_mb_by_sublayer",
            "saved_activation_reduction_percent", "launches_per_step", "launch_reduction_percent",
            "batch_time_reduction_percent", "flops_per_step", "achieved_tflops", "mfu", "first_step_time",
            "first_loss", "final_loss", "final_loss_difference"}


@pytest.mark.slow
def test_compare_fusion_from_the_command_line(tmp_path):
    names = ["baseline", "qkv_msa", "flash_attention", "triangle", "all"]
    flags = [*FLAGS, "--compare-fusion", "--variants", " ".join(names), "--num-steps", 2,
             "--profile-dir", tmp_path / "p"]
    result = run_program("tiny_openfold_v2.py", *flags)
    assert result.returncode == 0, result.stderr
    report = last_json(result)
    assert report == json.loads((tmp_path / "p/fusion_comparison_v2.json").read_text())
    assert [entry["name"].removesuffix(" alone") for entry in report["variants"]] == names
    for entry in report["variants"]:
        assert ROW_KEYS <= set(entry) and entry["measured"]
        parts = sum(entry[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer"))
        assert parts == pytest.approx(entry["median_batch_time"], rel=0.5)
    launches = [entry["launches_per_step"] for entry in report["variants"]
                if not entry["fusion_config"]["enable_flash_attention"]]
    assert launches[0] == max(launches) and len(set(launches)) > 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.slow
def test_a_compiled_row_comes_from_a_process_of_its_own(tmp_path):
    """Its baseline took turns with it there."""
    flags = [*FLAGS, "--compare-fusion", "--variants", "torch.compile", "--num-steps", 2,
             "--profile-dir", tmp_path / "p"]
    result = run_program("tiny_openfold_v2.py", *flags,
                         env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new")})
    assert result.returncode == 0, result.stderr
    baseline, compiled = last_json(result)["variants"]
    assert compiled["measured"] and ROW_KEYS <= set(compiled), compiled
    assert compiled["speedup"] == pytest.approx(
        compiled["baseline_batch_time"] / compiled["median_batch_time"])
    assert compiled["first_loss"] == pytest.approx(baseline["first_loss"], rel=1e-4)
    assert compiled["saved_activation_reduction_percent"] is not None


@pytest.mark.slow
def test_a_variant_that_does_not_compile_is_a_reason_in_its_row(tmp_path):
    flags = [*FLAGS, "--compare-fusion", "--variants", "torch.compile", "--num-steps", 2,
             "--profile-dir", tmp_path]
    result = run_program("tiny_openfold_v2.py", *flags, env={
        "CXX": "/nonexistent/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new")})
    assert result.returncode == 0, result.stderr
    compiled = last_json(result)["variants"][1]
    assert not compiled["measured"] and compiled["reason"], compiled


@pytest.mark.slow
def test_rows_are_kept_when_a_signal_ends_the_comparison(tmp_path):
    """SIGTERM after the first table: what is known is in the file, later rows say why they are not."""
    command = [sys.executable, str(ROOT / "tiny_openfold_v2.py"), *FLAGS, "--compare-fusion", "--num-steps",
               "2", "--variants", "all torch.compile", "--profile-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("all "):
            break
    for line in process.stderr:
        if "compiling" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    report = json.loads((tmp_path / "fusion_comparison_v2.json").read_text())
    assert report == last_json(out)
    assert [row["measured"] for row in report["variants"]] == [True, True, False]
    assert report["variants"][2]["reason"] == "stopped before it was measured"


def test_a_signal_before_the_first_round_leaves_no_figures(tmp_path, capsys):
    """The signal comes while the data are opened."""
    def open_source(settings):
        signal.raise_signal(signal.SIGINT)
        return tof.PROGRAM.data(settings)

    program = dataclasses.replace(tof.PROGRAM, data=open_source)
    settings = SETTINGS.having(profile_dir=str(tmp_path))
    assert comparison.compare_fusion(program, settings, picked="all cuda_graphs torch.compile") == 130
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["variants"] == []
    assert not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
