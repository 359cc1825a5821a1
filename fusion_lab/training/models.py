"""Model files: a config, weights in bfloat16 and a card that tells where they come from. Predictions and
--init-from read them, and checkpoints as well."""
import json
from dataclasses import dataclass

import torch

from fusion_lab.training import checkpoints, recipe
from fusion_lab.training.errors import UserError
from fusion_lab.training.options import flag


@dataclass(frozen=True)
class SavedModel:
    """What read_model() found."""
    config: object  # the program's model_config; what may be resized has its default
    weights: dict   # {unpacked parameter name: float32 tensor}
    card: dict      # plain values; of a checkpoint, its step and what it was trained on


def read_model(path, program):
    """The SavedModel of a model file or of a checkpoint of a program, made under any switches. UserError if
    the file cannot be read, is damaged or foreign."""
    saved = checkpoints.read_saved(path, "model", program, "model")
    with checkpoints.understanding("model", path):
        if saved["format"] == checkpoints.format_of(program):
            card = {name: saved.get(name) for name in ("step", "trained_on", "sequences", "chosen_by")}
            saved = dict(saved, card=card, model=saved.get("average", saved["model"]))
        config = checkpoints.saved_config(saved, program)
        weights = {name: weight.float() for name, weight in saved["model"].items()}
        with torch.device("meta"):
            expected = program.model(config, program.fusion_config.baseline()).state_dict()
        if {name: weight.shape for name, weight in weights.items()} != \
                {name: weight.shape for name, weight in expected.items()}:
            raise ValueError("weights of another model")
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise ValueError("weights are not finite")
        card = dict(saved["card"])
        json.dumps(card)  # a prediction's result holds it
        for names in (card.get("trained_on"), card.get("chosen_by"), dict(card.get("sequences") or {})):
            "".join(names or ())  # TypeError where they are no names
        return SavedModel(config, weights, card)


def load_weights(trainer, path, source):
    """Let a new run begin with the weights of a checkpoint, averaged if it has such, or of a model file.
    Raises UserError."""
    saved = read_model(path, trainer.program)
    checkpoints.refuse_other_sizes(saved.config, trainer.settings.model, f"--init-from {path}")
    checkpoints.refuse_leaks(saved.card, source, f"--init-from {path}")
    trainer.weights.put(checkpoints.packed(trainer, saved.weights))
    if trainer.average:
        trainer.average = recipe.Average(trainer.weights, trainer.average.decay)
    checkpoints.remember(trainer, saved.card)
    print(f"Begins with the weights of {path}")


def begin_from_files(trainer, source):
    """Take what --resume or --init-from names. Raises UserError."""
    training = trainer.settings.training
    for name in ("save_best", "early_stopping"):
        if getattr(training, name) and not source.chooses:
            raise UserError(f"{flag(name)}: {trainer.program.name} does not say which evaluation is better")
    if training.resume:
        checkpoints.load_run(trainer, training.resume, source)
    elif training.init_from:
        load_weights(trainer, training.init_from, source)
    trainer.trained_on.update(source.names)
    trainer.sequences.update(source.sequences)
    trainer.chosen_by.update(source.choosing)
