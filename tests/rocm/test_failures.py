"""What the tools say when they fail, and what is said about it."""
import pytest

from fusion_lab.rocm import failures
from fusion_lab.training.files import FAILED, MISSING


@pytest.mark.parametrize("said, code, words", [
    *((said, FAILED, "Two ROCms are in one process") for said in (
        "CommandLine Error: Option 'x' registered more than once!",
        "rocprofiler_register: ROCPROFILER_REGISTER_LIBRARY is already set to /opt/lib/librocprofiler.so",
        "ImportError: /site/_rocm_sdk_core/lib/libamdhip64.so.7: undefined symbol: hsa_amd_memory_copy")),
    ("ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED", FAILED, "Two copies of rocprofiler-sdk"),
    ("The 'pandas' package was not found", MISSING, "'pandas<3' -r $ROCM_PATH/libexec"),
    ("ROCTX not found. --torch-trace requires roctx", MISSING, "Python module roctx")])
def test_known_messages(said, code, words):
    found = failures.known_failure(f"Step 1\n{said}\nAborted\n")
    assert found[1] == code and words in found[2]
    assert failures.known_failure("libfoo.so: undefined symbol: foo_hsa_") is None


def test_exceptions_of_the_tool_and_of_the_program():
    tool = 'Traceback (most recent call last):\n  File "/opt/rocprofv3", line 1\nValueError: x\n'
    both = tool.replace("ValueError", '  File "/home/prog.py", line 2\nValueError')
    assert failures.crash_of_tool(tool, "/else/prog.py") == "ValueError: x"
    assert failures.crash_of_tool(both, "/else/prog.py") is None
    assert failures.crash_of_tool(tool.replace("rocprofv3", "torch"), "prog.py") is None
    assert failures.last_exception("Traceback (most recent call last):\n  cut") == ([], None)
