"""Model files: a config, weights in bfloat16 and a card that tells where they come from, for those who use a
model rather than train it. A checkpoint serves as well."""
import json
from dataclasses import dataclass, fields

import torch

from fusion_lab.training import checkpoints
from fusion_lab.training.files import UserError, printable
from fusion_lab.training.options import spelled
from fusion_lab.training.reading import parse_json
from fusion_lab.training.recipe import average
from fusion_lab.training.saved import read_saved, say_if_older, write_saved

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class SavedModel:
    """What read_model() found."""
    config: object  # the program's model_config; what may be resized has its default
    weights: dict   # {unpacked parameter name: float32 tensor}
    card: dict      # what save_model() was given; of a checkpoint, its step and what it was trained on


def format_of(program):
    """What the model files of a program call themselves."""
    return f"{program.name.removesuffix('.py')} model 1"


def sizes(config):
    """{name: value} of the fields of a config that make the model what it is."""
    return {f.name: getattr(config, f.name) for f in fields(config) if not f.metadata["resized"]}


def save_model(path, program, weights, config, card):
    """Write a model file. weights: {unpacked parameter name: tensor}, such as a model's state_dict() or the
    "model" of a checkpoint; card: what JSON can hold. Raises UserError, also for weights that are not finite
    or not of such a model."""
    content = dict(format=format_of(program), config=sizes(config), card=card,
                   model={name: weight.detach().cpu().to(torch.bfloat16) for name, weight in weights.items()})
    if found := next(faults(content, program), None):
        raise UserError(f"model {path}: {found} cannot be saved")
    write_saved(path, content)


def read_model(path, program):
    """The SavedModel of a model file or of a checkpoint of a program, made under any switches. UserError if
    the file cannot be read, is damaged or foreign."""
    saved = read_saved(path, "model")
    kind = str(saved.get("format")) if isinstance(saved, dict) else None
    if kind not in (format_of(program), checkpoints.format_of(program)):
        raise UserError(f"model {path}: neither a model file nor a checkpoint of {program.name}")
    if kind == checkpoints.format_of(program):
        saved = {**saved, "card": {name: saved.get(name) for name in ("step", "trained_on", "chosen_by")},
                 "model": saved.get("average", saved.get("model"))}
    if fault := next(faults(saved, program), None):
        raise UserError(f"model {path}: damaged, or of another version: {fault[:200]} cannot be used")
    say_if_older(saved, path)
    weights = {name: weight.float() for name, weight in saved["model"].items()}
    return SavedModel(config_in(saved, program), weights, saved["card"])


def load_weights(trainer, path, source):
    """Let a new run begin with the weights of a checkpoint, averaged if it has such, or of a model file.
    Raises UserError."""
    saved = read_model(path, trainer.program)
    refuse_other_sizes(sizes(saved.config), trainer.settings.model, f"--init-from {path}")
    checkpoints.refuse_leaks(saved.card, source, f"--init-from {path}")
    checkpoints.put(trainer, dict(saved.weights))
    trainer.average = average(trainer.updated, trainer.training.ema_decay)
    for name in ("trained_on", "chosen_by"):
        setattr(trainer, name, set(saved.card.get(name) or ()))
    print(f"Begins with the weights of {path}")


def refuse_other_sizes(made, config, what):
    """UserError, with the flags that fit, where made, {name: value}, is not of a model like config."""
    different = [spelled(name, made[name]) for name, value in sizes(config).items()
                 if made.get(name, value) != value]
    if different:
        raise UserError(f"{what}: made for another model; to use it, pass {' '.join(different)}")


def config_in(saved, program):
    """The config that a file describes. Raises TypeError and ValueError if no model has such a one."""
    resized = {f.name for f in fields(program.model_config) if f.metadata["resized"]}
    return program.model_config(**{name: value for name, value in saved["config"].items()
                                   if name not in resized})


def oversized(config, weights, program):
    """Whether a model of this config would be far larger than the weights there are."""
    elements = sum(weight.numel() for weight in weights.values())
    numbers = [value for value in sizes(config).values() if isinstance(value, (int, float))]
    return program.blocks(program.settings(**sizes(config))) > len(weights) or max(numbers) > elements


def faults(saved, program):
    """What of a file's content cannot be used, as it comes upon it. Nothing of the model's size is made."""
    weights, card = saved.get("model"), saved.get("card")
    if not isinstance(weights, dict) or not all(isinstance(w, torch.Tensor) for w in weights.values()):
        yield "model"
        return
    try:
        parse_json(json.dumps(card, allow_nan=False))
        config, why = config_in(saved, program), ""
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        config, why = None, f" ({printable(error)})"
    if config is None or not isinstance(card, dict) or oversized(config, weights, program):
        yield f"config or card{why}"
        return
    with torch.device("meta"):
        expected = program.model(config, program.fusion_config.preset(False)).state_dict()
    if set(weights) != set(expected):
        yield "names of model"
        return
    for name, weight in weights.items():
        if weight.dtype not in DTYPES or not checkpoints.alike(weight, expected[name].to(weight.dtype)) \
                or not weight.isfinite().all():
            yield f"model {name}"
