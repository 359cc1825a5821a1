"""Whatever reads files, given damaged ones: a valid object or the project's error in one line, nothing else.

FUZZ_CASES is how many cases there are in all; the same ones every time. Ten thousand:
    FUZZ_CASES=10000 make test ARGS=tests/programs/test_damaged_files.py
"""
import functools
import gzip
import json
import os
import pathlib
import random
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fusion_lab.training.reading import parse_json

import tiny_openfold_v2 as tof
from fusion_lab.measuring import metrics, summary
from fusion_lab.profiler import report
from fusion_lab.rocm import kernel_summary
from fusion_lab.training.checkpoints import load_run, snapshot
from fusion_lab.training.files import UserError, printable
from fusion_lab.training.models import read_model, save_model
from proteins import files
from tests.programs import damage
from tests.proteins.structures import as_cif, atom, model
from tests.rocm.fake_rocm import common
from tests.study.study_parts import read_back, write_study

CASES = int(os.environ.get("FUZZ_CASES", "500"))
LONGEST = 2000  # letters of a message


# --- Proteins -------------------------------------------------------------------------------------------

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
ROWS = [SEQUENCE, "MRTAYIAK-RQISFVKTHFSRQLDERLGLIEV", "MKTGYLAKQRQ----KSHFARQLEERLG----"]
ALIGNMENTS = {
    "a3m": "".join(f">row{i} of it\n{row[:9]}{'ac' * i}{row[9:]}\n" for i, row in enumerate(ROWS)),
    "sto": "# STOCKHOLM 1.0\n#=GF ID x\n" + "".join(f"row{i} {row[:20]}\n" for i, row in enumerate(ROWS))
           + "\n" + "".join(f"row{i} {row[20:]}\n" for i, row in enumerate(ROWS)) + "//\n",
    "fasta": "".join(f">row{i}\n{row[:20]}\n{row[20:]}\n" for i, row in enumerate(ROWS)),
    "aln": "".join(f"{row}\n" for row in ROWS)}


def require_protein(protein):
    rows, length = protein.msa.shape
    assert rows > 0 and length > 0 and protein.msa.dtype == np.uint8 and protein.msa.max() <= files.GAP
    assert (protein.msa[0] != files.GAP).all() and len(protein.numbers) == length
    assert protein.coords.shape == (length, 3) and not np.isinf(protein.coords).any()
    assert np.isfinite(protein.coords).all(1).any()


def alignment(suffix, random_, place):
    path, data = place / f"x.{suffix}", damage.damaged_text(ALIGNMENTS[suffix].encode(), random_)
    if random_.random() < 0.2:
        path, data = place / f"x.{suffix}.gz", gzip.compress(data)
        data = damage.damaged_bytes(data, random_) if random_.random() < 0.7 else data
    path.write_bytes(data)
    msa = files.read_alignment(path, "row1" if random_.random() < 0.2 else None)
    assert msa.ndim == 2 and msa.size and msa.max() <= files.GAP and (msa[0] != files.GAP).all()


@functools.cache
def structures():
    pytest.importorskip("gemmi")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x.pdb")
        lines = [*model(SEQUENCE, skip=(11, 12, 13)), "TER", *model("GSHMKTAYIAKQ", chain="B", start=-3),
                 atom("O", "HOH", "A", 300, (1, 2, 3), record="HETATM"), "END", ""]
        path.write_text("\n".join(lines))
        return {"pdb": path.read_bytes(), "cif": as_cif(path).read_bytes()}


def structure(suffix, random_, place):
    for name, text in (("x.a3m", ALIGNMENTS["a3m"].encode()),
                       (f"x.{suffix}", damage.damaged_text(structures()[suffix], random_))):
        (place / name).write_bytes(text)
    require_protein(files.load_protein(place / "x.a3m", place / f"x.{suffix}",
                                       random_.choice((None, None, "A", "B"))))


# --- Checkpoints ----------------------------------------------------------------------------------------

@functools.cache
def trained():
    """(Trainer, what a checkpoint of it holds, its bytes)"""
    settings = tof.PROGRAM.settings(num_blocks=1, msa_dim=4, pair_dim=4, msa_heads=1, pair_heads=1,
                                    outer_product_dim=2, num_seqs=3, seq_len=6, batch_size=1, use_amp=True,
                                    amp_dtype="float16")
    trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
    source = tof.PROGRAM.data(settings)
    trainer.step(source.batch(0))
    trainer.step_number, trainer.trained_on = 1, {"a"}
    saved = snapshot(trainer)
    saved = {**saved, "model": {k: v.clone() for k, v in saved["model"].items()}, "moments": {
        kind: {k: v.clone() for k, v in part.items()} for kind, part in saved["moments"].items()}}
    with tempfile.TemporaryFile() as file:
        torch.save(saved, file)
        file.seek(0)
        return trainer, source, saved, file.read()


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def checkpoint_bytes(random_, place):
    """What is restored from a damaged file is what was saved."""
    trainer, source, saved, whole = trained()
    (place / "c.pt").write_bytes(damage.damaged_bytes(whole, random_) if random_.random() < 0.8 else whole)
    load_run(trainer, place / "c.pt", source)
    assert same(snapshot(trainer), saved)


TENSORS = (torch.zeros(3), torch.zeros(0), torch.zeros(4, dtype=torch.int64), torch.full((4,), float("nan")),
           torch.zeros(4, 4).to_sparse(), torch.tensor(1.0), torch.zeros(16, dtype=torch.uint8))


def checkpoint_values(random_, place):
    trainer, source, saved, _ = trained()
    saved = damage.with_other_value(saved, random_, damage.VALUES + TENSORS)
    torch.save(saved, place / "c.pt")
    load_run(trainer, place / "c.pt", source)
    assert all(weight.isfinite().all() for weight in trainer.weights.values())
    assert type(trainer.step_number) is int and all(isinstance(name, str) for name in trainer.trained_on)


@functools.cache
def model_file():
    """(what a model file holds, its bytes)"""
    trainer, _, saved, _ = trained()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m.pt")
        save_model(path, tof.PROGRAM, saved["model"], trainer.settings.model, dict(about="x"))
        saved = torch.load(path, weights_only=True)
        del saved["digest"]  # or it alone would refuse whatever is changed
        return saved, path.read_bytes()


def model_bytes(random_, place):
    """What is read from a damaged file is what was saved."""
    whole = model_file()[1]
    (place / "m.pt").write_bytes(damage.damaged_bytes(whole, random_) if random_.random() < 0.8 else whole)
    found, saved = read_model(place / "m.pt", tof.PROGRAM), model_file()[0]
    assert found.card == saved["card"]
    assert same(found.weights, {name: weight.float() for name, weight in saved["model"].items()})


def model_values(random_, place):
    whole = model_file()[0]
    changed = damage.with_other_value(whole, random_, damage.VALUES + TENSORS)
    if random_.random() < 0.3:  # the one part of which most values can be used
        changed = {**whole, "card": damage.with_other_value(whole["card"], random_)}
    torch.save(changed, place / "m.pt")
    found = read_model(place / "m.pt", tof.PROGRAM)
    tof.TinyOpenFoldV2(found.config).load_state_dict(found.weights)
    assert all(weight.isfinite().all() for weight in found.weights.values()) and json.dumps(found.card)


# --- Results of earlier runs ----------------------------------------------------------------------------

RUN = dict(version="v2_fused", timestamp="2026-01-01", config=dict(msa_dim=64, seq_len=64),
           training_params=dict(batch_size=4, use_amp=False, num_steps=5, warmup_steps=1),
           fusion_config=dict(enable_x=True),
           system_info=dict(gpu_name=None, host_cpu="c", torch_version="2"),
           performance_summary=dict(avg_training_speed=100.0, peak_memory_mb=50.0, median_batch_time=0.04))
SESSION = dict(mode="pytorch_profiler", config=RUN["config"], fusion_config=RUN["fusion_config"],
               training_params=RUN["training_params"], system_info=RUN["system_info"], time_kind="time",
               step=dict(untraced_ms=2.5), sublayers=[dict(name="a", direction="forward", total_us=7.0),
                                                      dict(name="a", direction="backward", total_us=0)],
               kernels=[dict(name="k|1", self_us=3.5)])


def earlier_summary(random_, place):
    (place / "v1.json").write_bytes(damage.damaged_json(json.dumps(RUN), random_))
    found = summary.print_against(summary.read_summary(place / "v1.json"), RUN)
    parse_json(json.dumps(found, allow_nan=False))


def earlier_session(random_, place):
    (place / "fusion_analysis.json").write_bytes(damage.damaged_json(json.dumps(SESSION), random_))
    comparison = report.compare_sessions(report.read_analysis(place), SESSION, place)
    report.write_lines(place / "report.md", report.comparison_lines(comparison))
    parse_json(json.dumps(comparison, allow_nan=False))


@functools.cache
def study_files():
    """{name: bytes}"""
    with tempfile.TemporaryDirectory() as folder:
        write_study(pathlib.Path(folder))
        return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def study_file(name, random_, place):
    whole = study_files()
    for file, data in whole.items():
        (place / file).write_bytes(data)
    text = whole[name].decode()
    lines = text.split("\n") if name.endswith("jsonl") else [text]
    at = random_.randrange(len(lines) - 1) if len(lines) > 1 else 0
    damaged = damage.damaged_json(lines[at], random_)
    (place / name).write_bytes(b"\n".join([*(line.encode() for line in lines[:at]), damaged,
                                           *(line.encode() for line in lines[at + 1:])]))
    read_back(place)


def metrics_file(random_, place):
    lines = [dict(step=i, loss=1.5, learning_rate=1e-3, gradient_norm=0.1) for i in range(1, 4)]
    lines = [json.dumps(line) for line in [*lines, dict(step=3, evaluation={"held-out P(L/2)": 0.5})]]
    at = random_.randrange(len(lines))
    text = "\n".join([*lines[:at], "{}", *lines[at + 1:], ""]).encode()
    (place / "metrics.jsonl").write_bytes(text.replace(b"{}", damage.damaged_json(lines[at], random_)))
    metrics.cut_what_comes_again(place / "metrics.jsonl", SimpleNamespace(step_number=3, evaluated=3))
    steps, evaluations = metrics.read_metrics(place / "metrics.jsonl")
    assert all(type(line["step"]) is int and "loss" in line for line in steps)
    assert [line["step"] for line in steps] == sorted({line["step"] for line in steps})
    assert all(line["evaluation"].keys() for line in evaluations if line["evaluation"])


# --- What profilers leave -------------------------------------------------------------------------------

FEW = common.KERNELS[:2] + common.KERNELS[-1:]
KERNELS = [(name, 3, time) for name, _, time in FEW]


@functools.cache
def profiler_files():
    """{name: bytes} of every file that is read of a result directory."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        common.write_stats(place / "7_kernel_stats.csv", KERNELS)
        common.write_trace(place / "7_kernel_trace.csv", "7.0", KERNELS)
        common.write_api_traces(str(place / "7"), KERNELS)
        common.write_counters(place / "7_counter_collection.csv", ["SQ_WAVES", "OccupancyPercent"], KERNELS)
        (place / "7_memory_copy_stats.csv").write_text('"Name","Calls","TotalDurationNs"\n"D2H",4,8000\n')
        common.write_trace(place / "pmc_perf.csv", "rocprof-compute", KERNELS)
        (place / "results_pmc_perf_0.csv").write_text(
            "Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,Counter_Name,Counter_Value\n"
            "1,k,0,10,SQ_WAVES,1\n1,k,0,10,GRBM_COUNT,1\n2,k,20,30,SQ_WAVES,1\n")
        steps = {"measured": 4, "warmup": 3, "selected_regions": False, "ends_with_steps": True}
        name = "performance_summary.json"
        (place / name).write_text(json.dumps(RUN))
        (place / "manifest.json").write_text(json.dumps({"steps": steps, "summary": name}))
        common.write_rocpd(place / "7_results.db", KERNELS, counters=["SQ_WAVES"])
        return {path.name: path.read_bytes() for path in place.iterdir()}


SOURCES = {"stats": ("7_kernel_stats.csv", "7_memory_copy_stats.csv"),
           "trace": ("7_kernel_trace.csv", "7_hip_api_trace.csv", "7_marker_api_trace.csv"),
           "counters": ("7_counter_collection.csv", "7_kernel_stats.csv"),
           "compute": ("pmc_perf.csv",), "long form": ("results_pmc_perf_0.csv",),
           "database": ("7_results.db",)}
BESIDE = ("manifest.json", "performance_summary.json")


def profiler_file(source, random_, place):
    """One file is damaged, of the source or beside it; then all that is done with such a directory."""
    whole, names = profiler_files(), (*SOURCES[source], *BESIDE)
    for name in names:
        (place / name).write_bytes(whole[name])
    chosen = place / (random_.choice(BESIDE) if random_.random() < 0.2 else random_.choice(SOURCES[source]))
    if chosen.suffix == ".db":
        damage.damage_database(chosen, random_)
    elif chosen.suffix == ".json":
        chosen.write_bytes(damage.damaged_json(whole[chosen.name].decode(), random_))
    else:
        chosen.write_bytes(damage.damaged_csv(whole[chosen.name], random_))
    kernel_summary.main_figures(place)
    found = kernel_summary.load(place)
    differences = kernel_summary.differences(found, found)
    parse_json(json.dumps({**found, "comparison": differences}, allow_nan=False))
    assert found["launches"] > 0 and kernel_summary.report(found, differences)


READERS = {
    **{f"alignment {suffix}": functools.partial(alignment, suffix) for suffix in ALIGNMENTS},
    **{f"structure {suffix}": functools.partial(structure, suffix) for suffix in ("pdb", "cif")},
    "checkpoint bytes": checkpoint_bytes, "checkpoint values": checkpoint_values,
    "model bytes": model_bytes, "model values": model_values,
    "earlier summary": earlier_summary, "earlier session": earlier_session,
    **{f"study {name}": functools.partial(study_file, name)
       for name in ("config.json", "results.jsonl")},
    "metrics": metrics_file,
    **{f"profiler {source}": functools.partial(profiler_file, source) for source in SOURCES}}
NEVER_REFUSED = {"metrics"}  # its reader leaves out what it cannot use


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_an_object_or_one_line(name, tmp_path):
    count, refused = max(3, CASES // len(READERS)), 0
    for number in range(count):
        for path in tmp_path.iterdir():
            path.unlink()
        try:
            READERS[name](random.Random(f"{name} {number}"), tmp_path)
        except UserError as error:
            assert printable(str(error)) == str(error) and len(str(error)) < LONGEST, f"case {number}"
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {number} of {name!r} ends in {error!r:.300}") from error
    assert refused == 0 if name in NEVER_REFUSED else 0 < refused < count
