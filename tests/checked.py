"""Tests of kernels that need not run again, because their code is as it was when they passed.

    make test ARGS="-m full"    # all of them, some twenty minutes on two cores; renews checked.json

Interpreting every tile and compiling every kernel for five GPUs depends on the kernels, on their tests and on
Triton's version alone. checked.json says on which code each file of tests has passed; comments do not count.
Of a file whose code is the same, only a sample runs: the first case of each test marked `sample`.
"""
import ast
import functools
import hashlib
import importlib.metadata
import json
import os

import pytest

from tests.interpreter import PIPES
from tests.support import ROOT

RECORD = ROOT / "tests" / "checked.json"
ROOMS = ("fusion_lab.kernels", "companions.kernels", "companions.fusion_patterns", "companions.patterns",
         "tests.kernels", "tests.companions.kernels", "tests.companions.test_fusion_patterns")


def without_words(tree):
    """A syntax tree without docstrings; it has no comments anyway."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    return tree


@functools.cache
def read(dotted):
    """(a module's code, names that it imports) or None, if it is no module of the kernels' rooms."""
    path = ROOT / dotted.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not dotted.startswith(ROOMS) or not path.exists():
        return None
    tree = without_words(ast.parse(path.read_text(encoding="utf-8")))
    names = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
             for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))]
    return ast.dump(tree), names


@functools.cache
def digest(test):
    """Of all code that a file of tests depends on, and of Triton's version."""
    left, met = [test.removesuffix(".py").replace("/", ".")], {}
    while left:
        name = left.pop()
        if name not in met and (found := read(name)):
            met[name] = found[0]
            left += found[1]
    whole = [*sorted(met.items()), importlib.metadata.version("triton")]
    if "tests.kernels.triton_targets" in met:  # which compiles what is shipped; else only GPUs read it
        whole.append((ROOT / "fusion_lab/kernels/tiles.json").read_text(encoding="utf-8"))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def file_of(nodeid):
    return nodeid.partition("::")[0]


def recorded():
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def pytest_collection_modifyitems(config, items):
    if asked_for_all(config) or PIPES in os.environ:  # the interpreter serves whatever is asked for
        return
    known, met, left_out = recorded(), set(), []
    for item in items:
        file, function = file_of(item.nodeid), item.nodeid.partition("[")[0]
        if item.get_closest_marker("full") and known.get(file) == digest(file):
            if function in met or not item.get_closest_marker("sample"):
                left_out.append(item)
            met.add(function)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def asked_for_all(config):
    return config.option.markexpr == "full"


class Recorder:
    """Notes which files of tests have passed as a whole."""

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        self.outcomes.setdefault(file_of(report.nodeid), set()).add(report.outcome)

    def pytest_sessionfinish(self, session, exitstatus):
        parts = session.config.option.keyword or any("::" in argument for argument in session.config.args)
        if parts or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        passed = {file: digest(file) for file, outcomes in self.outcomes.items() if outcomes == {"passed"}}
        RECORD.write_text(json.dumps(recorded() | passed, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def pytest_configure(config):
    if asked_for_all(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
