"""run_rocprof_compute.sh: hardware counters and roofline, and reports on them."""
import os
import pathlib
import re
import shlex
import sys

from fusion_lab.rocm import preflight, records
from fusion_lab.rocm.failures import known_failure
from fusion_lab.rocm.session import Command, say
from fusion_lab.rocm.wrapper import Wrapper
from fusion_lab.training.errors import FAILED, NO_DATA, OK, PROGRAM_FAILED, UserError
from fusion_lab.training.flags import whole_number


class RocprofCompute(Wrapper):
    """Hardware counters and roofline of every kernel with rocprof-compute; runs the program many times."""
    script, executable = "run_rocprof_compute.sh", "rocprof-compute"
    default_dir = "rocprof_compute_profiles_v2"
    timeout = 14400
    workload = ["--batch-size", "2", "--num-steps", "2", "--warmup-steps", "1", "--seed", "42",
                "--deterministic"]
    sizes = [("--seq-len", "32")]
    help_arguments = ("profile", "--help")
    package = "rocprofiler-compute"

    @classmethod
    def add_options(cls, parser):
        super().add_options(parser)
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--mode", choices=("profile", "roof", "analyze"), help="count, or report "
                          "(default: profile; analyze with --list-stats or --dispatch)")
        mode.add_argument("--roof-only", dest="mode", action="store_const", const="roof", help="--mode roof")
        mode.add_argument("--no-roof", dest="mode", action="store_const", const="counters",
                          help="counters only")
        parser.add_argument("--list-stats", action="store_true", help="list kernels and dispatch ids")
        parser.add_argument("--dispatch", metavar="ID", type=whole_number(0), action="append", default=[],
                            help="report on one dispatch; take the ID from --list-stats; may be repeated")
        parser.add_argument("--output-name", metavar="NAME", default="workload",
                            help="of the workloads, NAME_counters and NAME_roof (default: workload)")
        parser.add_argument("--device", metavar="N", type=whole_number(0),
                            help="GPU index for roofline and trainer (default: 0 and the trainer's own)")

    def __init__(self, options, own_flags):
        reading = options.list_stats or options.dispatch
        mode = options.mode or ("analyze" if reading else "profile")
        self.continues = mode == "analyze"
        self.name = options.output_name
        if not re.fullmatch(r"[A-Za-z0-9_]{1,26}", self.name):  # what 3.0 takes
            raise UserError(f"--output-name: {self.name!r}; allowed are at most 26 letters, digits and _")
        if reading and not self.continues:
            raise UserError("--list-stats and --dispatch report on a profile: make it first, without them")
        if self.continues and own_flags:
            raise UserError(f"{shlex.join(own_flags)}: --mode analyze runs no trainer")
        self.parts = [mode] if mode in ("roof", "counters") else ["counters", "roof"]
        device = [] if options.device is None else ["--device", str(options.device)]
        super().__init__(options, [*device, *own_flags])
        if " " in sys.executable and not self.continues:
            raise UserError(f"PYTHON={sys.executable}: rocprof-compute takes no path with a blank there")
        if self.continues:
            self.records = os.path.join(self.directory, "analysis")  # the profile keeps its own

    def files(self):
        """rocprof-compute joins the program's words by spaces and splits them again: give it simple ones."""
        words = [sys.executable, self.program, *self.program_flags]
        script = f"import os\n\nwords = {words!r}\nos.chdir({os.getcwd()!r})\nos.execv(words[0], words)\n"
        return {} if self.continues else {"workload.py": script}

    def workload_directory(self, part):
        """The last folder is the GPU model, or what else a release appends; sysinfo.csv marks it."""
        workloads = pathlib.Path(self.directory, "workloads")
        marks = sorted(workloads.glob(f"{self.name}_{part}/**/sysinfo.csv"))
        return marks[0].parent if marks else None

    def commands(self):
        """The program's first word is a path, for 3.0, and no shell, which loses variables of 3.5 and 3.6."""
        if self.continues:
            return self.analyze_commands()
        device = str(self.options.device or 0)
        roof = ["--roof-only", "--device", device] if self.has("--roof-only") else \
            ["--roofline", "--roofline-device", device]  # after 10.1
        flags = {"counters": ["--no-roof"], "roof": roof}
        return [Command([self.tool.path or self.executable, "profile", "--name", f"{self.name}_{part}",
                         *flags[part], *self.options.tool_option, "--", sys.executable, "workload.py"],
                        cwd=self.directory) for part in self.parts]

    def analyze_commands(self):
        places = {part: path for part in self.parts if (path := self.workload_directory(part))}
        if not places:
            raise UserError(f"{self.directory}: no workload {self.name}_* there. Run "
                            f"./{self.script} first, or name its directory with -o.")
        first = next(iter(places))
        jobs = [(first, "list_stats.txt", ["--list-stats"])] * self.options.list_stats
        jobs += [(first, f"dispatch_{number}.txt", ["--dispatch", str(number)])
                 for number in self.options.dispatch]
        jobs = jobs or [(part, f"analysis_{part}.txt", []) for part in places]
        self.reports = [name for _, name, _ in jobs]
        return [Command([self.tool.path or self.executable, "analyze", "--path", str(places[part]),
                         *arguments, *self.options.tool_option], cwd=self.directory, log=name)
                for part, name, arguments in jobs]

    def warnings(self):
        yield from super().warnings()
        yield from preflight.pandas_warnings(self.tool)

    def explain(self, code, reason, log_text):
        if code != PROGRAM_FAILED or "execution failed" in log_text:  # what it says of a failed program
            return code, reason
        lines = log_text.strip().splitlines() or ["it printed nothing"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])[:200]
        return FAILED, f"rocprof-compute itself failed: {said}"

    def judge(self, log_text):
        if self.continues:
            empty = [name for name in self.reports
                     if not pathlib.Path(self.directory, name).read_text(errors="replace").strip()]
            return (NO_DATA, f"empty: {', '.join(empty)}") if empty else (
                OK, f"wrote {', '.join(self.reports)}")
        places = {part: self.workload_directory(part) for part in self.parts}
        missing = [part for part, place in places.items() if not (place and has_results(part, place))]
        skipped = missing == ["roof"] and self.parts[1:] and re.search("(?i)skip.*roofline", log_text)
        if missing and not skipped:
            known = known_failure(log_text)
            why = f": {known[0]}. {known[2]}" if known else ""
            return NO_DATA, f"rocprof-compute left no {' and no '.join(missing)} in workloads/{why}"
        say(f"Next: ./{self.script} -o {shlex.quote(self.directory)} --list-stats, then --dispatch ID")
        return OK, "counters collected, no roofline of this GPU" if skipped else (
            f"{' and '.join(self.parts)} collected")


def has_results(part, place):
    """Did the tool write results? The lists of counters that it writes for itself are none."""
    return records.has_counters(place) if part == "counters" else any(
        path.stat().st_size for pattern in ("roofline*", "empirRoof*")
        for path in records.result_files(place, pattern))
