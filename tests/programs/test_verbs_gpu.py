"""Every verb as a user types it, on a GPU: each a process of its own in an empty directory, a few at a time,
all judged by one strict function (verbs.py).

    make test ARGS="-m gpu"                          # with all other tests that need a GPU
    pytest tests/programs/test_verbs_gpu.py -k compare

VERBS_REPORT=FILE writes commit, date, GPU, torch and what came of each verb, as JSON. COMMIT names the commit
where the code is a copy without its history. VERBS_AT_ONCE says how many run at a time. VERBS_ON_CPU=1 is for
trying these tests themselves without a GPU: the same verbs at small sizes, without those that need one.
"""
import concurrent.futures
import csv
import datetime
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from fusion_lab.measuring.variants import make_variants
from fusion_lab.training.flags import make_parser, parse
from fusion_lab.training.program import load_program
from tests.programs.verbs import Run, Verb, judge, perform, read, the_file
from tests.support import ROOT

ON_CPU = os.environ.get("VERBS_ON_CPU") == "1"
AT_ONCE = int(os.environ.get("VERBS_AT_ONCE", 2 if ON_CPU else max(2, (os.cpu_count() or 1) // 2)))
FEW = "--num-steps 3 --warmup-steps 1"
SMALL = "--num-blocks 1 --seq-len 16 --num-seqs 8 --batch-size 2" if ON_CPU else (
    "--num-blocks 2 --seq-len 32 --num-seqs 8 --batch-size 2")
BF16, FP16, TF32 = ("--use-amp --amp-dtype bfloat16", "--use-amp --amp-dtype float16", "--use-tf32")
PRECISIONS = {"fp32": "", "tf32": TF32, "bf16": BF16, "fp16": FP16}
SHIPPED = ROOT / "tiny_openfold" / "models" / "families.pt"

# Why a row of a comparison is nothing of its own, whole sentences.
FLOAT32 = ("master weights need --use-amp",
           "Triton kernels need --use-amp: float32 is more exact without them",
           "triton-adamw needs a GPU, Triton, --use-amp and master weights")
GIVES_WAY = ("triton-attention gives way to the attention that was asked for",)
UNPACKED = (r"the pointwise kernel needs a GPU, Triton, --use-amp and packed projections "
            r"\(--enable-qkv-fusion, --enable-swiglu-fusion\)",)
CPU_ALONE = ("CUDA graphs need a GPU", "this device has no TF32", "needs a GPU", "Triton kernels need a GPU",
             "no GPU here, so no ranges for an outer profiler")
OF_A_CPU = ("first_step_time", "gpu_busy_ms", "busy_ms", "copy_bytes_per_s")  # null there


def only(text):
    return tuple(f"only-{name}" for name in text.split())


USUAL = ("baseline", "fused", *only("qkv-fusion-msa qkv-fusion-triangle flash-attention triangle-fusion "
                                    "opm-fusion"), "compiled")


def comparisons():
    """Of the Evoformer: the default table at default sizes, and small ones in all precisions."""
    compare = "tiny_openfold_v2.py --compare-fusion"
    small = f"{compare} {SMALL} --num-steps 4"

    def verb(name, flags, measured, named=(), expected=()):
        words = " ".join((*measured, *named))
        return Verb(f"compare {name}", (f'{small} {flags} --variants "{words}"',), measured=measured,
                    named=named, expected=expected)
    few = ("baseline", "fused", "only-flash-attention")
    if ON_CPU:
        return [verb(name, flags, few, ("only-cuda-graphs", "fused+cuda-graphs"))
                for name, flags in PRECISIONS.items() if name != "fp16"]
    return [
        Verb("compare default bf16", (f"{compare} {BF16}",), seconds=330,
             measured=(*USUAL, "everything", "ultra")),
        verb("fp32", "", (*USUAL, "everything"), ("only-master-weights", "fused+master-weights"), FLOAT32),
        verb("tf32", TF32, (*few, "only-cuda-graphs", "fused+cuda-graphs")),
        verb("bf16", BF16, (*few, "compiled+cuda-graphs", "everything+triton-attention"),
             ("only-triton-attention",), GIVES_WAY),
        verb("fp16", FP16, (*few, "everything+triton-adamw", "without-opm-fusion"))]


def trainings():
    """Of the Evoformer, and its demo."""
    train, files = "tiny_openfold_v2.py", ("pytorch_profiles_v2/performance_summary_v2.json",
                                           "pytorch_profiles_v2/metrics.jsonl")
    kinds = dict(default="", everything=f"--enable-all-fusion {BF16}", ultra=f"--enable-ultra {BF16}",
                 float16=f"--enable-ultra {FP16} {SMALL}", tf32=f"--enable-all-fusion {TF32} {SMALL}")
    sizes = ("--batch-size 1 --num-seqs 16 --seq-len 32 --extra-seqs 64" if ON_CPU else
             "--batch-size 4 --num-seqs 32 --seq-len 64 --extra-seqs 256")
    natural = (f"{train} --coevolution couplings --synthetic-world natural {sizes} --num-blocks 8 "
               "--orientations --num-steps 2 --warmup-steps 1")
    if ON_CPU:
        kinds = dict(default=SMALL, bf16=f"{BF16} {SMALL}", tf32=f"{TF32} {SMALL}")
    named = dict(tf32=("master weights need --use-amp",))
    return [
        *(Verb(f"train {name}", (f"{train} {flags} {FEW}",), files, expected=named.get(name, ()))
          for name, flags in kinds.items()),
        Verb("train demo", (f"{train} --demo{' --num-steps 4' * ON_CPU}",),
             files if ON_CPU else (*files, "pytorch_profiles_v2/contacts.png"),
             holds=None if ON_CPU else learned),
        Verb("train profiled", (f"{train} {SMALL} {FEW} --enable-all-profiling --profile-dir here "
                                "--save-checkpoint a.pt", f"{train} {SMALL} --num-steps 5 --warmup-steps 1 "
                                "--resume a.pt --profile-dir there"),
             ("here/*.pt.trace.json", "here/memory_profile.json", "a.pt", "there/metrics.jsonl"),
             null=() if ON_CPU else ("launches_per_step",)),  # which are left to the outer profiler
        Verb("fine-tune", (f"{natural} --profile-dir new",
                           f"{natural} --init-from {SHIPPED} --save-checkpoint tuned.pt"),
             (*files, "tuned.pt"), holds=tuned)]


def learned(result, directory):
    """Complaints about a demo that did not learn."""
    held_out = [each["p_l2"] for each in result["evaluation"]["final"]["held_out"].values()]
    if not sum(held_out) / len(held_out) > 0.6:
        yield f"after the demo P(L/2) is {sum(held_out) / len(held_out)}"


def tuned(result, directory):
    """Complaints about a run that did not begin with what the model file has learned."""
    new = read(directory / "new" / "performance_summary_v2.json")
    first, untrained = (each["performance_summary"]["first_loss"] for each in (result, new))
    if not first < untrained - 0.1:
        yield f"the first loss is {first}, that of a new model {untrained}"


def checks():
    """Accuracy and set-up."""
    verify = f"tiny_openfold_v2.py --verify-accuracy --num-blocks 1 --seq-len {16 if ON_CPU else 32}"
    kinds = {**PRECISIONS, "ultra": f"--enable-ultra {BF16}"}
    found = [Verb(f"accuracy {name}", (f"{verify} {flags}",), ("pytorch_profiles_v2/accuracy_v2.json",),
                  expected=("changes the optimizer's step, and outputs and gradients are checked",))
             for name, flags in kinds.items() if not (ON_CPU and name in ("fp16", "ultra"))]
    return [*found,
            Verb("validate", ("tiny_openfold_v2.py --validate-setup",), holds=lambda result, _: (
                () if all(map(math.isfinite, result["losses"])) and result["passed"] else ["not valid"]))]


def sessions():
    """Profiler session, roofline, a study with its resumption, tiles, contacts, a fold."""
    session, study = "run_pytorch_profiler.py", "launch_performance_study.sh"
    points = f"{study} --batch-sizes 1 --seq-lens 16 --num-seqs 8 --num-steps 3 --study-name s"
    block = "-- --num-blocks 1"
    report = tuple(f"p/{name}" for name in ("comprehensive_profiling_report.md", "fusion_analysis.json",
                                            "*.pt.trace.json", "*.png"))
    # null of backward; of operations on a CPU
    unknown = ("saved_activation_mb", "launches", *["launch", "gpu_busy_ms"] * ON_CPU)
    found = [
        Verb("session", (f"{session} {SMALL} --profile-steps 3 --profile-dir p",
                         "profile_summary.py r --json"), report, prepare=as_rocprofv3,
             holds=the_same_kernels, null=(*unknown, "steps", "launches_per_step", "kernel_time_ms_per_step",
                                           "steps_counted", "graphs", "memory_copies", "compared")),
        Verb("roofline", (f"{session} {SMALL} --profile-steps 2 --profile-dir p --roofline",), report,
             null=(*unknown, "bound", "share")),  # of a sub-layer that stays in a cache
        Verb("study", (f"{points} --num-runs 1 {block}", f"{points} --num-runs 2 {block}"),
             tuple(f"s/{name}" for name in ("report.html", "results.csv", "results.jsonl")),
             result="s/results_summary.json", holds=two_runs_of_each),
        Verb("contacts", ("tiny_openfold_v2.py --contacts query.a3m",), prepare=write_alignment,
             files=tuple(f"contacts/query.{end}" for end in ("rr", "tsv", "npz", "png", "json"))),
        Verb("fold", ("tiny_openfold_v2.py --fold query.a3m",), prepare=write_alignment,
             files=tuple(f"fold/query.{end}" for end in ("pdb", "html", "png", "json")),
             expected=("For alignments such as this it was not measured: it may be far too high",))]
    retune = Verb("retune", (f"tiny_openfold_v2.py --retune --enable-triton-relu {BF16} {SMALL}",),
                  ("pytorch_profiles_v2/tiles_v2.json", "cache/fusion_lab/*.json"),
                  environment=(("XDG_CACHE_HOME", "{here}/cache"),),
                  holds=lambda result, _: () if result["tiles"] else ["no tiles"])
    return found if ON_CPU else [*found, retune]


def as_rocprofv3(directory, number):
    """Before profile_summary.py, which reads AMD's files: the session's trace in rocprofv3's form."""
    if number != 1:
        return
    (directory / "r").mkdir()
    with open(directory / "r" / "1_kernel_trace.csv", "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(("Kind", "Agent_Id", "Correlation_Id", "Kernel_Name", "Correlation_Id",
                         "Start_Timestamp", "End_Timestamp"))
        for number, (name, start, end) in enumerate(kernels_of(directory), 1):
            writer.writerow(("KERNEL_DISPATCH", 1, number, name, number, start, end))


def kernels_of(directory):
    """(name, start, end) of each kernel of the session's trace, in ns; on a CPU of each operation."""
    with open(the_file(directory, "p/*.pt.trace.json"), encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [(event["name"], round(1e3 * event["ts"]), round(1e3 * event["ts"]) + round(1e3 * event["dur"]))
            for event in events if event.get("cat") == ("cpu_op" if ON_CPU else "kernel")]


def the_same_kernels(result, directory):
    kernels = kernels_of(directory)
    total = sum(end - start for _, start, end in kernels) / 1e6
    if not kernels or result["launches"] != len(kernels):
        yield f"{result['launches']} launches, {len(kernels)} in the trace"
    if not math.isclose(sum(row["time_ms"] for row in result["by_kind"].values()), total, rel_tol=1e-3):
        yield f"other times than the trace's {total} ms"


def two_runs_of_each(result, directory):
    found = [(point["setting"], point["n"], point["n_failed"]) for point in result["points"]]
    if found != [("baseline", 2, 0), ("fused", 2, 0)]:
        yield f"points {found}"


def write_alignment(directory, number):
    """60 rows of 40 residues, each a mutant of the first."""
    draw = random.Random(1)
    query = draw.choices("ACDEFGHIKLMNPQRSTVWY", k=40)
    with open(directory / "query.a3m", "w") as file:
        for row in range(60):
            mutant = [draw.choice("ACDEFGHIKLMNPQRSTVWY-") if row and draw.random() < 0.4 else letter
                      for letter in query]
            file.write(f">row{row}\n{''.join(mutant)}\n")


def companions():
    """Other models, patterns of fusion, OpenFold's block."""
    if not (ROOT / "companions").exists():
        return []
    sizes = {"protein_mpnn": "--batch-size 2", "tiny_llama": "--batch-size 4"}
    if ON_CPU:
        sizes = {"protein_mpnn": "--batch-size 2 --num-layers 1 --seq-len 32 --neighbors 16",
                 "tiny_llama": "--hidden-size 64 --num-layers 2 --seq-len 32"}
    alone = {"protein_mpnn": "split-fusion aggregate-fusion edge-fusion",
             "tiny_llama": "qkv-fusion flash-attention swiglu-fusion norm-fusion"}
    kernel = {"protein_mpnn": "message-kernel", "tiny_llama": "pointwise-kernel"}
    found = []
    for name, flags in sizes.items():
        program, words, precision = f"companions/{name}.py {flags}", alone[name], "" if ON_CPU else BF16
        found.append(Verb(f"train {name}", (f"{program} {precision} {FEW}",),
                          ("pytorch_profiles_v2/performance_summary_*.json",
                           "pytorch_profiles_v2/metrics.jsonl")))
        measured, named = ("baseline", "fused", *only(words)), ()
        if not ON_CPU:
            own = only(kernel[name])
            measured, named = (measured, own) if name == "tiny_llama" else (measured + own, ())
            measured += (f"fused+{kernel[name]}", "compiled")
        words = " ".join((*measured, *named))
        found.append(Verb(f"compare {name}", (f'{program} {precision} --compare-fusion --num-steps 3 '
                                              f'--variants "{words}"',), measured=measured, named=named,
                          expected=UNPACKED if named else ()))
    patterns = " --patterns add_norm --no-compile" if ON_CPU else " --ladder here"
    flags = "--quick --sizes 5 --steps 1" if ON_CPU else "--sizes 64 --steps 3"
    return [*found,
            Verb("patterns", (f"companions/fusion_patterns.py --rounds 3{patterns}",),
                 result="pytorch_profiles_v2/fusion_patterns.json", null=("forward", "both"),
                 expected=("needs a GPU and Triton",) * ON_CPU, holds=all_were_timed),
            Verb("patch openfold", (f"benchmarks/measure_patches.py {flags} --out out",),
                 result="out/patches.json",
                 expected=("boltz cannot be imported", *["its own forward runs"] * ON_CPU),
                 environment=(("PYTHONPATH", str(ROOT / "tests/programs/fake_peer")),))]


def all_were_timed(result, directory):
    """Complaints about a way to write a pattern that has no times, and nothing that stands in its way."""
    for pattern in result["patterns"]:
        for way in pattern["ways"]:
            if not way["reason"] and not (way["forward"] and min(way["forward"]) > 0):
                yield f"{pattern['name']}, {way['name']}: no time"


def all_verbs():
    """Those that take longest first."""
    found = [*comparisons(), *trainings(), *checks(), *sessions(), *companions()]
    return {verb.name: replace(verb, expected=verb.expected + CPU_ALONE, null=verb.null + OF_A_CPU)
            if ON_CPU else verb for verb in found}


VERBS = all_verbs()


@pytest.fixture(scope="module")
def place(request, tmp_path_factory):
    """A directory that pytest's processes share, in which every verb that is asked for runs in one of them, a
    few at a time, from now on."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "verbs"
    place.mkdir(exist_ok=True)
    asked = {item.callspec.params["name"] for item in request.session.items
             if item.nodeid.startswith(request.node.nodeid) and hasattr(item, "callspec")
             and "name" in item.callspec.params}
    place.joinpath("started").touch()
    with concurrent.futures.ThreadPoolExecutor(max(1, AT_ONCE // workers)) as pool:
        for name in VERBS:
            if name in asked:
                pool.submit(in_one_process, VERBS[name], place)
        yield place
        pool.shutdown(cancel_futures=request.session.shouldstop is not False)


def in_one_process(verb, place):
    """Run and judge a verb, unless another process does; what came of it goes into NAME.verdict."""
    directory = place / verb.name.replace(" ", "_")
    try:
        directory.mkdir()
    except FileExistsError:
        return
    seconds = 0.0
    try:
        run = perform(verb, directory)
        seconds, complaints = round(run.seconds, 1), judge(verb, run, directory)
    except Exception as error:  # else its test would wait
        complaints = [f"{type(error).__name__}: {error}"]
    verdict = dict(name=verb.name, commands=[" ".join(text.replace(f"{ROOT}/", "").split())
                                             for text in verb.commands],
                   seconds=seconds, complaints=complaints)
    written = directory.with_suffix(".part")
    written.write_text(json.dumps(verdict), encoding="utf-8")
    written.rename(directory.with_suffix(".verdict"))
    if os.environ.get("VERBS_REPORT"):  # after each, so that a run that is ended early leaves what it found
        write_report(place, os.environ["VERBS_REPORT"])


def write_report(place, path):
    """What came of all verbs so far; seconds since the first began."""
    seconds = time.time() - place.joinpath("started").stat().st_mtime
    commit, changed = (subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True,
                                      check=False).stdout.strip()
                       for words in ("rev-parse HEAD".split(),
                                     "status --porcelain --untracked-files=no".split()))
    verdicts = [json.loads(file.read_text(encoding="utf-8")) for file in place.glob("*.verdict")]
    result = dict(
        commit=os.environ.get("COMMIT", commit), changed=None if "COMMIT" in os.environ else bool(changed),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None, torch=torch.__version__,
        triton=triton_version(), python=sys.version.split()[0], cores=len(os.sched_getaffinity(0)),
        at_once=AT_ONCE, seconds=round(seconds, 1), passed=sum(not each["complaints"] for each in verdicts),
        verbs=sorted(verdicts, key=lambda each: [*VERBS].index(each["name"])))
    written = f"{path}.{threading.get_ident()}"  # several verbs may end at once
    with open(written, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    os.replace(written, path)


def triton_version():
    try:
        import triton
        return triton.__version__
    except ImportError:
        return None


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if ON_CPU else pytest.mark.gpu)
                                  for name in VERBS])
def test_verb(name, place):
    there, deadline = place / f"{name.replace(' ', '_')}.verdict", time.monotonic() + 1800
    while not there.exists():
        assert time.monotonic() < deadline, "it was not run"
        time.sleep(0.1)
    complaints = json.loads(there.read_text(encoding="utf-8"))["complaints"]
    assert not complaints, "\n".join(complaints)


# What needs no GPU: the command lines, and the judge itself

def test_programs_accept_the_flags_and_have_these_rows():
    """Those that a GPU would see: which would be measured, and the reasons of the others."""
    pytest.importorskip("triton")
    for verb in VERBS.values():
        for file, *words in map(shlex.split, verb.commands):
            if not (ROOT / file).is_file() or "PROGRAM = " not in (ROOT / file).read_text(encoding="utf-8"):
                continue  # no trainer
            program = load_program(ROOT / file)
            arguments, settings, mode = parse(make_parser(program), program, words)
            if mode == "--compare-fusion":
                found = make_variants(settings, arguments.variants, not ON_CPU)
                assert {v.name for v in found if not v.reason} == {*verb.measured}, verb.name
                assert {v.name for v in found if v.reason} == {*verb.named}, verb.name
                for reason in "; ".join(v.reason for v in found if v.reason).split("; "):
                    assert not reason or any(re.fullmatch(known, reason) for known in verb.expected), (
                        verb.name, reason)


FIGURES = dict(median_batch_time=.1, p20_batch_time=.1, p80_batch_time=.1, samples_per_second=2.0,
               speedup=1.0, peak_memory_mb=3.0, launches_per_step=4, saved_activation_mb=5.0,
               flops_per_step=6, final_loss=7.0)
COMPARED = Verb("compare", ("tiny_openfold_v2.py --compare-fusion",), ("table.json",),
                measured=("baseline", "fused"), named=("only-idle",), expected=("it is idle",))


def a_row(name, **values):
    return dict(name=name, measured=True, reason=None, median_forward_time=.1,
                fusion_config=dict(enable_cuda_graphs=False), **{**FIGURES, **values})


def a_run(tmp_path, **values):
    """A comparison in which nothing is wrong, but for values."""
    (tmp_path / "table.json").write_text("{}")
    idle = dict(name="only-idle", measured=False, reason="it is idle", fusion_config={})
    good = dict(codes=[0], stdout="only-idle  not measured: it is idle\nWritten: table.json\n", stderr="",
                seconds=1.0, results=[dict(variants=[a_row("baseline"), a_row("fused"), idle])])
    return Run(**{**good, **values})


def changed(number, **values):
    """Replacement of the result: one row of it has other values."""
    found = [a_row("baseline"), a_row("fused"),
             dict(name="only-idle", measured=False, reason="it is idle", fusion_config={})]
    found[number].update(values)
    return dict(results=[dict(variants=found)])


def test_the_judge_finds_nothing_in_a_good_run(tmp_path):
    assert judge(COMPARED, a_run(tmp_path), tmp_path) == []
    graph = changed(1, fusion_config=dict(enable_cuda_graphs=True), median_forward_time=None)
    assert judge(COMPARED, a_run(tmp_path, **graph), tmp_path) == []


@pytest.mark.parametrize("values, words", [
    (changed(1, measured=False, reason="Unsupported: skipped function"), "fused was not measured: Uns"),
    (changed(2, reason="NotImplementedError: no rule; it is idle"), "only-idle: not measured: NotImpl"),
    (changed(2, measured=True, reason=None, **FIGURES), "only-idle was measured"),
    (changed(1, name="other"), "rows ["), (dict(results=[dict(variants=[])]), "rows []"),
    (changed(1, speedup=math.nan), "variants/1/speedup is nan"),
    (changed(1, final_loss=math.inf), "variants/1/final_loss is inf"),
    (changed(1, peak_memory_mb=0.0), "peak_memory_mb is 0.0"),
    (changed(1, launches_per_step=None), "launches_per_step is null"),
    (changed(1, median_forward_time=None), "median_forward_time is null"),
    (dict(results=[dict(passed=False)]), "passed is False"),
    (dict(results=[dict(performance_summary=dict(median_batch_time=.1))]), "no peak_memory_mb"),
    (dict(stderr="x.py:3: UserWarning: flex_attention called without torch.compile()"), "a warning: x.py"),
    (dict(stderr="W1124 17:31:39.123000 81 torch/_inductor/utils.py:1] Not enough SMs"), "a warning: W1124"),
    (dict(stderr="Traceback (most recent call last):"), "a traceback"),
    (dict(stdout="falling back to eager"), "not expected: falling back"),
    (dict(stdout="fused  not measured: Unsupported"), "not expected: fused  not measured"),
    (dict(stdout="Not used here: the kernel"), "not expected: Not used"),
    (dict(stdout="Written: table.json, gone.png"), "named, but missing or empty: gone.png"),
    (dict(codes=[1], stderr="error: why"), "exit codes [1]"), (dict(codes=[]), "exit codes []"),
    (dict(results=[], trouble="no result: none"), "no result: none")])
def test_the_judge_complains(values, words, tmp_path):
    complaints = judge(COMPARED, a_run(tmp_path, **values), tmp_path)
    assert any(words in complaint for complaint in complaints), complaints


def test_the_judge_counts_again(tmp_path):
    run = a_run(tmp_path)
    result = dict(run.results[0], training_params=dict(batch_size=2))
    for row in result["variants"][:2]:
        row.update(samples_per_second=20.0, achieved_tflops=6e-11, step_times=[1, 2],
                   baseline_step_times=[1, 2], peak_memory_reduction_percent=0.0,
                   saved_activation_reduction_percent=0.0)
    run.results[0] = result
    assert judge(COMPARED, run, tmp_path) == []
    result["variants"][1].update(samples_per_second=21.0, peak_memory_mb=6.0, step_times=[0.5, 1])
    assert judge(COMPARED, run, tmp_path) == ["fused: samples_per_second is 21.0, not 20.0",
                                              "fused: speedup is 1.0, not 2.0",
                                              "fused: peak_memory_reduction_percent is 0.0, not -100.0"]


def test_the_judge_misses_a_file(tmp_path):
    run = a_run(tmp_path)
    (tmp_path / "table.json").write_text("")
    assert judge(COMPARED, run, tmp_path) == ["missing or empty: table.json",
                                              "named, but missing or empty: table.json"]
    (tmp_path / "table.json").unlink()
    assert len(judge(COMPARED, run, tmp_path)) == 2
