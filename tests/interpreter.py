"""Tests marked `interpreted` run in a second process, in which Triton interprets kernels on the CPU.

Triton chooses between compiler and interpreter where a kernel is defined, so one process cannot have both.
The second process collects the same files, is told names of tests through a pipe and answers with pytest's
reports. It is started by the first such test and serves all others: importing torch and Triton takes longer
than most of them.
"""
import json
import os
import subprocess
import sys
import tempfile

import pytest

PIPES = "TESTS_INTERPRETER_PIPES"  # in the second process: the file numbers that it reads and writes
UNWRITTEN = "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"  # new memory: -1.7e38, no old result
started = pytest.StashKey()


def interpreted(item):
    return item.get_closest_marker("interpreted") is not None


class Interpreter:
    """The second process."""

    def __init__(self, items):
        ours, theirs = os.pipe(), os.pipe()
        files = sorted({str(item.path) for item in items if interpreted(item)})
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "interpreted"]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "GLIBC_TUNABLES": UNWRITTEN,
                       PIPES: f"{theirs[0]} {ours[1]}"}
        for name in [name for name in environment if name.startswith("PYTEST_")]:
            del environment[name]  # of this process, or of xdist's
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*command, *files], env=environment, stdin=subprocess.DEVNULL,
                                        stdout=self.output, stderr=subprocess.STDOUT,
                                        pass_fds=(theirs[0], ours[1]))
        os.close(theirs[0]), os.close(ours[1])
        self.questions, self.answers = os.fdopen(theirs[1], "w"), os.fdopen(ours[0])

    def run(self, item):
        """The test's reports, as they come."""
        try:
            print(item.nodeid, file=self.questions, flush=True)
        except BrokenPipeError:
            pass  # which is said below
        for line in iter(self.answers.readline, "null\n"):
            if not line:
                self.output.seek(0)
                raise RuntimeError(f"the process of the interpreter has ended:\n{self.output.read()[-5000:]}")
            yield item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))

    def close(self):
        self.questions.close()
        self.process.wait()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if PIPES in os.environ or not interpreted(item):
        return None
    stash = item.config.stash
    if started not in stash:
        stash[started] = Interpreter(item.session.items)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[started].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # fixtures of folders that the last test of here was in
    return True


def pytest_unconfigure(config):
    if started in config.stash:
        config.stash[started].close()


class Served:
    """In the second process: runs the tests that it is told, and nothing else."""

    def __init__(self, config, questions, answers):
        self.config, self.questions, self.answers = config, os.fdopen(questions), os.fdopen(answers, "w")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        for line in self.questions:
            self.config.hook.pytest_runtest_protocol(item=items[line.rstrip("\n")], nextitem=None)
            print("null", file=self.answers, flush=True)
        return True

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(data), file=self.answers, flush=True)


def pytest_configure(config):
    if PIPES in os.environ:
        from tests.kernels.triton_targets import mend_interpreter
        mend_interpreter()
        config.pluginmanager.register(Served(config, *map(int, os.environ[PIPES].split())))
