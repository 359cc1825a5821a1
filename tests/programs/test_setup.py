"""From a clone to a run: the Python that `make` takes, a torch that stays, pages that keep to the code."""
import os
import re
import subprocess
import sys
import venv
import zipfile

import pytest

from fusion_lab import environment
from tests.support import PATIENCE, ROOT

ENVIRONMENT = ROOT / "fusion_lab" / "environment.py"
REQUIREMENTS = environment.requirements(ROOT / "requirements-dev.txt")
COMPLETE = {name: condition.partition(",")[0].lstrip(">=") + ".1" for name, condition in REQUIREMENTS.items()}
STUBS = {"pytest": "import sys; print('stub', sys.executable, sys.argv[1:])",  # started with -m
         "numpy": "raise SystemExit('stub numpy')", "torch": "raise SystemExit('stub torch')", "tqdm": ""}


def make_environment(place, packages, with_pip=False):
    """A venv whose packages are names and versions; sees nothing of the base Python."""
    venv.create(place, with_pip=with_pip)
    site = next(place.glob("lib/python*/site-packages"))
    for name, version in packages.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text("")
    for name, source in STUBS.items():
        (site / f"{name}.py").write_text(source + "\n")
    return place


def activate(place, **more):
    """Variables as `source place/bin/activate` leaves them; nothing of an environment or make round tests."""
    foreign = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHON", "PYTHONPATH", "CONDA_PREFIX",
               "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in foreign}
    path = f"{place / 'bin'}{os.pathsep}{kept['PATH']}"
    return {**kept, "VIRTUAL_ENV": str(place), "PATH": path, **more}


def run(*command, env):
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=env, timeout=PATIENCE,
                          capture_output=True, text=True)


def dry_run(place, *arguments, file="requirements.txt", **more):
    return run("python3", ENVIRONMENT, "--dry-run", file, *arguments, env=activate(place, **more))


def commands(done):
    """What a dry run would run."""
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1+rocm7.2", "2.10.0a0+git0123", "2.13.9"])
def test_an_environment_with_a_torch_in_range_is_used_as_it_is(version, tmp_path):
    place = make_environment(tmp_path / "my env", {**COMPLETE, "torch": version})
    done = dry_run(place, "tiny_openfold_v2.py", "--seed", "3")
    assert done.returncode == 0 and done.stderr == f"Using {place} with its torch {version}\n"
    assert commands(done) == [f"'{place / 'bin' / 'python3'}' tiny_openfold_v2.py --seed 3"]


def test_what_is_missing_or_too_old_is_installed_beside_that_torch(tmp_path):
    there = {"torch": "2.11.0+rocm7.2", "numpy": "1.21.0", "pytest": "8.1"}
    place = make_environment(tmp_path / "env", there)
    for file, lacking in (("requirements.txt", ["numpy", "tqdm"]),
                          ("requirements-dev.txt", REQUIREMENTS.keys() - {"torch", "pytest"})):
        done = dry_run(place, "-m", "pytest", file=file)
        wanted = [name + condition for name, condition in REQUIREMENTS.items() if name in lacking]
        assert done.stderr.count("\n") == 1 and done.stderr.endswith(f"there: {', '.join(wanted)}\n")
        pip, program = commands(done)
        assert "-m pip install -c " in pip and program.endswith(" -m pytest")
        assert [word.strip("'") for word in pip.partition(".txt ")[2].split()] == wanted


def test_a_torch_out_of_range_is_one_line(tmp_path):
    for version in ("2.9.1", "2.14.0+cu130", "3.0"):
        done = dry_run(make_environment(tmp_path / version, {**COMPLETE, "torch": version}))
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert version in done.stderr and "torch>=2.10,<2.14" in done.stderr and "deactivate" in done.stderr


def test_without_a_torch_the_project_gets_its_own_venv(tmp_path, monkeypatch, capsys):
    """Called in this process, so that the venv can lie elsewhere than in the project."""
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "installed", lambda name: None)
    environment.main(["--dry-run", "requirements.txt", "tiny_openfold_v2.py"])
    out, err = capsys.readouterr()
    assert out.endswith(f"-m venv --system-site-packages --clear {tmp_path / '.venv'}\n")
    assert err.startswith("Making") and f"also sees the packages of {sys.executable} " in err
    monkeypatch.setattr(environment, "in_own_venv", lambda: True)
    environment.main(["--dry-run", "requirements.txt", "tiny_openfold_v2.py"])
    out, err = capsys.readouterr()
    assert "pip install 'torch>=2.10,<2.14' 'numpy>=1.26' 'tqdm>=4.64'\n" in out and "CUDA build" in err


@pytest.mark.parametrize("prefix, conda, expected", [("venv", None, True), ("conda", "conda", True),
                                                     ("base", "conda", False), ("base", None, False)])
def test_what_counts_as_activated(prefix, conda, expected, tmp_path, monkeypatch):
    for name in ("venv", "conda", "base"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / ("base" if prefix == "venv" else prefix)))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    if conda:
        monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / conda))
    assert environment.activated() is expected


def test_a_venv_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nfor place; do :; done; mkdir -p \"$place\"/bin; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(SystemExit) as stopped:
        environment.make_venv(dry=False)
    assert stopped.value.code == 3 and not environment.VENV.exists()


def test_make_starts_the_activated_python(tmp_path):
    place = make_environment(tmp_path / "env", {**COMPLETE, "torch": "2.12.0"})
    done = run("make", "--no-print-directory", "test", "ARGS=-k 'two words'", env=activate(place))
    given = ["-n", "2", "--dist", "worksteal", "-k", "two words"]
    assert done.stdout == f"stub {place / 'bin' / 'python3'} {given}\n", done.stderr
    done = run("make", "--no-print-directory", "train", env=activate(place))
    assert done.returncode == 2 and "stub " in done.stderr, done.stderr  # the stand-in for numpy or torch


def wheel(folder, name, version, requires=""):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", f"Name: {name}",
                                                        f"Version: {version}", requires, ""]))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_pip_never_replaces_a_torch_in_range(tmp_path):
    """With pip's own resolver: a package that needs another torch fails, one that takes any is installed."""
    pytest.importorskip("ensurepip")
    place = make_environment(tmp_path / "env", {"torch": "2.12.0+rocm7.1"}, with_pip=True)
    site = next(place.glob("lib/python*/site-packages"))
    wheel(tmp_path, "torch", "2.13.0")
    wheel(tmp_path, "modest", "1.0", "Requires-Dist: torch>=2")
    wheel(tmp_path, "greedy", "1.0", "Requires-Dist: torch>=2.13")
    offline = dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=os.devnull)
    for name, code in (("greedy", 3), ("modest", 0)):
        wanted = tmp_path / f"{name}.txt"
        wanted.write_text(f"torch>=2.10,<2.14\n{name}>=1.0\n")
        done = run("python3", ENVIRONMENT, wanted, "-c", "print('started')", env=activate(place, **offline))
        assert done.returncode == code, done.stdout + done.stderr
        assert (done.stdout == "started\n") == (code == 0)
        assert (site / f"{name}-1.0.dist-info").exists() == (code == 0)
        assert [path.name for path in site.glob("torch-*")] == ["torch-2.12.0+rocm7.1.dist-info"]


def test_requirements_are_of_the_form_that_is_understood():
    core = environment.requirements(ROOT / "requirements.txt")
    assert set(core) == {"torch", "numpy", "tqdm"} and core.items() < REQUIREMENTS.items()
    assert all(re.fullmatch(r">=[\d.]+(,<[\d.]+)?", condition) for condition in REQUIREMENTS.values())


# README and docs

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "WORKSHOP")),
         *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ["tiny_openfold_v2.py", "run_pytorch_profiler.py", "profile_summary.py",
            *(path.name for path in sorted(ROOT.glob("*.sh"))),
            *(f"companions/{path.name}" for path in sorted(ROOT.glob("companions/*.py"))
              if "interrupts.quiet(" in path.read_text(encoding="utf-8"))]  # as every program begins
ON_THEIR_OWN = ("profile_summary.py", "companions/fusion_patterns.py")  # hand nothing on to the trainer
ON_ITS_SITE = ("../../issues",)  # relative to a page on the site that hosts the repository
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")  # not the --enable- of --enable-X
FOREIGN = {"--index-url", "--function-exclude", "--msa-only",  # of pip, rocprof-sys, ColabFold; of AMD's:
           "--block", "--collection-period", "--dispatch", "--hip-graph-trace", "--hip-trace", "--kernel",
           "--iteration-multiplexing", "--kernel-rename", "--marker-trace", "--runtime-trace", "--set",
           "--sys-trace",  # of torchrun and Slurm:
           "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--nodes",
           "--ntasks-per-node", "--gpus-per-node", "--gpus-per-task", "--cpus-per-task", "--time", "--signal"}


@pytest.fixture(scope="module")
def flags():
    """{program: its flags, those that it hands on included}."""
    own = {}
    for name in PROGRAMS:
        done = run(*([sys.executable] if name.endswith(".py") else []), ROOT / name, "--help",
                   env={**os.environ, "PYTHON": sys.executable})
        assert done.returncode == 0, done.stderr
        own[name] = set(FLAG.findall(done.stdout))
    trainer = own["tiny_openfold_v2.py"]
    alone = {f"benchmarks/{path.name}": set(FLAG.findall(path.read_text(encoding="utf-8")))
             for path in ROOT.glob("benchmarks/*.py")}
    alone |= {name: own.pop(name) for name in ON_THEIR_OWN if name in own}
    return alone | {name: found | trainer for name, found in own.items()}


def anchors(page):
    """Names that links may have after #, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "models" / "README.md", *sorted((ROOT / "benchmarks").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("https://") and link not in ON_ITS_SITE:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_raw_results_are_dated_and_named_somewhere():
    """By a document or a program, at least without their suffix; and what these name is there."""
    results = {path.name: path.stem for path in ROOT.glob("benchmarks/results/*")}
    if not results:
        pytest.skip("raw results were deleted")
    places = ("models/*.md", "benchmarks/**/*.md", "benchmarks/*.py", "tests/**/*.py")
    pages = {*PAGES, *(path for place in places for path in ROOT.glob(place))}
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert [name for name in results if not re.search(r"_\d{4}-\d\d-\d\d(?![\d-])", name)] == []
    mentioned = set(re.findall(r"(?<![\w-])\w+_\d{4}-\d\d-\d\d\w*(?![\w-]|\*)", text))
    assert mentioned == set(results.values())
    assert set(re.findall(r"results/([\w-]+\.(?:json|png|txt))", text)) <= results.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_programs_exist(page, flags):
    """Every flag is one of some program; in a command, one of its program."""
    if page.stem in ("companions", "WORKSHOP") and not (ROOT / "companions").exists():
        pytest.skip("companions were deleted")
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


def test_readme_is_short_and_its_example_runs(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1))
    done = run(sys.executable, tmp_path / "example.py", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.count("[1, 32, 32]") == 2, done.stderr
