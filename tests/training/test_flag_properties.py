"""The command line that is made of configs: what their fields take it takes, and refuses what they refuse."""
import contextlib
import functools
import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_lab.training.flags import command_line, config_classes, make_parser, parse
from fusion_lab.training.options import flag
from fusion_lab.training.program import Settings, load_program
from tests.properties import cases
from tests.support import ROOT

FILES = [path for path in (ROOT / "tiny_openfold_v2.py", ROOT / "tests" / "second_program.py",
                           ROOT / "companions" / "tiny_llama.py", ROOT / "companions" / "protein_mpnn.py")
         if path.exists()]

OF_ONE_FIELD = re.compile(
    r": must (be (at least|at most|less than|a number|a whole number) ?[-\d.e]*(\n|$)|not be empty)")


@functools.cache
def known(path):
    """(Program, its parser)"""
    program = load_program(path)
    return program, make_parser(program)


def value_of(f, paired):
    """Strategy: values that this field takes by itself."""
    meta, kind = f.metadata, f.metadata["type"]
    if kind is bool:
        return st.booleans() if paired else st.just(True)
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if kind is str:
        return st.text("ab-=. 7", min_size=1, max_size=4)
    low, high = meta["low"], meta["below"] or meta["at_most"]
    if kind is int:
        return st.integers(low, high - 1 if high and meta["below"] else high or low + 10 ** 6)
    return st.floats(low, high, exclude_max=bool(meta["below"]), allow_infinity=False)


def wrong_for(f):
    """Strategy: texts that this field refuses."""
    meta, kind = f.metadata, f.metadata["type"]
    if meta["choices"] or kind is str:
        return st.sampled_from(["", "no such"] if meta["choices"] else [""])
    outside = [meta["low"] - 1, *[meta["below"]] * (meta["below"] is not None)]
    outside += [] if meta["at_most"] is None else [meta["at_most"] + 1]
    return st.sampled_from([*map(str, outside), "x", "", "1e400", "nan", "-inf", "0x10"])


def as_flags(name, value, paired, joined):
    """The words of the command line that say so."""
    if isinstance(value, bool):
        return [flag(name) if value else flag(name).replace("--enable", "--disable", 1)]
    text = value if isinstance(value, str) else repr(value)
    return [f"{flag(name)}={text}"] if joined or text.startswith("-") else [flag(name), text]


@st.composite
def command_lines(draw):
    """(program, parser, words, {field: value}, the preset of switches, the field that is wrong or None)"""
    program, parser = known(draw(st.sampled_from(FILES)))
    members = [(f, cls is program.fusion_config) for cls in config_classes(program)
               for f in cls.__dataclass_fields__.values() if not f.metadata["mode"]]
    chosen = draw(st.lists(st.sampled_from(members), max_size=6, unique_by=lambda member: member[0].name))
    values, groups, wrong = {}, [], None
    for f, paired in chosen:
        values[f.name] = draw(value_of(f, paired))
        words = as_flags(f.name, values[f.name], paired, draw(st.booleans()))
        if paired and isinstance(values[f.name], bool) and draw(st.booleans()):  # the later one wins
            words = [*as_flags(f.name, not values[f.name], paired, False), *words]
        groups.append(words)
    numbers = [i for i, (f, _) in enumerate(chosen) if f.metadata["type"] is not bool]
    if numbers and draw(st.booleans()):
        number = draw(st.sampled_from(numbers))
        wrong = chosen[number][0].name
        groups[number] = [f"{flag(wrong)}={draw(wrong_for(chosen[number][0]))}"]
    preset = draw(st.sampled_from([None, True, False]))
    if preset is not None:
        groups.append(["--enable-all-fusion" if preset else "--disable-all-fusion"])
    words = [word for group in draw(st.permutations(groups)) for word in group]
    return program, parser, words, values, preset, wrong


def settings_of(program, values, preset):
    """What the configs themselves make of these values. Raises ValueError."""
    base = {} if preset is None else vars(program.fusion_config.preset(preset))
    return Settings(*(cls(**{name: value for name, value in {**base, **values}.items()
                             if name in cls.__dataclass_fields__}) for cls in config_classes(program)))


@cases(150)
@given(command_lines())
def test_properties_of_command_lines(line):
    program, parser, words, values, preset, wrong = line
    try:
        expected = None if wrong else settings_of(program, values, preset)
        blamed = [wrong]
    except ValueError as error:
        expected, blamed = None, [str(error).partition(" = ")[0]]
    said = io.StringIO()
    if expected is not None:
        arguments, settings, mode = parse(parser, program, words)
        assert settings == expected and mode is None
        steps = ["--num-steps", str(settings.training.num_steps)]
        again = parse(parser, program, [*command_line(program, settings), *steps])[1]
        assert replace(again, profiler=settings.profiler) == settings
        return
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        parse(parser, program, words)
    message = said.getvalue()
    assert ended.value.code == 2 and message.count("\n") == 1
    assert message.startswith(f"{program.name}: error: ")
    if not wrong:  # each value is one that its field takes: the fields do not go together
        assert f"argument {flag(blamed[0])}: " in message and not OF_ONE_FIELD.search(message)
