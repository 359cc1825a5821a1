"""Every verb as a user types it, on a GPU: each a process of its own in an empty directory, all judged by one
strict function (verbs.py). Several run at once where pytest has several processes:

    pytest -n 8 tests/programs/test_verbs_gpu.py -k compare
"""
import math
import random
import re
import shlex
from dataclasses import replace

import pytest

from fusion_lab.measuring.variants import make_variants
from fusion_lab.training.flags import make_parser, parse
from fusion_lab.training.program import load_program
from tests.programs.verbs import ROW, Run, Verb, judge, perform, read
from tests.support import ROOT

FEW = "--num-steps 3 --warmup-steps 1"
SMALL = "--num-blocks 2 --seq-len 32 --num-seqs 8 --batch-size 2"
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
ANYWHERE = ("opm-fusion changes nothing at these sizes", "here it is the same as .*")


def only(text):
    return tuple(f"only-{name}" for name in text.split())


USUAL = ("baseline", "fused",
         *only("qkv-fusion-msa qkv-fusion-triangle flash-attention triangle-fusion"), "compiled")


def comparisons():
    """Of the Evoformer: the default table at default sizes, and small ones in all precisions."""
    compare = "tiny_openfold_v2.py --compare-fusion"
    small = f"{compare} {SMALL} --num-steps 4"

    def verb(name, flags, measured, named=(), expected=()):
        words = " ".join((*measured, *named))
        return Verb(f"compare {name}", (f'{small} {flags} --variants "{words}"',), measured=measured,
                    named=named, expected=expected)
    few = ("baseline", "fused", "only-flash-attention")
    return [
        Verb("compare default bf16", (f"{compare} {BF16}",), seconds=330,
             measured=(*USUAL, "everything", "ultra"), named=only("opm-fusion")),
        verb("fp32", "", (*USUAL, "everything"), ("only-opm-fusion", "fused+master-weights"), FLOAT32),
        verb("tf32", TF32, (*few, "only-cuda-graphs", "fused+cuda-graphs")),
        verb("bf16", BF16, (*few, "compiled+cuda-graphs", "everything+triton-attention"),
             ("only-triton-attention",), GIVES_WAY),
        verb("fp16", FP16, (*few, "everything+triton-adamw"), ("without-opm-fusion",))]


def trainings():
    """Of the Evoformer, and its demo."""
    train, files = "tiny_openfold_v2.py", ("pytorch_profiles_v2/performance_summary_v2.json",
                                           "pytorch_profiles_v2/metrics.jsonl")
    kinds = dict(default="", everything=f"--enable-all-fusion {BF16}", ultra=f"--enable-ultra {BF16}",
                 float16=f"--enable-ultra {FP16} {SMALL}", tf32=f"--enable-all-fusion {TF32} {SMALL}")
    natural = (f"{train} --coevolution couplings --synthetic-world natural --batch-size 4 --num-seqs 32 "
               "--seq-len 64 --extra-seqs 256 --num-blocks 8 --orientations --num-steps 2 --warmup-steps 1")
    named = dict(tf32=("master weights need --use-amp",))
    return [
        *(Verb(f"train {name}", (f"{train} {flags} {FEW}",), files, expected=named.get(name, ()))
          for name, flags in kinds.items()),
        Verb("train demo", (f"{train} --demo",), (*files, "pytorch_profiles_v2/contacts.png"), holds=learned),
        Verb("train profiled", (f"{train} {SMALL} {FEW} --enable-all-profiling --profile-dir here "
                                "--save-checkpoint a.pt", f"{train} {SMALL} --num-steps 5 --warmup-steps 1 "
                                "--resume a.pt --profile-dir there"),
             ("here/*.pt.trace.json", "here/memory_profile.json", "a.pt", "there/metrics.jsonl")),
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
    verify = "tiny_openfold_v2.py --verify-accuracy --num-blocks 1 --seq-len 32 --profile-dir p"
    kinds = {**PRECISIONS, "all fp16": f"--enable-all-fusion {FP16}", "ultra": f"--enable-ultra {BF16}"}
    found = [Verb(f"accuracy {name}", (f"{verify} {flags}",), ("p/accuracy_v2.json",),
                  expected=("changes the optimizer's step, and outputs and gradients are checked",))
             for name, flags in kinds.items()]
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
    unknown = ("saved_activation_mb", "launches")  # of backward
    return [
        Verb("session", (f"{session} {SMALL} --profile-steps 3 --profile-dir p",), report, null=unknown),
        Verb("roofline", (f"{session} {SMALL} --profile-steps 2 --profile-dir p --roofline",), report,
             null=(*unknown, "bound", "share")),  # of a sub-layer that stays in a cache
        Verb("study", (f"{points} --num-runs 1 {block}", f"{points} --num-runs 2 {block}"),
             tuple(f"s/{name}" for name in ("report.html", "results.csv", "results.jsonl")),
             result="s/results_summary.json", holds=two_runs_of_each),
        Verb("contacts", ("tiny_openfold_v2.py --contacts query.a3m",), prepare=write_alignment,
             files=tuple(f"contacts/query.{end}" for end in ("rr", "tsv", "npz", "png", "json"))),
        Verb("fold", ("tiny_openfold_v2.py --fold query.a3m",), prepare=write_alignment,
             files=tuple(f"fold/query.{end}" for end in ("pdb", "html", "png", "json")),
             expected=("For alignments such as this it was not measured: it may be far too high",)),
        Verb("retune", (f"tiny_openfold_v2.py --retune --enable-triton-relu {BF16} {SMALL}",),
             ("pytorch_profiles_v2/tiles_v2.json", "cache/evoformer_kernels/*.json"),
             environment=(("XDG_CACHE_HOME", "{here}/cache"),),
             holds=lambda result, _: () if result["tiles"] else ["no tiles"])]


def two_runs_of_each(result, directory):
    found = [(point["variant"], point["n"], point["n_failed"]) for point in result["points"]]
    if found != [("baseline", 2, 0), ("fused", 2, 0)]:
        yield f"points {found}"


def write_alignment(directory):
    """60 rows of 40 residues, each a mutant of the first."""
    draw = random.Random(1)
    query = draw.choices("ACDEFGHIKLMNPQRSTVWY", k=40)
    with open(directory / "query.a3m", "w") as file:
        for row in range(60):
            mutant = [draw.choice("ACDEFGHIKLMNPQRSTVWY-") if row and draw.random() < 0.4 else letter
                      for letter in query]
            file.write(f">row{row}\n{''.join(mutant)}\n")


def companions():
    """Other models, patterns of fusion."""
    sizes = {"protein_mpnn": "--batch-size 2", "tiny_llama": "--batch-size 4"}
    alone = {"protein_mpnn": "split-fusion aggregate-fusion edge-fusion",
             "tiny_llama": "qkv-fusion flash-attention swiglu-fusion norm-fusion"}
    kernel = {"protein_mpnn": "message-kernel", "tiny_llama": "pointwise-kernel"}
    found = []
    for name, flags in sizes.items():
        program, words = f"companions/{name}.py {flags} {BF16}", alone[name]
        found.append(Verb(f"train {name}", (f"{program} {FEW}",),
                          ("pytorch_profiles_v2/performance_summary_*.json",
                           "pytorch_profiles_v2/metrics.jsonl")))
        own, measured, named = only(kernel[name]), ("baseline", "fused", *only(words)), ()
        measured, named = (measured, own) if name == "tiny_llama" else (measured + own, ())
        measured += (f"fused+{kernel[name]}", "compiled")
        words = " ".join((*measured, *named))
        command = f'{program} --compare-fusion --num-steps 3 --variants "{words}"'
        found.append(Verb(f"compare {name}", (command,), measured=measured, named=named,
                          expected=UNPACKED if named else ()))
    return [*found,
            Verb("patterns", ("companions/fusion_patterns.py --rounds 3 --ladder here",),
                 result="pytorch_profiles_v2/fusion_patterns.json", null=("forward", "both"),
                 holds=all_were_timed)]


def all_were_timed(result, directory):
    """Complaints about a way to write a pattern that has no times, and nothing that stands in its way."""
    for pattern in result["patterns"]:
        for way in pattern["ways"]:
            if not way["reason"] and not (way["forward"] and min(way["forward"]) > 0):
                yield f"{pattern['name']}, {way['name']}: no time"


VERBS = {verb.name: replace(verb, expected=verb.expected + ANYWHERE) for verb in  # the longest first
         (*comparisons(), *trainings(), *checks(), *sessions(), *companions())}


@pytest.mark.gpu
@pytest.mark.parametrize("name", VERBS)
def test_verb(name, tmp_path):
    run = perform(VERBS[name], tmp_path)
    complaints = judge(VERBS[name], run, tmp_path)
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
                found = make_variants(settings, arguments.variants, True)
                assert {v.name for v in found if not v.reason} == {*verb.measured}, verb.name
                assert {v.name for v in found if v.reason} == {*verb.named}, verb.name
                for reason in "; ".join(v.reason for v in found if v.reason).split("; "):
                    assert not reason or any(re.fullmatch(known, reason) for known in verb.expected), (
                        verb.name, reason)


FIGURES = dict.fromkeys(ROW, 1.0)
COMPARED = Verb("compare", ("tiny_openfold_v2.py --compare-fusion",), ("table.json",),
                measured=("baseline", "fused"), named=("only-idle",), expected=("it is idle",))


def judged(directory, number=1, changes=(), **values):
    """Complaints about a comparison in which nothing is wrong but `values`, or `changes` of one row."""
    (directory / "table.json").write_text("{}")
    rows = [*(dict(name=name, measured=True, reason=None, median_forward_time=.1, fusion_config={}, **FIGURES)
              for name in COMPARED.measured),
            dict(name="only-idle", measured=False, reason="it is idle", fusion_config={})]
    rows[number].update(changes)
    good = dict(codes=[0], stdout="only-idle  not measured: it is idle\nWritten: table.json\n", stderr="",
                results=[dict(variants=rows)])
    return judge(COMPARED, Run(**{**good, **values}), directory)


@pytest.mark.parametrize("wrong, words", [
    ({}, None),
    (dict(changes=dict(fusion_config=dict(enable_cuda_graphs=True), median_forward_time=None)), None),
    (dict(changes=dict(measured=False, reason="Unsupported: skipped")), "fused was not measured: Uns"),
    (dict(number=2, changes=dict(reason="NotImplementedError: x; it is idle")), "not measured: NotImpl"),
    (dict(number=2, changes=dict(measured=True, reason=None, **FIGURES)), "only-idle was measured"),
    (dict(changes=dict(speedup=math.nan)), "variants/1/speedup is nan"),
    (dict(changes=dict(peak_memory_mb=0.0)), "peak_memory_mb is 0.0"),
    (dict(changes=dict(speedup=None)), "fused: no speedup"),
    (dict(changes=dict(median_forward_time=None)), "median_forward_time is null"),
    (dict(results=[dict(passed=False)]), "passed is False"), (dict(results=[dict(variants=[])]), "rows []"),
    (dict(results=[dict(performance_summary=dict(median_batch_time=.1))]), "no peak_memory_mb"),
    (dict(stderr="W1124 17:31:39.123000 81 torch/_inductor/utils.py:1] Not enough SMs"), "a warning: W1124"),
    (dict(stderr="Traceback (most recent call last):"), "a traceback"),
    (dict(stdout="falling back to eager"), "not expected: falling back"),
    (dict(stdout="Written: table.json, gone.png"), "named, but missing or empty: gone.png"),
    (dict(codes=[1], stderr="error: why"), "exit codes [1]")])
def test_the_judge_complains_about_what_is_wrong_alone(wrong, words, tmp_path):
    found = judged(tmp_path, **wrong)
    assert any(words in complaint for complaint in found) if words else found == []
