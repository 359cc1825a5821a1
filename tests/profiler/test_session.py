"""The PyTorch profiler session, from the command line to its files, for any program."""
import json
import re
import shutil

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.ranges import RECOMPUTE
from fusion_lab.measuring.variants import fusion_named, with_fusion
from fusion_lab.profiler import report
from fusion_lab.profiler.command import run
from fusion_lab.profiler.session import ablation_names, run_session
from fusion_lab.training.errors import UserError, exit_code
from tests.support import code_of, last_json, run_program
from tests.tiny import flags_of, settings_of

CPU = torch.device("cpu")
PROGRAM = tof.PROGRAM
SIZES = dict(num_seqs=8, seq_len=24, msa_dim=16, pair_dim=16)
FLAGS = flags_of(**SIZES)


def given(fused=True, **values):
    settings = settings_of(**SIZES)
    fusion = PROGRAM.fusion_config() if fused else PROGRAM.fusion_config.baseline()
    return with_fusion(settings, fusion).having(**values)


def test_a_trace_that_is_not_written_costs_no_result_but_is_no_success(tmp_path, monkeypatch, capsys):
    """PyTorch logs it and returns, as on a full disk."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    settings = given(enable_pytorch_profiler=True, num_steps=3, profile_dir=str(tmp_path),
                     save_checkpoint=str(tmp_path / "run.pt"))
    assert tof.train(PROGRAM, settings) == 1 and "is the disk full?" in capsys.readouterr().out
    assert {"run.pt", "performance_summary_v2.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("checkpointing", [None, "selective", "activation"])
def test_operations_by_sublayer_add_up_to_all(checkpointing):
    """What a sub-layer makes again by itself is a part of its backward."""
    which = {f"enable_{checkpointing}_checkpointing": True} if checkpointing else {}
    settings = given(enable_pytorch_profiler=True, **which)
    found = probe(PROGRAM.trainer(PROGRAM, settings, CPU), PROGRAM.data(settings).batch(0))
    counts = found.launches_by_range
    assert sum(counts.values()) == found.launches
    directions = ("forward", "backward", *[RECOMPUTE] * (checkpointing == "activation"))
    assert {(name, d) for name in PROGRAM.model.SUBLAYERS for d in directions} <= set(counts)


# Sessions


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    directory = tmp_path_factory.mktemp("session") / "out"
    result = run_program("run_pytorch_profiler.py", *FLAGS, "--profile-steps", 2, "--num-steps", 11,
                         "--roofline", "--profile-dir", directory)
    assert result.returncode == 0, result.stderr
    assert "USDT" not in result.stdout + result.stderr  # of torch's profiler, each time that it starts
    return directory, last_json(result), result.stdout


def test_a_session_is_a_training_run_and_a_report(session):
    directory, result, output = session
    assert result == report.read_analysis(directory) and result["mode"] == "pytorch_profiler"
    *_, finding, to_copy, _ = output.splitlines()  # before the JSON, for people
    assert finding.endswith(result["findings"][-1]) and to_copy.startswith("To copy")
    summary = json.loads((directory / "performance_summary_v2.json").read_text())["performance_summary"]
    assert summary["step_times"] == result["step"]["step_times"] and len(summary["step_times"]) == 8
    assert summary["median_batch_time"] == pytest.approx(result["step"]["untraced_ms"] / 1e3)
    text = (directory / report.REPORT).read_text()
    assert all(finding in text for finding in result["findings"]) and "## Roofline" in text
    share = sum(e["share"] for e in result["sublayers"] if e["name"].startswith("triangle_mult_"))
    assert (f"| triangle-fusion | triangle_mult_outgoing, triangle_mult_incoming | {100 * share:.1f}% | "
            f"{1 / (1 - share):.2f}x |") in re.sub(" +", " ", text)
    pictures = {"time_by_sublayer.png", "memory_timeline.png"}
    assert all(f"]({name})" in text and (directory / name).exists() for name in pictures)


def test_a_session_attributes_time(session):
    """Counts by sub-layer: tests/programs/test_printed_figures.py."""
    result = session[1]
    table = {(e["name"], e["direction"]): e for e in result["sublayers"]}
    assert {(n, d) for n in PROGRAM.model.SUBLAYERS for d in ("forward", "backward")} <= set(table)
    assert result["profile_steps"] == 2  # the last ones
    assert result["coverage"]["unattributed"] == pytest.approx(0, abs=0.01)
    assert result["coverage"]["sublayers"] > 0.2
    assert all(e["calls"] == 1 and e["total_us"] > 0 for (name, _), e in table.items() if name != "rest")
    total = sum(e["total_us"] for e in table.values())
    assert 0.3 < total / (1e3 * result["step"]["untraced_ms"]) < 3
    assert sum(e["share"] for e in result["kernels"]) == pytest.approx(1.0)


def test_the_roofline_of_a_session(session):
    result = session[1]
    assert [e["name"] for e in result["roofline"]] == list(PROGRAM.model.SUBLAYERS)
    assert all(e["bound"] or "ceilings" in e["note"] for e in result["roofline"])
    for e in result["roofline"]:  # forward and backward
        assert e["measured_s"] == pytest.approx(sum(
            other["total_us"] for other in result["sublayers"] if other["name"] == e["name"]) / 1e6)


@pytest.mark.parametrize("code, ends", [(130, 130), (0, 1)])
def test_a_session_that_ends_before_its_trace_is_no_success(code, ends, tmp_path):
    """By a signal, or since nothing better came (--early-stopping)."""
    with pytest.raises(UserError, match="before the trace") as ended:
        run_session(PROGRAM, given(), str(tmp_path), lambda program, settings: code)
    assert ended.value.code == ends


def test_a_session_that_a_signal_ended_has_a_report_of_what_there_is_and_the_signals_code(session, tmp_path):
    shutil.copytree(session[0], tmp_path / "s")
    (tmp_path / "s" / report.REPORT).unlink()
    with pytest.raises(UserError) as ended:
        run_session(PROGRAM, given(), str(tmp_path / "s"), lambda program, settings: 143)
    assert ended.value.code == 143 and (tmp_path / "s" / report.REPORT).exists()


@pytest.mark.slow
def test_an_ablation_is_a_comparison_and_a_session_of_each_row(tmp_path, capsys):
    assert run([*FLAGS, "--num-steps", "2", "--profile-dir", str(tmp_path), "--compare-v1"]) == 0
    result, last = last_json(out := capsys.readouterr().out), json.loads(out.splitlines()[-1])
    assert last["variants"] == [dict(name=row["name"], speedup=row["speedup"]) for row in result["variants"]]
    assert [row["name"] for row in result["variants"]] == list(result["folders"]) == ["baseline", "given"]
    against = report.read_analysis(tmp_path / "given")["compared_with"]
    assert against["before"] == str(tmp_path / "baseline")
    assert "enable_flash_attention False -> True" in against["differences"]
    assert "## Against" in (tmp_path / "given" / report.REPORT).read_text()
    for name in ("baseline.log", "given.log", "ablation_summary.md", "ablation_summary.png"):
        assert (tmp_path / name).exists()


def test_an_ablation_has_every_fusion_alone_and_left_out():
    names, usual = ablation_names(PROGRAM), PROGRAM.fusion_config()
    on = [name for name in usual.names() if getattr(usual, name)]
    assert len({fusion_named(name, usual) for name in names}) == 3 + 2 * len(on)


# Command line


@pytest.mark.parametrize("flags, message", [
    (["--profile-steps", "0"], "--profile-steps"), (["--seq-len", "300000"], "--seq-len 300000"),
    (["--validate-setup"], "--validate-setup: belongs to tiny_openfold_v2.py"),
    (["--compare-with", "nowhere"], "nowhere"),
    (["--baseline", "--ablation"], "--ablation"), (["--program", "nowhere.py"], "nowhere.py"),
    (["--ablation", "--compare-with", "x"], "--compare-with: not with --ablation")])
def test_wrong_use_is_one_line_and_exit_two(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code = code_of(lambda given: exit_code(run, given, "run_pytorch_profiler.py"), *flags)
    err = capsys.readouterr().err
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not any(tmp_path.iterdir())
