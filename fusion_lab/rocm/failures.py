"""What the tools say when they fail, and what to do about it."""
import os
import re

from fusion_lab.training.errors import FAILED, MISSING, NO_DATA, NO_GPU, OK, PROGRAM_FAILED, TIMEOUT, USAGE

MEANING = {OK: "done", FAILED: "the profiler failed", USAGE: "wrong use", MISSING: "something is missing",
           NO_GPU: "no usable GPU", PROGRAM_FAILED: "the profiled program failed", TIMEOUT: "time limit",
           NO_DATA: "the profiler produced no data", 130: "interrupted", 143: "terminated"}
# rocprof-compute before 3.5 joins its tables by columns of type `object`, which pandas 3 does not have.
OLD_PANDAS = ("It cannot work with pandas 3, which its list of packages allows: python3 -m pip install "
              "'pandas<3' for its interpreter.")
OWN_PACKAGES = ("Give it an environment of its own: python3 -m venv compute; compute/bin/pip install "
                "'pandas<3' -r $ROCM_PATH/libexec/rocprofiler-compute/requirements.txt. Then start this "
                "with PYTHON=$(command -v python3) PATH=$PWD/compute/bin:$PATH")
TWO_ROCMS = ("Two ROCms are in one process. Take torch and the profiler from one: PYTHON=venv/bin/python "
             "where pip installed both, else a torch for the ROCm of ROCM_PATH; none in LD_LIBRARY_PATH.")
STABLE_CLOCKS = ("On RDNA GPUs counters need a stable performance level: sudo amd-smi set --gpu all "
                 "--perf-level STABLE_STD, and AUTO afterwards.")
KNOWN_FAILURES = [(re.compile(pattern, re.MULTILINE), code, advice) for pattern, code, advice in (
    (r"No module named '?rocprofsys", MISSING, "It has no bindings for this Python. Set PYTHON to the "
     "version it was built for, or sample without bindings: rocprof-sys-sample -- python3 PROGRAM"),
    (r"The '.*' package was not found|^.*does not meet version requirements", MISSING, OWN_PACKAGES),
    (r"No module named '?roctx|ROCTX (Python module )?not found", MISSING, "--torch-trace needs the Python "
     "module roctx of rocprofiler-sdk for this Python. Set PYTHON to a version that it is there for, in "
     "$ROCM_PATH/lib/python3.*/site-packages."),
    (r"unsupported locale setting", MISSING, "It wants the locale en_US.UTF-8: sudo locale-gen en_US.UTF-8 "
     "(in a bare container first: apt-get install locales)."),
    (r"Cannot write results for|no counter csv files generated", NO_DATA, OLD_PANDAS),
    (r"Cannot find a supported arch in rocminfo", FAILED, "It knows AMD Instinct GPUs and, from 7.13 on, "
     "some Ryzen ones. ./run_rocprofv3.sh --pmc counts on others too."),
    (r"No HIP GPUs are available", NO_GPU, "Torch sees no GPU under the profiler: its ROCm differs from the "
     "profiler's, or the GPU is hidden."),
    (r"^.*(registered more than once|ROCPROFILER_REGISTER_LIBRARY is already set to|undefined symbol: hsa_)",
     FAILED, TWO_ROCMS),
    (r"CONFIGURATION_LOCKED", FAILED, "Two copies of rocprofiler-sdk were loaded, or torch.profiler ran as "
     "well. Use the profiler of torch's own ROCm, and no --enable-pytorch-profiler."),
    (r"exceeds the capabilities of the hardware", FAILED, "They do not fit into one pass: name fewer "
     "counters in one --pmc, and run once for each group."),
    (r"^(rocprofv3(\.py)?|rocprofsys|tool|rocprof-compute): error: .*", USAGE, "The tool refused "
     "its command line: look at --tool-option, else please report it, with command.txt and env.txt."),
    (r"Fatal error: (?!Command ').*", FAILED, "The profiler stopped before the program ran."),
    (r"^F\d{4,8} \d\d:\d\d:\S+ +\d+ \S+\.cpp:\d+\] .*", FAILED, "The profiler's library ended the "
     "program; try fewer kinds of trace."))]


def known_failure(text):
    """(what the tool said, exit code, advice) for the first known message in its output, or None."""
    for pattern, code, advice in KNOWN_FAILURES:
        if said := pattern.search(text):
            return said[0].strip()[:200], code, advice
    return None


def last_exception(text):
    """(files of the last Python traceback, its last line: "KeyError: 'x'"), or ([], None)."""
    block = text.rpartition("Traceback (most recent call last):\n")
    ending = re.search(r"^[A-Za-z_][\w.]*(:.*)?$", block[2], re.MULTILINE) if block[1] else None
    return re.findall(r'^ +File "([^"]+)"', block[2], re.MULTILINE), ending and ending[0][:200]


def crash_of_tool(text, program):
    """The last line of a traceback that ends in a ROCm tool and never came to the program, or None."""
    frames, ending = last_exception(text)
    names = {os.path.basename(frame) for frame in frames}
    theirs = any("rocprof" in os.path.basename(frame) or "rocprofsys" in frame for frame in frames)
    return ending if theirs and os.path.basename(program) not in names else None
