"""What the tools say when they fail, and what to do about it."""
import re

from fusion_lab.training.files import FAILED, MISSING, NO_DATA, NO_GPU, OK, PROGRAM_FAILED, TIMEOUT, USAGE

MEANING = {OK: "done", FAILED: "the profiler failed", USAGE: "wrong use", MISSING: "something is missing",
           NO_GPU: "no usable GPU", PROGRAM_FAILED: "the profiled program failed",
           NO_DATA: "the profiler produced no data", TIMEOUT: "time limit", 130: "interrupted",
           143: "terminated"}
KNOWN_FAILURES = [(re.compile(pattern, re.MULTILINE), code, advice) for pattern, code, advice in (
    (r"No module named '?rocprofsys", MISSING,
     "It has no bindings for this Python. Set PYTHON to the version it was built for, or sample without "
     "bindings: rocprof-sys-sample -- python3 tiny_openfold_v2.py"),
    (r"The '.*' package was not found", MISSING,
     "Install its Python packages, best in a virtual environment of their own: python3 -m pip install -r "
     "$ROCM_PATH/libexec/rocprofiler-compute/requirements.txt"),
    (r"No HIP GPUs are available", NO_GPU,
     "Torch sees no GPU under the profiler: its ROCm differs from the profiler's, or the GPU is hidden."),
    (r"CONFIGURATION_LOCKED", FAILED,
     "Two copies of rocprofiler-sdk were loaded, or torch.profiler ran as well. Use the profiler of torch's "
     "own ROCm, and no --enable-pytorch-profiler."),
    (r"^(rocprofv3(\.py)?|rocprofsys|tool|rocprof-compute): error: .*", FAILED,
     "The tool refused its command line; please report it, with command.txt and env.txt."),
    (r"Fatal error: .*", FAILED, "The profiler stopped before the program ran."),
)]


def known_failure(text):
    """(what the tool said, exit code, advice) for the first known message in its output, or None."""
    for pattern, code, advice in KNOWN_FAILURES:
        said = pattern.search(text)
        if said:
            return said[0].strip()[:200], code, advice
    return None
