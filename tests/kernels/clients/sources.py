"""Other projects' own code, unpacked into a folder of the tests, and imported one project at a time.

From ../shared/clients where that is, else releases as pinned wheels from the registry.
"""
import collections
import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import types
import warnings
import zipfile
from unittest import mock

import numpy
import pytest
import torch
import torch.utils._pytree as pytree

from tests.kernels.clients import ours
from tests.support import SHARED, require_shared

PROJECTS = {"boltz-2.2.1": "boltz", "boltzgen-0.3.2": "boltzgen", "openfold3-0.5.0": "openfold3",
            "protenix-2.0.0": "protenix", "commits/boltz": "boltz", "commits/openfold": "openfold",
            "commits/openfold3": "openfold3", "commits/protenix": "protenix"}  # where it lies: its package
WITH_INIT = ("openfold3.core.model.primitives",)  # other __init__ files import the world, or nothing
STAND_INS = {  # for what the layers' files import and the layers that are tested do not use
    "attn_core_inplace_cuda", "scipy", "biotite", "rdkit", "openfold.utils.feats",
    "protenix.data.constants", "protenix.utils.scatter_utils"}
FOLDER = tempfile.TemporaryDirectory(prefix="clients-")  # gone at the end
CALLED = collections.Counter()  # how often a project has called one of our two functions


def counted(name):
    """One of our functions as a project finds it under cuEquivariance's name."""
    def function(*arguments, **named):
        CALLED[name] += 1
        return getattr(ours, name)(*arguments, **named)
    return function


NAMES = {name: counted(name) for name in ("triangle_attention", "triangle_multiplicative_update")}
OURS = {  # modules of cuEquivariance's that projects import. Theirs leaves up to 100 keys to PyTorch, and
    # OpenFold3 asks for this number to do so itself
    "cuequivariance_torch": NAMES, "cuequivariance_torch.primitives": {},
    "cuequivariance_torch.primitives.triangle": NAMES, "cuequivariance_ops_torch": {},
    "cuequivariance_ops_torch.triangle_attention": {"CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0},
    "optree": {"tree_map": pytree.tree_map, "tree_flatten": functools.partial(
        pytree.tree_flatten, is_leaf=lambda x: isinstance(x, torch.Size))},
    "scipy.stats": {"truncnorm": types.SimpleNamespace(  # of initial weights, which tests perturb
        std=lambda **_: 1., rvs=lambda size, scale, **_: numpy.random.normal(0, scale, size))}}


@functools.cache
def folder_of(where):
    """The folder in which a project's package lies, unpacked. Skips where there is neither."""
    folder = pathlib.Path(FOLDER.name, where)
    name, _, release = where.partition("-")
    if (SHARED / "clients").exists() or not release:
        return unpacked() / (where if release else "commits")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries=0", "--timeout=20",
               f"--dest={folder}", f"{name}=={release}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"no code of {where}: neither {SHARED / 'clients'} nor {' '.join(command[1:])}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


@functools.cache
def unpacked():
    folder = pathlib.Path(FOLDER.name)
    with tarfile.open(require_shared("clients", "sources.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Empty(types.ModuleType):
    """A stand-in: any name may be imported from it."""
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class Project(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """One project's modules, which are in sys.modules only within loaded(): two releases have one name."""

    def __init__(self, where):
        self.folder, self.name, self.modules = folder_of(where), PROJECTS[where], {}
        self.tops = {name.partition(".")[0] for name in (self.name, *STAND_INS, *OURS)}

    def owns(self, module):
        return module.partition(".")[0] in self.tops

    def find_spec(self, name, path=None, target=None):
        if not self.owns(name):
            return None
        place = self.folder.joinpath(*name.split("."))
        if name in OURS or any(f"{name}.".startswith(f"{each}.") for each in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if place.is_dir() and name not in WITH_INIT:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        return importlib.machinery.PathFinder.find_spec(name, path)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        vars(module).update(OURS.get(module.__name__, {}))

    @contextlib.contextmanager
    def loaded(self):
        """Within, its modules and stand-ins are those that are imported."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if self.owns(name)}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        try:
            yield self
        finally:
            sys.meta_path.remove(self)
            self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if self.owns(name)}
            sys.modules.update(others)

    def load(self, module):
        """One of its modules. OpenFold3 0.5.0 imports cuEquivariance only where there is a GPU; Protenix'
        own LayerNorm would be compiled for one."""
        with (mock.patch.object(torch.cuda, "is_available", lambda: True), warnings.catch_warnings(),
              mock.patch.dict(os.environ, LAYERNORM_TYPE="torch")):
            return importlib.import_module(f"{self.name}.{module}")


project = functools.cache(Project)
