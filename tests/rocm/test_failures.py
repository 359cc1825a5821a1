"""What the tools say when two ROCms meet, and when packages do not fit; and what is said about it."""
import pytest

from fusion_lab.rocm import failures, process
from fusion_lab.training.files import FAILED, MISSING
from tests.rocm.fake_rocm.machine import start


@pytest.mark.parametrize("said", [
    "CommandLine Error: Option 'greedy-reverse-local-assignment' registered more than once!",
    "rocprofiler_register: ROCPROFILER_REGISTER_LIBRARY is already set to /opt/rocm/lib/librocprofiler.so",
    "ImportError: /site/_rocm_sdk_core/lib/libamdhip64.so.7: undefined symbol: hsa_amd_memory_copy"])
@pytest.mark.parametrize("code", [1, -6])
def test_two_rocms_in_one_process(said, code):
    found, reason = process.failure(process.Ended(code), f"Step 1\n{said}\nAborted\n")
    assert found == FAILED and "Two ROCms are in one process" in reason and "PYTHON=venv/bin/python" in reason


def test_other_missing_symbols_are_no_rocm():
    assert failures.known_failure("libfoo.so: undefined symbol: foo_hsa_") is None


@pytest.mark.slow
@pytest.mark.parametrize("release, code", [("7.12", 3), ("7.13", 3), ("10.1", 3), ("7.2", 0)])
def test_pinned_packages_of_rocprof_compute(release, code, machine):
    """7.12 looks at them before anything else, later releases where they analyze."""
    machine(release)
    assert start("run_rocprof_compute.sh").returncode == 0
    machine(release, FAKE_FAIL="pins")
    done = start("run_rocprof_compute.sh", "--list-stats")
    assert done.returncode == code, done.stdout + done.stderr
    for words in ("python3 -m venv compute", "pip install 'pandas<3' -r", "PATH=$PWD/compute/bin:$PATH"):
        assert (words in done.stderr) == (code == MISSING)


def test_advice_on_packages():
    text = "The 'pandas' package was not found"
    said, code, advice = failures.known_failure(text)
    assert (said, code) == (text, MISSING) and "'pandas<3' -r $ROCM_PATH/libexec" in advice
    assert failures.known_failure("all is well") is None


def test_exceptions_of_the_tool_and_of_the_program():
    tool = 'Traceback (most recent call last):\n  File "/opt/rocprofv3", line 1\nValueError: x\n'
    both = tool.replace("ValueError", '  File "/home/prog.py", line 2\nValueError')
    assert failures.crash_of_tool(tool, "/else/prog.py") == "ValueError: x"
    assert failures.crash_of_tool(both, "/else/prog.py") is None
    assert failures.crash_of_tool(tool.replace("rocprofv3", "torch"), "prog.py") is None
    assert failures.last_exception("nothing") == ([], None) == failures.last_exception(
        "Traceback (most recent call last):\n  cut")
    assert failures.last_exception(f"{tool}{tool.replace('x', 'y' * 300)}")[1] == f"ValueError: {'y' * 188}"
    assert failures.without_colours("\x1b[31mred\x1b[0m") == "red"
