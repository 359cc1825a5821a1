"""What the lab asks of a program, and where it finds one."""
import json
import subprocess
import sys

import pytest

import tests.second_program as second
from fusion_lab.training.errors import UserError
from fusion_lab.training.program import load_program
from tests.support import ROOT


def test_the_seam_to_a_program():
    settings = second.PROGRAM.settings(width=8, num_steps=3, enable_fused_relu=False, profile_dir="p")
    found = [settings.get(name) for name in ("width", "num_steps", "enable_fused_relu", "profile_dir")]
    assert found == [8, 3, False, "p"]
    assert settings.having(width=9).get("width") == 9 and settings.get("width") == 8
    with pytest.raises(ValueError, match="^heigth: no config has this field"):
        settings.having(heigth=2)
    assert second.PROGRAM.sample(settings) == "B 4, W 8" and second.PROGRAM.name == "second_program.py"
    assert second.PROGRAM.result("accuracy") == f"accuracy_{second.PROGRAM.suffix}.json"


@pytest.mark.parametrize("name, text, words", [
    ("absent.py", None, "no such Python file"), ("x.txt", "", "no such Python file"),
    ("empty.py", "", "it has no PROGRAM = Program"), ("json.py", "PROGRAM = 1", "it has no PROGRAM")])
def test_programs_that_are_none(name, text, words, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        load_program(tmp_path / name)


@pytest.mark.parametrize("name", ["json.py", "a.b.py"])  # a module's, and none that a module can have
def test_a_program_may_have_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / name).write_text("from tests.second_program import PROGRAM\n")
    assert load_program(tmp_path / name) is second.PROGRAM
    assert load_program().name == "tiny_openfold_v2.py"


@pytest.mark.parametrize("name", ["tiny_openfold_v2", "tests.second_program"])
def test_whoever_imports_a_model_loads_a_model(name):
    """No reader of proteins, no picture, no comparison, no profiler; so does a user's program of the lab."""
    code = (f"import json, sys, {name}; print(json.dumps([(n, m.__file__) for n, m in sys.modules.items() if "
            "getattr(m, '__file__', None)]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {module: file for module, file in json.loads(done.stdout) if file.startswith(f"{ROOT}/")
              and "site-packages" not in file}  # of a .venv here
    loaded.pop("tests.second_program", None)
    loaded.pop("tests", None)
    assert len(loaded) <= 30 and not [module for module in loaded if "measuring" in module], sorted(loaded)
    of_proteins = {module.rpartition(".")[2] for module in loaded if "proteins." in module}
    assert of_proteins <= {"options", "seam", "costs", "fast_evoformer", "coevolution", "orientations"}
    assert sum(len(open(file, encoding="utf-8").readlines()) for file in loaded.values()) <= 4000


def test_a_program_that_runs_is_no_module_beside_itself():
    """Its file is executed once, also where it is what --program names."""
    done = subprocess.run([sys.executable, "-X", "importtime", "tiny_openfold_v2.py", "--check-flags",
                           "--program", "tiny_openfold_v2.py"], cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "fusion_lab.training.flags" in imported
    assert "tiny_openfold_v2" not in imported
