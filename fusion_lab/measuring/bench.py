"""The bench: candidates are made, warm up and are counted one by one; then all take steps in turn, so that a
machine that drifts hits all alike. Comparisons of variants and contests with other projects' code use it."""
import contextlib
import gc
import itertools
import re
import time
from types import SimpleNamespace

import torch

from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.probe import Counts, begin_peak, peak_megabytes
from fusion_lab.measuring.tables import markdown
from fusion_lab.measuring.variants import BASELINE, at_work, with_fusion
from fusion_lab.training.errors import UserError
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import MEGABYTE
from fusion_lab.training.words import counted, time_left

ROUNDS, SECONDS = 20, 60.0  # by default, whichever ends first
TELL = 5.0  # s between two words on the time left
FEWEST = 6  # rounds, from which on there is an interval of 95%
NEVER = SimpleNamespace(signal=None)  # a StopRequest without a signal


def only_a_graph(trainer, batch):
    """The Counts of a trainer that probe() cannot count. Replays of a CUDA graph show no peak, so it is the
    capture's."""
    graph = getattr(trainer, "graph", None)
    return Counts({}, 0, peak=graph.peak if graph else None)


class Candidate:
    """make() returns a trainer: its step(batch, mark) returns the loss and calls mark() after each phase.
    count(trainer, batch) returns Counts. reason: why it is not measured, or no longer."""

    def __init__(self, name, make, reason=None, count=only_a_graph):
        self.name, self.make, self.reason, self.count = name, make, reason, count
        self.trainer, self.counts, self.timer, self.losses = None, None, None, []
        self.first_loss, self.first_step_time, self.peak = None, None, None

    def prepare(self, batch, device, workspace):
        """Make the trainer and count one of its steps; a Trainer's weights are as before. Peak memory (MB) is
        that of two steps, after those that make what stays. It holds this batch and the workspace (bytes)
        that a library keeps for all, but nothing else that was there before."""
        torch._dynamo.reset()
        others, on_gpu = 0, device.type == "cuda"
        if on_gpu:
            others = (torch.cuda.memory_allocated(device) - workspace
                      - sum(tensor.nbytes for tensor in batch.values()))
        trainer = self.make()
        with getattr(trainer, "preserved", contextlib.nullcontext)():
            started = time.perf_counter()
            self.first_loss = trainer.step(batch).item()
            self.first_step_time = time.perf_counter() - started
            self.counts = self.count(trainer, batch)
            if on_gpu:
                trainer.step(batch)
                begin_peak(device)
                trainer.step(batch)
                trainer.step(batch)
            peak = peak_megabytes(device, self.counts)
        self.peak = None if peak is None else peak - others / MEGABYTE
        self.trainer, self.timer = trainer, PhaseTimer(device)

    def take_turn(self, number, batch):
        """One timed step; on a GPU an untimed one before it keeps the queue as full as in training."""
        torch.manual_seed(number)  # dropout draws alike for all
        if self.timer.on_gpu:
            self.trainer.step(batch)
        self.timer.start()
        loss = self.trainer.step(batch, self.timer.mark)
        self.losses.append(loss.item())


@contextlib.contextmanager
def reasons(candidate):
    """Within, whatever stops a candidate becomes its reason, and it gives its memory back; the baseline must
    run."""
    try:
        yield
    except Exception as error:  # compilers fail in many ways, and the other rows are still wanted
        if candidate.name == BASELINE:
            raise
        text = str(error).strip().splitlines()
        candidate.trainer = None
        candidate.reason = f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"


def release():
    """Give back the memory of deleted trainers."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare_all(candidates, batch, device, note=lambda text: None):
    """Prepare the candidates that have no reason against it, one after the other; note(text) is told what
    goes on."""
    workspace = library_workspace(device)
    wanted = [candidate for candidate in candidates if not candidate.reason]
    for number, candidate in enumerate(wanted, 1):
        note(f"counting memory and launches of {candidate.name}, {number} of {len(wanted)}")
        with reasons(candidate):
            candidate.prepare(batch, device, workspace)
        release()


def library_workspace(device):
    """Bytes that a GPU's matrix library keeps from its first product on, for all that comes later."""
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.zeros(16, 16, device=device).mm(torch.zeros(16, 16, device=device))
    return torch.cuda.memory_allocated(device) - before


def alternate(candidates, supply, rounds, stop, note=lambda text: None):
    """Timed steps of all candidates in turn; each round begins with another one. note(text) is told from time
    to time how long it will take. Returns in words how it ended."""
    began = told = time.monotonic()
    for number in itertools.count():
        alive = [candidate for candidate in candidates if not candidate.reason]
        first = number % max(1, len(alive))
        for candidate in alive[first:] + alive[:first]:
            if stop.signal:
                return f"interrupted after {counted(number, 'round')}"
            with reasons(candidate):
                candidate.take_turn(number, supply[number % len(supply)])
            if candidate.reason:
                release()
        if number + 1 == (rounds or ROUNDS):
            return counted(number + 1, "round")
        took = time.monotonic() - began
        if rounds is None and number + 1 >= FEWEST and took > SECONDS:
            return f"{number + 1} rounds in {took:.0f} s"
        if began + took - told > TELL:
            told, each = began + took, took / (number + 1)
            left = each * ((rounds or ROUNDS) - number - 1)
            if rounds is None:
                left = min(left, max(SECONDS - took, each * (FEWEST - number - 1)))
            note(f"{counted(number + 1, 'round')} done, {time_left(left)}")


def by_turns(calls, device, rounds, repeats=5):
    """{name: (p20, median, p80) in s} of calls, {name: function}; each round begins with another one. On a
    GPU so many calls are timed together."""
    names, repeats = list(calls), repeats if device.type == "cuda" else 1
    timers = {name: PhaseTimer(device) for name in names}
    for number in range(rounds + 2):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            timers[name].start()
            for _ in range(repeats):
                calls[name]()
            timers[name].mark()
    return {name: quantiles(timer.seconds()[2:, 0] / repeats) for name, timer in timers.items()}


# --- Contests of what is no variant -------------------------------------------------------------------------


def contest(made, only, batch, device, rounds, count=only_a_graph):
    """Rows {name, loss (of the first step), peak_mb, p20, median, p80 (s)} of those of made, {name: what
    makes a trainer}, whose names the regular expression finds, and launches where count(trainer, batch) finds
    them; of one that cannot run {name, reason}. UserError if the expression finds none."""
    entered = [Candidate(name, make, count=count) for name, make in made.items() if re.search(only, name)]
    if not entered:
        raise UserError(f"--only {only}: no contender has such a name")
    batch = to_device(batch, device)
    prepare_all(entered, batch, device)
    alternate(entered, [batch], rounds, NEVER)
    rows = []
    for one in entered:
        rows.append(dict(name=one.name, reason=one.reason))
        if not one.reason:
            p20, median, p80 = quantiles(one.timer.seconds().sum(axis=1))
            rows[-1] = dict(name=one.name, loss=one.first_loss, peak_mb=one.peak, p20=p20, median=median,
                            p80=p80)
            if one.counts.launches is not None:
                rows[-1]["launches"] = one.counts.launches
    return rows


def ours(program, settings, device, switches):
    """{name: function that makes a trainer} for switches, {name: those that are added to the defaults; None:
    the baseline}. One that runs like an earlier one here is left out."""
    makers, known, kind = {}, set(), program.fusion_config
    for name, given in switches.items():
        fusion = kind.baseline() if given is None else kind(
            **dict.fromkeys(given, True), enable_master_weights=settings.training.use_amp)
        chosen = with_fusion(settings, fusion)
        runs = at_work(chosen, device.type == "cuda")
        if runs not in known:
            known.add(runs)
            makers[name] = lambda chosen=chosen: program.trainer(program, chosen, device)
    return makers


def clipped_step(loss, model, optimizer, mark):
    """The rest of a peer's step after its forward pass; clips to --grad-clip's default and marks once."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mark()
    return loss.detach()


def contest_table(title, rows):
    """Lines for the terminal."""
    launches = any("launches" in row for row in rows)
    cells = [[title, "step ms (p20, p80)", "peak MB", *["launches"] * launches]]
    for row in rows:
        times = [row["reason"]] if "reason" in row else ["{:.2f} ({:.2f}, {:.2f})".format(
            *(1e3 * row[key] for key in ("median", "p20", "p80"))),
            "n/a" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}",
            *[str(row.get("launches"))] * launches]
        cells.append([row["name"], *times])
    return "\n".join(markdown(cells))


def failed(rows, start):
    """The names of the rows of contest() that did not run and begin with `start`."""
    return [row["name"] for row in rows if "reason" in row and row["name"].startswith(start)]
