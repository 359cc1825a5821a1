"""A run that was stopped or killed anywhere, and continued each time, is the run that never was."""
import dataclasses
import os
import signal

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.metrics import read_metrics
from tests import second_program
from tests.support import last_json

pytestmark = pytest.mark.usefixtures("quick_runs")
KILL = 0  # in place of a signal: nothing of the process is left but its files
HALF = "--use-amp --amp-dtype float16"


class Killed(BaseException):
    pass


class Noisy(tof.Trainer):
    """Draws random numbers in every step, as dropout does."""

    def step(self, batch, mark=lambda: None):
        return super().step(batch | dict(x=batch["x"] + 0.1 * torch.randn(batch["x"].shape)), mark)


def run(directory, flags, at=None, number=None):
    """One process's share of a run of eight steps; the batch of one step comes with a signal."""
    class Stopping(second_program.Numbers):
        def batch(self, step):
            if step == at and number == KILL:
                raise Killed
            if step == at:
                os.kill(os.getpid(), number)
            return super().batch(step)
    program = dataclasses.replace(second_program.PROGRAM, data=Stopping, trainer=Noisy)
    own = "--width 8 --depth 1 --batch-size 2 --num-steps 8 --warmup-steps 0 --log-every 99 --device cpu"
    return tof.main([*own.split(), *flags.split(), "--profile-dir", str(directory)], program)


def losses_of(directory):
    path = directory / "metrics.jsonl"
    return {step["step"]: step["loss"] for step in read_metrics(path)[0]} if path.exists() else {}


def plain(content):
    """What == compares: tensors as such, and without the flags, which name files."""
    if isinstance(content, dict):
        return {key: plain(part) for key, part in content.items() if key != "training"}
    return (str(content.dtype), content.tolist()) if isinstance(content, torch.Tensor) else content


def test_a_run_that_goes_on_under_the_profiler_leaves_its_trace_and_counts_its_own_steps(tmp_path, capsys):
    assert run(tmp_path / "first", f"--save-checkpoint {tmp_path}/c.pt") == 0
    assert run(tmp_path / "then", f"--resume {tmp_path}/c.pt --num-steps 12 --enable-pytorch-profiler") == 0
    assert last_json(capsys.readouterr().out)["performance_summary"]["total_samples"] == 4 * 2
    assert len(list((tmp_path / "then").glob("*.pt.trace.json"))) == 1


@pytest.mark.parametrize("flags, breaks", [
    ("--lr-schedule cosine --lr-warmup-steps 3 --weight-decay 0.5 --save-every 2",
     [(3, KILL), (5, signal.SIGTERM)]),
    (f"{HALF} --ema-decay 0.9 --save-every 3", [(1, KILL), (2, signal.SIGINT), (6, KILL)]),
    (f"{HALF} --learning-rate 0.1 --lr-schedule linear --save-every 1",
     [(1, signal.SIGINT), (4, KILL), (4, KILL), (6, signal.SIGTERM)]),
    ("--use-amp --amp-dtype bfloat16 --ema-decay 0.9 --learning-rate 0.1 --save-every 7", [(5, KILL)])])
def test_a_run_in_pieces_is_the_whole_run(flags, breaks, tmp_path):
    whole, pieces, losses = tmp_path / "whole.pt", tmp_path / "pieces.pt", {}
    assert run(tmp_path / "whole", f"{flags} --save-checkpoint {whole}") == 0
    for number, broken in enumerate([*breaks, ()]):
        more = f" --resume {pieces}" * pieces.exists()
        torch.manual_seed(number)  # what is restored is not what was drawn
        try:
            code = run(place := tmp_path / str(number), f"{flags} --save-checkpoint {pieces}{more}", *broken)
            assert code == (128 + broken[1] if broken else 0)
        except Killed:
            assert broken[1] == KILL
        losses |= losses_of(place)
    assert losses == losses_of(tmp_path / "whole")
    assert plain(torch.load(whole)) == plain(torch.load(pieces))
