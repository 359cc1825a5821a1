"""A run that was stopped or killed anywhere, and continued each time, is the run that never was."""
import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny_openfold_v2 as tof
from fusion_lab.training import checkpoints
from fusion_lab.training.files import StopRequest
from tests import second_program
from tests.properties import cases

STEPS, CPU = 7, torch.device("cpu")
KILL = 0  # in place of a signal: nothing of the process is left but its files
SETTINGS = st.fixed_dictionaries(dict(
    learning_rate=st.sampled_from([1e-3, 0.1]), ema_decay=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.5]), lr_warmup_steps=st.integers(0, 3),
    lr_schedule=st.sampled_from(["constant", "linear", "cosine"]), depth=st.integers(1, 2),
    amp_dtype=st.sampled_from([None, "float16", "bfloat16"]),
    save_every=st.integers(1, STEPS), seed=st.integers(0, 2 ** 62)))


class Killed(BaseException):
    pass


class Stopping(second_program.Numbers):
    """Numbers, whose batch of one step comes with a signal."""

    def __init__(self, settings, number, at):
        super().__init__(settings)
        self.number, self.at = number, at

    def batch(self, step):
        if step == self.at and self.number == KILL:
            raise Killed
        if step == self.at:
            os.kill(os.getpid(), self.number)
        return super().batch(step)


class Noisy(tof.Trainer):
    """Draws random numbers in every step, as dropout does."""

    def step(self, batch, mark=lambda: None):
        return super().step(batch | dict(x=batch["x"] + 0.1 * torch.randn(batch["x"].shape)), mark)


def run(settings, place, number, at, resume):
    """One process's share of a run; returns its losses by step, {} if it was killed."""
    settings = settings.having(save_checkpoint=str(place))
    torch.manual_seed(settings.training.seed if not resume else 1)  # what is restored is not what was drawn
    trainer = Noisy(second_program.PROGRAM, settings, CPU)
    if resume:
        checkpoints.load_run(trainer, place, SimpleNamespace(held_out=[], choosing=[]))
    first = trainer.step_number
    profiling = SimpleNamespace(enter=lambda name: None, leave=lambda: None, step=lambda: None,
                                paused=contextlib.nullcontext)
    metrics = SimpleNamespace(step=lambda *_: None, flush=lambda: None)
    found = SimpleNamespace(peak=1.0, peak_mb=1.0)
    with contextlib.suppress(Killed), StopRequest() as stop:
        losses, _ = tof.run_steps(trainer, Stopping(settings, number, at), profiling, found, metrics, stop)
        return dict(enumerate(losses, first))
    return {}


def plain(content):
    """Tensors as what == compares."""
    if isinstance(content, dict):
        return {key: plain(part) for key, part in content.items()}
    return (str(content.dtype), content.tolist()) if isinstance(content, torch.Tensor) else content


@pytest.mark.slow
@cases(60)
@given(SETTINGS, st.lists(st.tuples(st.integers(0, STEPS - 1), st.sampled_from(
    [signal.SIGINT, signal.SIGTERM, KILL])), max_size=4))
def test_properties_of_a_run_in_pieces(tmp_path_factory, chosen, breaks):
    place = tmp_path_factory.mktemp("run")
    settings = second_program.PROGRAM.settings(
        **chosen, use_amp=chosen["amp_dtype"] is not None, width=8, batch_size=2, num_steps=STEPS,
        device="cpu", log_every=STEPS + 1, save_checkpoint=str(place / "none.pt"))
    whole, losses = run(settings, place / "whole.pt", None, None, False), {}
    pieces = place / "pieces.pt"
    for at, number in sorted(breaks):
        if pieces.exists() and torch.load(pieces, weights_only=True)["step"] >= STEPS:
            break
        losses.update(run(settings, pieces, number, at, pieces.exists()))
    if not pieces.exists() or torch.load(pieces, weights_only=True)["step"] < STEPS:
        losses.update(run(settings, pieces, None, None, pieces.exists()))
    assert losses.items() <= whole.items() and STEPS - 1 in losses
    first, second = (plain(torch.load(path, weights_only=True)) for path in (place / "whole.pt", pieces))
    for content in (first, second):
        content["training"].pop("save_checkpoint")
    assert first == second
