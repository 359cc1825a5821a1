"""Pictures of benchmarks/: plots as the raw files digit by digit, marks where traces have them."""
import json
import re
import xml.etree.ElementTree as tree

import pytest

from benchmarks import plot_folds, plot_results
from fusion_lab.training.errors import UserError
from tests.measuring.test_trace import Events
from tests.proteins.folds_at_hand import SEQUENCE, a_fold
from tests.support import ROOT, run_program
from tests.tiny import flags_of
from tiny_openfold.proteins import maps, structure_files


@pytest.mark.parametrize("draw", [plot_results.results, plot_results.patches])
def test_the_committed_plot_is_of_the_raw_files(draw):
    assert (ROOT / "docs" / f"{draw.__name__}.svg").read_text(encoding="utf-8") == draw()


# --- The time line --------------------------------------------------------------------------------------

SYSTEM = dict(gpu_name="NVIDIA X", host_cpu="a CPU", torch_version="2.13.0")


def a_session(folder, events):
    """A directory as a profiler session leaves it, as far as the picture needs it."""
    folder.mkdir()
    (folder / "x.json").write_text(json.dumps(dict(traceEvents=events)))
    (folder / "fusion_analysis.json").write_text(json.dumps(dict(
        trace="x.json", timestamp="2026-11-28T10:00:00", system_info=SYSTEM,
        config=dict(seq_len=8, world="x"), training_params=dict(batch_size=2, amp_dtype=None))))
    return folder


def phases(events, *begins):
    for begin in begins:
        for number, phase in enumerate(("forward", "backward", "optimizer")):
            events.add("user_annotation", phase, 1, begin + 100.0 * number, 100.0)


def drawn(*sessions):
    """({y of a row: [(x, width, class)]} of the bars, all texts) of the sessions' time line."""
    page, rows = tree.fromstring(plot_results.timeline(*map(str, sessions))), {}
    for rect in page.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("height") == "30":
            rows.setdefault(rect.get("y"), []).append(
                (float(rect.get("x")), float(rect.get("width")), rect.get("class").removeprefix("bar ")))
    return rows, [text.text for text in page.iter("{http://www.w3.org/2000/svg}text")]


def test_marks_stand_where_the_traces_have_them(tmp_path):
    """The faster of two steps; kernels, by the phase that launched them, and operations of a CPU, neither
    views nor what another one calls."""
    gpu = Events()
    phases(gpu, 0.0, 1000.0)
    for number, (launch, start, length) in enumerate([(10, 50, 100), (150, 500, 200), (1010, 1040, 40),
                                                      (1110, 1100, 40), (1210, 1140, 200)]):
        gpu.add("cuda_runtime", "cudaLaunchKernel", 1, float(launch), 5.0, correlation=number)
        gpu.add("kernel", "k", 7, float(start), float(length), correlation=number)
    gpu.memory(1, 20.0, 64 * 2 ** 20, device=1)
    gpu.memory(1, 1020.0, 32 * 2 ** 20, device=1)
    gpu.memory(1, 1030.0, -32 * 2 ** 20, device=1)
    cpu = Events()
    phases(cpu, 0.0)
    cpu.add("cpu_op", "aten::linear", 1, 10.0, 90.0)
    cpu.add("cpu_op", "aten::t", 1, 15.0, 5.0)
    cpu.add("cpu_op", "aten::addmm", 1, 25.0, 70.0)
    cpu.add("cpu_op", "aten::copy_", 1, 30.0, 10.0)  # within it
    cpu.add("cpu_op", "aten::empty", 1, 96.0, 2.0)
    cpu.add("cpu_op", "aten::mm", 2, 115.0, 60.0)  # on autograd's thread
    cpu.memory(1, 20.0, 16 * 2 ** 20)
    rows, texts = drawn(a_session(tmp_path / "old", gpu), a_session(tmp_path / "new", cpu))
    (*kernels, written), (*operations, less) = rows.values()
    scale = plot_results.AXIS / 300  # pixels a µs: the longer step takes 300

    def expected(*marks):
        return [(pytest.approx(20 + scale * start, abs=0.01),
                 pytest.approx(scale * length - plot_results.GAP, abs=0.01), kind)
                for start, length, kind in marks]
    assert kernels == expected((0, 40, "fused"), (60, 40, "ours"), (100, 200, "plain"))
    assert operations == expected((0, 70, "fused"), (90, 60, "ours"))
    assert less[1] == pytest.approx(written[1] / 2)
    assert "1,917 kernels unfused and 363 with" in texts[-1]  # which the ladder's file says of an H100
    assert {"old", "new", "3 kernels in 0.3 ms", "2 operations in 0.1 ms", "32 MB", "16 MB",
            "float32, batch_size 2, seq_len 8"} <= set(texts)


def test_a_trace_without_a_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="without a training step"):
        drawn(*[a_session(tmp_path / "x", Events())] * 2)


@pytest.mark.slow
def test_the_time_line_of_a_real_session(tmp_path):
    """Fused and not, from the command line."""
    for name, flags in (("before", ["--baseline"]),
                        ("after", ["--enable-all-fusion", "--disable-torch-compile"])):
        done = run_program("run_pytorch_profiler.py", *flags_of(num_seqs=8, seq_len=24), *flags,
                           "--num-steps", "5", "--profile-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
    done = run_program("benchmarks/plot_results.py", "timeline", tmp_path / "before", tmp_path / "after")
    assert done.returncode == 0, done.stderr
    counts = [int(count) for count in re.findall(r">(\d+) operations in", done.stdout)]
    launches = [json.loads((tmp_path / name / "fusion_analysis.json").read_text())["launches_per_step"]
                for name in ("before", "after")]
    assert counts == pytest.approx(launches, rel=0.06) and counts[1] < 0.9 * counts[0]


# --- Folds ----------------------------------------------------------------------------------------------


def test_folds_stand_beside_the_experiment(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("gemmi")
    atoms, figures = a_fold().numpy(), []
    (tmp_path / "x.a3m").write_text(f">x\n{SEQUENCE}\n")
    for name, plddt in (("true", 0.0), ("fold", 60.0)):
        structure_files.write_pdb(tmp_path / f"{name}.pdb", "x", SEQUENCE, atoms, [plddt] * len(atoms))
    (tmp_path / "fold.json").write_text(json.dumps(dict(
        rows=1303, scores=dict(tm_score=0.834), plddt_by_residue=[60.0] * len(atoms))))
    monkeypatch.setattr(maps, "save", lambda figure, path: figures.append(figure))
    assert plot_folds.run([str(tmp_path / each) for each in ("x.a3m", "true.pdb", "fold.json")]
                          + ["--output", "x.png"]) == 0
    true, fold = figures[0].axes
    assert [true.get_title(), fold.get_title()] == ["x\nexperiment", "from 1,303 rows\nTM-score 0.83"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["pLDDT 50 to 70: low"]
    ends = [axis.collections[-1].get_segments()[0] for axis in (true, fold)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-2)
