"""--preflight, and what it looks at: tool, torch, GPU, packages."""
import sys

import pytest

from fusion_lab.rocm import preflight
from fusion_lab.rocm.preflight import Tool
from tests.rocm.fake_rocm.machine import start


def test_every_problem_of_every_tool_at_once(machine):
    workplace = machine(None, FAKE_GPUS="0")  # what is missing comes before the GPU
    done = start("all", "--preflight")
    assert done.returncode == 3 and not list(workplace.iterdir())
    for words in ("rocm-profiler by pip", "sees no GPU", "cannot profile here"):
        assert done.stdout.count(words) == 3
    assert start("rocprofv3").stderr.count("problem: ") == 2
    machine("7.0", FAKE_TRAINER="no_torch")
    assert "flags were not judged: needs torch" in start("rocprofv3", "--dry-run").stdout


@pytest.mark.parametrize("pandas, warned", [("2.3.3", False), ("3.1.1", True)])
def test_pandas_of_the_tools_own_interpreter(pandas, warned, tmp_path):
    for name, text in (("python3", f"#!/bin/sh\necho {pandas}\n"), ("tool", f"#!{tmp_path}/python3\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    assert any("'pandas<3'" in text for text in preflight.pandas_warnings(
        Tool("rocprof-compute", str(tmp_path / "tool")))) is warned


def test_a_tool_of_the_wheels_comes_before_the_system_s(machine, tmp_path, monkeypatch):
    """Its release is known, and only a tool from elsewhere is a second ROCm beside a torch of the wheels."""
    machine("7.0")
    site = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for folder in ("_rocm_sdk_core/bin", "_rocm_profiler/bin", "torch", "rocm_sdk_core-7.14.0.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "rocm_sdk_core-7.14.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rocm-sdk-core\nVersion: 7.14.0\n")
    path = site / "_rocm_sdk_core" / "bin" / "rocprofv3"
    path.write_text("#!/bin/sh\necho '  --kernel-trace  x'\n")
    path.chmod(0o755)
    monkeypatch.syspath_prepend(site)
    tool = preflight.find_tool("rocprofv3", "--help")
    assert tool == Tool("rocprofv3", str(path), True, "7.14", frozenset(["--kernel-trace"]))
    torch = {"hip": "7.14.1", "torch_path": str(site / "torch" / "__init__.py")}
    assert not [*preflight.mismatch_warnings(tool, torch)]
    system = Tool("rocprofv3", "/opt/rocm/bin/rocprofv3", rocm="7.14")
    assert "PYTHON=venv/bin/python" in next(preflight.mismatch_warnings(system, torch))
    system.rocm, torch["torch_path"] = "7.0", "/x/y"
    assert "built for ROCm 7.14" in next(preflight.mismatch_warnings(system, torch))


def test_options_of_a_help_text():
    text = ("usage: tool [--not-this]\n  -k, --kernel-trace    see --pmc\n  --stats\twords --none\n"
            "  --a-b [FILE]   x\n")
    assert preflight.options_in(text) == {"--kernel-trace", "--stats", "--a-b"}
