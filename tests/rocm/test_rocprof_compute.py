"""rocprof-compute: rooflines that a release does not draw, counters that have other names in results."""
import pytest

from fusion_lab.rocm import kernel_summary, records
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm.machine import manifest, start, wrapper


@pytest.mark.slow
@pytest.mark.parametrize("release, version, name", [
    ("7.2", 90008, "gfx908"), ("6.3", 90402, "gfx942"), ("6.4", 90402, None), ("7.13", 110501, "gfx1151"),
    ("7.14", 110500, "gfx1150"), ("10.0", 110501, None), ("10.0", 110503, "gfx1153"),
    ("10.1", 120500, "gfx1250")])
def test_no_roofline_where_there_is_none(release, version, name, machine, gpu):
    """It is left out with a note, and the session succeeds; asked for by itself, it is refused."""
    workplace = machine(release)
    gpu(version)
    done = start("run_rocprof_compute.sh", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (f"draws no roofline of {name}: left out" in done.stdout) == (name is not None)
    assert len(manifest(workplace / "x")["commands"]) == (1 if name else 2)
    assert ("counters and roof collected" in done.stdout) == (name is None)
    alone = start("run_rocprof_compute.sh", "-o", "y", "--roof-only")
    assert (alone.returncode, "draws no roofline" in alone.stderr) == ((1, True) if name else (0, False))


def test_an_unknown_release_is_not_judged_by_its_gpus(machine, gpu):
    machine("next")
    gpu(110000)
    shown = start("run_rocprof_compute.sh", "--preflight")
    assert shown.returncode == 0 and "ROCm 10.2 is not among those known here" in shown.stdout


def test_counters_under_the_names_of_their_release(tmp_path):
    """7.0 to 7.12 call all *_ACCUM by one name in their results, and wrote text; 7.13 writes YAML."""
    lists = tmp_path / "perfmon"
    lists.mkdir()
    (lists / "SQ_IFETCH_LEVEL.txt").write_text("pmc: SQ_WAVES SQ_IFETCH_LEVEL_ACCUM TCC_HIT[0]\n")
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n1,k,5\n")
    assert records.missing_counters(tmp_path) == ["SQ_IFETCH_LEVEL_ACCUM", "TCC_HIT[0]"]
    (tmp_path / "pmc_perf.csv").write_text("Kernel_Name,SQ_WAVES,SQ_ACCUM_PREV_HIRES,TCC_HIT[0]\nk,5,6,7\n")
    assert records.missing_counters(tmp_path) == []
    (lists / "pmc_perf_0.yaml").write_text("jobs:\n- pmc:\n  - SQ_WAVES\n  - 'TCC_HIT[1]'\n  - SQ_BUSY\n")
    (lists / "counter_def_0.yaml").write_text("counters:\n- name: X\n  architectures:\n  - gfx942\n  - Y\n")
    assert records.missing_counters(tmp_path) == ["SQ_BUSY", "TCC_HIT[1]"]


def test_lists_of_dispatches_without_times_are_passed_over(tmp_path):
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name\n0,k\n")
    assert records.read_kernels(tmp_path).totals == {}
    with pytest.raises(UserError, match="no kernel .*left out, as they list dispatches without times: pmc_p"):
        kernel_summary.load(tmp_path)
    (tmp_path / "pmc_perf_1.csv").write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,1,4\n")
    assert records.read_kernels(tmp_path) == (
        {"k": (1, 3.0)}, "rocprof-compute counters", ["pmc_perf_1.csv"], ["pmc_perf.csv"])
    said = "left out, as they list dispatches without times: pmc_perf.csv\n"
    assert said in kernel_summary.render(kernel_summary.load(tmp_path))


def test_options_are_those_of_the_mode(machine):
    """--block is known to both, --set to profile of 7.1 on."""
    machine("7.1")
    words = ["--tool-option=--set", "--tool-option", "launch_stats"]
    first, second = (command.argv for command in wrapper("rocprof-compute", *words).commands())
    assert first[4:7] == ["--no-roof", "--set", "launch_stats"] and second[-5:-3] == ["--set", "launch_stats"]
    assert start("run_rocprof_compute.sh", "-o", "x", "--no-roof", *words).returncode == 0
    assert start("run_rocprof_compute.sh", "-o", "x", "--mode=analyze", "--tool-option=--block",
                 "--tool-option=2").returncode == 0
    with pytest.raises(UserError, match="--set: not an option of rocprof-compute of ROCm 7.1"):
        wrapper("rocprof-compute", "-o", "x", "--mode=analyze", *words).commands()
