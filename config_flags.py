"""Dataclass fields that are command-line flags: defaults, limits and help are written once, in the dataclass."""
import argparse
import math
from dataclasses import field, fields


def option(default, help, low=None, choices=None, type=None, below=None):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata=dict(help=help, low=low, below=below, choices=choices,
                                                type=type or default.__class__))


class Checked:
    """Base of the configs: a value outside its field's limits raises a ValueError that names it."""

    def __post_init__(self):
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            numeric = meta["low"] is not None
            if numeric and (isinstance(value, bool) or not isinstance(value, (int, meta["type"]))):
                raise ValueError(f"{f.name} = {value!r}: must be of type {meta['type'].__name__}")
            if numeric and not (value >= meta["low"] and math.isfinite(value)):
                raise ValueError(f"{f.name} = {value!r}: must be at least {meta['low']}")
            if meta["below"] is not None and not value < meta["below"]:
                raise ValueError(f"{f.name} = {value!r}: must be less than {meta['below']}")
            if meta["choices"] and value not in meta["choices"]:
                raise ValueError(f"{f.name} = {value!r}: must be one of {', '.join(meta['choices'])}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def flag(name):
    return "--" + name.replace("_", "-")


def converter(kind):
    def convert(text):
        try:
            return kind(text)
        except ValueError:
            allowed = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed}") from None
    return convert if kind in (int, float) else kind


def add_config_flags(parser, config_class, paired=False):
    """One flag for every field. A bool is a switch; with paired, an --enable-X/--disable-X pair of which the
    later one on the command line wins. A flag that is not given leaves no trace in the parsed arguments."""
    group = parser.add_argument_group(config_class.__doc__.strip().rstrip("."))
    for f in fields(config_class):
        text = f"{f.metadata['help']} (default: {f.default})".replace("%", "%%")
        if f.metadata["type"] is not bool:
            group.add_argument(flag(f.name), type=converter(f.metadata["type"]), choices=f.metadata["choices"],
                               metavar=f.name.split("_")[-1].upper(), help=text, default=argparse.SUPPRESS)
            continue
        group.add_argument(flag(f.name), action="store_true", help=text, default=argparse.SUPPRESS)
        if paired:
            group.add_argument(flag(f.name).replace("--enable", "--disable", 1), dest=f.name, action="store_false",
                               help="the opposite", default=argparse.SUPPRESS)
