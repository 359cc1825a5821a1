#!/usr/bin/env python3
"""Would a test notice? Mutants of the project's files, and how many of them its tests kill.

    make mutants                                      # a seeded sample of every file, an hour on two cores
    make mutants ARGS="proteins/batches.py --each 0"  # every mutant of some files

mutmut makes the mutants: numbers plus one, operators exchanged, arguments left out, conditions forced, keys
renamed; on top come calls left out whose result nobody wants, and `if` turned over. None in place of a value
is left out, since it crashes, and so are wording, that of options' help among it, and zip's strict. They are
run here, because mutmut's own way, a wrapper round every function, stops torch.compile and spares constants
and decorated functions. torch is imported once; a mutant is a fork in a copy of the tree with one file
changed, and meets the tests of its file, those named first and the cheapest first, as many as fit in --budget
seconds: a score is a lower bound. An endless loop ends at its limit of CPU time, which a busy machine does
not change, and counts as killed; what waits for ever does not: it is listed with the survivors, as
"(waited)".
"""
import argparse
import contextlib
import datetime
import gc
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

os.environ |= dict(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", TORCHINDUCTOR_COMPILE_THREADS="1")
import torch._inductor  # noqa: F401  what takes long to import, once for all

from fusion_lab.training.files import require_packages

require_packages("mutants.py", "libcst", "mutmut", "pytest", listed="requirements-mutants.txt")
import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.pragma_handling import IgnoredCode

TABLE = ROOT / "benchmarks" / "mutants.md"
BY_HAND = "## Why they survive\n"  # what stands below it on the table's page is kept
GOAL = 85  # percent
SAYS_NOTHING = ("strict", "metavar", "help")  # arguments: no mutants of these
FAILED = 1e9  # seconds of a test that fails without any mutant

AMD = ("rocm_figures rocm_commands profile_summary rocm_outcomes rocm_profilers rocm_releases rocm_preflight "
       "rocm_wrappers")
SESSION = "session_figures profiler_session profiling"
COMPARISON = "sums_by_hand comparison_figures comparison profiling"
STUDY = "sums_by_hand study_figures study_report study_files performance_study"
TESTS = {  # file: which tests/test_*.py, tests/FOLDER/test_*.py are meant to notice
    "tiny_openfold_v2.py": "model_by_hand numbers_by_hand steps evoformer training",
    "proteins/batches.py": "batches coevolution learning training",
    "proteins/synthetic.py": "batches training",
    "proteins/fast_evoformer.py": "proteins/fast_evoformer evoformer sequence_parallel",
    "proteins/splitting.py": "proteins/fast_evoformer sequence_parallel",
    "proteins/contacts.py": "batches contacts", "proteins/costs.py": "numbers_by_hand profiler_session",
    "proteins/files.py": "sums_by_hand protein_data prediction",
    "fusion_lab/training/checkpoints.py": "checkpoints_by_hand checkpoints choices learning training",
    "fusion_lab/training/master_weights.py": "masters_by_hand steps evoformer distributed",
    "fusion_lab/training/feeding.py": "masters_by_hand batches distributed",
    "fusion_lab/training/torchrun.py": "ranks_by_hand ends_by_hand distributed",
    "fusion_lab/training/distributed.py": "ranks_by_hand ends_by_hand distributed",
    "fusion_lab/training/watch.py": "ends_by_hand distributed",
    "fusion_lab/measuring/trace/collectives.py": "exchanges_by_hand distributed",
    "fusion_lab/measuring/bounds/scaling.py": "exchanges_by_hand distributed",
    "proteins/coevolution.py": "coevolution learning", "proteins/yardsticks.py": "yardsticks",
    "proteins/homology.py": "homology", "proteins/prediction.py": "prediction",
    "fusion_lab/training/recipe.py": "choices learning",
    "fusion_lab/training/evaluations.py": "sums_by_hand learning contacts",
    "fusion_lab/training/models.py": "learning prediction",
    "fusion_lab/training/files.py": "endings choices reliability checkpoints training start study_files",
    "fusion_lab/measuring/accuracy.py": "accuracy evoformer training",
    "fusion_lab/measuring/metrics.py": "summary_figures start",
    "fusion_lab/measuring/summary.py": "summary_figures training",
    "fusion_lab/measuring/trace/trace.py": "trace profiler_session",
    "fusion_lab/profiler/report.py": SESSION,
    "fusion_lab/measuring/retune.py": "tuner", "companions/patterns.py": "fusion_patterns",
    "fusion_lab/measuring/bounds/flops.py": "measuring/flops predictions profiler_session",
    "fusion_lab/measuring/bounds/sizes.py": "predictions profiler_session",
    "fusion_lab/kernels/library/attention_choice.py": "choices evoformer numbers_by_hand tuner",
    **{f"fusion_lab/kernels/{name}.py": "choices tuner evoformer numbers_by_hand" for name in (
        "library/custom_gradients", "limits", "precision", "dispatch", "tuner")},
    **{f"companions/kernels/{name}.py": "choices tiny_llama" for name in ("dispatch", "limits")},
    **{f"fusion_lab/measuring/trace/{name}.py": SESSION for name in ("analysis", "attribution")},
    "fusion_lab/measuring/comparison/compare.py": f"comparing_by_hand {COMPARISON}",
    **{f"fusion_lab/measuring/comparison/{name}.py": COMPARISON for name in (
        "pace", "rows", "table", "worth")},
    **{f"fusion_lab/measuring/bounds/{name}.py": "predictions profiling profiler_session" for name in (
        "ceilings", "predictions", "roofline")},
    **{f"fusion_lab/measuring/{name}.py": "profiling numbers_by_hand evoformer profiler_session" for name in (
        "clocks", "counters", "probe")},
    **{f"fusion_lab/study/{name}.py": STUDY for name in (
        "recommendation", "regression", "results", "statistics", "summary")},
    **{f"fusion_lab/rocm/{name}.py": f"rocm_story sums_by_hand {AMD}" for name in (
        "kernel_summary records rocprof_compute rocprof_sys rocprofv3 session timeline").split()}}


def test_file(name):
    """"proteins/batches" -> "tests/proteins/test_batches.py" """
    folder, _, module = name.rpartition("/")
    return f"tests/{folder}{'/' * bool(folder)}test_{module}.py"


def left_out(node):
    return isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value in SAYS_NOTHING


def fewer_arguments(call):
    return (mutant for mutant in mutators.operator_arg_removal(call) if len(mutant.args) < len(call.args)
            and not any(map(left_out, set(call.args) - set(mutant.args))))


def renamed_key(string):
    if isinstance(string, cst.SimpleString) and str(string.evaluated_value).isidentifier():
        yield next(iter(mutators.operator_string(string)))


def no_call(statement):
    if isinstance(statement.value, cst.Call):
        yield statement.with_changes(value=cst.Name("None"))


def turned_over(statement):
    test = statement.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield statement.with_changes(test=cst.UnaryOperation(cst.Not(), test))


OWN = {mutators.operator_arg_removal: fewer_arguments, mutators.operator_string: renamed_key}
OPERATORS = [(kind, OWN.get(operator, operator)) for kind, operator in mutators.mutation_operators
             if operator is not mutators.operator_assignment] + [(cst.Expr, no_call), (cst.If, turned_over)]


class Visitor(MutationVisitor):
    """mutmut's, in decorated functions too, and with the line of every mutation."""

    def _skip_node_and_children(self, node):
        inner = isinstance(node, cst.FunctionDef)  # decorated ones too
        return left_out(node) or not inner and super()._skip_node_and_children(node)

    def _create_mutations(self, node):
        before = len(self.mutations)
        super()._create_mutations(node)
        for mutation in self.mutations[before:]:
            mutation.line = self.get_metadata(PositionProvider, node).start.line


def mutants(file, each):
    """How many a file has, and a sample by order of lines: [("line: its text then", the mutated source)]."""
    source = (ROOT / file).read_text(encoding="utf-8")
    visitor = Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True).visit(visitor)
    chosen, number = [], len(visitor.mutations)
    for mutation in random.Random(file).sample(visitor.mutations, min(each or number, number)):
        code = deep_replace(module, mutation.original_node, mutation.mutated_node).code
        lines = zip(source.splitlines(), code.splitlines(), strict=False)
        old, new = next(((old.strip(), new.strip()) for old, new in lines if old != new), ("", ""))
        text = new if new != "None" else f"without {old}"
        chosen.append((f"{mutation.line}: {text}", code))
    return number, sorted(chosen, key=lambda mutant: int(mutant[0].partition(":")[0]))


class Chosen:
    """A plugin of pytest: measures all tests, or runs until one fails those whose known seconds fit into what
    is left, the cheapest first."""

    def __init__(self, seconds=None, left=0):
        self.seconds, self.left, self.found = seconds, left, {}

    def takes(self, name):
        """Whether any test of tests/test_<name>.py fits in."""
        return not self.seconds or any(seconds < self.left for test, seconds in self.seconds.items()
                                       if test.startswith(f"{test_file(name)}::"))

    def pytest_collection_modifyitems(self, session, items):
        if self.seconds:
            session.config.option.maxfail = 1
            items.sort(key=lambda item: self.seconds.get(item.nodeid, FAILED))
            totals = list(itertools.accumulate(self.seconds.get(item.nodeid, FAILED) for item in items))
            items[sum(total < self.left for total in totals):] = []
            self.left -= totals[len(items) - 1] if items else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """CPU seconds, of ended children too: a busy machine does not change them."""
        before = sum(os.times()[:4])
        done = yield
        self.found[item.nodeid] = max(self.found.get(item.nodeid, 0), sum(os.times()[:4]) - before)
        return done

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.found[report.nodeid] = FAILED

    def pytest_sessionfinish(self):
        Path("../seconds.json").write_text(json.dumps(self.found))


def make_tree(into):
    """This process works in a copy of the project as git would add it, beside the same ../shared."""
    global tree
    tree = Path(tempfile.mkdtemp(dir=into)) / "project"
    listed = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree.parent / "shared").symlink_to(ROOT.parent / "shared")


NOTHING = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # has failed


def exit_code(tests, plugin):
    """pytest's for tests/test_*.py of these names, one after the other until one fails: most mutants are
    killed by the first, and to collect the others takes longer than that."""
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tree.parent / "tmp")]
    codes = (pytest.main([*options, test_file(name)], [plugin])
             for name in tests if plugin.takes(name))
    return next((code for code in codes if code not in NOTHING), pytest.ExitCode.OK)


def run(tests, limit, plugin):
    """(exit_code() in the tree, CPU seconds). A process ends after limit CPU seconds; the code is None where
    one waits for anything five times as long."""
    if not (process := os.fork()):
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # with quiet()'s, a test's own would end all
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        os.chdir(tree)
        log = os.open("../log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.path[0] = str(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] == "fusion_lab"]:
            del sys.modules[name]  # or what is in it would come from beside this file
        os._exit(exit_code(tests, plugin))
    ended, begun = 0, time.monotonic()
    while not ended and time.monotonic() - begun < 5 * limit:
        ended, status, used = os.wait4(process, os.WNOHANG)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with whatever it started
    if not ended:
        _, _, used = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, used.ru_utime + used.ru_stime


def measure(name):
    """({test: seconds} of tests/test_<name>.py without any mutant, CPU seconds)"""
    found = tree.parent / "seconds.json"
    found.unlink(missing_ok=True)  # another file's
    ended, used = run([name], 1200, Chosen())
    if not found.exists():
        print(f"left out, it does not come to its end (code {ended}): {test_file(name)}", flush=True)
    return json.loads(found.read_text()) if found.exists() else {}, used


def judge(task):
    """(file, text of the mutant, pytest's exit code or None as in run, CPU seconds)"""
    file, (text, code), seconds, budget = task
    whole = (tree / file).read_text(encoding="utf-8")
    (tree / file).write_text(code, encoding="utf-8")
    ended, used = run(TESTS[file].split(), 3 * budget + 30, Chosen(seconds, budget))
    (tree / file).write_text(whole, encoding="utf-8")
    return file, text, ended, used


def write_table(found):
    """The page, with the rows and survivors of the files in found, {file: (mutants, sample, survivors)}, in
    place of their old ones."""
    before, _, by_hand = (TABLE.read_text(encoding="utf-8") if TABLE.exists() else "").partition(BY_HAND)
    lines = [line for line in before.splitlines()
             if (name := re.match(r"[|-] ([\w/]+\.py)", line)) and name[1] not in found]
    for file, (number, sample, alive) in found.items():
        lines += [f"| {file} | {sample} of {number} | {sample - len(alive)} | {len(alive)} | "
                  f"{100 - 100 * len(alive) / sample:.0f}% | {datetime.date.today()} |"]
        lines += [f"- {file}:{text}" for text in alive]
    rows, alive = (sorted(line for line in lines if line[0] == sign) for sign in "|-")
    TABLE.write_text("\n".join([
        "# Mutants", "", "Written by `make mutants`; [mutants.py](mutants.py) says how.", "",
        "| file | mutants | killed | survived | score | date |", "|---|--:|--:|--:|--:|--:|", *rows, "",
        "## Survivors", "", "```", *alive, "```", "", BY_HAND]) + by_hand, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE", help="default: all")
    parser.add_argument("--each", type=int, default=30, help="mutants of a file, 0 for all (default: 30)")
    parser.add_argument("--budget", type=float, default=15, help="seconds of tests (default: 15)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: all cores)")
    arguments = parser.parse_args()
    if unknown := set(arguments.files) - set(TESTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(TESTS)}")
    made = {file: mutants(file, arguments.each) for file in arguments.files}
    found = {file: (number, len(sample), []) for file, (number, sample) in made.items()}
    gc.freeze()  # or pytest collects torch's garbage too, five times at every end
    with tempfile.TemporaryDirectory() as into, get_context("fork").Pool(arguments.jobs, make_tree,
                                                                         [into]) as pool:
        seconds, total = {}, 0
        names = sorted({name for file in made for name in TESTS[file].split()})
        for measured, used in pool.imap(measure, names):
            seconds, total = seconds | measured, total + used
        for test in (test for test in seconds if seconds[test] >= FAILED):
            print(f"left out, it fails without a mutant: {test}", flush=True)
        tasks = [(file, mutant, seconds, arguments.budget) for file in made for mutant in made[file][1]]
        for place, (file, text, ended, used) in enumerate(pool.imap(judge, tasks), 1):
            total += used
            if ended in (None, pytest.ExitCode.OK):
                found[file][2].append(f"{text} (waited)" if ended is None else text)
                print(f"survived: {file}:{found[file][2][-1]}", flush=True)
            if place == len(tasks) or tasks[place][0] != file:
                write_table({file: found[file]})
    print(f"{total / 60:.0f} minutes of CPU time")
    poor = [file for file, (_, sample, alive) in found.items() if 100 * len(alive) > (100 - GOAL) * sample]
    print(f"{TABLE}: " + (f"under {GOAL}%: {', '.join(poor)}" if poor else f"{GOAL}% or more everywhere"))
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
