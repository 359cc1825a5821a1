"""The kernels' folder is a package of its own: it installs alone and imports nothing else of the project."""
import shutil
import subprocess
import sys
import zipfile

from tests.support import PATIENCE, ROOT

USED = """
import sys, time
import evoformer_kernels
assert "torch" not in sys.modules, "the package itself loads torch"
environment, interpreter = dict(__import__("os").environ), None
import torch
from torch import nn
from evoformer_kernels import patch
assert not {"fusion_lab", "tiny_openfold"} & {name.partition(".")[0] for name in sys.modules}
assert dict(__import__("os").environ) == environment, "an import changes the environment"
print(evoformer_kernels.__file__, evoformer_kernels.__version__)
try:
    patch(nn.Linear(2, 2))
except ValueError as error:
    print(error)
"""


def test_it_installs_alone(tmp_path):
    """As `pip install ./evoformer_kernels` does, in an environment that has torch."""
    source, site = tmp_path / "evoformer_kernels", tmp_path / "site"
    shutil.copytree(ROOT / "evoformer_kernels", source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    ours = {f"evoformer_kernels/{f.relative_to(source)}" for f in source.rglob("*")
            if f.suffix in (".py", ".pyi", ".json", ".md") or f.name == "py.typed"}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w",
               tmp_path, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    wheel, = tmp_path.glob("evoformer_kernels-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
        archive.extractall(site)
    assert ours - {"evoformer_kernels/pyproject.toml"} <= held
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist")] == [
        "Requires-Dist: torch>=2.10.0a0"]
    done = subprocess.run([sys.executable, "-c", USED], cwd=site, capture_output=True, text=True,
                          env={"PYTHONPATH": str(site), "PATH": ""}, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    place, words = done.stdout.splitlines()
    assert place.startswith(str(site)) and "no triangle layer" in words
