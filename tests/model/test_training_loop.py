"""The optimizer step and the training loop against numbers worked out by hand: clipping, scaling, AdamW, what
is restored; which step is logged, saved, evaluated and counted."""
import dataclasses

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.metrics import read_metrics
from fusion_lab.training import checkpoints
from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation
from fusion_lab.training.master_weights import ModelWeights
from fusion_lab.training.program import Data
from tests.support import last_json
from tests.tiny import flags_of, trainer_of
from tiny_openfold.proteins.batches import SyntheticProteins

pytestmark = pytest.mark.usefixtures("quick_runs")


# --- Optimizer step ------------------------------------------------------------------------------------

def moments(trainer, kind):
    return torch.cat([state[kind].flatten() for state in trainer.optimizer.state.values()])


@pytest.mark.parametrize("amp", [{}, dict(use_amp=True, amp_dtype="float16"),
                                 dict(use_amp=True, amp_dtype="bfloat16", enable_master_weights=True),
                                 dict(use_amp=True, amp_dtype="float16", enable_master_weights=True)])
def test_gradients_are_unscaled_then_clipped_to_the_norm(amp):
    """AdamW's first moment after one step is a tenth of the clipped gradient."""
    trainer = trainer_of(grad_clip=1e-3, **amp)
    assert trainer.scaler.is_enabled() == (amp.get("amp_dtype") == "float16")
    batch, reported = SyntheticProteins(trainer.settings).batch(0), trainer.gradient_norm
    trainer.step(batch)
    assert trainer.gradient_norm is reported > 0.1  # one tensor, which CUDA graphs of several lengths fill
    assert moments(trainer, "exp_avg").norm().item() == pytest.approx(1e-4, rel=1e-3)
    loose = trainer_of(grad_clip=1e3, **amp)
    loose.step(batch)
    norm = moments(loose, "exp_avg").norm().item()
    assert norm == pytest.approx(0.1 * loose.gradient_norm.item(), rel=1e-3)  # smaller ones stay
    assert loose.gradient_norm.item() == pytest.approx(trainer.gradient_norm.item())
    assert all(w.grad is None for w in [*loose.weights.tensors, *loose.model.parameters()])


def test_one_step_is_adamw_with_the_given_learning_rate():
    trainer = trainer_of(learning_rate=0.01)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = SyntheticProteins(trainer.settings).batch(0)
    trainer.forward(batch)["loss"].backward()
    norm = sum(p.grad.square().sum() for p in trainer.model.parameters() if p.grad is not None).sqrt()
    gradients = {name: p.grad * min(1, 1 / norm) for name, p in trainer.model.named_parameters()
                 if p.grad is not None}
    trainer.model.zero_grad()
    loss = trainer.step(batch)
    assert not loss.requires_grad and torch.equal(loss, trainer_of().forward(batch)["loss"])
    moved, state = 0, trainer.optimizer.state
    for name, weight in trainer.model.named_parameters():
        if name in gradients:  # decay of 0.01, then a step of the learning rate along the gradient's sign
            g = gradients[name]
            expected = before[name] * (1 - 0.01 * 0.01) - 0.01 * g / (g.abs() + 1e-8)
            torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-4 * 0.01, msg=name)
            torch.testing.assert_close(state[weight]["exp_avg"], 0.1 * g, rtol=1e-4, atol=1e-9)
            torch.testing.assert_close(state[weight]["exp_avg_sq"], 0.001 * g * g, rtol=1e-4, atol=1e-12)
            moved += (weight != before[name]).sum().item()
    assert moved > 1000


def test_an_overflow_in_float16_skips_the_step_and_halves_the_scale():
    trainer = trainer_of(use_amp=True, amp_dtype="float16")
    batch = SyntheticProteins(trainer.settings).batch(0)
    trainer.step(batch)
    scale, before = trainer.scaler.get_scale(), trainer.model.distogram_head.weight.detach().clone()
    trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    trainer.step(batch)
    assert trainer.scaler.get_scale() == scale / 2
    assert torch.equal(trainer.model.distogram_head.weight, before)


def everything(trainer):
    state = trainer.optimizer.state_dict()["state"]
    tensors = [*trainer.weights.tensors, *trainer.model.parameters(), *trainer.average.tensors,
               trainer.gradient_norm, *(t for s in state.values() for t in s.values())]
    return [*(t.detach().clone() for t in tensors), torch.get_rng_state(),
            torch.tensor([trainer.scaler.get_scale(), trainer.average.steps])]


@pytest.mark.parametrize("amp", [{}, dict(use_amp=True, amp_dtype="float16", enable_master_weights=True)])
def test_preserved_brings_back_a_run_that_is_under_way(amp):
    trainer = trainer_of(dropout=0.5, ema_decay=0.9, **amp)
    batch = SyntheticProteins(trainer.settings).batch(0)
    with trainer.preserved():
        trainer.step(batch)  # the very first one
    assert not any(t.any() for state in trainer.optimizer.state.values() for t in state.values())
    trainer.step(batch)
    before = everything(trainer)
    with pytest.raises(KeyError), trainer.preserved():
        trainer.step(batch)
        trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
        trainer.step(batch)  # in float16 the scale changes
        assert any(not torch.equal(a, b) for a, b in zip(before, everything(trainer), strict=True))
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(before, everything(trainer), strict=True))


def test_mixed_precision_is_autocast_and_low_weights_with_masters():
    dtypes = {}
    for masters in (False, True):
        trainer = trainer_of(use_amp=True, amp_dtype="bfloat16", enable_master_weights=masters)
        trainer.model.blocks[0].pair_transition.linear2.register_forward_hook(
            lambda _, x, y, m=masters: dtypes.update({m: (y.dtype, torch.is_autocast_enabled("cpu"))}))
        trainer.step(SyntheticProteins(trainer.settings).batch(0))
        assert next(trainer.model.parameters()).dtype == (torch.bfloat16 if masters else torch.float32)
    assert dtypes == {False: (torch.bfloat16, True), True: (torch.bfloat16, False)}
    assert type(trainer_of(enable_master_weights=True).weights) is ModelWeights


# --- Loop ----------------------------------------------------------------------------------------------

def watched_run(tmp_path, monkeypatch, capsys, **values):
    """Exit code, step lines, summary and metrics of a run, and which steps it evaluated and saved. Its times,
    by a clock made by hand: tests/measuring/test_summary.py."""
    calls, really_save = dict(evaluate=[], saved=[]), checkpoints.save

    class Watched(SyntheticProteins):
        finish = Data.finish

        def evaluate(self, trainer, stop):
            calls["evaluate"].append(trainer.step_number)
            return Evaluation("evaluated", dict(score=0.5))

    def save(trainer, path):
        calls["saved"].append(trainer.step_number)
        really_save(trainer, path)

    with monkeypatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoints, "save", save)
        code = tof.main(flags_of(profile_dir=tmp_path / "p", save_checkpoint=tmp_path / "c.pt", **values),
                        dataclasses.replace(tof.PROGRAM, data=Watched))
    out = capsys.readouterr().out
    lines = [line.split(" | ") for line in out.splitlines() if line.startswith("Step ")]
    return code, lines, last_json(out), read_metrics(tmp_path / "p" / "metrics.jsonl"), calls


def test_a_run_step_by_step(tmp_path, monkeypatch, capsys):
    code, lines, result, (steps, evaluations), calls = watched_run(
        tmp_path, monkeypatch, capsys, num_steps=6, log_every=4, eval_every=3, save_every=2)
    assert code == 0 and [line[0] for line in lines] == ["Step   4/6", "Step   6/6"]
    losses = {step["step"]: step["loss"] for step in steps}
    assert list(losses) == [1, 2, 3, 4, 5, 6] and len(set(losses.values())) == 6
    assert [line[1] for line in lines] == [f"Loss: {losses[n]:.4f}" for n in (4, 6)]
    performance = result["performance_summary"]
    assert (performance["first_loss"], performance["final_loss"]) == (losses[1], losses[6])
    assert performance["total_samples"] == 12
    assert list(result["evaluation"]) == ["3", "final"]
    assert [(e["step"], e["evaluation"]) for e in evaluations] == [(3, dict(score=0.5)), (6, dict(score=0.5))]
    assert calls == dict(evaluate=[3, 6], saved=[2, 4, 6])


def test_a_checkpoint_knows_what_its_run_has_learned_from(tmp_path):
    class Named(SyntheticProteins):
        def __init__(self, settings):
            super().__init__(settings)
            self.names = ["b", "a"]
    program = dataclasses.replace(tof.PROGRAM, data=Named)
    flags = flags_of(profile_dir=tmp_path / "p", num_steps=1, save_checkpoint=tmp_path / "c.pt")
    assert tof.main(flags, program) == 0
    assert torch.load(tmp_path / "c.pt", weights_only=True)["trained_on"] == ["a", "b"]


def test_a_run_closes_with_averaged_weights(tmp_path):
    """What it says of its model at the end is of the one that was evaluated."""
    seen = {}

    class Closing(SyntheticProteins):
        def finish(self, trainer, evaluations):
            seen.update(trainer=trainer, closing=trainer.weights.tensors[0].clone(),
                        average=trainer.average.tensors[0].clone())
    flags = flags_of(profile_dir=tmp_path / "p", num_steps=3, ema_decay=0.9, learning_rate=0.1)
    assert tof.main(flags, dataclasses.replace(tof.PROGRAM, data=Closing)) == 0
    assert torch.equal(seen["closing"], seen["average"])
    assert not torch.equal(seen["trainer"].weights.tensors[0], seen["average"])


def test_what_is_not_finite_is_not_saved(tmp_path):
    """The loss of the last step says nothing of the weights after it."""
    trainer, path = trainer_of(), tmp_path / "c.pt"
    checkpoints.save(trainer, path)
    before = path.read_bytes()
    with torch.no_grad():
        trainer.model.distogram_head.bias[3] = torch.inf
    with pytest.raises(UserError, match="model is not finite"):
        checkpoints.save(trainer, path)
    assert path.read_bytes() == before


def test_a_cpu_captures_no_graph():
    trainer = trainer_of(enable_cuda_graphs=True)
    assert not trainer.use_graph and not trainer.optimizer.defaults["capturable"]
