"""Counters against hand counts, attribution on a hand-made trace, a fair comparison, real sessions."""
import json
import sys
import time

import pytest
import torch
from conftest import ROOT, last_json, run_program

import tiny_openfold_v2 as tof
from fusion_lab.measuring import comparison, predictions, roofline
from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.tables import aligned, markdown
from fusion_lab.profiler import report
from fusion_lab.profiler.session import operations_by_sublayer
from fusion_lab.profiler.trace import RECOMPUTE, Ranges, TraceAnalysis, kind, own_times, read_trace
from fusion_lab.training.files import UserError, exit_code, fresh_directory, set_aside
from fusion_lab.training.flags import COMPILE_MODES
from run_pytorch_profiler import run

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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_operations_by_sublayer_add_up_to_all(checkpointing):
    trainer, batch = setup(tof.FusionConfig(enable_activation_checkpointing=checkpointing))
    for _ in range(2):
        trainer.step(batch)
    counts = operations_by_sublayer(trainer, batch)
    assert sum(counts.values()) == probe(trainer, batch)["launches"] and min(counts.values()) >= 0
    directions = ("forward", "backward", RECOMPUTE)[:2 + checkpointing]
    assert {(name, d) for name in tof.SUBLAYERS for d in directions} <= set(counts)


def test_hooks_close_a_range_that_an_exception_leaves():
    layer, names = torch.nn.Linear(2, 2), []
    with pytest.raises(RuntimeError), ranges([("layer", layer)], names.append, names.pop):
        layer(torch.zeros(3, 3))
    assert names == []


# Attribution, on a GPU trace made by hand


def gpu_trace():
    """Two steps; autograd's thread is 2. Every kernel runs long after its launch, out of its range's time."""
    events = []

    def add(cat, name, thread, start, length, **arguments):
        events.append(dict(ph="X", cat=cat, name=name, tid=thread, ts=start, dur=length, args=arguments))

    for step in range(2):
        t = 1000.0 * step
        add("user_annotation", "forward", 1, t, 100.0)
        add("user_annotation", "pair_transition", 1, t + 10, 40.0)
        add("cpu_op", "aten::addmm", 1, t + 12, 20.0)
        add("cuda_runtime", "cudaLaunchKernel", 1, t + 14, 5.0, correlation=10 * step + 1)
        add("cuda_driver", "cuLaunchKernelEx", 1, t + 60, 5.0, correlation=10 * step + 2)
        add("user_annotation", "backward", 1, t + 100, 100.0)
        add("user_annotation", "pair_transition.backward", 2, t + 110, 50.0)
        add("cuda_runtime", "hipLaunchKernel", 2, t + 120, 5.0, correlation=10 * step + 3)
        add("kernel", "sm90_gemm", 7, t + 500, 30.0, correlation=10 * step + 1)
        add("kernel", "vectorized_elementwise_kernel", 7, t + 530, 10.0, correlation=10 * step + 2)
        add("kernel", "sm90_gemm", 7, t + 535, 60.0, correlation=10 * step + 3)
        add("gpu_memcpy", "Memcpy HtoD", 8, t + 700, 4.0, correlation=99)
        events.append(dict(ph="i", name="[memory]", tid=1, ts=t + 13,
                           args={"Bytes": 256, "Device Type": 1, "Total Allocated": 256}))
    return events


def test_kernels_belong_to_the_range_that_launched_them():
    trace = TraceAnalysis(gpu_trace(), tof.SUBLAYERS)
    table = trace.sublayer_table()
    assert trace.steps == 2 and trace.on_gpu
    forward, backward = (table["pair_transition", d] for d in ("forward", "backward"))
    assert (forward["device_us"], forward["launches"], forward["calls"]) == (30.0, 1, 1)
    assert (forward["host_us"], forward["allocated_bytes"]) == (40.0, 256)
    assert (backward["device_us"], backward["launches"]) == (60.0, 1)
    assert table["rest", "forward"]["device_us"] == 10.0 and table["rest", "forward"]["host_us"] == 60.0
    assert table["rest", "launch not recorded"]["device_us"] == 4.0
    assert trace.gpu_busy() == 30 + 5 + 60 + 4  # two kernels overlap by 5
    gemm = trace.kernel_table()[0]
    assert (gemm["name"], gemm["calls"], gemm["self_us"], gemm["launches"]) == ("sm90_gemm", 2, 90.0, 2)
    assert gemm["allocated_bytes"] == 256


def test_forward_within_backward_is_recomputation():
    events = gpu_trace()
    for event in events:
        if event["name"] == "pair_transition":
            event["ts"] += 100
    assert ("pair_transition", RECOMPUTE) in TraceAnalysis(events, tof.SUBLAYERS).sublayer_table()


def test_nested_ranges_and_own_times():
    spans = [dict(tid=1, ts=0, dur=10, name="a"), dict(tid=1, ts=2, dur=3, name="b")]
    found = Ranges(spans)
    assert [found.find(1, t) for t in (0, 2, 4.9, 5, 9.9, 10, -1)] == ["a", "b", "b", "a", "a", None, None]
    assert found.find(2, 1) is None and own_times(spans) == {0: 7, 1: 3}


def test_kinds_of_kernels():
    names = {"sm90_xmma_gemm_bf16": "matrix product", "fmha_cutlassF_f32_aligned": "attention",
             "aten::view": "view", "void at::native::softmax_warp_forward": "softmax", "Memcpy DtoD": "copy",
             "vectorized_layer_norm_kernel": "normalisation", "triton_poi_fused_mul_3": "elementwise",
             "multi_tensor_apply_kernel<AdamW>": "optimizer", "aten::resolve_conj": "view",
             "vectorized_elementwise_kernel<4, sigmoid>": "elementwise", "triton_red_fused_sum": "reduction",
             "aten::item": "other", "torch::autograd::AccumulateGrad": "autograd's own",
             "CompiledFunctionBackward": "compiled code"}
    assert {name: kind(name) for name in names} == names


@pytest.mark.parametrize("busy, verdict", [(0.002, "launch-bound"), (0.007, "partly launch-bound"),
                                           (0.0095, "not launch-bound")])
def test_launch_verdict(busy, verdict):
    result = report.launch_arithmetic(1000, 0.010, busy)
    assert result["verdict"] == verdict and "one comes every 10.0 µs" in result["text"]
    assert f"runs {1000 * busy:.1f} µs" in result["text"]


@pytest.mark.parametrize("without_work, verdict", [(0.006, "launch-bound"), (0.004, "not launch-bound"),
                                                   (None, "unknown")])
def test_launch_verdict_on_cpu(without_work, verdict):
    assert report.launch_arithmetic(1000, 0.010, host_s=without_work)["verdict"] == verdict


def test_what_bounds_a_sublayer():
    times = dict(compute=2.0, memory=1.0, launch=3.0)
    assert roofline.bound(times, 2.5, on_gpu=True) == "launch"  # the host takes longer than the kernels
    assert roofline.bound(times, 3.5, on_gpu=True) == "compute"
    assert roofline.bound(times, 3.5, on_gpu=False) == "launch"


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


# Sessions


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    directory = tmp_path_factory.mktemp("session") / "out"
    result = run_program("run_pytorch_profiler.py", *FLAGS, "--profile-steps", 2, "--roofline", "--seq-lens",
                         "8 16", "--profile-dir", directory)
    assert result.returncode == 0, result.stderr
    return directory, last_json(result)


def test_session_writes_everything(session):
    directory, analysis = session
    assert analysis == json.loads((directory / "fusion_analysis.json").read_text())
    names = {path.name for path in directory.iterdir()}
    assert {"comprehensive_profiling_report.md", "time_by_sublayer.png", "memory_timeline.png",
            "kernel_histogram.png", analysis["trace"]} <= names
    assert len(analysis["findings"]) == 3
    report = (directory / "comprehensive_profiling_report.md").read_text()
    for heading in ("Findings", "Launch-bound?", "Time and memory by sub-layer", "Top 20", "Roofline"):
        assert heading in report
    assert all(text in report for text in analysis["findings"])


def test_trace_has_ranges_of_all_sublayers_in_both_directions(session):
    directory, analysis = session
    events = read_trace(directory / analysis["trace"])
    found = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert {*tof.SUBLAYERS, *(f"{name}.backward" for name in tof.SUBLAYERS), "forward", "backward", "data",
            "optimizer"} <= found


def test_session_attributes_time_and_operations(session):
    analysis = session[1]
    table = {(e["name"], e["direction"]): e for e in analysis["sublayers"]}
    assert {(n, d) for n in tof.SUBLAYERS for d in ("forward", "backward")} <= set(table)
    assert sum(e["share"] for e in table.values()) == pytest.approx(1.0)
    assert sum(e["launches"] or 0 for e in table.values()) == analysis["launches_per_step"]
    assert analysis["coverage"]["unattributed"] == pytest.approx(0, abs=0.01)
    assert all(e["calls"] == 1 and e["self_us"] > 0 for (name, _), e in table.items() if name != "rest")
    assert sum(e["share"] for e in analysis["kernels"]) == pytest.approx(1.0)
    assert sum(e["saved_activation_mb"] or 0 for e in table.values()) == pytest.approx(
        sum(analysis["saved_activation_mb"].values()))


def test_scaling_and_roofline_of_a_session(session):
    analysis = session[1]
    assert [p["seq_len"] for p in analysis["scaling"]["points"]] == [8, 8, 16, 16]
    assert 1 < analysis["scaling"]["exponents"]["plain"]["saved_activation_mb"] < 3
    assert [e["name"] for e in analysis["roofline"]] == list(tof.SUBLAYERS)
    assert all(e["measured_s"] > 0 for e in analysis["roofline"])
    assert {e["bound"] for e in analysis["roofline"]} <= {"compute", "memory", "launch"}


def test_a_second_session_in_a_directory_is_of_its_own_trace(tmp_path, capsys):
    (tmp_path / "aaa.1.pt.trace.json").write_text(json.dumps(dict(traceEvents=[])))  # an earlier one's
    flags = "--num-blocks 2 --batch-size 1 --seq-len 4 --num-seqs 2 --warmup-steps 1 --profile-steps 1"
    assert run([*flags.split(), "--profile-dir", str(tmp_path), "--force"]) == 0
    analysis = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert analysis["trace"] != "aaa.1.pt.trace.json"
    assert {e["calls"] for e in analysis["sublayers"] if e["name"] == "pair_transition"} == {2}
    assert len(analysis["findings"]) == 3


def test_two_sessions_side_by_side(session, tmp_path):
    before = session[1]
    after = json.loads(json.dumps(before))
    after["sublayers"][0]["total_us"] *= 2
    after["kernels"] = after["kernels"][1:]
    comparison = report.compare_sessions(before, after, "earlier")
    first = f"{before['sublayers'][0]['name']}.{before['sublayers'][0]['direction']}"
    assert {e["name"]: e["ratio"] for e in comparison["sublayers"]}[first] == pytest.approx(2.0)
    gone = next(e for e in comparison["kernels"] if e["name"] == before["kernels"][0]["name"])
    assert gone["after_us"] is None and gone["ratio"] is None
    assert comparison["differences"] == []
    assert any("| gone |" in line for line in report.comparison_lines(comparison))
    with pytest.raises(UserError, match="No such file"):
        report.read_analysis(tmp_path)


def test_exponent_of_a_cubic_is_three():
    points = [dict(seq_len=s, peak_memory_mb=s ** 3, saved_activation_mb=None) for s in (8, 16, 32)]
    fitted = predictions.exponents(points)
    assert fitted["peak_memory_mb"] == pytest.approx(3) == fitted["last_peak_memory_mb"]
    assert fitted["saved_activation_mb"] is None


# Roofline and predictions


@pytest.mark.parametrize("sizes", [{}, dict(num_seqs=3, seq_len=9, msa_dim=8, outer_product_dim=6)])
def test_flop_formulas_agree_with_the_flop_counter(sizes):
    config = tof.TinyOpenFoldConfig(**{**SMALL, **sizes})
    formula, counted = roofline.forward_flops(config, 2), roofline.counted_flops(config, 2)
    assert {name: (formula[name], 2 * formula[name]) for name in counted} == counted
    trainer = tof.Trainer(config, PLAIN, tof.TrainingConfig(batch_size=2), CPU)
    batch = tof.open_source(config, trainer.training).batch(0)
    assert probe(trainer, batch)["flops"] == 3 * sum(formula.values())


def test_minimal_bytes_at_the_sizes_of_alphafold():
    """Where N c_m = S c_z, a pass over either tensor is as long: passes per sub-layer, counted by hand."""
    config = tof.TinyOpenFoldConfig(msa_dim=256, pair_dim=128, msa_heads=8, num_seqs=128, seq_len=256)
    one_pass = 256 * 256 * 128 * 2
    sizes = roofline.minimal_bytes(config, 1, 2)
    passes = {name: [size / one_pass for size in both] for name, both in sizes.items()}
    assert passes["triangle_mult_outgoing"] == [9, 15] and passes["pair_transition"] == [2, 3]
    assert passes["msa_column_attention"] == [11, 18]
    assert passes["triangle_attn_starting"] == pytest.approx([11, 18], rel=0.01)
    assert 2.4 <= passes["outer_product_mean"][0] <= 3.5 and 3 <= passes["outer_product_mean"][1] <= 6


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_simulated_memory_agrees_with_the_measured_one(amp, fused):
    trainer, batch = setup(tof.FusionConfig() if fused else PLAIN, use_amp=amp)
    for _ in range(2):
        trainer.step(batch)
    found = probe(trainer, batch)
    peak, saved = roofline.simulate_memory(trainer.model.config, trainer.model.fusion, trainer.training, CPU)
    assert peak == pytest.approx(found["peak"], rel=0.02)
    assert saved == pytest.approx(sum(found["saved"].values()), rel=0.01)


def test_prediction_checks_cover_six_shapes_at_least():
    shapes = predictions.prediction_shapes(tof.TinyOpenFoldConfig(), tof.TrainingConfig())
    assert len(set(shapes)) >= 6
    one = predictions.prediction_shapes(tof.TinyOpenFoldConfig(), tof.TrainingConfig(batch_size=1))
    assert len(set(one)) >= 6
    shortest = predictions.prediction_shapes(tof.TinyOpenFoldConfig(seq_len=1, num_seqs=1),
                                             tof.TrainingConfig(batch_size=1))
    assert min(min(shape) for shape in shortest) == 1


# Command line and files


@pytest.mark.parametrize("flags, message", [
    (["--profile-steps", "0"], "--profile-steps"), (["--seq-lens", "a"], "--seq-lens"),
    (["--validate-setup"], "--validate-setup"), (["--compare-with", "nowhere"], "nowhere"),
    (["--predict", "1", "2"], "--predict"), (["--baseline", "--ablation"], "--ablation"),
    (["--predict", "1", "8", "4", "--profile-dir", "x"], "--profile-dir: not with --predict"),
    (["--ablation", "--compare-with", "x"], "--compare-with: not with --ablation")])
def test_wrong_use_is_one_line_and_exit_two(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = exit_code(run, flags, "run_pytorch_profiler.py")
    except SystemExit as exit_:
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not any(tmp_path.iterdir())


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
