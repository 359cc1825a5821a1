"""Steps of different makes side by side: each alone for its peak memory, then in turn for the times."""
import gc
import re
from dataclasses import replace
from functools import partial

import torch

from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.tables import aligned
from fusion_lab.measuring.variants import at_work
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError
from fusion_lab.training.machine import MEGABYTE

WARMUP_STEPS = 3


class Contender:
    """What make() gives, warm after three steps; its row {name, peak_mb, loss, then p20, median, p80 in s}.

    peak_mb (None on a CPU) is all that a step needs beside what was there before: weights, optimizer, and on
    a stream of its own also the workspaces that libraries keep for every stream, as a CUDA graph holds them.
    """

    def __init__(self, name, make, batch, device):
        torch._dynamo.reset()
        on_gpu = device.type == "cuda"
        self.stream, self.timer, before = torch.cuda.Stream(device) if on_gpu else None, PhaseTimer(device), 0
        if on_gpu:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        with torch.cuda.stream(self.stream):
            self.made = make()
            for _ in range(WARMUP_STEPS):
                self.made.step(batch).item()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.row = dict(name=name, loss=self.made.step(batch).item(), peak_mb=None)
        if on_gpu:
            graph = getattr(self.made, "graph", None)  # whose memory is that of its capture
            peak = max(torch.cuda.max_memory_allocated(), graph.peak if graph else 0)
            self.row["peak_mb"] = (peak - before) / MEGABYTE

    def timed_step(self, batch):
        """Behind an untimed one, which fills the GPU's queue; nobody else's step runs beside it."""
        with torch.cuda.stream(self.stream):
            self.made.step(batch)
            self.timer.start()
            self.made.step(batch)
            self.timer.mark()
        if self.stream:
            self.stream.synchronize()


def clipped_step(loss, model, optimizer):
    """What follows a peer's forward pass: the rest of a step like Trainer's."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def ours(program, settings, device, amp, switches):
    """{name: what makes a trainer}, of {name: switches beside the defaults, None for the baseline}; without
    those that run like an earlier one here."""
    found, known = {}, set()
    for name, given in switches.items():
        kind = program.fusion_config
        fusion = kind.preset(False) if given is None else replace(
            kind(), **dict.fromkeys(given, True), enable_master_weights=amp is not None)
        chosen = replace(settings, fusion=fusion)
        runs = at_work(chosen, device.type == "cuda")
        if runs not in known:
            known.add(runs)
            found[name] = partial(program.trainer, program, chosen, device)
    return found


def race(contenders, batch, steps):
    """Fill their rows with times of so many steps; each round begins with another one."""
    for number in range(steps if contenders else 0):
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            contender.timed_step(batch)
    for contender in contenders:
        found = quantiles(contender.timer.seconds()[:, 0])
        contender.row.update(zip(("p20", "median", "p80"), found, strict=True))


def measured(made, only, batch, device, steps):
    """Rows of those of made, {name: what makes a contender}, whose names the regular expression finds; of one
    that cannot run the row has the reason. UserError if it finds none."""
    entered, rows, batch = [], [], to_device(batch, device)
    for name, make in made.items():
        if not re.search(only, name):
            continue
        try:
            entered.append(Contender(name, make, batch, device))
            rows.append(entered[-1].row)
        except Exception as error:  # peers fail in their own ways, and the rest is still wanted
            first = str(error).strip().partition("\n")[0]
            rows.append(dict(name=name, reason=f"{type(error).__name__}: {first[:150]}"))
    if not rows:
        raise UserError(f"--only {only}: no contender has such a name")
    race(entered, batch, steps)
    return rows


def table(title, rows):
    """Lines for the terminal."""
    cells = [[title, "step ms (p20, p80)", "peak MB"]]
    for row in rows:
        if "reason" in row:
            cells.append([row["name"], row["reason"], ""])
            continue
        times = "{:.2f} ({:.2f}, {:.2f})".format(*(1e3 * row[key] for key in ("median", "p20", "p80")))
        cells.append([row["name"], times, "n/a" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"])
    return "\n".join(aligned(cells))


def failed(rows, start):
    """Names of the rows of measured() that did not run, of those that start so."""
    return [row["name"] for row in rows if "reason" in row and row["name"].startswith(start)]
