"""run_rocprofv3.sh: which kernels ran on the GPU, how often, how long."""
import os
import re
import sys

from fusion_lab.measuring.roctx import BLIND
from fusion_lab.rocm import kernel_summary
from fusion_lab.rocm.failures import STABLE_CLOCKS
from fusion_lab.rocm.session import Command, say
from fusion_lab.rocm.wrapper import Wrapper
from fusion_lab.training.errors import NO_DATA, OK
from fusion_lab.training.files import write_json, write_text

MARKERS = "--marker-trace"
WITH_MARKERS = {MARKERS, "--runtime-trace", "--sys-trace"}  # with them, recording ends at the last pause
WITH_CALLS = {"--hip-trace", "--runtime-trace", "--sys-trace"}


class Rocprofv3(Wrapper):
    """GPU kernel trace with rocprofv3: which kernels ran, how often, how long, of what kind."""
    script, executable, default_dir = "run_rocprofv3.sh", "rocprofv3", "rocprofv3_profiles_v2"
    workload = ["--num-steps", "10", "--warmup-steps", "3"]
    package = "rocprofiler-sdk"
    switches = {"--hip-trace": "HIP API calls as well",
                "--runtime-trace": "HIP API, markers, copies, allocations",
                "--sys-trace": "as --runtime-trace, and HSA and compiler API; very large",
                "--marker-trace": "the trainer's named ranges"}

    @classmethod
    def add_options(cls, parser):
        super().add_options(parser)
        for switch, meaning in cls.switches.items():
            parser.add_argument(switch, action="store_true", help=meaning)
        parser.add_argument("--memory-trace", action="store_true", help="memory copies and allocations")
        parser.add_argument("--pftrace", action="store_true", help="also a Perfetto trace (ui.perfetto.dev)")
        parser.add_argument("--pmc", metavar="COUNTERS", action="append", default=[], help="hardware counters"
                            " of one run, by space or comma; repeatable (ROCm 7.12 or newer)")
        parser.add_argument("--selected-regions", action="store_true",
                            help="the measured steps only, no start-up and warm-up (ROCm 7.0 or newer)")

    def __init__(self, options, own_flags):
        super().__init__(options, own_flags)
        self.selected = options.selected_regions and self.has("--selected-regions")
        self.counters = [re.split(r"[\s,]+", names.strip(" ,")) for names in options.pmc]  # of each run

    def commands(self):
        options = self.options
        switches = [switch for switch in self.switches if vars(options)[switch[2:].replace("-", "_")]]
        if not WITH_MARKERS.isdisjoint(switches):
            self.counted = "start-up in the count, evaluation not"
        if self.selected and MARKERS not in switches:  # without, 7.0 to 7.2 do not hear start and stop
            switches.append(MARKERS)
        if self.graphs_asked_for and WITH_CALLS.isdisjoint(switches):
            switches.append("--hip-trace")  # to count the kernels of each replay
        arguments = ["--kernel-trace", "--stats", *switches]
        if options.memory_trace:
            arguments += ["--memory-copy-trace"]
            arguments += ["--memory-allocation-trace"] * self.has("--memory-allocation-trace")
        for counters in self.counters:
            arguments += ["--pmc", *counters]
        if self.selected:
            arguments.append("--selected-regions")
        elif options.selected_regions:
            self.notes.append(f"{self.tool} has no --selected-regions: the whole run is recorded, start-up "
                              "and warm-up included")
        arguments += ["--output-format", "csv", *["pftrace"] * options.pftrace, "--output-directory",
                      self.directory, "--output-file", "process_%pid%"]
        return [Command([self.tool.path or self.executable, *arguments, *options.tool_option, "--",
                         sys.executable, self.program, *self.program_flags],
                        unset_env=[f"ROCPROF_OUTPUT_{what}" for what in ("FORMAT", "PATH", "FILE_NAME")])]

    def judge(self, log_text):
        """Summarise whatever was recorded; a run without a kernel is a failure of its own."""
        summary = kernel_summary.summarize(self.directory)
        if not summary["launches"]:
            launches = summary["launches_without_kernels"]
            why = f"{launches} launches without. {BLIND}" if launches else self.why_no_kernel(log_text)
            return NO_DATA, f"rocprofv3 recorded no GPU kernel: {why}"
        text = kernel_summary.render(summary)
        place = os.path.join(self.directory, "rocprofv3_summary")
        write_text(place + ".txt", text)
        write_json(place + ".json", summary)
        say("", text)
        if missing := self.why_no_counters({**summary["counters"], **summary["counter_averages"]}):
            return NO_DATA, missing
        return OK, f"{summary['launches']} kernel launches, {summary['kernel_time_ms']:.3f} ms of kernels"

    def why_no_kernel(self, log_text):
        unheard = re.search(r"no profiler start and stop \((.*)\)", log_text)
        if self.selected and unheard:
            return f"the program could not say where its measured steps begin, {unheard[1]}"
        if self.selected:
            return "no region was marked by roctxProfilerResume; try without --selected-regions"
        return "the program used no GPU, or only one that is hidden from the profiler"

    def why_no_counters(self, values):
        """What {counter: value} lacks of what was asked for, or None; rocprofv3 itself only warns."""
        names = [name.partition(":")[0] for names in self.counters for name in names]  # of NAME:device=0
        missing = [name for name in names if name not in values]
        if missing:
            return (f"rocprofv3 left no value of {', '.join(missing)}: misspelled, or no counter of this GPU "
                    "(rocprofv3 --list-avail lists them), or of a --pmc before the last, which before ROCm "
                    "7.12 is the only one")
        if names and not any(values[name] for name in names):
            return f"all counters are 0. {STABLE_CLOCKS}"
        return None
