"""`pip install .` holds everything, and its console commands work from elsewhere."""
import ast
import dataclasses
import email
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import typing

import pytest

import fusion_lab
import tiny_openfold_v2
from evoformer_kernels.patches import Patch, patch
from fusion_lab import commands
from fusion_lab.measuring.compare import compare
from fusion_lab.training.program import Program, Settings
from tests.support import PATIENCE, ROOT, run_program

ALIGNMENT = "".join(f">row{i}\nMQIFVKTLTGKTITLEVEPSDTIEN{letters}IQDKEGIPPDQQRLIFAGKQL\n"
                    for i, letters in enumerate(("VKAK", "VRAK", "IKAR")))


NAMED = f"tinyopenfold-{fusion_lab.__version__}"
REPOSITORY = "https://example.org/lab"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with what a release has: an archive of the sources, and the wheel made from it."""
    for name in ("pip", "setuptools"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"this Python has no {name}")
    place = tmp_path_factory.mktemp("release")
    done = run_program(".ci/package", REPOSITORY, place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def site(built):
    """A directory with the installed wheel."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--target", built / "site", built / f"{NAMED}-py3-none-any.whl"],
                          capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return built / "site"


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    ["tinyopenfold", "--contacts", "x.a3m", "--device", "cpu"],
    ["tinyopenfold-study", "--batch-sizes", 1, "--seq-lens", 16, "--num-runs", 1, "--num-steps", 1,
     "--no-plots", "--device", "cpu", "--", "--num-blocks", 1],
    ["tinyopenfold-profile", "--help"], ["-m", "tiny_openfold_v2", "--version"],
    ["tinyopenfold", "--version"]],
    ids=lambda command: "_".join(map(str, command[:2])))
def test_it_runs_from_elsewhere(site, tmp_path, command):
    program, *flags = map(str, command)
    (tmp_path / "x.a3m").write_text(ALIGNMENT)
    start = [site / "bin" / program] if program in commands.COMMANDS else [sys.executable, program]
    done = subprocess.run([*start, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout + done.stderr
    if "--version" in flags:
        assert done.stdout.split()[0] == ("tiny_openfold_v2.py" if program == "-m" else program)
    if "--contacts" in flags:
        result = json.loads((tmp_path / "contacts" / "x.json").read_text())
        assert result["model"].startswith(str(site)) and result["residues"] == 50


@pytest.mark.slow
def test_the_wheel_says_what_it_is(site):
    """What an index asks for, and that all files which are no modules are in it."""
    about = email.message_from_string(next(site.glob("*.dist-info/METADATA")).read_text(encoding="utf-8"))
    assert (about["Name"], about["Version"], about["Requires-Python"]) == (
        "tinyopenfold", fusion_lab.__version__, ">=3.10")
    assert about["Description-Content-Type"] == "text/markdown" and about["License-Expression"] == "MIT"
    assert all(REPOSITORY in address for address in about.get_all("Project-URL"))
    links, own = (re.findall(r"\]\(([^)]*)\)", text) for text in (
        about.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")))
    assert len(links) == len(own) > 20 and all(link.startswith("https://") for link in links)
    for name in ("tiny_openfold/models/families.pt", "tiny_openfold/models/README.md",
                 "tiny_openfold/proteins/fold_page.html", "evoformer_kernels/tiles.json",
                 "evoformer_kernels/__init__.pyi", "evoformer_kernels/py.typed", "fusion_lab/py.typed",
                 "tiny_openfold/py.typed", "tiny_openfold_v2-stubs/__init__.pyi"):
        assert (site / name).read_bytes() == (ROOT / name).read_bytes()
    modules = {str(file.relative_to(ROOT)) for package in ("evoformer_kernels", "fusion_lab", "tiny_openfold")
               for file in (ROOT / package).rglob("*.py")}
    assert modules <= {str(file.relative_to(site)) for file in site.rglob("*.py")}
    assert {path.name for path in site.iterdir()} - {"bin", "__pycache__"} == {
        "evoformer_kernels", "fusion_lab", "tiny_openfold", "tiny_openfold_v2.py",
        "tiny_openfold_v2-stubs", f"{NAMED}.dist-info"}
    assert next(site.glob("*.dist-info/licenses/LICENSE"), None)


@pytest.mark.slow
def test_the_archive_of_the_sources_has_no_part_of_the_tests(built):
    with tarfile.open(built / f"{NAMED}.tar.gz") as archive:
        assert [name for name in archive.getnames() if "/tests" in name] == []


def arguments(function):
    """Names of a function's arguments in a stub."""
    every = function.args
    return [argument.arg for argument in (*every.args, *filter(None, [every.vararg]), *every.kwonlyargs,
                                          *filter(None, [every.kwarg]))]


def test_the_stubs_know_every_size_switch_and_argument():
    stubs = ast.parse((ROOT / "tiny_openfold_v2-stubs" / "__init__.pyi").read_text(encoding="utf-8"))
    named = {node.name: node for node in stubs.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for name, node in named.items():
        kind = getattr(tiny_openfold_v2, name, None)
        if dataclasses.is_dataclass(kind):
            assert [line.target.id for line in node.body] == list(kind.__annotations__)
        elif isinstance(node, ast.ClassDef):
            for method in (line for line in node.body if isinstance(line, ast.FunctionDef)):
                run = getattr(kind, method.name.replace("__call__", "forward"))
                assert arguments(method) == list(inspect.signature(run).parameters), (name, method.name)
        elif name != "__getattr__":
            assert arguments(node) == list(inspect.signature(kind).parameters), name


@pytest.mark.parametrize("function", [compare, Program.settings, Settings.having, patch, Patch.undo])
def test_what_users_call_has_types_for_their_checker(function):
    """fusion_lab has a py.typed, so a checker takes what these say for whole."""
    named = {*inspect.signature(function).parameters, "return"} - {"self"}
    assert typing.get_type_hints(function).keys() == named
