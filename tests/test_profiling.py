"""Counters against hand counts, a fair comparison."""
import json
import sys
import time

import pytest
import torch
from conftest import ROOT, last_json, run_program

import tiny_openfold_v2 as tof
from fusion_lab.measuring import comparison
from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.tables import aligned, markdown
from fusion_lab.training.files import UserError, fresh_directory, set_aside
from fusion_lab.training.flags import COMPILE_MODES

CPU = torch.device("cpu")
SMALL = dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, outer_product_dim=4, num_blocks=1,
             num_seqs=6, seq_len=16)
FLAGS = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), value)]
FLAGS += ["--batch-size", 2, "--device", "cpu", "--warmup-steps", 1]
PLAIN = tof.FusionConfig.preset(False)


def setup(fusion=PLAIN, **training):
    config, training = tof.TinyOpenFoldConfig(**SMALL), tof.TrainingConfig(batch_size=2, **training)
    trainer = tof.Trainer(config, fusion, training, CPU)
    return trainer, tof.open_source(config, training).batch(0)


# Counters


def test_layer_norm_and_linear_save_exactly_these_bytes():
    layer = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    x = torch.randn(5, 8, requires_grad=True)
    names = [("norm", layer[0]), ("linear", layer[1])]
    # The norm keeps its input and a mean and a factor per row; the linear layer keeps its input.
    saved = saved_activations(layer, names, lambda: layer(x).sum())
    assert saved == {"norm": 4 * (40 + 5 + 5), "linear": 4 * 40}


def test_a_transition_launches_exactly_these_operations():
    block = tof.FusedEvoformerBlock(tof.TinyOpenFoldConfig(**SMALL))
    pair = torch.randn(1, 3, 3, 16)
    with OpCounter() as counter:
        block.pair_transition(pair)
    assert counter.launches == 4  # layer norm, linear, relu, linear


def test_saved_activations_of_a_transition_within_one_percent_of_a_hand_count():
    trainer, batch = setup()
    saved = probe(trainer, batch)["saved"]
    pairs, c = 2 * 16 * 16, 16
    # Norm: input, mean, factor. linear1: the norm's output. relu: its output, which linear2 keeps as well.
    by_hand = 4 * pairs * (c + 2 + c + 4 * c)
    assert saved["pair_transition"] == pytest.approx(by_hand, rel=0.01)


def test_nothing_is_saved_by_a_fusion_that_saves_nothing():
    trainer, batch = setup()
    packed, _ = setup(tof.FusionConfig(**{**vars(PLAIN), "enable_qkv_fusion_msa": True}))
    before, after = (sum(probe(t, batch)["saved"].values()) for t in (trainer, packed))
    assert after == pytest.approx(before, rel=0.002)
    assert probe(packed, batch)["launches"] < probe(trainer, batch)["launches"]


def test_range_sums_leave_out_what_is_nested():
    ticks = iter([0, 1, 4, 10])
    sums = RangeSums(lambda: next(ticks))
    sums.enter("outer")
    sums.enter("inner")
    sums.leave()
    sums.leave()
    assert sums.sums == {"inner": 3, "outer": 7}


def test_hooks_close_a_range_that_an_exception_leaves():
    layer, names = torch.nn.Linear(2, 2), []
    with pytest.raises(RuntimeError), ranges([("layer", layer)], names.append, names.pop):
        layer(torch.zeros(3, 3))
    assert names == []


# The comparison


def test_variants_come_from_the_config_and_the_baseline_is_first():
    variants = comparison.comparison_variants(
        tof.TinyOpenFoldConfig(), tof.FusionConfig(), tof.TrainingConfig(), CPU)
    names = [v.name for v in variants]
    assert names[0] == "baseline" and {"qkv_msa alone", "all", "all + torch.compile"} <= set(names)
    assert len(set(map(str, (v.fusion for v in variants)))) == len(variants)
    for name in comparison.switches(True) + comparison.switches(False):
        assert "combo" in name or any(getattr(v.fusion, name) for v in variants if v.name.endswith("alone"))
        assert any(getattr(v.fusion, name) for v in variants if v.name.startswith("+") or v.name == "all")
    top = next(v for v in variants if v.name == "+ transition").fusion  # what cannot run on CPU is left out
    assert top.enable_projection_fusion and top.enable_torch_compile
    assert not top.enable_cuda_graphs and not top.enable_master_weights
    for given in (tof.FusionConfig(enable_flash_attention=False),
                  *(tof.FusionConfig(enable_torch_compile=True, torch_compile_mode=mode)
                    for mode in COMPILE_MODES)):
        variants = comparison.comparison_variants(
            tof.TinyOpenFoldConfig(), given, tof.TrainingConfig(), CPU)
        assert any(v.fusion == given for v in variants)
        assert not any(v.fusion.idle(False, False, 64) for v in variants if v.name == "+ projection")
    everything = tof.FusionConfig.preset(True)  # some of it idle on CPU: the user's own row is still measured
    variants = comparison.comparison_variants(
        tof.TinyOpenFoldConfig(), everything, tof.TrainingConfig(), CPU)
    assert [v.fusion for v in variants if v.name == "as given"] == [everything]
    assert len({str(v.fusion) for v in comparison.combination_variants()}) == 16


def test_idle_switches_are_named_and_only_the_users_own_are_measured():
    everything = tof.FusionConfig.preset(True)
    assert len(everything.idle(use_amp=False, on_gpu=False, seq_len=256)) == 3
    assert everything.idle(use_amp=True, on_gpu=True, seq_len=64) == []
    odd = tof.FusionConfig(enable_flash_attention=False, attention_backend="math",
                           torch_compile_mode="max-autotune")
    assert len(odd.idle(use_amp=False, on_gpu=True, seq_len=64)) == 2
    odd = tof.FusionConfig(enable_opm_fusion=False, enable_master_weights=True)
    assert odd.beside(["enable_torch_compile"]) == ["--disable-opm-fusion", "--enable-master-weights"]
    assert everything.idle(use_amp=True, on_gpu=True, seq_len=256) == [
        "combo kernels cost time above 128 residues"]
    trainer, batch = setup(PLAIN)
    for name, measured in (("as given", True), ("+ master_weights", False)):
        variant = comparison.Variant(name, tof.FusionConfig(enable_master_weights=True))
        comparison.measure_alone(variant, trainer.model.config, trainer.training, CPU, batch)
        assert (variant.found is not None) == measured and (variant.reason is None) == measured


class SlowTrainer(tof.Trainer):
    """A step with the triangle fusion takes 30 ms more, and notes whose turn it is."""
    turns = []

    def step(self, batch, mark=lambda: None):
        SlowTrainer.turns.append(self.model.fusion)
        if self.model.fusion.enable_triangle_fusion:
            time.sleep(0.03)
        return super().step(batch, mark)


def some_variants():
    fusions = dict(baseline=PLAIN, all=tof.FusionConfig(), broken=tof.FusionConfig(attention_backend="sdpa"))
    return [comparison.Variant(name, fusion) for name, fusion in fusions.items()]


def test_comparison_is_interleaved_restored_and_shows_a_slowdown(monkeypatch, capsys):
    monkeypatch.setattr(comparison, "Trainer", SlowTrainer)
    real_probe = comparison.probe

    def failing_probe(trainer, batch):
        if trainer.model.fusion.attention_backend == "sdpa":
            raise RuntimeError("no such kernel here\nsecond line")
        return real_probe(trainer, batch)

    monkeypatch.setattr(comparison, "probe", failing_probe)
    config = tof.TinyOpenFoldConfig(**SMALL)
    training = tof.TrainingConfig(batch_size=2, num_steps=4, device="cpu", warmup_steps=1)
    variants = some_variants()
    result = comparison.compare(config, tof.FusionConfig(), training, variants=variants)
    baseline, fused, broken = result["variants"]
    assert broken["reason"] == "RuntimeError: no such kernel here" and not broken["measured"]
    assert fused["speedup"] < 1 and fused["batch_time_reduction_percent"] < 0
    assert fused["median_batch_time"] > baseline["median_batch_time"] + 0.02
    last = [f.enable_triangle_fusion for f in SlowTrainer.turns[-8:]]
    assert last == [False, True, True, False, False, True, True, False]
    fresh = tof.Trainer(config, PLAIN, training, CPU).model.state_dict()
    for variant in variants[:2]:
        state = variant.trainer.model.state_dict()
        assert all(torch.equal(state[name], fresh[name]) for name in fresh)
    assert baseline["first_loss"] == pytest.approx(fused["first_loss"], rel=1e-5)
    comparison.print_comparison(result)
    out = capsys.readouterr().out
    assert "(a slowdown)" in out and "not measured: RuntimeError" in out and "nominal 80.0%" in out
    assert [line.split(":")[0] for line in out.splitlines()[-4:]] == [
        "Training speed", "Memory reduction", "Batch time improvement", "Kernel reduction"]


def test_baseline_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(comparison, "probe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        comparison.compare(tof.TinyOpenFoldConfig(**SMALL), PLAIN, tof.TrainingConfig(device="cpu"),
                                  variants=some_variants())


def test_switch_effects():
    names = comparison.FOUR
    results = []
    for v in comparison.combination_variants():
        factor = 0.5 if v.fusion.enable_flash_attention else 1.0
        results.append(dict(measured=True, fusion_config=vars(v.fusion), median_batch_time=factor,
                            saved_activation_mb=10 * factor))
    effects = comparison.switch_effects(results)
    assert effects["enable_flash_attention"] == dict(speedup=pytest.approx(2.0), smallest=2.0, largest=2.0,
                                                     saved_activation_mb=5.0)
    assert all(effects[name]["speedup"] == pytest.approx(1.0) for name in names if "flash" not in name)


ROW_KEYS = {"name", "measured", "reason", "fusion_config", "median_batch_time", "p20_batch_time",
            "p80_batch_time", "median_forward_time", "median_backward_time", "median_optimizer_time",
            "samples_per_second", "speedup", "peak_memory_mb", "peak_memory_reduction_percent",
            "saved_activation_mb",
            "saved_activation_reduction_percent", "launches_per_step", "launch_reduction_percent",
            "flops_per_step", "achieved_tflops", "mfu", "first_step_time"}


def test_compare_fusion_combinations_from_the_command_line(tmp_path):
    flags = [*FLAGS, "--compare-fusion", "--combinations", "--num-steps", 2, "--profile-dir", tmp_path]
    result = run_program("tiny_openfold_v2.py", *flags)
    assert result.returncode == 0, result.stderr
    report = last_json(result)
    assert report == json.loads((tmp_path / "fusion_comparison_v2.json").read_text())
    assert len(report["variants"]) == 16 and set(report["switch_effects"]) == set(comparison.FOUR)
    for entry in report["variants"]:
        assert ROW_KEYS <= set(entry) and entry["measured"]
        parts = sum(entry[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer"))
        assert parts == pytest.approx(entry["median_batch_time"], rel=0.5)
    launches = [entry["launches_per_step"] for entry in report["variants"]
                if not entry["fusion_config"]["enable_flash_attention"]]
    assert launches[0] == max(launches) and len(set(launches)) > 1


def test_benchmark_tables_are_made_from_results_and_tell_disagreement():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import measure_fusion
    training = tof.TrainingConfig(batch_size=2, num_steps=1, device="cpu", warmup_steps=1)
    part = comparison.compare(tof.TinyOpenFoldConfig(**SMALL), PLAIN, training,
                                     variants=some_variants()[:2])
    launches = {r["name"]: r["launches_per_step"] for r in part["variants"]}
    peaks = {r["name"]: r["peak_memory_mb"] for r in part["variants"]}
    part |= dict(plain_profiler_launches=launches, lone_run_peak_mb={**peaks, "all": 2 * peaks["all"]})
    assert [row["verdict"] for row in measure_fusion.agreement(part)] == ["agree", "DISAGREE"]
    lines = measure_fusion.tables(dict(command="x", timestamp="y", roofline={}, compare={"B2 S16 N6": part,
                                       "B9 S9 N9": dict(error="first\nout of memory")}))
    assert any(line.startswith("| baseline |") for line in lines) and "failed: out of memory" in lines


# Command line and files


def test_directories_are_refused_or_set_aside(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "result").write_text("old")
    with pytest.raises(UserError, match="--force"):
        fresh_directory(full, named=True, force=False)
    fresh_directory(full, named=True, force=True)
    assert (full / "result").exists()
    fresh_directory(full, named=False, force=False)
    assert list(full.iterdir()) == [] and len(list(tmp_path.glob("full.old-*/result"))) == 1
    for _ in range(2):
        (tmp_path / "file").write_text("x")
        set_aside(tmp_path / "file")
    assert len(list(tmp_path.glob("file.old-*"))) == 2


def test_tables():
    rows = [["name", "a"], ["long name", "1"], ["short", "a row that overhangs"]]
    assert aligned(rows)[1] == "long name  1" and markdown(rows)[1] == "|---|---|"
    assert aligned([["n", "a", "b"], ["x", "the reason"]])[1] == "x  the reason"
