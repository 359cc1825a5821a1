"""Training steps of different makes side by side, for compare_llama.py and compare_mpnn.py: each alone for
its peak memory, then in turn for the times."""
import re
from dataclasses import replace
from functools import partial

import torch

from fusion_lab.measuring.contest import Contender, cells, race
from fusion_lab.measuring.tables import aligned
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError


def clipped_step(loss, model, optimizer):
    """What follows a peer's forward pass: the rest of a step like Trainer's."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def ours(program, settings, device, amp, switches):
    """{name: what makes a trainer}, of {name: switches beside the defaults, None for the baseline}; without
    those that are of no use here."""
    found = {}
    for name, given in switches.items():
        kind = program.fusion_config
        fusion = kind.preset(False) if given is None else replace(
            kind(), **dict.fromkeys(given, True), enable_master_weights=amp is not None)
        chosen = replace(settings, fusion=fusion)
        if not chosen.idle(device.type == "cuda"):
            found[name] = partial(program.trainer, program, chosen, device)
    return found


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
    lines = [[title, "step ms (p20, p80)", "peak MB"]]
    lines += [[row["name"], *((row["reason"], "") if "reason" in row else cells(row))] for row in rows]
    return "\n".join(aligned(lines))
