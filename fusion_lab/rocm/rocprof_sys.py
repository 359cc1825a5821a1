"""run_rocprof_sys.sh: call stack and timeline of CPU and GPU."""
import mmap
import os
import pathlib
import re

from fusion_lab.rocm import preflight
from fusion_lab.rocm.failures import last_exception
from fusion_lab.rocm.session import Command, say
from fusion_lab.rocm.wrapper import Wrapper
from fusion_lab.training.errors import NO_DATA, OK, PROGRAM_FAILED


class RocprofSys(Wrapper):
    """Python call stack and timeline of CPU and GPU with rocprof-sys-python. From ROCm 7.13 on the GPU side
    covers the measured steps only: from there it hears the program's start and stop."""
    script, executable, default_dir = "run_rocprof_sys.sh", "rocprof-sys-python", "rocprof_sys_profiles_v2"
    workload = ["--batch-size", "2", "--num-steps", "3", "--warmup-steps", "1"]
    sizes = [("--seq-len", "16")]
    package = "rocprofiler-systems"
    components = "wall_clock trip_count cpu_clock peak_rss page_rss"

    @classmethod
    def add_options(cls, parser):
        super().add_options(parser)
        parser.add_argument("--modules", metavar="REGEX", action="append", help="record Python calls of files"
                            " with such a path; repeatable (default: program, torch/nn/modules, torch/optim)")
        parser.add_argument("--rocpd", action="store_true",
                            help="also write a rocpd database (ROCm 7.2 or newer; 7.1 crashes)")

    def commands(self):
        modules = self.options.modules
        modules = modules or [pathlib.Path(self.program).stem, "torch/nn/modules", "torch/optim"]
        environment = {  # all explicit: the defaults depend on each other, and changed with ROCm 7.1 and 10.1
            "ROCPROFSYS_TRACE": "ON", "ROCPROFSYS_PROFILE": "ON", "ROCPROFSYS_TIME_OUTPUT": "OFF",
            "ROCPROFSYS_USE_ROCPD": "ON" if self.options.rocpd else "OFF",
            "ROCPROFSYS_OUTPUT_PATH": self.directory, "ROCPROFSYS_USE_PID": "ON",
            "ROCPROFSYS_TIMEMORY_COMPONENTS": self.components,
            "PYTHON_EXECUTABLE": preflight.versioned_python()}
        if path := self.answer.get("torch_path"):  # to its own GPU libraries: else early releases see no GPU
            places = os.path.join(os.path.dirname(path), "lib"), os.environ.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = ":".join(filter(None, places))
        # The script itself follows `--`, never `python`: the launcher compiles that word as Python source.
        arguments = ["--module-restrict", *modules, "--function-exclude", "_call_impl"]
        return [Command([self.tool.path or self.executable, *arguments, *self.options.tool_option, "--",
                         self.program, *self.program_flags], environment,
                        ("ROCPROFSYS_OUTPUT_PREFIX", "ROCPROFSYS_CONFIG_FILE"))]

    def judge(self, log_text):
        """The launcher returns 0 when the script fails, so look at what the script left behind."""
        place, name = pathlib.Path(self.directory), re.escape(os.path.basename(self.program))
        error = re.search(rf"^(?:Exception -|{name}: error:) (.*)", log_text, re.MULTILINE)
        left = any(place.glob("program/performance_summary*")) or re.search(r"^\{.*\}\s*$", log_text,
                                                                            re.MULTILINE)
        if error or not left:
            return PROGRAM_FAILED, error[1][:200] if error else last_exception(log_text)[1] or (
                "it left no result, and rocprof-sys-python hides its exit code")
        patterns = ("*.proto", "*.db", *(f"*{name}*" for name in self.components.split()))
        found = sorted({path for pattern in patterns for path in place.rglob(pattern) if path.stat().st_size})
        if not found:
            return NO_DATA, "rocprof-sys-python wrote no trace, no profile and no database"
        say("", f"In {place}; open *.proto at https://ui.perfetto.dev, *.txt in any editor:",
            *(f"  {path.relative_to(place)}  {path.stat().st_size / 1e6:.1f} MB" for path in found))
        lacks = ["no GPU kernel in the trace"] * (not sees_gpu(found))
        if self.options.rocpd and not any(path.suffix == ".db" for path in found):
            lacks.append("no rocpd database, which comes with ROCm 7.2")
        return OK, ", but ".join([f"{len(found)} result files", *lacks])


def sees_gpu(results):
    """Is there a GPU kernel in a timeline, or no timeline? Its category stands there as text."""
    timelines = [path for path in results if path.suffix == ".proto"]
    for path in timelines:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if re.search(b"kernel_dispatch|device_hip", content):
                return True
    return not timelines
