#!/usr/bin/env python3
"""Would a test notice? Mutants of the project's files, and how many of them its tests kill.

    make mutants                                      # a seeded sample of every file, an hour on two cores
    make mutants ARGS="proteins/batches.py --each 0"  # every mutant of some files

mutmut makes the mutants: numbers plus one, operators exchanged, arguments left out, conditions forced, keys
renamed; on top come calls left out whose result nobody wants, and `if` turned over. None in place of a value
is left out, since it crashes, and so are wording, that of options' help among it, zip's strict, and how a
picture looks: sizes, widths and distances on the page, not what is drawn, where and in which colour. They are
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

from tests.layout import modules, tests_of

TABLE = ROOT / "benchmarks" / "mutants.md"
BY_HAND = "## Why they survive\n"  # what stands below it on the table's page is kept
GOAL = 85  # percent
LOOKS = ("figsize", "layout", "dpi", "fontsize", "linewidth", "linewidths", "markersize", "markeredgewidth",
         "capstyle", "pad", "shrink", "loc", "ncols", "frameon", "columnspacing", "handletextpad",
         "textcoords", "xytext")  # of matplotlib; hatch, marker, color and limits say something
SAYS_NOTHING = ("strict", "metavar", "help", *LOOKS)  # arguments: no mutants of these
FAILED = 1e9  # seconds of a test that fails without any mutant


def tests_for(file, nearest):
    """What a mutant of this file meets, the nearest first; what needs a GPU sees none."""
    return [test for test in tests_of(file) if "gpu" not in test][:nearest]


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


def mutants(file, each, seed=""):
    """How many a file has, and a sample by order of lines: [("line: its text then", the mutated source)]."""
    source = (ROOT / file).read_text(encoding="utf-8")
    visitor = Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True).visit(visitor)
    chosen, number = [], len(visitor.mutations)
    for mutation in random.Random(file + seed).sample(visitor.mutations, min(each or number, number)):
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
        """Whether any test of this file fits in."""
        return self.seconds is None or any(seconds < self.left for test, seconds in self.seconds.items()
                                           if test.startswith(f"{name}::"))

    def pytest_collection_modifyitems(self, session, items):
        if self.seconds is not None:
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
    """pytest's for these files, one after the other until one fails: most mutants are killed by the first,
    and to collect the others takes longer than that."""
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tree.parent / "tmp")]
    codes = (pytest.main([*options, name], [plugin])
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
        for name in [name for name in sys.modules if name.partition(".")[0] in ("fusion_lab", "tests")]:
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
    """({test: seconds} of a file of tests without any mutant, CPU seconds)"""
    found = tree.parent / "seconds.json"
    found.unlink(missing_ok=True)  # another file's
    ended, used = run([name], 1200, Chosen())
    if not found.exists():
        print(f"left out, it does not come to its end (code {ended}): {name}", flush=True)
    return json.loads(found.read_text()) if found.exists() else {}, used


def judge(task):
    """(file, text of the mutant, pytest's exit code or None as in run, CPU seconds)"""
    file, tests, (text, code), seconds, budget = task
    whole = (tree / file).read_text(encoding="utf-8")
    (tree / file).write_text(code, encoding="utf-8")
    ended, used = run(tests, 3 * budget + 30, Chosen(seconds, budget))
    (tree / file).write_text(whole, encoding="utf-8")
    return file, text, ended, used


def in_table():
    return re.findall(r"^\| ([\w/]+\.py) ", TABLE.read_text(encoding="utf-8"), re.MULTILINE)


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
        "# Mutants", "", "Written by `make mutants`; [mutants.py](mutants.py) says how. Left out are None in "
        "place of a value, wording, texts of help, zip's `strict`, and sizes and widths in pictures.", "",
        "| file | mutants | killed | survived | score | date |", "|---|--:|--:|--:|--:|--:|", *rows, "",
        "## Survivors", "", "```", *alive, "```", "", BY_HAND]) + by_hand, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=in_table(), metavar="FILE",
                        help="default: those of the table")
    parser.add_argument("--each", type=int, default=30, help="mutants of a file, 0 for all (default: 30)")
    parser.add_argument("--seed", default="", help="any text, for another sample (default: none)")
    parser.add_argument("--nearest", type=int, default=6,
                        help="files of tests that a mutant meets at most (default: 6)")
    parser.add_argument("--budget", type=float, default=15, help="seconds of tests (default: 15)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: all cores)")
    arguments = parser.parse_args()
    if unknown := set(arguments.files) - set(modules()):
        parser.error(f"{', '.join(sorted(unknown))}: not a file of the project's code")
    made = {file: mutants(file, arguments.each, arguments.seed) for file in arguments.files}
    found = {file: (number, len(sample), []) for file, (number, sample) in made.items()}
    gc.freeze()  # or pytest collects torch's garbage too, five times at every end
    with tempfile.TemporaryDirectory() as into, get_context("fork").Pool(arguments.jobs, make_tree,
                                                                         [into]) as pool:
        seconds, total = {}, 0
        tests = {file: tests_for(file, arguments.nearest) for file in made}
        names = sorted(set().union(*tests.values()))
        for measured, used in pool.imap(measure, names):
            seconds, total = seconds | measured, total + used
        for test in (test for test in seconds if seconds[test] >= FAILED):
            print(f"left out, it fails without a mutant: {test}", flush=True)
        tasks = [(file, tests[file], mutant, seconds, arguments.budget)
                 for file in made for mutant in made[file][1]]
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
