"""The command line that is made of configs: its help, presets and modes, what it refuses."""
import argparse
from dataclasses import fields, replace
from pathlib import Path

import pytest

import tiny_openfold_v2 as tof
from fusion_lab import __version__
from fusion_lab.training import flags
from fusion_lab.training.flags import (
    Parser,
    command_line,
    config_classes,
    make_parser,
    parse,
    read_settings,
    regular_expression,
    whole_number,
    whole_numbers,
    with_demo,
)
from fusion_lab.training.options import ProfilerConfig, as_flag, flag
from fusion_lab.training.program import load_program
from tests.second_program import PROGRAM as SECOND
from tests.support import ROOT

PARSER = make_parser(tof.PROGRAM)


def values_of(f, paired):
    """What a field takes, its limits among it, and texts that it refuses."""
    meta, kind = f.metadata, f.metadata["type"]
    if kind is bool:
        return [True, False][:1 + paired], []
    if meta["choices"] or kind is str:
        return meta["choices"] or ["a", "-x", "b c=d"], ["", "no such"][:1 + bool(meta["choices"])]
    low, most, below = meta["low"], meta["at_most"], meta["below"]
    high = most or below and (below - 1 if kind is int else below / 2) or low + 1
    beyond = [low - 1, *([below] if below else [most + 1] if most else [])]
    return [kind(low), high], [*beyond, "x", "", "1e400", "nan", "-inf", "0x10"]


@pytest.mark.parametrize("file", ["tiny_openfold_v2.py", "tests/second_program.py",
                                  "companions/tiny_llama.py", "companions/protein_mpnn.py"])
def test_every_field_is_a_flag_that_takes_its_limits_and_nothing_beyond(file, capsys):
    """And the command line that is made of settings makes these settings."""
    program = load_program(ROOT / file)
    parser = make_parser(program)
    for f, paired in ((f, kind is program.fusion_config) for kind in config_classes(program)
                      for f in fields(kind) if not f.metadata["takes"]):
        taken, refused = values_of(f, paired)
        for value in taken:
            word = as_flag(f.name, value)
            try:
                settings = program.settings(**{f.name: value})
            except ValueError:
                refused.append(value)  # it needs another field
                continue
            words = [*command_line(program, settings), f"--num-steps={settings.training.num_steps}"]
            assert parse(parser, program, [word])[1] == settings
            assert replace(parse(parser, program, words)[1], profiler=settings.profiler) == settings, words
        for value in refused:
            with pytest.raises(SystemExit) as ended:
                parse(parser, program, [f"{flag(f.name)}={value}"])
            said = capsys.readouterr().err
            assert ended.value.code == 2 and said.count("\n") == 1, (f.name, value)
            assert said.startswith(f"{program.name}: error: argument --"), said


@pytest.mark.parametrize("words, named", [
    ("--num-steps x", "argument --num-steps: "), ("--seq-le 3", "--seq-le 3"), ("stray", "stray"),
    ("--enable-triton-projection", "--enable-triton-projection"),
    ("--num-stepss 5", ": --num-stepss 5 (did you mean --num-steps?)\n"), ("--lr=1", ": --lr=1\n"),
    ("--enable-flash", "(did you mean --enable-flash-attention?)"),
    ("--compare_fusion --enable-qkv-fusion", ": --compare_fusion --enable-qkv-fusion "
     "(did you mean --compare-fusion, --enable-qkv-fusion-msa, --enable-qkv-fusion-triangle?)"),
    ("--msa-heads 5", "argument --msa-heads: 5: "), ("--pair-heads 5", "argument --pair-heads: 5: "),
    ("--validate-setup --retune", "argument --retune: "),
    ("--validate-setup --variants all", "argument --variants: "),
    ("--retune --save-checkpoint x", "argument --save-checkpoint: "),
    ("--compare-fusion --compare-with-v1 x", "argument --compare-with-v1: "),
    ("--validate-setup --enable-memory-profiling", "argument --enable-memory-profiling: "),
    ("--contacts x --demo", "argument --demo: not with --contacts, which takes --structure, --query, "),
    ("--fold x --disable-opm-fusion", "argument --disable-opm-fusion: not with --fold, "),
    ("--contacts x --enable-opm-fusion", "argument --enable-opm-fusion: not with --contacts, ")])
def test_wrong_use_is_one_line_that_names_the_flag(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(PARSER, tof.PROGRAM, words.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and named in said.err


@pytest.mark.parametrize("words, mode, given", [
    ("", None, {}), ("--num-steps 3 --check-flags", None, dict(num_steps=3, check_flags=True)),
    ("--retune", "--retune", {}), ("--fold x -o y --seed 3", "--fold", dict(fold=["x"], output="y", seed=3)),
    ("--contacts x --query q", "--contacts", dict(contacts=["x"], query="q"))])
def test_modes_and_what_they_take(words, mode, given):
    arguments, settings, found = parse(PARSER, tof.PROGRAM, words.split())
    assert found == mode and vars(arguments).items() >= given.items()
    assert all(settings.get(name) == value for name, value in given.items() if name != "check_flags")


def test_presets():
    def fusion(*words):
        return parse(PARSER, tof.PROGRAM, words)[1].fusion
    kind = tof.FusionConfig
    assert fusion("--enable-ultra") == kind.ultra() != fusion("--enable-all-fusion") == kind.preset()
    assert fusion("--disable-all-fusion") == kind.baseline() != fusion() == kind()
    assert fusion("--enable-opm-fusion", "--disable-all-fusion").enable_opm_fusion
    assert fusion("--disable-opm-fusion", "--enable-opm-fusion").enable_opm_fusion  # the later one wins
    assert not fusion("--enable-opm-fusion", "--disable-opm-fusion").enable_opm_fusion
    recorded = parse(PARSER, tof.PROGRAM, ["--enable-all-profiling"])[1].profiler
    assert recorded == ProfilerConfig(**{name: True for name in vars(recorded) if name[:7] == "enable_"})


def test_help_says_every_default_once():
    for program in (tof.PROGRAM, SECOND):
        helps = {action.dest: action.help for action in make_parser(program)._actions}
        del helps["help"], helps["version"]
        assert [name for name, text in helps.items()
                if text != argparse.SUPPRESS and text.count("default:") != 1] == []
    for name, default in dict(width=32, enable_fused_relu="on", enable_fused_residual="off",
                              save_checkpoint="none", deterministic="off").items():
        assert helps[name].endswith(f" (default: {default})")


def test_a_tool_with_other_modes_hides_the_programs(capsys):
    tool, own = make_parser(SECOND, "Other work.", "tool.py"), make_parser(SECOND)
    assert [text.count(name) for name in ("--retune", "--variants", "--check-flags")
            for text in (tool.format_help(), own.format_help())] == [0, 1] * 3
    with pytest.raises(SystemExit) as ended:
        tool.parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tool.py of TinyOpenFold {__version__}\n"


@pytest.mark.parametrize("convert, taken, refused", [
    (whole_number(), {"1": 1, "12": 12}, ("0", "-1", "1.5", "\u0663", "")),
    (whole_number(0), {"0": 0}, ("-1",)),
    (whole_numbers, {"32 64": [32, 64], "32,64": [32, 64], "7": [7]}, ("", " ", "1 x", "0")),
    (regular_expression, {"a|b$": "a|b$"}, ("(",))])
def test_what_converters_take(convert, taken, refused):
    assert {text: convert(text) for text in taken} == taken
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=": (must be|no regular expression)"):
            convert(text)


def test_one_rank_of_several_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(flags.torchrun, "first", lambda: False)
    with pytest.raises(SystemExit) as ended:
        Parser(prog="x").parse_args(["--y"])
    assert ended.value.code == 2 and capsys.readouterr().err == ""


def test_what_words_stand_for():
    """No flags mean the demonstration, and single flags win over it; the shipped model has a name."""
    settings = read_settings(tof.PROGRAM, PARSER.parse_args(with_demo([], tof.PROGRAM)))
    assert settings == tof.PROGRAM.settings(**tof.PROGRAM.demo) and settings.model.num_blocks == 1
    assert with_demo([], SECOND) == []  # which has none
    settings = read_settings(tof.PROGRAM, PARSER.parse_args(["--seq-len", "40", "--demo"]))
    assert settings.model.seq_len == 40 and settings.training.batch_size == tof.PROGRAM.demo["batch_size"]
    _, settings, _ = parse(PARSER, tof.PROGRAM, with_demo(["--seed", "1"], tof.PROGRAM))
    assert settings.model == tof.TinyOpenFoldConfig()
    assert Path(tof.PROGRAM.settings(init_from="shipped").training.init_from).samefile(
        ROOT / "tiny_openfold" / "models" / "families.pt")
