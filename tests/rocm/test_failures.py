"""What the tools say when they fail, and what is said about it."""
import pytest

from fusion_lab.rocm import failures, preflight
from fusion_lab.training.errors import FAILED, MISSING


@pytest.mark.parametrize("said, code, words", [
    *((said, FAILED, "Two ROCms are in one process") for said in (
        "CommandLine Error: Option 'x' registered more than once!",
        "rocprofiler_register: ROCPROFILER_REGISTER_LIBRARY is already set to /opt/lib/librocprofiler.so",
        "ImportError: /site/_rocm_sdk_core/lib/libamdhip64.so.7: undefined symbol: hsa_amd_memory_copy")),
    ("ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED", FAILED, "Two copies of rocprofiler-sdk"),
    ("ERROR The 'astunparse==1.6.2' package was not found", MISSING, "python3 -m venv compute"),
    ("the 'numpy==1.26.4' distribution does not meet version requirements", MISSING, "'pandas<3' -r"),
    ("locale.Error: unsupported locale setting", MISSING, "locale-gen en_US.UTF-8"),
    ("ERROR Cannot find a supported arch in rocminfo.", FAILED, "Instinct"),
    ("ModuleNotFoundError: No module named 'rocprofsys.libpyrocprofsys'", MISSING, "rocprof-sys-sample"),
    ("ROCTX not found. --torch-trace requires roctx", MISSING, "Python module roctx")])
def test_known_messages(said, code, words):
    """In a session, and where its --help already ends so."""
    found = failures.known_failure(f"Step 1\n{said}\nAborted\n")
    assert found[1] == code and words in found[2]
    (_, what, advice), = preflight.tool_problems(preflight.Tool("tool", "/bin/tool", trouble=said), "package")
    assert what.startswith("/bin/tool does not start (") and words in advice
    assert failures.known_failure("libfoo.so: undefined symbol: foo_hsa_") is None


def test_exceptions_of_the_tool_and_of_the_program():
    tool = 'Traceback (most recent call last):\n  File "/opt/rocprofv3", line 1\nValueError: x\n'
    both = tool.replace("ValueError", '  File "/home/prog.py", line 2\nValueError')
    assert failures.crash_of_tool(tool, "/else/prog.py") == "ValueError: x"
    assert failures.crash_of_tool(both, "/else/prog.py") is None
    assert failures.crash_of_tool(tool.replace("rocprofv3", "torch"), "prog.py") is None
    assert failures.last_exception("Traceback (most recent call last):\n  cut") == ([], None)
