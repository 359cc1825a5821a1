"""The three ROCm profilers: options, command lines and verdicts of their wrappers.

    python rocm_profilers.py {rocprofv3,rocprof-sys,rocprof-compute} [options] [--] [trainer flags]

The command lines keep to what the tools' own parsers accept from ROCm 6.3 to 10.1; where releases differ, the
--help of the installed tool decides. What the three have in common is profiler_session.Wrapper.
"""
import json
import os
import pathlib
import re
import shlex
import sys

from fusion_lab.rocm import kernel_summary, session
from fusion_lab.rocm.machine import (
    FAILED,
    NO_DATA,
    OK,
    PROGRAM_FAILED,
    USAGE,
    Stop,
    bindings_problems,
    tool_problems,
    versioned_python,
)
from fusion_lab.rocm.session import Command, Wrapper, at_least


class Rocprofv3(Wrapper):
    """GPU kernel trace with rocprofv3: which kernels ran, how often, how long, of what kind."""
    script, program, default_dir = "run_rocprofv3.sh", "rocprofv3", "rocprofv3_profiles_v2"
    workload = ["--num-steps", "10", "--warmup-steps", "3"]
    install_hint = "Install the package rocprofiler-sdk (ROCm 6.3 or newer), or set ROCM_PATH."
    oldest = "6.2"
    since = {"--runtime-trace": "6.3", "--pmc": "6.3", "--memory-allocation-trace": "6.3",
             "--selected-regions": "7.0"}
    inherited = ("ROCPROF_OUTPUT_FORMAT", "ROCPROF_OUTPUT_PATH", "ROCPROF_OUTPUT_FILE_NAME")
    switches = {"--hip-trace": "HIP API calls as well",
                "--runtime-trace": "HIP API, markers, copies, allocations",
                "--sys-trace": "as --runtime-trace, and HSA and compiler API; very large",
                "--marker-trace": "the trainer's named ranges",
                "--truncate-kernels": "short kernel names; the roll-up by kind becomes coarser"}
    examples = """examples:
  ./run_rocprofv3.sh                                     10 steps of the default model
  ./run_rocprofv3.sh --selected-regions -o fused         warm steps only (ROCm 7.0 or newer)
  ./run_rocprofv3.sh --selected-regions -o base --disable-all-fusion
  python kernel_summary.py fused --compare base         or --compare base in the second run
  ./run_rocprofv3.sh --pmc "SQ_WAVES GRBM_COUNT" --batch-size 8 --num-steps 5
"""

    @classmethod
    def add_options(cls, parser):
        for switch, meaning in cls.switches.items():
            parser.add_argument(switch, action="store_true", help=meaning)
        parser.add_argument("--memory-trace", action="store_true", help="memory copies and allocations")
        parser.add_argument("--pftrace", action="store_true", help="also a Perfetto trace (ui.perfetto.dev)")
        parser.add_argument("--pmc", metavar="COUNTERS", action="append",
                            help="hardware counters that fit into one pass, by space or comma")
        parser.add_argument("--selected-regions", action="store_true",
                            help="the measured steps only, no start-up and warm-up (ROCm 7.0 or newer)")
        parser.add_argument("--compare", metavar="DIR", help="compare with an earlier result directory")

    def __init__(self, options, trainer_flags):
        super().__init__(options, trainer_flags)
        if options.pmc and len(options.pmc) > 1:
            raise Stop(USAGE, "--pmc: given twice, and releases before 7.13 keep only the last. Name the "
                              "counters of one pass in one --pmc, and run once for each pass.")
        self.selected = options.selected_regions and self.has("--selected-regions") is not False
        self.earlier = None
        if options.compare and not options.dry_run:
            try:
                self.earlier = kernel_summary.load(options.compare)
            except (kernel_summary.Unreadable, kernel_summary.NoKernels, OSError) as error:
                raise Stop(USAGE, f"--compare: {error}") from None

    def commands(self):
        options, arguments = self.options, ["--kernel-trace", "--stats"]
        arguments += [self.require(switch) for switch in self.switches
                      if getattr(options, switch[2:].replace("-", "_"))]
        if options.memory_trace:
            arguments.append("--memory-copy-trace")
            if self.has("--memory-allocation-trace"):
                arguments.append("--memory-allocation-trace")
            else:
                self.notes.append("memory allocations are traced where rocprofv3 can (ROCm 6.3 or newer)")
        if options.pmc:
            arguments += [self.require("--pmc"), *re.split(r"[\s,]+", options.pmc[0].strip(" ,"))]
        if self.selected:
            arguments.append(self.require("--selected-regions"))
        elif options.selected_regions:
            self.notes.append(f"{self.tool_name()} has no --selected-regions: the whole run is recorded, "
                              "start-up and warm-up included")
        # The default format became rocpd with ROCm 7.0, and ROCPROF_OUTPUT_* from outside would join ours.
        arguments += ["--output-format", "csv", *(["pftrace"] if options.pftrace else []),
                      "--output-directory", self.directory, "--output-file", "tinyopenfold_%pid%"]
        return [Command([self.tool.command, *arguments, "--", sys.executable, self.target(),
                         *self.trainer_flags], unset_env=self.inherited)]

    def steps(self):
        steps = super().steps()
        return steps and {**steps, "selected_regions": self.selected}

    def replaced(self):
        stale = kernel_summary.result_files(pathlib.Path(self.directory), "*kernel_stats.csv")
        if stale:
            raise Stop(USAGE, f"-o {self.directory}: holds kernel records ({stale[0].name}) that would be "
                              "added to the new ones. Name a fresh directory.")
        return set()

    def judge(self, log_text):
        """Summarise whatever was recorded; a run without a kernel is a failure of its own."""
        try:
            summary = kernel_summary.summarize(self.directory)
        except kernel_summary.Unreadable as error:
            return NO_DATA, str(error)
        if not summary["launches"]:
            why = "the program used no GPU, or only one that is hidden from the profiler"
            if self.selected:
                why = "no region was marked by roctxProfilerResume; try without --selected-regions"
            return NO_DATA, f"rocprofv3 recorded no GPU kernel: {why}"
        comparison = kernel_summary.compare(summary, self.earlier) if self.earlier else None
        text = kernel_summary.report(summary, comparison)
        place = os.path.join(self.directory, "rocprofv3_summary")
        session.write_atomically(place + ".txt", text)
        session.write_atomically(place + ".json", json.dumps({**summary, "comparison": comparison}, indent=1))
        session.say("", text)
        return OK, f"{summary['launches']} kernel launches, {summary['kernel_time_ms']:.3f} ms of kernels"


class RocprofSys(Wrapper):
    """Python call stack and timeline of CPU and GPU with rocprof-sys-python."""
    script, program, default_dir = "run_rocprof_sys.sh", "rocprof-sys-python", "rocprof_sys_profiles_v2"
    workload = ["--batch-size", "2", "--seq-len", "16", "--num-steps", "3", "--warmup-steps", "1"]
    install_hint = ("Install the package rocprofiler-systems (ROCm 6.3 or newer), or set ROCM_PATH. Where "
                    "only its Python part is missing: rocprof-sys-sample -- python3 tiny_openfold_v2.py")
    examples = """examples:
  ./run_rocprof_sys.sh                          batch 2, 16 residues, 3 steps
  ./run_rocprof_sys.sh --modules . -o all       every Python call, import torch included: slow and large
  ./run_rocprof_sys.sh --rocpd --num-steps 5    also a rocpd database, which has child threads (from ROCm 7.2)
"""

    @classmethod
    def add_options(cls, parser):
        parser.add_argument("--modules", metavar="REGEX", action="append",
                            help="record Python calls of files whose path matches; may be repeated (default: "
                                 "the profiled program, torch/nn/modules, torch/optim)")
        parser.add_argument("--rocpd", action="store_true", help="also write a rocpd database")

    def commands(self):
        modules = self.options.modules
        modules = modules or [pathlib.Path(self.target()).stem, "torch/nn/modules", "torch/optim"]
        environment = {  # all explicit: the defaults depend on each other, and changed with ROCm 7.1 and 10.1
            "ROCPROFSYS_TRACE": "ON", "ROCPROFSYS_PROFILE": "ON",
            "ROCPROFSYS_USE_ROCPD": "ON" if self.options.rocpd else "OFF",
            "ROCPROFSYS_TIMEMORY_COMPONENTS": "wall_clock trip_count",
            "ROCPROFSYS_OUTPUT_PATH": self.directory, "ROCPROFSYS_TIME_OUTPUT": "OFF",
            "ROCPROFSYS_USE_PID": "ON", "PYTHON_EXECUTABLE": versioned_python()}
        # The script itself follows `--`, never `python`: the launcher compiles that word as Python source.
        return [Command([self.tool.command, "--module-restrict", *modules, "--", self.target(),
                         *self.trainer_flags], set_env=environment,
                        unset_env=("ROCPROFSYS_OUTPUT_PREFIX", "ROCPROFSYS_CONFIG_FILE"))]

    def problems(self):
        yield from super().problems()
        yield from bindings_problems(self.tool)

    def judge(self, log_text):
        """The launcher returns 0 when the script fails, so look at what the script left behind."""
        raised = re.search(r"^Exception - (.*)$", log_text, re.MULTILINE)
        if raised or re.search(r"^Traceback \(most recent call last\)", log_text, re.MULTILINE):
            return PROGRAM_FAILED, "it raised an exception" + (f": {raised[1]}" if raised else "")
        place = pathlib.Path(session.last_value(self.trainer_flags, "--profile-dir"))
        summary = place / "performance_summary_v2.json"
        fresh = summary.is_file() and summary.stat().st_mtime >= self.started - 1
        if not fresh and not re.search(r"^\{.*\}\s*$", log_text, re.MULTILINE):
            return PROGRAM_FAILED, "it left no result, and rocprof-sys-python hides its exit code"
        return self.list_results()

    def list_results(self):
        place = pathlib.Path(self.directory)
        found = sorted({path for kind in ("*.proto", "*wall_clock*", "*trip_count*", "*.db")
                        for path in place.rglob(kind) if path.stat().st_size})
        if not found:
            return NO_DATA, "rocprof-sys-python wrote no trace, no profile and no database"
        session.say("", f"In {self.directory}:")
        for path in found:
            size = path.stat().st_size
            large = "; large: use fewer steps or --modules" if size > 500e6 else ""
            amount = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
            session.say(f"  {path.relative_to(place)}  {amount}  {how_to_open(path)}{large}")
        return OK, f"{len(found)} result files"


def how_to_open(path):
    if path.suffix == ".proto":
        return "timeline, open at https://ui.perfetto.dev"
    if path.suffix == ".db":
        return f"rocpd, read with: python kernel_summary.py {shlex.quote(str(path.parent))}"
    return "call stack, read in any editor" if path.suffix == ".txt" else "the same for programs"


class RocprofCompute(Wrapper):
    """Hardware counters and roofline of every kernel with rocprof-compute; runs the program many times."""
    script, program, default_dir = "run_rocprof_compute.sh", "rocprof-compute", "rocprof_compute_profiles_v2"
    timeout = 14400
    workload = ["--batch-size", "2", "--seq-len", "32", "--num-steps", "2", "--warmup-steps", "1",
                "--seed", "42", "--deterministic"]
    help_arguments = ("profile", "--help")
    install_hint = "Install the package rocprofiler-compute (ROCm 6.3 or newer), or set ROCM_PATH."
    since = {"--roofline": "99.0"}  # it came after 10.1: only --help can tell
    wanted = {"counters": ("pmc_perf*", "results_*", "SQ_*", "*.db"), "roof": ("roofline*", "empirRoof*")}
    examples = """examples:
  ./run_rocprof_compute.sh                     counters, then roofline (a dozen runs and more)
  ./run_rocprof_compute.sh --roof-only         roofline only; --no-roof: counters only
  ./run_rocprof_compute.sh --list-stats        kernels and dispatch ids of the last run -> list_stats.txt
  ./run_rocprof_compute.sh --dispatch 12       everything about one dispatch -> dispatch_12.txt
"""

    @classmethod
    def add_options(cls, parser):
        parser.add_argument("--mode", choices=("profile", "roof", "analyze"),
                            help="counters and roofline, roofline only, or report on an earlier profile "
                                 "(default: profile; analyze with --list-stats or --dispatch)")
        parser.add_argument("--roof-only", action="store_true", help="the same as --mode roof")
        parser.add_argument("--no-roof", action="store_true", help="counters only")
        parser.add_argument("--list-stats", action="store_true", help="list kernels and dispatch ids")
        parser.add_argument("--dispatch", metavar="ID", type=at_least(0), action="append",
                            help="report on one dispatch; take the ID from --list-stats; may be repeated")
        parser.add_argument("--output-name", metavar="NAME", default="tinyopenfold",
                            help="workloads become NAME_counters and NAME_roof (default: %(default)s)")
        parser.add_argument("--device", metavar="N", type=at_least(0),
                            help="GPU index for roofline and trainer (default: 0 and the trainer's own)")

    def __init__(self, options, trainer_flags):
        roof = options.roof_only or options.mode == "roof"
        reading = bool(options.list_stats or options.dispatch)
        self.analyze = options.mode == "analyze" or reading and not (options.mode or roof or options.no_roof)
        if not re.fullmatch(r"[\w.-]+", options.output_name) or ".." in options.output_name:
            raise Stop(USAGE, f"--output-name: {options.output_name!r}; allowed are letters, digits, . _ -")
        if roof and options.no_roof:
            raise Stop(USAGE, "--no-roof: contradicts --roof-only and --mode roof")
        if self.analyze and (roof or options.no_roof) or reading and not self.analyze:
            raise Stop(USAGE, "--list-stats, --dispatch: are for --mode analyze, --roof-only and --no-roof "
                              "for --mode profile. Profile first, then run again to analyze.")
        if self.analyze and trainer_flags:
            raise Stop(USAGE, f"{shlex.join(trainer_flags)}: --mode analyze runs no trainer")
        self.parts = ["roof"] if roof else ["counters"] if options.no_roof else ["counters", "roof"]
        super().__init__(options, trainer_flags)
        if ".." in self.directory:
            raise Stop(USAGE, f"-o {self.directory}: rocprof-compute refuses a path that contains '..'")
        if self.analyze:
            self.records = os.path.join(self.directory, "analysis")  # the profile keeps its own

    def extra_flags(self):
        return [] if self.options.device is None else ["--device", str(self.options.device)]

    def fresh_directory(self):
        return not self.analyze

    def replaced(self):
        """What is there is set aside: old releases mix old files with new ones, from 10.0 they refuse."""
        workloads = {os.path.join(self.directory, "workloads", f"{self.options.output_name}_{part}")
                     for part in self.parts}
        return {self.records} if self.analyze else workloads

    def files(self):
        """rocprof-compute joins the program's words by spaces and splits them again: give it simple ones."""
        words = shlex.join([sys.executable, self.target(), *self.trainer_flags])
        script = f"cd {shlex.quote(os.getcwd())} || exit 1\nexec {words}\n"
        return {} if self.analyze else {"workload.sh": script}

    def workload_directory(self, part):
        """The last folder is the GPU model, or what else a release appends; sysinfo.csv marks it."""
        workloads = pathlib.Path(self.directory, "workloads")
        found = sorted(workloads.glob(f"{self.options.output_name}_{part}/**/sysinfo.csv"))
        return found[0].parent if found else None

    def commands(self):
        return self.analyze_commands() if self.analyze else self.profile_commands()

    def profile_commands(self):
        """Run in the result directory, where every release writes workloads/NAME/<GPU model> by default."""
        commands = []
        for part in self.parts:
            arguments = ["--name", f"{self.options.output_name}_{part}"]
            if part == "counters":
                arguments += ["--no-roof"]
            elif self.has("--roofline"):
                arguments += ["--roofline", "--roofline-device", str(self.options.device or 0)]
            else:
                arguments += ["--roof-only", "--device", str(self.options.device or 0)]
            commands.append(Command([self.tool.command, "profile", *arguments, "--", "bash", "workload.sh"],
                                    cwd=self.directory))
        return commands

    def analyze_commands(self):
        found = {part: self.workload_directory(part) for part in self.parts}
        found = {part: path for part, path in found.items() if path}
        if not found and self.options.dry_run:
            self.notes.append("GPU_MODEL stands for the folder that profiling creates")
            place = pathlib.Path(self.directory, "workloads", f"{self.options.output_name}_counters")
            found = {"counters": place / "GPU_MODEL"}
        if not found:
            raise Stop(USAGE, f"{self.directory}: no workload {self.options.output_name}_* there. Run "
                              f"./{self.script} first, or name its directory with -o.")
        jobs = [("list_stats.txt", ["--list-stats"])] if self.options.list_stats else []
        jobs += [(f"dispatch_{number}.txt", ["--dispatch", str(number)])
                 for number in self.options.dispatch or []]
        first = next(iter(found))
        jobs = [(first, *job) for job in jobs] or [(part, f"analysis_{part}.txt", []) for part in found]
        self.reports = ", ".join(name for _, name, _ in jobs)
        return [Command([self.tool.command, "analyze", "--path", str(found[part]), *arguments],
                        cwd=self.directory, log=name, echo=name == "list_stats.txt")
                for part, name, arguments in jobs]

    def problems(self):
        if self.analyze:
            yield from tool_problems(self.tool, self.install_hint)
        else:
            yield from super().problems()

    def steps(self):
        return None if self.analyze else super().steps()

    def explain(self, code, reason, log_text):
        if code != PROGRAM_FAILED or "execution failed" in log_text:  # what it says of a failed program
            return code, reason
        lines = log_text.strip().splitlines() or ["it printed nothing"]
        return FAILED, f"rocprof-compute itself failed: {lines[-1][:200]}"

    def judge(self, log_text):
        if self.analyze:
            return (OK, f"wrote {self.reports}") if log_text.strip() else (NO_DATA, "the report is empty")
        missing = []
        for part in self.parts:
            place = self.workload_directory(part)
            results = [path for kind in self.wanted[part] for path in (place.rglob(kind) if place else [])]
            if any(path.stat().st_size for path in results):
                session.say(f"{part}: {place}")
            else:
                missing.append(part)
        if missing:
            return NO_DATA, f"rocprof-compute left no {' and no '.join(missing)} in workloads/"
        where = f" -o {shlex.quote(self.options.output_dir)}" if self.options.output_dir else ""
        session.say(f"Next: ./{self.script}{where} --list-stats, then --dispatch ID")
        return OK, f"{' and '.join(self.parts)} collected"


WRAPPERS = {"rocprofv3": Rocprofv3, "rocprof-sys": RocprofSys, "rocprof-compute": RocprofCompute}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in WRAPPERS:
        sys.exit(f"usage: python rocm_profilers.py {{{','.join(WRAPPERS)}}} [options] [--] [trainer flags]")
    sys.exit(session.main(WRAPPERS[sys.argv[1]], sys.argv[2:]))
