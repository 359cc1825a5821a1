"""The PyTorch profiler session: traces, findings, reports, roofline, for any program."""
import json
import os
import stat
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import attribution, roofline, tables
from fusion_lab.measuring.attribution import medians, operations_in_a_step, share_samples
from fusion_lab.measuring.comparison.variants import with_fusion
from fusion_lab.measuring.probe import Findings, probe
from fusion_lab.measuring.trace import RECOMPUTE, read_trace, split_name
from fusion_lab.profiler import report, several
from fusion_lab.profiler import session as session_module
from fusion_lab.profiler.session import analyse, run_session
from fusion_lab.training.files import exit_code
from fusion_lab.training.options import option
from run_pytorch_profiler import run
from tests.support import ROOT, last_json, run_program

CPU = torch.device("cpu")
PROGRAM = tof.PROGRAM
SIZES = dict(num_blocks=1, num_seqs=8, seq_len=24, msa_dim=16, pair_dim=16, outer_product_dim=4, batch_size=2,
             warmup_steps=1, device="cpu")
FLAGS = [word for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]


def given(fused=True, **values):
    settings = PROGRAM.settings(**SIZES)
    fusion = PROGRAM.fusion_config() if fused else PROGRAM.fusion_config.preset(False)
    return with_fusion(settings, fusion).having(**values)


def two_steps_later(settings):
    """A trainer whose optimizer has its state, and a batch."""
    trainer, batch = PROGRAM.trainer(PROGRAM, settings, CPU), PROGRAM.data(settings).batch(0)
    for _ in range(2):
        trainer.step(batch)
    return trainer, batch


@pytest.mark.parametrize("checkpointing", [None, "selective", "activation"])
def test_operations_by_sublayer_add_up_to_all(checkpointing):
    """What a sub-layer makes again by itself is a part of its backward."""
    which = {f"enable_{checkpointing}_checkpointing": True} if checkpointing else {}
    trainer, batch = two_steps_later(given(**which))
    counts = operations_in_a_step(trainer, batch)
    assert sum(counts.values()) == probe(trainer, batch).launches and min(counts.values()) >= 0
    directions = ("forward", "backward", *[RECOMPUTE] * (checkpointing == "activation"))
    assert {(name, d) for name in PROGRAM.model.SUBLAYERS for d in directions} <= set(counts)


# Attribution, on a GPU trace made by hand


def gpu_trace(steps=2):
    """Two steps; autograd's thread is 2. Every kernel runs long after its launch, out of its range's time."""
    events = []

    def add(cat, name, thread, start, length, **arguments):
        events.append(dict(ph="X", cat=cat, name=name, tid=thread, ts=start, dur=length, args=arguments))

    for step in range(steps):
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


def test_names_of_sublayers_may_have_dots():
    assert split_name("mlp.up") == ("mlp.up", "forward")
    assert split_name("mlp.up.backward") == ("mlp.up", "backward")
    assert split_name(f"mlp.up.{RECOMPUTE}") == ("mlp.up", RECOMPUTE)


def test_equal_work_is_told_by_formulas_alone():
    pairs = roofline.equal_work(PROGRAM, given())
    assert set(pairs) == {("triangle_mult_outgoing", "triangle_mult_incoming"),
                          ("triangle_attn_starting", "triangle_attn_ending")}


def test_medians_and_shares_of_steps():
    samples = [{"a": 1.0, "b": 3.0}, {"a": 2.0}, {"a": 9.0, "b": 1.0}]
    assert medians(samples) == {"a": 2.0, "b": 1.0}
    assert share_samples(samples, ["a", "b"]) == [
        dict(a=0.25, b=0.75), dict(a=1.0, b=0.0), dict(a=0.9, b=0.1)]


# Sessions


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    directory = tmp_path_factory.mktemp("session") / "out"
    result = run_program("run_pytorch_profiler.py", *FLAGS, "--profile-steps", 2, "--roofline",
                         "--profile-dir", directory)
    assert result.returncode == 0, result.stderr
    return directory, last_json(result), result.stdout


OF_AN_ANALYSIS = {"mode", "timestamp", "config", "fusion_config", "training_params", "profile_steps",
                  "system_info", "trace", "time_kind", "unit", "step", "total_us", "sublayers",
                  "launches_per_step", "coverage", "kernels", "kinds", "short_kernels", "saved_activation_mb",
                  "flops_per_step", "flops_share", "memory_peak_mb", "launch", "unrecorded", "findings"}


def test_session_writes_everything(session):
    directory, result, _ = session
    assert result == report.read_analysis(directory)
    assert set(result) == OF_AN_ANALYSIS | {"ceilings", "roofline"}
    names = {path.name for path in directory.iterdir()}
    assert {"comprehensive_profiling_report.md", "time_by_sublayer.png", "memory_timeline.png",
            "kernel_histogram.png", result["trace"]} <= names
    assert len(result["findings"]) == 3 and result["launch"] is None
    text = (directory / "comprehensive_profiling_report.md").read_text()
    for heading in ("Findings", "Time and memory by sub-layer", "Top 20", "Roofline"):
        assert heading in text
    assert all(finding in text for finding in result["findings"])
    for name in names:
        assert name.endswith(".png") == (f"]({name})" in text), name


def test_findings_are_the_last_that_people_read(session):
    _, result, output = session
    lines = output.splitlines()[:-1]  # the last one is JSON, for programs
    assert [line.strip() for line in lines[-4:]] == [
        "Findings:", *(f"{i}. {text}" for i, text in enumerate(result["findings"], 1))]


def test_trace_has_ranges_of_all_sublayers_in_both_directions(session):
    directory, result, _ = session
    events = read_trace(directory / result["trace"])
    found = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    names = PROGRAM.model.SUBLAYERS
    assert {*names, *(f"{name}.backward" for name in names), "forward", "backward", "data",
            "optimizer"} <= found


def test_session_attributes_time_and_operations(session):
    result = session[1]
    table = {(e["name"], e["direction"]): e for e in result["sublayers"]}
    assert {(n, d) for n in PROGRAM.model.SUBLAYERS for d in ("forward", "backward")} <= set(table)
    assert sum(e["share"] for e in table.values()) == pytest.approx(1.0)
    assert sum(e["launches"] or 0 for e in table.values()) == result["launches_per_step"]
    assert result["coverage"]["unattributed"] == pytest.approx(0, abs=0.01)
    assert all(e["calls"] == 1 and e["self_us"] > 0 for (name, _), e in table.items() if name != "rest")
    assert sum(e["share"] for e in result["kernels"]) == pytest.approx(1.0)
    assert sum(e["saved_activation_mb"] or 0 for e in table.values()) == pytest.approx(
        sum(result["saved_activation_mb"].values()))


def test_roofline_of_a_session(session):
    result = session[1]
    assert [e["name"] for e in result["roofline"]] == list(PROGRAM.model.SUBLAYERS)
    assert all(e["measured_s"] > 0 and "note" not in e for e in result["roofline"])
    assert {e["bound"] for e in result["roofline"]} <= {"compute", "memory", "launch"}


@pytest.mark.slow
def test_a_second_session_in_a_directory_is_of_its_own_trace(tmp_path, capsys):
    (tmp_path / "aaa.1.pt.trace.json").write_text(json.dumps(dict(traceEvents=[])))  # an earlier one's
    flags = "--num-blocks 2 --batch-size 1 --seq-len 4 --num-seqs 2 --warmup-steps 1 --profile-steps 1"
    assert run([*flags.split(), "--device", "cpu", "--profile-dir", str(tmp_path), "--force"]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["trace"] != "aaa.1.pt.trace.json"
    assert {e["calls"] for e in result["sublayers"] if e["name"] == "pair_transition"} == {2}
    assert len(result["findings"]) == 3


def test_names_of_kernels_cannot_break_a_table():
    rows = report.comparison_rows([dict(name="f|<`x`>\n", before_us=1e3, after_us=2e3, ratio=2.0)], "k")
    assert tables.markdown(rows)[2] == r"| ``f\|<`x`>\n`` | 1.000 | 2.000 | 2.00 |"
    assert tables.code("`") == "`` ` ``" and tables.escaped("a<b>*[c]`\\") == r"a\<b\>\*\[c\]\`\\"


@pytest.mark.slow
def test_v1_and_ablation_in_folders_of_their_own(tmp_path, capsys):
    settings = given(num_steps=2, profile_dir=str(tmp_path))
    result = several.compare_v1(PROGRAM, settings, str(tmp_path), steps=1)
    assert set(result) == {"before", "differences", "time_kind", "step_ms", "sublayers", "kernels",
                           "interleaved", "mode", "session_step_ms"}
    assert result["step_ms"] == [1e3 * row["median_batch_time"] for row in result["interleaved"]]
    assert [row["name"] for row in result["interleaved"]] == ["baseline", "as given"]
    for name in ("v1_baseline/fusion_analysis.json", "v2/fusion_analysis.json", "v1_comparison.md"):
        assert (tmp_path / name).exists()
    assert "enable_flash_attention False -> True" in result["differences"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("Interleaved steps of both: ")


@pytest.mark.slow
def test_ablation_has_every_fusion_alone_and_left_out(tmp_path, monkeypatch, capsys):
    variants = several.ablation_variants(PROGRAM, given())
    usual = [name for name in PROGRAM.fusion_config().names() if getattr(PROGRAM.fusion_config(), name)]
    assert len(variants) == len({v.settings for v in variants}) == 3 + 2 * len(usual)
    for name in usual:
        alone = [v for v in variants if v.name.endswith(" alone") and getattr(v.settings.fusion, name)]
        without = [v for v in variants if v.name.startswith("all but ")
                   and not getattr(v.settings.fusion, name)]
        assert len(alone) == len(without) == 1
    monkeypatch.setattr(several, "ablation_variants", lambda *_: variants[:2])
    result = several.ablation(PROGRAM, given(num_steps=2), str(tmp_path), steps=1)
    assert result == json.loads((tmp_path / "ablation_summary.json").read_text())
    assert result["mode"] == "ablation" and list(result["folders"]) == [v.name for v in variants[:2]]
    for folder in result["folders"].values():
        assert {"session.log", "fusion_analysis.json"} <= set(os.listdir(tmp_path / folder))
    assert "Speed-up within noise (its 95% interval" in (tmp_path / "ablation_summary.md").read_text()
    assert (tmp_path / "ablation_summary.png").exists()


def test_a_session_on_a_gpu_from_its_trace_to_its_report(tmp_path, monkeypatch):
    """On the trace made by hand: what the CPU cannot run."""
    (tmp_path / "t.json").write_text(json.dumps(dict(traceEvents=gpu_trace(4))))
    untraced = np.full((4, 4), 0.25e-3)  # 1 ms a step, of which kernels run for 99 µs
    monkeypatch.setattr(session_module, "time_and_trace", lambda *_: (untraced, str(tmp_path / "t.json")))
    monkeypatch.setattr(attribution, "system_info", lambda _: dict(
        gpu_name="GPU|`1`", host_cpu="CPU", torch_version="2", git_commit=None))
    trainer = SimpleNamespace(program=PROGRAM, settings=given(), device=torch.device("cuda"))
    found = Findings(saved=dict(pair_transition=2 ** 20), flops=1, launches=3, peak_memory_mb=5.0)
    result, trace = analyse(trainer, None, found, str(tmp_path), 4)
    assert result.unit == "kernel" and result.total_us == 104
    assert result.times() == {"pair_transition": pytest.approx(90 / 104)}
    assert all(step["pair_transition", "backward"] == pytest.approx(60 / 104) for step in result.samples)
    assert result.launch.verdict == "launch-bound" and result.launch.busy_ms == pytest.approx(0.099)
    assert result.step["gpu_busy_ms"] == pytest.approx(0.099)
    assert result.coverage["unattributed"] == pytest.approx(4 / 104)
    assert {kind: entry["calls"] for kind, entry in result.kinds.items()} == {
        "matrix product": 2, "elementwise": 1, "copy": 1}
    assert "`pair_transition` takes most time of the 9 sub-layers: 87% (p20" in result.findings()[0]
    result.unrecorded = ["2 of 3 kernels"]
    report.write_report(str(tmp_path), result, trace)
    text = (tmp_path / report.REPORT).read_text()
    assert all(part in text for part in ("\n`` GPU|`1` ``, torch 2, ", "**Caution:** 2 of 3 kernels",
                                         "Top 20 kernels", "GPU time in the trace"))
    assert json.loads((tmp_path / report.ANALYSIS).read_text())["launch"]["verdict"] == "launch-bound"


# A new sub-layer and a new switch, which nobody told the lab about


@dataclass(frozen=True)
class MoreSwitches(tof.FusionConfig):
    """The usual switches and a new one."""
    enable_scaling: bool = option(True, "a new switch", preset=True)


class PairScale(torch.nn.Module):
    def __init__(self, channels, fused):
        super().__init__()
        self.weight, self.fused = torch.nn.Parameter(torch.eye(channels)), fused

    def forward(self, pair):
        return pair @ self.weight if self.fused else (pair.flatten(0, -2) @ self.weight).view_as(pair)


class WithPairScale(tof.TinyOpenFoldV2):
    """TinyOpenFold with one more sub-layer, the first to run."""
    SUBLAYERS = ("pair_scale", *tof.SUBLAYERS)

    def __init__(self, config, fusion):
        super().__init__(config, fusion)
        self.pair_scale = PairScale(config.pair_dim, fusion.enable_scaling)

    def embed(self, msa_tokens, target, features=None):
        msa, pair = super().embed(msa_tokens, target, features)
        return msa, self.pair_scale(pair)

    def sublayers(self):
        return [("pair_scale", self.pair_scale), *((name, getattr(block, name)) for block in self.blocks
                                                   for name in tof.SUBLAYERS)]


NEW_PROGRAM = replace(PROGRAM, model=WithPairScale, fusion_config=MoreSwitches)


@pytest.mark.slow
def test_a_new_sublayer_and_a_new_switch_walk_through_a_session(tmp_path, capsys):
    settings = NEW_PROGRAM.settings(**SIZES)
    result = run_session(NEW_PROGRAM, settings, str(tmp_path), steps=2, roofline=True)
    found = result.as_dict()
    row = next(row for row in found["roofline"] if row["name"] == "pair_scale")
    positions = SIZES["batch_size"] * SIZES["seq_len"] ** 2
    assert row["flops"] == 3 * 2 * positions * SIZES["pair_dim"] ** 2  # counted as a formula would
    assert row["minimal_bytes"] is None and row["note"] == "bytes not worked out"
    assert row["measured_s"] > 0 and row["bound"] in ("compute", "launch")
    assert found["flops_share"]["pair_scale"] > 0 and found["fusion_config"]["enable_scaling"]
    directions = {e["direction"] for e in found["sublayers"] if e["name"] == "pair_scale"}
    assert directions == {"forward", "backward"}
    text = (tmp_path / report.REPORT).read_text()
    assert "The 10 sub-layers" in text and "bytes not worked out" in text
    assert "scaling" in text.split("; on: ")[1].splitlines()[0]
    assert json.loads((tmp_path / report.ANALYSIS).read_text()) == found


def test_a_new_switch_has_a_place_in_the_ablation():
    names = {v.name for v in several.ablation_variants(NEW_PROGRAM, NEW_PROGRAM.settings(**SIZES))}
    assert {"scaling alone", "all but scaling"} <= names


# Command line


@pytest.mark.parametrize("flags, message", [
    (["--profile-steps", "0"], "--profile-steps"),
    (["--validate-setup"], "--validate-setup"), (["--compare-with", "nowhere"], "nowhere"),
    (["--baseline", "--ablation"], "--ablation"), (["--program", "nowhere.py"], "nowhere.py"),
    (["--ablation", "--compare-with", "x"], "--compare-with: not with --ablation")])
def test_wrong_use_is_one_line_and_exit_two(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = exit_code(run, flags, "run_pytorch_profiler.py")
    except SystemExit as exit_:
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not any(tmp_path.iterdir())


def test_the_program_is_an_executable_file():
    assert os.stat(ROOT / "run_pytorch_profiler.py").st_mode & stat.S_IXUSR
