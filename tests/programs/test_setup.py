"""From a clone to a run: the Python that `make` takes, a torch that stays, pages that keep to the code."""
import ast
import os
import re
import shutil
import subprocess
import sys
import venv

import numpy as np
import pytest

from tests.support import PATIENCE, ROOT, run_program
from tiny_openfold.proteins.files import load_protein


@pytest.fixture
def clone(tmp_path):
    """The Makefile beside stand-ins: a trainer that says which Python runs it, and what it needs."""
    place = tmp_path / "a clone"
    place.mkdir()
    shutil.copy(ROOT / "Makefile", place)
    (place / "tiny_openfold_v2.py").write_text("import sys; print(sys.prefix, sys.argv[1:])\n")
    (place / "requirements.txt").write_text("pytest\n")  # which is there already
    return place


def make(clone, *words, **variables):
    """make in an environment in which nothing can be fetched; variables as an activated one sets them."""
    foreign = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHONPATH", "CONDA_PREFIX", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in foreign}
    environment = {**kept, "PIP_NO_INDEX": "1", "PYTHON": sys.executable, **variables}
    return subprocess.run(["make", "--no-print-directory", *words], cwd=clone, env=environment,
                          timeout=PATIENCE, capture_output=True, text=True)


def test_make_uses_an_activated_environment_with_torch_as_it_is(clone):
    done = make(clone, "train", "ARGS=--seed 3", VIRTUAL_ENV="somewhere")
    assert done.stdout == f"{sys.prefix} ['--demo', '--seed', '3']\n", done.stderr
    assert not (clone / ".venv").exists()


def test_make_folds_the_example_or_what_it_is_given(clone):
    example, own = (ast.literal_eval(make(clone, "fold", *words, VIRTUAL_ENV="somewhere").stdout
                                     .removeprefix(sys.prefix).strip()) for words in ([], ["ARGS=x.a3m"]))
    assert example[::2] == ["--fold", "--structure"] and own == ["--fold", "x.a3m"]
    protein = load_protein(*(str(ROOT / path) for path in example[1::2]))
    assert np.isfinite(protein.backbone).all((1, 2)).sum() == protein.length == 145
    assert len(protein.msa) == 435


@pytest.mark.slow
def test_make_completes_an_environment_of_its_own_where_none_has_torch(clone, tmp_path):
    """What the base has is seen, and not installed again; what cannot be had is an error each time. What is
    isolated stays so."""
    venv.create(tmp_path / "empty")
    seen = str(tmp_path / "empty" / "bin" / "python3")
    (clone / "requirements.txt").write_text("pip\n")
    done = make(clone, "train", VIRTUAL_ENV=str(tmp_path / "empty"), PYTHON=seen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{clone / '.venv'} ['--demo']"
    (clone / "requirements.txt").write_text("a_package_that_nobody_has\n")
    os.utime(clone / "requirements.txt", (2e9, 2e9))  # the seconds of a file system's clock
    config = clone / ".venv" / "pyvenv.cfg"
    isolated = config.read_text().replace("packages = true", "packages = false")  # as its owner made it
    config.write_text(isolated)
    assert make(clone, "train").returncode == 2 and config.read_text() == isolated != ""


@pytest.mark.parametrize("program", ["tiny_openfold_v2.py", "run_pytorch_profiler.py", "benchmarks/peers.py",
                                     "launch_performance_study.py", "companions/fusion_patterns.py"])
def test_a_python_without_torch_is_told_what_to_install(program):
    done = subprocess.run([sys.executable, "-S", program, "--seed", "3"], cwd=ROOT, capture_output=True,
                          text=True, timeout=PATIENCE, check=False)  # -S: it sees no installed package
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "lacks torch" in done.stderr


# README and docs

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "WORKSHOP", "examples/README",
                                            "puzzles/README")),
         *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ["tiny_openfold_v2.py", "run_pytorch_profiler.py", "profile_summary.py", "optimize_batch_size.py",
            *(path.name for path in sorted(ROOT.glob("*.sh"))),
            *(f"companions/{path.name}" for path in sorted(ROOT.glob("companions/*.py"))
              if "errors.begin(" in path.read_text(encoding="utf-8"))]  # as every program begins
ON_THEIR_OWN = ("profile_summary.py", "companions/fusion_patterns.py")  # hand nothing on to the trainer
ON_ITS_SITE = ("../../issues", "../../security")  # relative to a page on the site that hosts the repository
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")  # not the --enable- of --enable-X
FOREIGN = {"--index-url", "--msa-only",  # of pip and ColabFold; of AMD's:
           "--experimental", "--kernel-rename", "--list-avail", "--list-torch-operators", "--set",
           "--torch-trace", "--nproc-per-node"}  # the last of torchrun


@pytest.fixture(scope="module")
def flags():
    """{program: its flags, those that it hands on included}."""
    own = {}
    for name in PROGRAMS:
        done = run_program(name, "--help")
        assert done.returncode == 0, done.stderr
        own[name] = set(FLAG.findall(done.stdout))
    trainer = own["tiny_openfold_v2.py"]
    common = set(FLAG.findall((ROOT / "benchmarks" / "script.py").read_text(encoding="utf-8")))
    alone = {str(path.relative_to(ROOT)): common | set(FLAG.findall(path.read_text(encoding="utf-8")))
             for path in (*ROOT.glob("benchmarks/*.py"), ROOT / "puzzles" / "check.py")}
    alone |= {name: own.pop(name) for name in ON_THEIR_OWN if name in own}
    return alone | {name: found | trainer for name, found in own.items()}


def anchors(page):
    """Names that links may have after #, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
             *sorted((ROOT / "tiny_openfold").rglob("*.md")), ROOT / "evoformer_kernels" / "README.md",
             *sorted((ROOT / "benchmarks").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("https://") and link not in ON_ITS_SITE:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    rooms = "|".join(("fusion_lab", "tiny_openfold", "companions", "benchmarks", "docs", "tests"))
    for path in re.findall(rf"`((?:{rooms})/[\w./-]*)`", text):
        assert (ROOT / path).exists() or not (ROOT / path.split("/")[0]).exists(), f"{page.name}: {path}"
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in source, f"{page.name}: {name}"


def test_raw_results_are_named_somewhere_and_what_is_named_is_there():
    results = {path.name for path in ROOT.glob("benchmarks/results/*")}
    places = ("tiny_openfold/**/*.md", "benchmarks/**/*.md", "benchmarks/*.py", "tests/**/*.py")
    pages = {*PAGES, *(path for place in places for path in ROOT.glob(place))}
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert [name for name in results if name.partition(".")[0] not in text] == []
    assert set(re.findall(r"results/([\w-]+\.(?:json|png|txt))", text)) <= results


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_programs_exist(page, flags):
    """Every flag is one of some program; in a command, one of its program."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    assert set(FLAG.findall(text)) - set.union(FOREIGN, *flags.values()) == set()
    for command in re.findall(r"^(?:\./|python )(.*)$", text, re.MULTILINE):
        program, _, words = command.partition(" #")[0].partition(" ")
        assert (ROOT / program).is_file(), f"{page.name}: {command}"
        if program in flags:
            words = re.sub(r"--tool-option=\S+", "--tool-option", words)  # which the tool judges
            own, _, trainers = words.partition(" -- ")  # what a program hands on
            assert set(FLAG.findall(own)) <= flags[program], f"{page.name}: {command}"
            assert set(FLAG.findall(trainers)) <= flags["tiny_openfold_v2.py"], f"{page.name}: {command}"


def test_the_model_s_example_runs(tmp_path):
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1))
    done = run_program(tmp_path / "example.py", env=dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0 and done.stdout.count("[1, 32, 32]") == 2, done.stderr


@pytest.mark.parametrize("given, expected", [
    ({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)])
def test_threads_wait_less_unless_the_user_decides(given, expected, tmp_path, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):  # which a program started in this process has set
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "torch.py").write_text("import os\nraise SystemExit(str(os.environ.get('GOMP_SPINCOUNT')))")
    done = run_program("tiny_openfold_v2.py", "--num-steps", "1", cwd=tmp_path,
                       env=dict(given, PYTHONPATH=str(tmp_path)))
    assert done.stderr == f"{expected}\n"
