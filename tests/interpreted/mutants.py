"""Broken copies of a module of kernels, which a test of them must catch."""
import importlib.util
import itertools
import pathlib
import re

NUMBERS = itertools.count()


def mutant(module, old, new, directory):
    """The module with one change of its text, as a module of its own; its ops get names of their own."""
    source, name = pathlib.Path(module.__file__).read_text(encoding="utf-8"), f"mutant{next(NUMBERS)}"
    assert old in source, f"{module.__name__} has no {old!r} to break"
    path = pathlib.Path(directory, f"{name}.py")
    broken = re.sub(r'operation\((f?)"', rf'operation(\1"{name}_', source.replace(old, new))
    path.write_text(broken, encoding="utf-8")
    specification = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(found)
    return found
