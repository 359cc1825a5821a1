"""What somebody types who holds one of the documents that describe this family of examples: the READMEs of
TinyOpenFold V2 (O), TinyLlama V2 (L) and V4 (U), an article on fusion (F), a study of ProteinMPNN (M).

Everything is accepted, or refused in a line that says what does it here; and what once was different or
missing has its answer, row by row.
"""
import json
import re
import shlex

import pytest
import torch

import tiny_openfold_v2 as tof
from companions import fusion_patterns
from fusion_lab.measuring import batch_size
from fusion_lab.measuring.probe import probe
from fusion_lab.profiler import command
from fusion_lab.rocm.all_profilers import WRAPPERS, add_options
from fusion_lab.rocm.wrapper import parse as wrapper_parse
from fusion_lab.study import arguments as study
from fusion_lab.training import flags, hints
from fusion_lab.training.machine import ROOM
from fusion_lab.training.program import load_program
from tests.second_program import PROGRAM as SECOND
from tests.support import ROOT, code_of, last_json, require_shared, run_program

LLAMA, MPNN = (load_program(ROOT / "companions" / f"{name}.py") for name in ("tiny_llama", "protein_mpnn"))

# Of all documents: what is started, and with which words
TYPED = """
O openfold --batch-size 4 --seq-len 64
O openfold --validate-setup
O openfold --verify-accuracy --batch-size 4
O openfold --compare-fusion --batch-size 4 --num-steps 50
O openfold --enable-all-fusion --batch-size 4 --num-steps 50 --profile-dir ./fused
O openfold --disable-all-fusion --batch-size 4
O openfold --disable-qkv-fusion-triangle --disable-flash-attention --disable-triangle-fusion
O openfold --enable-torch-compile --torch-compile-mode max-autotune
O openfold --enable-all-fusion --torch-compile-mode max-autotune
O openfold --enable-flash-attention --seq-len 128 --enable-memory-profiling --profile-dir ./with_flash
O openfold --disable-qkv-fusion-msa --enable-pytorch-profiler
O openfold --batch-size 4 --seq-len 64 --num-steps 50 --compare-with-v1 performance_summary.json
O session --disable-all-fusion --profile-dir ./baseline_analysis
O session --ablation --batch-size 4
O study --batch-sizes "2 4 8" --seq-lens "32 64 128" --num-runs 3
O study --ablation --num-runs 3
O rocprofv3 --batch-size 4 --seq-len 64
O rocprof-sys --batch-size 4 --seq-len 64
O rocprof-sys --trace --batch-size 2 --seq-len 16
O rocprof-compute --roof-only --batch-size 4
O rocprof-compute --mode analyze --dispatch 1538
O all --quick --batch-size 4
L llama --seq-len 1024 --batch-size 4 --enable-memory-profiling --profile-dir ./flash_attention_seq1024
L llama --enable-qkv-fusion --enable-flash-attention --disable-swiglu-fusion --enable-torch-compile
L llama --use-amp --amp-dtype bfloat16 --enable-all-fusion
L llama --baseline tiny_llama_v1.py --optimized tiny_llama_v2.py --tolerance 1e-4
L llama --baseline-results v1.json --current-results v2.json --min-speedup 1.3
L llama --all-combinations
L session --batch-size 8 --profile-dir ./fusion_analysis --generate-report
L session --batch-size 8 --seq-len 256 --computational-intensity --generate-roofline
L study --models v1,v2 --batch-sizes 4,8,16,32 --seq-lengths 128,256,512 --metrics throughput,memory
L batch_size --target-memory-usage 0.8 --seq-len 128 --optimization-target throughput
L rocprofv3 --batch-size 8 --profile-kernels
L rocprofv3 --truncate-kernels
L rocprof-sys --duration 60 --output-dir ./system_profile
L rocprof-compute --batch-size 8 --seq-len 128 --detailed-analysis --optimization-hints
L rocprof-compute -n ver2 --kernel-names
L all --batch-size 8 --seq-len 128 --enable-rocm-tools --profile-dir ./complete_rocm_analysis
U rocprofv3 --stats --kernel-trace --hip-trace
U rocprofv3 --memory-trace --sys-trace
U llama --predict
M mpnn --enable-bucketing
M mpnn --data structures --design 8 --weights v_48_020.pt
M mpnn --num-layers 2 --hidden-dim 64 --neighbors 12 --batch-size 8
F patterns --patterns conv relu silu
F patterns --patterns causal --ladder
""".strip().splitlines()


def parsed(what, words):
    """Parse them as the program does; SystemExit where it refuses them."""
    programs = dict(openfold=tof.PROGRAM, llama=LLAMA, mpnn=MPNN)
    if what in programs:
        return flags.parse(flags.make_parser(programs[what]), programs[what], words)
    if what == "session":
        return command.parse(words, LLAMA)
    if what == "study":
        return study.parse(words, LLAMA)
    if what == "batch_size":
        parser = batch_size.make_parser(LLAMA)
        return flags.parse(parser, LLAMA, words)
    if what == "patterns":
        return fusion_patterns.arguments_of(words)
    adds = WRAPPERS[what].add_options if what in WRAPPERS else add_options
    _, rest = wrapper_parse(words, what, "", "d", 60, adds)
    return parsed("openfold", rest)  # what a wrapper does not know goes to the program


@pytest.mark.parametrize("line", TYPED)
def test_what_the_documents_say_is_taken_or_answered(line, capsys):
    _, what, *words = shlex.split(line)
    try:
        parsed(what, words)
    except SystemExit as refused:
        said = capsys.readouterr().err
        assert refused.code == 2 and said.count("\n") == 1
        unknown = [w for w in words if w.startswith("-") and w in re.split(r"[\s:]", said.partition("; ")[0])]
        assert unknown and all(f"; {word} here: {hints.HERE[word]}" in said for word in unknown)


def test_the_table_of_hints_has_no_flag_that_is_one_here():
    """Of the model's program; and what it names exists."""
    known = flags.make_parser(tof.PROGRAM)._option_string_actions
    assert not {*hints.HERE} & {*known}
    for script in re.findall(r"\./(\w+\.sh)|(\w+\.py)", " ".join(hints.HERE.values())):
        assert (ROOT / "".join(script)).exists()


SMALL = ["--num-blocks", "1", "--seq-len", "32", "--num-seqs", "4", "--batch-size", "1", "--num-steps", "1",
         "--warmup-steps", "0", "--device", "cpu"]
MSA, TRIANGLE = ["--disable-qkv-fusion-msa"], ["--disable-qkv-fusion-triangle"]
FLASH = ["--disable-flash-attention"]


@pytest.mark.parametrize("recipe, variant", [
    ([*TRIANGLE, *FLASH, "--disable-triangle-fusion"], "qkv-fusion-msa+opm-fusion"),
    ([*MSA, *TRIANGLE, "--disable-triangle-fusion"], "flash-attention+opm-fusion"),
    ([*MSA, *TRIANGLE, *FLASH], "triangle-fusion+opm-fusion"),
    ([*TRIANGLE, *FLASH, "--disable-triangle-fusion", "--disable-opm-fusion"], "only-qkv-fusion-msa")])
def test_rows_1_and_14_a_recipe_says_what_it_leaves_on(recipe, variant, tmp_path, capsys):
    assert tof.main([*SMALL, *recipe, "--profile-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"In a comparison: --variants {variant}\n" in out
    assert ("   Opm Fusion: Enabled\n" in out) == variant.endswith("opm-fusion")
    assert ("less memory: --attention-backend sdpa" in out) == ("flash" in variant)


@pytest.mark.slow
@pytest.mark.parametrize("program, sizes", [
    ("tiny_llama", "--hidden-size 64 --intermediate-size 128 --num-layers 1 --seq-len 32 --data README.md"),
    ("protein_mpnn", "--hidden-dim 32 --num-layers 1 --neighbors 8 --seq-len 32")])
def test_row_2_the_roofline_has_bytes_for_both_companions(program, sizes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = ["--program", f"companions/{program}.py", *sizes.split(), "--batch-size", "2", "--num-steps", "6",
            "--profile-steps", "1", "--device", "cpu", "--roofline", "--profile-dir", str(tmp_path / "p")]
    assert command.run(argv) == 0
    out = capsys.readouterr().out
    rows = last_json(out)["roofline"]
    assert all(row["minimal_bytes"] > 0 and row["baseline_bytes"] >= 0 for row in rows)
    assert all(row["bound"] or "ceilings" in row["note"] for row in rows)
    assert not [row for row in rows if row["bound"] == "compute" and not row["flops"]]
    assert "To copy, without the profiler: python companions/" in out  # the last line


def second(tmp_path, name, *words):
    return code_of(lambda argv: tof.main(argv, SECOND), "--num-steps", 8, "--width", 64, "--device", "cpu",
                   "--profile-dir", tmp_path / name, *words)


def test_row_5_a_run_that_is_not_fast_enough_ends_with_1(tmp_path, capsys):
    earlier = ["--compare-with-v1", tmp_path / "v1" / "performance_summary_mlp.json", "--min-speedup"]
    assert second(tmp_path, "v1") == 0
    assert second(tmp_path, "slow", *earlier, 1000) == 1 and "FAILED" in capsys.readouterr().out
    assert second(tmp_path, "fast", *earlier, 1e-6) == 0 and "passed" in capsys.readouterr().out
    assert second(tmp_path, "none", "--min-speedup", 1) == 2


@pytest.mark.parametrize("words, said", [
    (["--enable-bucketing", "--shortest", "8"], "built-in backbones"), (["--data", "families"], "held out")])
def test_rows_7_and_8_bucketing_and_real_backbones(words, said, tmp_path, capsys):
    words = [str(require_shared("data", word)) if word == "families" else word for word in words]
    sizes = "--hidden-dim 16 --num-layers 1 --neighbors 4 --seq-len 40 --batch-size 2 --num-steps 2".split()
    argv = [*sizes, *words, "--device", "cpu", "--profile-dir", str(tmp_path)]
    assert tof.main(argv, MPNN) == 0
    out = capsys.readouterr().out
    assert said in out and 0 <= last_json(out)["evaluation"]["final"]["recovery"] <= 1


def test_rows_9_and_19_patterns_of_the_article(tmp_path):
    names = ["conv", "relu", "silu", "causal"]
    done = run_program("companions/fusion_patterns.py", "--patterns", *names, "--rounds", 2, "--no-compile",
                       "--device", "cpu", "--profile-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    found, said = map(json.loads, ((tmp_path / "fusion_patterns.json").read_text(),
                                   done.stdout.splitlines()[-1]))
    assert [p["name"] for p in found["patterns"]] == names and found["ladder"] == said["wrong"] == []
    assert said["verdicts"]["causal"] == ["NONE", "NONE"]  # no library has it
    assert all(way["forward"] for way in found["patterns"][0]["ways"])  # plain and folded


@pytest.mark.slow
def test_row_13_a_figure_that_is_null_says_why(tmp_path, capsys):
    assert second(tmp_path, "compiled", "--enable-torch-compile") == 0
    found = last_json(capsys.readouterr().out)["performance_summary"]
    assert found["peak_memory_mb"] is found["launches_per_step"] is None
    assert all("--disable-torch-compile" in found["not_measured"][key] for key in
               ("peak_memory_mb", "launches_per_step"))
    assert second(tmp_path, "eager") == 0
    assert last_json(capsys.readouterr().out)["performance_summary"]["not_measured"] == {}


@pytest.mark.parametrize("program, sizes", [
    (LLAMA, dict(hidden_size=128, num_layers=2, seq_len=64, batch_size=8, data=str(ROOT / "README.md"))),
    (MPNN, dict(hidden_dim=64, num_layers=2, neighbors=32, seq_len=64, batch_size=4))], ids=["llama", "mpnn"])
def test_row_18_a_batch_that_cannot_fit_is_refused_with_one_that_does(program, sizes, tmp_path, capsys):
    """By a bound that lies below what a step takes, and not too far below."""
    for recomputed in (False, True):
        settings = program.settings(**sizes, enable_activation_checkpointing=recomputed)
        trainer = program.trainer(program, settings, torch.device("cpu"))
        peak = probe(trainer, program.data(settings).batch(0)).peak
        assert 1 < peak / program.model.least_bytes(settings) < ROOM
    argv = ["--batch-size", "400000000", "--device", "cpu", "--profile-dir", str(tmp_path)]
    assert tof.main(argv, program) == 2
    said = capsys.readouterr().err
    assert re.search(r"--batch-size \d+ would fit", said) and "--num-seqs" not in said


def test_row_21_what_a_step_needs_at_least_can_be_asked(capsys):
    needs = []
    for count in (1, 64):
        assert tof.main(["--check-flags", "--batch-size", str(count)]) == 0
        needs.append(json.loads(capsys.readouterr().out)["least_memory_mb"])
    assert 0 < needs[0] < needs[1] / 8


def test_rows_16_and_22_names_and_what_went_are_in_the_documents():
    promised, changes = ((ROOT / name).read_text(encoding="utf-8") for name in
                         ("docs/promised.md", "CHANGELOG.md"))
    for name in ("tiny_llama_v2", "analyze_kernel_reduction", "fusion_ablation_study", "benchmark_suite",
                 "validate_numerical_accuracy", "run_deepspeed_flops"):
        assert re.search(rf"^# .*\b{name}\.py", promised, re.MULTILINE)
    for word in ("--find-batch-size", "--check-against", "--min-speedup", "--recommend", "--predict",
                 "--design", "--enable-bucketing", "--weights", "max-autotune", "`conv`"):
        assert word in changes


# Rows that the tests of their own module hold
ELSEWHERE = {4: "test_sizes_double_up_to_the_straight_line", 3: "test_autotuning_leaves_the_graph_to_whoever",
             6: "test_a_contest_counts_launches_and_tokens", 10: "test_all_profilers(run_all",
             11: "test_rounds_end_as_asked_or_after", 12: "test_a_cpu_is_timed_without_the_profiler",
             15: "test_an_option_that_the_tools_help_lacks", 17: "test_what_the_documents_say_is_taken",
             20: "test_smaller_models_have_their_recovery"}


def test_every_row_has_its_test():
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = {int(n) for text in re.findall(r"def test_rows?_((?:\d+_(?:and_)?)+)", source)
             for n in re.findall(r"\d+", text)}
    assert named | {*ELSEWHERE} == {*range(1, 23)}
    assert all(f"def {name}" in source for name in ELSEWHERE.values())
