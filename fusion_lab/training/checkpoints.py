"""Checkpoints: the state of a run under unpacked parameter names, so that any switches can continue it."""
import contextlib
import math
from dataclasses import asdict, fields, replace

import torch

from fusion_lab.training.files import FAILED, UserError, printable
from fusion_lab.training.options import spelled
from fusion_lab.training.saved import read_saved, say_if_older, write_saved


def format_of(program):
    """What the checkpoints of a program call themselves."""
    return f"{program.name.removesuffix('.py')} checkpoint 1"

# Fields that may differ between a run and its continuation without a word.
OF_A_SESSION = ("num_steps", "warmup_steps", "log_every", "eval_every", "save_checkpoint", "save_every",
                "save_best", "early_stopping", "resume", "init_from", "device")


def packings(model):
    """(module, its prefix in parameter names) of all modules that may have packed projections."""
    return [(m, f"{name}.") for name, m in model.named_modules() if hasattr(m, "split_packed")]


def unpacked(model, tensors):
    """Bring a dict of tensors by parameter name of the model to unpacked names, in place."""
    for module, prefix in packings(model):
        module.split_packed(tensors, prefix)
    return tensors


def optimizer_state(trainer, kind):
    """{parameter name: its tensor of this kind in the optimizer}, zeros where there was no gradient yet."""
    state = trainer.optimizer.state
    if trainer.masters and state:
        return trainer.masters.views(state[trainer.masters.flat][kind])
    return {name: state[p][kind] if p in state else torch.zeros_like(p)
            for name, p in trainer.weights.items()}


def snapshot(trainer):
    """Everything a run needs to continue. Raises UserError if a weight or a moment is not finite."""
    state = trainer.optimizer.state
    moments = {kind: unpacked(trainer.model, optimizer_state(trainer, kind))
               for kind in (("exp_avg", "exp_avg_sq") if state else ())}
    weights = unpacked(trainer.model, {name: p.detach() for name, p in trainer.weights.items()})
    average = averaged(trainer)
    kinds = dict(weights=weights, average=average.get("average", {}), **moments)
    for kind, tensors in kinds.items():
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{kind} are not finite at step {trainer.step_number}: not saved", code=FAILED)
    rng = dict(cpu=torch.get_rng_state())
    if trainer.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(trainer.device)
    updates = next((s["step"].item() for s in state.values()), 0.0)  # a scaler skips some
    return dict(format=format_of(trainer.program), config=asdict(trainer.settings.model),
                step=trainer.step_number, updates=updates, model=weights, moments=moments,
                scaler=trainer.scaler.state_dict(), rng=rng, trained_on=sorted(trainer.trained_on),
                best=dict(trainer.best), evaluated=trainer.evaluated, ended=trainer.ended,
                gradient_norm=trainer.gradient_norm.item(), chosen_by=sorted(trainer.chosen_by),
                training=dict(asdict(trainer.training), ranks=trainer.world.size), **average)


def averaged(trainer):
    """What snapshot() holds of averaged weights, if there are: as names, and how many steps are in them."""
    if not trainer.average:
        return {}
    tensors = trainer.average.weights
    named = trainer.masters.views(tensors[0]) if trainer.masters else dict(
        zip(trainer.weights, tensors, strict=True))
    return dict(average=unpacked(trainer.model, dict(named)), averaged_steps=trainer.average.steps)


def save(trainer, path):
    """Write a snapshot(), whole or not at all; of several ranks one does."""
    if trainer.world.first:
        write_saved(path, snapshot(trainer))


@contextlib.contextmanager
def preserving(trainer):
    """Whatever runs within leaves weights, their average, optimizer, scaler and random numbers as they
    were. The copies lie on the host: a CUDA graph is captured within, and its peak is without them."""
    kept = [*trainer.updated, *(trainer.average.weights if trainer.average else ()), trainer.gradient_norm]
    copies = [p.detach().to("cpu", copy=True) for p in kept]
    moments = {p: {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
               for p, state in trainer.optimizer.state.items()}
    scaler = trainer.scaler.state_dict()
    averaged_steps = trainer.average and trainer.average.steps

    try:
        with torch.random.fork_rng(devices=[trainer.device] if trainer.device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():  # in place, because a captured graph knows these tensors by address
            torch._foreach_copy_(kept, copies)
            for p, state in trainer.optimizer.state.items():
                for key, tensor in state.items():
                    tensor.copy_(moments[p][key]) if p in moments else tensor.zero_()
        if trainer.average:
            trainer.average.steps = averaged_steps
        trainer.publish()
        trainer.scaler.load_state_dict(scaler)


MOST_STEPS = 2 ** 53  # a float counts no further
FIELDS = {"config": dict, "step": int, "updates": (int, float), "model": dict, "moments": dict,
          "scaler": dict, "rng": dict, "trained_on": list}


def read_checkpoint(path, program, config):
    """The dict in a checkpoint file of a program whose model has this config; UserError if the file cannot be
    read, is damaged, foreign or has other model sizes."""
    saved = read_saved(path)
    if not isinstance(saved, dict) or str(saved.get("format")) != format_of(program):
        raise UserError(f"checkpoint {path}: not a checkpoint of this program")
    if absent := sorted(set(FIELDS) - set(saved)):
        raise UserError(f"checkpoint {path}: it lacks {', '.join(absent)}")
    for name, kind in FIELDS.items():
        if not isinstance(saved[name], kind) or isinstance(saved[name], bool):
            raise UserError(f"checkpoint {path}: damaged: {name} is of the wrong type")
    resized = [f.name for f in fields(config) if f.metadata["resized"]]
    made = {f.name: f.default for f in fields(config)} | saved["config"]  # older ones lack newer fields
    different = [spelled(printable(k), v if isinstance(v, bool) else f"{printable(v):.60}")
                 for k, v in made.items()
                 if k not in resized and repr(v) != repr(getattr(config, str(k), None))]
    if different:
        refuse_what_no_model_has(config, saved["config"], path)
        raise UserError(f"checkpoint {path}: made for another model; to use it, pass {' '.join(different)}")
    return saved


def refuse_what_no_model_has(config, made, path):
    """Raise UserError if no flags of this version make a config like the one that was saved."""
    try:
        replace(config, **made)
    except (TypeError, ValueError) as error:
        why = printable(error).removeprefix(f"{type(config).__name__}.__init__() ")
        raise UserError(f"checkpoint {path}: of a model that this version lacks: {why:.200}") from None


def alike(tensor, expected):
    """Whether it is a tensor that can take the place of the expected one."""
    return (isinstance(tensor, torch.Tensor) and tensor.shape == expected.shape and
            (tensor.device.type, tensor.layout, tensor.dtype) == ("cpu", torch.strided, expected.dtype))


def faults(saved, trainer):
    """What of read_checkpoint()'s dict this trainer cannot use, as it comes upon it."""
    expected = unpacked(trainer.model, {name: p.detach() for name, p in trainer.weights.items()})
    kinds = {"model": saved["model"], **({"average": saved["average"]} if "average" in saved else {}),
             **{f"moments {kind}": part for kind, part in saved["moments"].items()}}
    if saved["moments"] and set(saved["moments"]) != {"exp_avg", "exp_avg_sq"}:
        yield "moments"
    for kind, tensors in kinds.items():
        if not isinstance(tensors, dict) or set(tensors) != set(expected):
            yield f"names of {kind}"
        else:
            yield from (f"{kind} {name}" for name in expected if not alike(tensors[name], expected[name])
                        or not tensors[name].isfinite().all())
    if type(saved.get("averaged_steps", 0)) is not int or saved.get("averaged_steps", 0) < 0:
        yield "averaged_steps"
    yield from (name for name in ("step", "updates") if not 0 <= saved[name] <= MOST_STEPS)
    scaler = saved["scaler"]
    if scaler and (set(scaler) != set(torch.amp.GradScaler("cpu").state_dict()) or not all(
            isinstance(value, (int, float)) and 0 <= value < math.inf for value in scaler.values())):
        yield "scaler"
    for key in ("trained_on", "chosen_by"):
        names = saved.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield key
    if not isinstance(saved.get("training", {}), dict):
        yield "training"
    if not whole_best(saved.get("best", trainer.best)):
        yield "best"
    yield from (name for name, kind in dict(evaluated=int, ended=bool, gradient_norm=float).items()
                if type(saved.get(name, kind())) is not kind)
    devices = [trainer.device] if trainer.device.type == "cuda" and "cuda" in saved["rng"] else []
    for device in [torch.device("cpu"), *devices]:
        try:
            torch.Generator(device).set_state(saved["rng"][device.type])
        except (KeyError, RuntimeError, TypeError):
            yield f"rng {device.type}"


def whole_best(best):
    """Whether it is what a trainer keeps of its best evaluation."""
    if not isinstance(best, dict) or set(best) != {"score", "step", "since"}:
        return False
    score, step, since = (best[name] for name in ("score", "step", "since"))
    return ((score is None or type(score) in (int, float) and math.isfinite(score)) and type(since) is int
            and (step is None or type(step) is int))


def usable(trainer, path):
    """read_checkpoint(), whose tensors fit this trainer. Raises UserError."""
    saved = read_checkpoint(path, trainer.program, trainer.settings.model)
    if fault := next(faults(saved, trainer), None):
        raise UserError(f"checkpoint {path}: damaged, or of another version: {fault[:200]} cannot be used")
    return saved


def packed(trainer, tensors):
    """Tensors by unpacked names -> a list in the form of trainer.updated."""
    for module, prefix in packings(trainer.model):
        module.adapt(tensors, prefix)
    if trainer.masters:
        return [trainer.masters.join(tensors, torch.zeros_like(trainer.masters.flat))]
    return [tensors[name] for name in trainer.weights]


def put(trainer, tensors):
    """Make tensors by unpacked names the weights; all that belongs to a captured graph stays in place."""
    with torch.no_grad():
        torch._foreach_copy_(trainer.updated, packed(trainer, tensors))
    trainer.publish()


def restore(trainer, path):
    """Continue from a checkpoint made under any FusionConfig; returns what was saved. Raises UserError, see
    read_checkpoint."""
    saved = usable(trainer, path)
    put(trainer, saved["model"])
    if trainer.average:
        trainer.average.steps = saved.get("averaged_steps", 0)
        kept = packed(trainer, saved["average"]) if "average" in saved else trainer.updated
        torch._foreach_copy_(trainer.average.weights, [tensor.detach() for tensor in kept])
    state = trainer.optimizer.state_dict()
    if saved["moments"]:
        moments = {kind: packed(trainer, tensors) for kind, tensors in saved["moments"].items()}
        state["state"] = {i: dict(step=torch.tensor(saved["updates"]),
                                  **{kind: tensors[i] for kind, tensors in moments.items()})
                          for i in range(len(trainer.updated))}
    trainer.optimizer.load_state_dict(state)
    if saved["scaler"]:
        trainer.scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["rng"]["cpu"])
    if trainer.device.type == "cuda" and "cuda" in saved["rng"]:
        torch.cuda.set_rng_state(saved["rng"]["cuda"], trainer.device)
    trainer.world.reseed(trainer.training.seed, saved["step"])
    trainer.step_number, trainer.trained_on = saved["step"], set(saved["trained_on"])
    trainer.best = {**trainer.best, **saved.get("best", {})}  # older ones have none
    trainer.evaluated = saved.get("evaluated", max(saved["step"] - 1, 0))
    trainer.gradient_norm.fill_(saved.get("gradient_norm", 0.0))
    trainer.chosen_by = set(saved.get("chosen_by", ()))
    return saved


def load_run(trainer, path, source):
    """restore(), and refuse what the run could not honestly do with it. Raises UserError."""
    saved = restore(trainer, path)
    say_if_older(saved, path)
    refuse_what_has_ended(trainer, path, saved.get("ended", True))
    refuse_leaks(saved, source, f"--resume {path}")
    now = {**asdict(trainer.settings.model), **asdict(trainer.training), "ranks": trainer.world.size}
    then = {**saved["config"], **saved.get("training", {})}  # older ones have no "training"
    free = {*OF_A_SESSION} - ({"num_steps"} if trainer.training.lr_schedule != "constant" else set())
    different = [f"{name} {printable(then[name]):.200} -> {now[name]}" for name in now
                 if name in then and name not in free and repr(then[name]) != repr(now[name])]
    print(f"Resumed from {path} at step {trainer.step_number}"
          + (f"; different now: {', '.join(different)}" if different else ""))


def refuse_what_has_ended(trainer, path, ended):
    """Raise UserError if nothing is left to do: no step, and no evaluation of the final weights."""
    step, training = trainer.step_number, trainer.training
    ended = ended or not trainer.program.evaluate
    if step > training.num_steps or step == training.num_steps and ended:
        raise UserError(f"--num-steps {training.num_steps}: {path} is at step {step} already")
    if out_of_patience(trainer) and ended:
        raise UserError(f"--early-stopping {training.early_stopping}: {path} was ended by it at step {step}; "
                        "a larger one goes on")


def out_of_patience(trainer):
    """Whether --early-stopping ends the run: so many evaluations since the best one."""
    patience = trainer.training.early_stopping
    return patience is not None and trainer.best["since"] >= patience


def refuse_leaks(saved, source, flag):
    """Raise UserError if what was saved was trained on what is held out now, or on what chooses between
    evaluations now, or was chosen by what is held out now."""
    held_out, choosing = source.held_out, getattr(source, "choosing", ())
    for key, names, what in (("trained_on", held_out, "trained on {}, held out now"),
                             ("chosen_by", held_out, "chosen by {}, held out now"),
                             ("trained_on", choosing, "trained on {}, for validation now: other --seed?")):
        if leaked := sorted(set(saved.get(key) or ()).intersection(names)):
            raise UserError(f"{flag}: was {what.format(', '.join(leaked))}")
