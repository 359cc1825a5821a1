"""What programs print: start-up, step and last lines, commands to copy, results as JSON, --check-flags."""
import json
import math
import os
import shlex
import sys

import numpy as np
import torch

from fusion_lab.measuring.variants import name_of
from fusion_lab.training.errors import FAILED, UserError
from fusion_lab.training.flags import command_line
from fusion_lab.training.machine import MEGABYTE, cpu_name, runs_in_tf32
from fusion_lab.training.options import GRAPHED


def require_finite(loss, step):
    """Raise UserError where the loss after this step is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"loss is {loss} at step {step}: nothing was saved since; lower --learning-rate, or "
                        "use --amp-dtype bfloat16 if it is float16", FAILED)


def step_line(trainer, loss, timer, memory):
    """The line about the last --log-every steps. memory: MB of one GPU, or None; the speed is of all
    GPUs."""
    training, done = trainer.settings.training, trainer.step_number
    seconds = float(np.median(timer.seconds(training.log_every).sum(axis=1)))
    memory = "   n/a" if memory is None else f"{memory:6.1f}"
    speed = training.batch_size * trainer.world.size / seconds
    return (f"Step {done:3d}/{training.num_steps} | Loss: {loss:.4f} | Speed: {speed:6.1f} samples/sec"
            f" | Memory: {memory} MB | Time: {seconds * 1e3:5.1f}ms")


def busy_line(device):
    """What a machine's load says about times on its CPU, or None: processes that share a core wait for each
    other."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    if device.type != "cpu" or load + torch.get_num_threads() <= cores + 1:
        return None
    return f"Busy machine: load {load:.1f} on {cores} cores; times are long, with several threads most of all"


def describe_start(trainer, source):
    """The start-up lines."""
    program, settings, device = trainer.program, trainer.settings, trainer.device
    own = dict(sizes="", remarks={}, last=None) | trainer.model.in_words(trainer.amp_dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    dtype = str(trainer.amp_dtype or torch.float32).removeprefix("torch.")
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"Device: {device} ({name}) | torch {torch.__version__} | dtype: {dtype} | "
          f"seed: {settings.training.seed}")
    if trainer.world.size > 1:
        print(f"Ranks: {trainer.world.size}")
    print(f"Model: {own['sizes']}{', ' if own['sizes'] else ''}{count:,} parameters")
    print(f"Data: {source.describe()} | {program.sample(settings)}")
    print("Fusion Optimizations:")
    for title, switch in settings.fusion.titles().items():
        on = getattr(settings.fusion, switch)
        remark = f" ({own['remarks'][switch]})" if on and switch in own["remarks"] else ""
        print(f"   {title}: {'Enabled' if on else 'Disabled'}{remark}")
    on_gpu, fusion = device.type == "cuda", settings.fusion
    for title, on in fusion.untitled(settings.in_use(on_gpu)).items():
        print(f"   {title}: {'Enabled' if on else 'Disabled'}")
    if own["last"]:
        print(f"   {own['last']}")
    kind = type(fusion)
    if fusion not in (kind(), kind.baseline(), kind.preset(), kind.ultra()) and (
            name := name_of(settings, on_gpu)):
        print(f"In a comparison: --variants {name}")
    idle = settings.idle_reasons(on_gpu)
    if settings.training.use_tf32 and not runs_in_tf32(settings.training, device):
        idle.append("this device has no TF32")
    if idle:
        print(f"Not used here: {'; '.join(idle)}")
    if busy := busy_line(device):
        print(busy)
    if torch.version.hip and fusion.enable_torch_compile and fusion.compile_mode in GRAPHED:
        print("Note: on ROCm, training in mode reduce-overhead was seen to go wrong silently "
              "(pytorch issue 187715), and this mode makes the same graphs: compare its losses with those of "
              "the default mode")
    sys.stdout.flush()


def print_ending(trainer, paths, stopped):
    """How far a run came, where its files are, and how to go on. stopped: the signal that ended it, or
    None."""
    training, done = trainer.settings.training, trainer.step_number
    planned, saved, best = training.num_steps, training.save_checkpoint, trainer.best
    if best["score"] is not None:
        print(f"Best evaluation: {best['score']:.3f} after step {best['step']}"
              + (f", saved in {training.save_best}" if os.path.exists(training.save_best or "") else ""))
    if stopped:
        print(f"Interrupted at step {done} of {planned}"
              + ("" if saved else "; without --save-checkpoint FILE there is nothing to continue from"))
    elif done < planned:
        print(f"Stopped at step {done} of {planned}: {best['since']} evaluations brought nothing better")
    print(f"Written: {', '.join(path for path in paths if path)}")
    if saved and done == planned and training.lr_schedule != "constant":
        print(f"Its learning rate has come down to 0; to go on: --init-from {shlex.quote(saved)}")
    elif saved and not stopped and done < planned:
        print(f"Continue: the same flags, --resume {shlex.quote(saved)} and a larger --early-stopping")
    elif saved:
        steps = planned if done < planned else 2 * planned
        print(f"Continue: the same flags and --resume {shlex.quote(saved)} --num-steps {steps}")


def command_of(program, settings):
    """The command line that trains in these settings, to be copied into a shell."""
    start = f"python {shlex.quote(os.path.relpath(program.file))}" if program.name.endswith(".py") else (
        program.name)
    words = [*command_line(program, settings), f"--num-steps={settings.training.num_steps}"]
    return " ".join([start, *map(shlex.quote, words)])


MOST_BYTES = 1024  # of the line of JSON that ends the output


def for_people(settings):
    """Whether people read the output, and not a program."""
    return sys.stdout.isatty() and not settings.profiler.json


def print_result(headline, path, settings):
    """The end of the output. For programs: one line of JSON with the headline figures, named and nested as in
    the file with all of them, and that file's path, None without one; for people on a terminal the path."""
    if for_people(settings):
        print(end=f"Results: {path}\n" if path else "", flush=True)
        return
    place = dict(summary_file=path and os.path.abspath(path))
    while len(text := json.dumps(headline | place, allow_nan=False)) > MOST_BYTES and \
            (told := [key for key, value in headline.items() if value is not None]):
        longest = max(told, key=lambda key: len(json.dumps(headline[key])))
        headline = {**headline, longest: shorter(headline[longest])}  # whose least important stand last
    print(text, flush=True)


def shorter(value):
    """A dict or list without its last entry; None instead of anything else."""
    if isinstance(value, dict) and len(value) > 1:
        return dict(list(value.items())[:-1])
    return value[:-1] if isinstance(value, (list, str)) and value else None


def print_settings(program, settings, asked):
    """--check-flags: what the flags mean, beside which mode they ask for, and which torch would run them, as
    one line of JSON."""
    print(json.dumps(dict(
        mode="check_flags", asked=asked, program=program.name, suffix=program.suffix,
        summary=program.result("performance_summary"), **settings.as_dict(), torch=torch.__version__,
        torch_path=torch.__file__, hip=torch.version.hip, cuda=torch.version.cuda,
        gpus=torch.cuda.device_count(), least_memory_mb=program.model.least_bytes(settings) / MEGABYTE)))
    return 0
