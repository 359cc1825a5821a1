"""Steps of different makes side by side: each alone for its peak memory, then in turn for the times."""
import re
from dataclasses import replace
from functools import partial

import torch

from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.compare import NEVER, alternate, reasons, release
from fusion_lab.measuring.tables import aligned
from fusion_lab.measuring.variants import at_work
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError
from fusion_lab.training.machine import MEGABYTE

WARMUP_STEPS = 3


class Contender:
    """What make() gives, and its row {name, peak_mb, loss, then p20, median, p80 in s}, or {name, reason}.

    peak_mb (None on a CPU) is all that a step needs beside what was there before: weights, optimizer, and on
    a stream of its own also the workspaces that libraries keep for every stream, as a CUDA graph holds them.
    """

    def __init__(self, name, make):
        self.name, self.make, self.reason, self.trainer = name, make, None, None

    def warm_up(self, batch, device):
        """Three steps, then one for the peak memory."""
        torch._dynamo.reset()
        on_gpu = device.type == "cuda"
        self.stream, self.timer, before = torch.cuda.Stream(device) if on_gpu else None, PhaseTimer(device), 0
        if on_gpu:
            release()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        with torch.cuda.stream(self.stream):
            self.trainer = self.make()
            for _ in range(WARMUP_STEPS):
                self.trainer.step(batch).item()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.loss, self.peak = self.trainer.step(batch).item(), None
        if on_gpu:
            graph = getattr(self.trainer, "graph", None)  # whose memory is that of its capture
            peak = max(torch.cuda.max_memory_allocated(), graph.peak if graph else 0)
            self.peak = (peak - before) / MEGABYTE

    def take_turn(self, number, batch):
        """A timed step behind an untimed one, which fills the GPU's queue; nobody else's step runs beside."""
        with torch.cuda.stream(self.stream):
            self.trainer.step(batch)
            self.timer.start()
            self.trainer.step(batch)
            self.timer.mark()
        if self.stream:
            self.stream.synchronize()

    def row(self):
        if self.reason:
            return dict(name=self.name, reason=self.reason)
        p20, median, p80 = quantiles(self.timer.seconds()[:, 0])
        return dict(name=self.name, loss=self.loss, peak_mb=self.peak, p20=p20, median=median, p80=p80)


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


def measured(made, only, batch, device, steps):
    """Rows of those of made, {name: what makes a contender}, whose names the regular expression finds; of one
    that cannot run the row has the reason. UserError if it finds none."""
    entered = [Contender(name, make) for name, make in made.items() if re.search(only, name)]
    if not entered:
        raise UserError(f"--only {only}: no contender has such a name")
    batch = to_device(batch, device)
    for contender in entered:
        with reasons(contender):
            contender.warm_up(batch, device)
    alternate(entered, [batch], steps, NEVER)
    return [contender.row() for contender in entered]


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
