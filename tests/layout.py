"""Which tests are a module's: its mirror image first, then all that import it. Run it to see them:

    python tests/layout.py fusion_lab/training/files.py
"""
import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fusion_lab", "proteins", "companions")
ROOMS = {"tiny_openfold_v2.py": "model", "run_pytorch_profiler.py": "profiler", "profile_summary.py": "rocm"}
STARTED = dict.fromkeys(("profile_rocm.py", "launch_performance_study.py"), "tests/programs/test_scripts.py")


@functools.cache
def modules():
    """Every file with code of the project, benchmarks apart, as a path from its root."""
    files = [*ROOT.glob("*.py"), *(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))]
    return sorted(str(file.relative_to(ROOT)) for file in files if file.stat().st_size)


def mirror(file):
    """"fusion_lab/kernels/tuner.py" -> "tests/kernels/test_tuner.py", which need not exist."""
    path = Path(file)
    folders = path.parts[path.parts[0] == "fusion_lab":-1]
    name = path.parent.name if path.name == "__init__.py" else path.stem
    return "/".join(["tests", *folders, f"test_{name}.py"])


@functools.cache
def named(file):
    """Dotted names that a file imports, and names of programs that it starts."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            found.add(node.value)
    return found


def tests_of(file):
    """Tests of a module, the nearest first: its mirror image, its room's, others that import or start it; if
    there are none, those of the modules that import it."""
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    room = f"tests/{ROOMS[file]}" if file in ROOMS else mirror(file).rpartition("/")[0]
    own = mirror(file), STARTED.get(file)
    tests = [test for test in all_tests() if test in own or {dotted, file} & named(test)]
    if not tests:
        tests = {test for user in modules() if dotted in named(user) for test in tests_of(user)}
    return sorted(tests, key=lambda test: (test != mirror(file), not test.startswith(f"{room}/"),
                                           test.startswith("tests/programs/"), test))


@functools.cache
def all_tests():
    return [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]


if __name__ == "__main__":
    for name in sys.argv[1:] or modules():
        print(name, *tests_of(name) or ["none"])
