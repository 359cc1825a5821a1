"""Checkpoints: the state of a run under unpacked parameter names, so that any switches can continue it."""
import contextlib
import os
import zipfile
from dataclasses import asdict, fields
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from fusion_lab.training.errors import FAILED, UserError
from fusion_lab.training.files import write_atomically
from fusion_lab.training.options import as_flag, flag
from fusion_lab.training.words import printable

# Fields that may differ between a run and its continuation without a word.
MAY_DIFFER = ("num_steps", "warmup_steps", "log_every", "eval_every", "save_checkpoint", "save_every",
              "save_best", "early_stopping", "resume", "init_from", "device")
MOMENTS = "exp_avg", "exp_avg_sq"  # of AdamW


def format_of(program, kind="checkpoint"):
    """The `format` in the checkpoints of a program, or in its files of another kind."""
    return f"{program.stem} {kind} 1"


def packings(model):
    """(module, its prefix in parameter names) of all modules that may have packed projections."""
    return [(m, f"{name}.") for name, m in model.named_modules() if hasattr(m, "split_packed")]


def unpacked(model, tensors):
    """Bring {parameter name: tensor} to unpacked names, in place. The reverse, packed(), makes a list."""
    for module, prefix in packings(model):
        module.split_packed(tensors, prefix)
    return tensors


def optimizer_state(trainer, kind):
    """The optimizer's tensors of this kind, in the form of trainer.weights.tensors."""
    return [trainer.optimizer.state[p][kind] for p in trainer.weights.tensors]


# --- Writing ------------------------------------------------------------------------------------------------


def snapshot(trainer):
    """Everything a run needs to continue. Raises UserError if a weight or a moment is not finite."""
    average, weights = trainer.average, trainer.weights
    kinds = dict({kind: optimizer_state(trainer, kind) for kind in MOMENTS}, model=weights.tensors,
                 **dict(average=average.tensors) if average else {})
    kinds = {kind: unpacked(trainer.model, weights.named([tensor.detach() for tensor in tensors]))
             for kind, tensors in kinds.items()}
    for kind, tensors in kinds.items():
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{kind} is not finite at step {trainer.step_number}: not saved", code=FAILED)
    rng = dict(cpu=torch.get_rng_state())
    if trainer.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(trainer.device)
    updates = max(step.item() for step in optimizer_state(trainer, "step"))  # a scaler skips some
    return dict(format=format_of(trainer.program), config=asdict(trainer.settings.model),
                training=dict(asdict(trainer.settings.training), ranks=trainer.world.size),
                step=trainer.step_number,
                moments={kind: kinds.pop(kind) for kind in MOMENTS},
                updates=updates, scaler=trainer.scaler.state_dict(), rng=rng, best=dict(trainer.best),
                averaged_steps=average.steps if average else 0, gradient_norm=trainer.gradient_norm.item(),
                trained_on=sorted(trainer.trained_on), sequences=trainer.sequences,
                chosen_by=sorted(trainer.chosen_by), **kinds)


def save(trainer, path):
    """Write a snapshot(), whole or not at all; of several ranks one does."""
    if trainer.world.first:
        write_atomically(path, partial(torch.save, snapshot(trainer)))


OTHER_RESULTS = (".json", ".jsonl", ".png", ".tsv")  # of a run, which would write over a checkpoint


def outputs(trainer):
    """{path: whether the run goes on with what is in it} of the files that a run saves into. UserError, now
    rather than after hours of training: only a checkpoint of this program may be replaced."""
    training, place = trainer.settings.training, os.path.realpath(trainer.settings.profiler.profile_dir)
    paths = {flag(name): getattr(training, name) for name in ("save_checkpoint", "save_best")
             if getattr(training, name)}
    for name, path in paths.items():
        if path.endswith(OTHER_RESULTS):
            raise UserError(f"{name} {path}: so this run names other results; give it a name in .pt")
        above = os.path.dirname(os.path.dirname(os.path.realpath(path)))  # the last directory is made
        if not os.path.isdir(above) and not os.path.realpath(path).startswith(place + os.sep):
            raise UserError(f"{name} {path}: there is no directory {above}")
    try:
        earlier = {path: read_saved(path, name, trainer.program) if os.path.lexists(path) else None
                   for name, path in paths.items()}
    except UserError as error:
        raise UserError(f"{error}; it was not overwritten") from None
    return {path: saved is not None and continues(trainer, path, saved) for path, saved in earlier.items()}


def continues(trainer, path, saved):
    """Whether a file is the one that is resumed, or holds the best weights of that run."""
    resumed, best, of_file = trainer.settings.training.resume, trainer.best, saved.get("best", {})
    return bool(resumed) and (os.path.samefile(path, resumed) or best["step"] is not None and
                              saved["step"] == best["step"] and of_file.get("score") == best["score"])


# --- Reading ------------------------------------------------------------------------------------------------

def read_saved(path, what, program, *kinds):
    """The dict of tensors and plain values in a checkpoint of a program, or in a file of one of the other
    kinds. torch.load() checks no checksum, and one wrong bit makes it read an entry as a directory, so the
    entries of the zip file are checked first. A file that would need more memory than it has bytes, by packed
    entries or by a view of few numbers, is refused. Raises UserError, which calls the file `what`."""
    try:
        with zipfile.ZipFile(path) as entries:
            listed = entries.infolist()
            sound = (sum(e.file_size for e in listed) <= os.path.getsize(path) and entries.testzip() is None
                     and not any(e.external_attr for e in listed))
        saved = torch.load(path, map_location="cpu", weights_only=True) if sound else None
        sound = sound and all(leaf.nbytes <= leaf.untyped_storage().nbytes() for leaf in tree_leaves(saved)
                              if isinstance(leaf, torch.Tensor))
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror or error}") from None
    except Exception:  # a damaged file raises whatever its first bad byte leads to
        sound = False
    if not sound:
        raise UserError(f"{what} {path}: damaged, or not a file that torch saved")
    kinds = ("checkpoint", *kinds)
    if not isinstance(saved, dict) or saved.get("format") not in [format_of(program, kind) for kind in kinds]:
        of_weights = "; weights alone belong to --init-from" if what == "--resume" and len(kinds) == 1 else ""
        raise UserError(f"{what} {path}: no {' and no '.join(kinds)} of {program.name}{of_weights}")
    return saved


@contextlib.contextmanager
def understanding(what, path):
    """Within, an error that the content of a file leads to becomes a UserError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        words = printable(error).strip()[:200]
        raise UserError(f"{what} {path}: damaged, or of another version ({words})") from None


def read_checkpoint(path, program, config):
    """The dict in a checkpoint of a program whose model has this config; UserError if the file cannot be
    read, is damaged, foreign or of another model."""
    saved = read_saved(path, "checkpoint", program)
    with understanding("checkpoint", path):
        made = saved_config(saved, program)
    refuse_other_sizes(made, config, f"checkpoint {path}")
    return saved


def saved_config(saved, program):
    """The config of a saved model. Fields that may be resized, and fields that are newer than the file, have
    their defaults. Call it within understanding()."""
    resized = {f.name for f in fields(program.model_config) if f.metadata["resized"]}
    return program.model_config(**{n: v for n, v in saved["config"].items() if n not in resized})


def refuse_other_sizes(made, config, what):
    """UserError, with the flags that fit, where the config of a saved model is of another model than this."""
    different = [as_flag(f.name, getattr(made, f.name)) for f in fields(config)
                 if not f.metadata["resized"] and getattr(made, f.name) != getattr(config, f.name)]
    if different:
        raise UserError(f"{what}: made for another model; to use it, pass {' '.join(different)}")


def packed(trainer, tensors):
    """Tensors by unpacked names -> a list in the form of trainer.weights.tensors. If they are not this
    model's, or not finite, it raises an error that understanding() turns into a UserError."""
    tensors, parameters = dict(tensors), trainer.weights.parameters
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError("not finite")
    for module, prefix in packings(trainer.model):
        module.adapt(tensors, prefix)
    if tensors.keys() != parameters.keys():
        raise KeyError(next(iter(tensors.keys() ^ parameters.keys())))
    if any(tensors[name].shape != parameter.shape for name, parameter in parameters.items()):
        raise ValueError("other shapes")
    return trainer.weights.listed(tensors)


def restore(trainer, path):
    """Continue from a checkpoint made under any FusionConfig; returns what was saved. Raises UserError, see
    read_checkpoint."""
    saved = read_checkpoint(path, trainer.program, trainer.settings.model)
    with understanding("checkpoint", path):
        trainer.weights.put(packed(trainer, saved["model"]))
        if trainer.average:
            trainer.average.steps = saved.get("averaged_steps", 0)
            kept = packed(trainer, saved.get("average", saved["model"]))
            torch._foreach_copy_(trainer.average.tensors, kept)
        for kind in MOMENTS if dict(saved["moments"]) else ():  # one of no steps has none
            torch._foreach_copy_(optimizer_state(trainer, kind), packed(trainer, saved["moments"][kind]))
        for step in optimizer_state(trainer, "step"):
            step.fill_(saved["updates"])
        if saved["scaler"]:
            trainer.scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"]["cpu"])
        if trainer.device.type == "cuda" and "cuda" in saved["rng"]:
            torch.cuda.set_rng_state(saved["rng"]["cuda"], trainer.device)
        trainer.step_number = int(saved["step"])
        trainer.best = {**trainer.best, **saved.get("best", {})}  # older ones have none
        trainer.gradient_norm.fill_(saved.get("gradient_norm", 0.0))
        remember(trainer, saved)
    trainer.world.reseed(trainer.settings.training.seed, saved["step"])
    return saved


def remember(trainer, saved):
    """Tell the trainer what the weights in a file have seen."""
    trainer.trained_on, trainer.chosen_by = (set(saved.get(name) or ()) for name in
                                             ("trained_on", "chosen_by"))
    trainer.sequences = dict(saved.get("sequences") or {})


def load_run(trainer, path, source):
    """restore(). UserError if this run may not go on from it, or has nothing left to do."""
    saved, training = restore(trainer, path), trainer.settings.training
    refuse_leaks(saved, source, f"--resume {path}")
    if trainer.step_number >= training.num_steps:
        raise UserError(f"--num-steps {training.num_steps}: {path} is at step {trainer.step_number} already")
    if out_of_patience(trainer):
        raise UserError(f"--early-stopping {training.early_stopping}: {path} was ended by it; a larger one "
                        "goes on")
    now = {**asdict(trainer.settings.model), **asdict(training), "ranks": trainer.world.size}
    then = {**saved["config"], **saved.get("training", {})}  # older ones have no "training"
    free = {*MAY_DIFFER} - ({"num_steps"} if training.lr_schedule != "constant" else set())
    different = [f"{name} {printable(then[name]):.200} -> {now[name]}" for name in now
                 if name in then and name not in free and repr(then[name]) != repr(now[name])]
    print(f"Resumed from {path} at step {trainer.step_number}"
          + (f"; different now: {', '.join(different)}" if different else ""))


def out_of_patience(trainer):
    """Whether --early-stopping ends the run: that many evaluations have come since the best one."""
    patience = trainer.settings.training.early_stopping
    return patience is not None and trainer.best["since"] >= patience


def refuse_leaks(saved, source, flag):
    """Raise UserError if the saved weights were trained on or chosen by what is held out now, or were trained
    on what chooses the best weights now."""
    held_out, choosing = source.held_out, source.choosing
    for key, names, what in (("trained_on", held_out, "trained on {}, held out now"),
                             ("chosen_by", held_out, "chosen by {}, held out now"),
                             ("trained_on", choosing, "trained on {}, for validation now: other --seed?")):
        if leaked := sorted(set(saved.get(key) or ()).intersection(names)):
            raise UserError(f"{flag}: was {what.format(', '.join(leaked))}")


# --- In memory ----------------------------------------------------------------------------------------------


def own_random_numbers(device):
    """Within, random numbers may be drawn without changing those of the training, which a resumed run
    needs."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextlib.contextmanager
def preserving(trainer):
    """Whatever runs within leaves weights, their average, optimizer, scaler and random numbers as they were.
    The copies lie on the host, so that the peak of a CUDA graph that is captured within does not contain
    them."""
    averaged = trainer.average.tensors if trainer.average else ()
    kept = [*trainer.weights.tensors, *averaged, trainer.gradient_norm,
            *(tensor for kind in ("step", *MOMENTS) for tensor in optimizer_state(trainer, kind))]
    copies = [p.detach().to("cpu", copy=True) for p in kept]
    scaler, averaged_steps = trainer.scaler.state_dict(), trainer.average and trainer.average.steps
    try:
        with own_random_numbers(trainer.device):
            yield
    finally:
        with torch.no_grad():  # in place, because a captured graph knows these tensors by address
            torch._foreach_copy_(kept, copies)
        if trainer.average:
            trainer.average.steps = averaged_steps
        trainer.weights.publish()
        trainer.scaler.load_state_dict(scaler)
