"""AdamW of master weights in Triton's interpreter: torch's own beside it."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from evoformer_kernels import adamw
from evoformer_kernels.precision import HALF
from fusion_lab.training import checkpoints, recipe
from fusion_lab.training.master_weights import KernelMasters, MasterWeights
from tests import tiny
from tiny_openfold.proteins.batches import SyntheticProteins

pytestmark = pytest.mark.interpreted

STEPS = 10
CASES = {  # numbers, dtype of gradients, norm to clip to, weight decay, whether the rate is a tensor
    "clipped, odd": (2501, torch.bfloat16, 1.0, 0.01, False),
    "not clipped, rate on the device": (64, torch.bfloat16, 1e3, 0.5, True),
    "gradients of several ranks": (1025, torch.float32, 2.0, 0.0, True),
    "half": (1024, torch.float16, 1e-3, 0.1, False),
}


def gradients(count, dtype):
    """Of which the last ones are far smaller than the first."""
    torch.manual_seed(1)
    scale = torch.logspace(0, -6, STEPS, dtype=torch.float64)
    return [(factor * torch.randn(count, dtype=torch.float64)).to(dtype) for factor in scale.sqrt()]


def start_of(count):
    torch.manual_seed(0)
    return torch.randn(count)


def rate_at(step):
    return torch.tensor(0.01 / (1 + step)).item()  # as float32 has it


def by_torch(dtype, count, half, limit, decay, _):
    """[weights, exp_avg, exp_avg_sq] after the steps, computed in this dtype."""
    weight = start_of(count).to(dtype)
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=decay)
    for step, gradient in enumerate(gradients(count, half)):
        optimizer.param_groups[0]["lr"] = rate_at(step)
        weight.grad = gradient.to(dtype)
        torch.nn.utils.clip_grad_norm_([weight], limit)
        optimizer.step()
    state = optimizer.state[weight]
    return [weight, state["exp_avg"], state["exp_avg_sq"]]


def state_of(count):
    return dict(step=torch.zeros(()), exp_avg=torch.zeros(count), exp_avg_sq=torch.zeros(count))


def group(lr=0.1, eps=1e-8, weight_decay=0.0):
    return dict(lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=weight_decay)


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_are_torch_s(name):
    """Errors against float64 are at most three times those of torch in float32, and a rounding a step. Before
    each step stands one that a scaler has skipped."""
    count, half, limit, decay, on_device = CASES[name]
    weight, low, state = start_of(count), torch.zeros(count, dtype=torch.float16), state_of(count)
    for step, gradient in enumerate(gradients(count, half)):
        rate, norm = rate_at(step), torch.linalg.vector_norm(gradient, dtype=torch.float32)
        given = group(torch.tensor(rate) if on_device else rate, weight_decay=decay)
        adamw.update(weight, gradient / 0, state, low, norm / 0, limit, given, torch.tensor(1.0))
        adamw.update(weight, gradient, state, low, norm, limit, given, *[torch.tensor(0.0)] * (step % 2))
    assert state["step"] == STEPS and torch.equal(low, weight.half())
    exact, plain = by_torch(torch.float64, *CASES[name]), by_torch(torch.float32, *CASES[name])
    for ours, own, truth in zip((weight, state["exp_avg"], state["exp_avg_sq"]), plain, exact, strict=True):
        error, allowed = ((x - truth).abs().max() for x in (ours, own))
        assert error <= 3 * allowed + STEPS * torch.finfo(torch.float32).eps * truth.abs().max()


@pytest.mark.parametrize("repeated", [1, 100])  # more tiles than the norm's kernel takes at once
def test_gradients_are_joined_with_their_norm(repeated, monkeypatch):
    """Of gradients that lie anywhere, one of which there is not."""
    torch.manual_seed(0)
    sizes, begin, length = (1300, 1, 64, 512, 130, 70), (0, 1344, 1408, 1472, 1984, 2176), 2304 * repeated
    sizes, starts = sizes * repeated, [first + each for first in range(0, length, 2304) for each in begin]
    memory = torch.randn(3 * length + 2048).bfloat16()
    given, expected = [], torch.zeros(length, dtype=torch.bfloat16)
    for number, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        given.append(None if number == 2 else memory[3 * start + number:][:size])
        if number != 2:
            expected[start:start + size] = given[-1]
    empty = torch.empty  # what a kernel does not write is not 0 by chance
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(9))
    joined, norm = adamw.Joined(sizes, starts, length, torch.device("cpu"))(given, torch.bfloat16)
    exact = torch.linalg.vector_norm(expected.double())
    assert torch.equal(joined, expected) and abs(norm - exact) <= 1e-6 * exact


def test_a_captured_step_joins_its_gradients(monkeypatch):
    """Once: a second graph would write another table over the first one's. Gradients may lie transposed."""
    model = torch.nn.Sequential(torch.nn.Linear(23, 37), torch.nn.Linear(5, 3))
    masters, steps = KernelMasters(model, torch.float16, wide=False), []
    for captured in (False, True, True):
        monkeypatch.setattr(KernelMasters, "captured", lambda self, captured=captured: captured)
        torch.manual_seed(0)
        for number, p in enumerate(masters.parameters.values()):
            p.grad = torch.randn(p.t().shape).half().t() if number != 2 else None
        assert not masters.parameters["0.weight"].grad.is_contiguous()
        masters.take_gradients()
        assert all(p.grad is None for p in masters.parameters.values())
        steps.append((masters.gradient, masters.norm is not None, masters.clip(1.0)))
    assert [by_kernel for _, by_kernel, _ in steps] == [False, True, False] and steps[0][0].any()
    assert all(torch.equal(gradient, steps[0][0]) for gradient, *_ in steps)
    assert [norm.item() for *_, norm in steps] == pytest.approx([steps[0][2].item()] * 3, rel=1e-6)


def test_moments_do_not_drift():
    """Of a gradient that stays: factors of float32 that do not add up to 1 would move them by 3e-5."""
    gradient, weight = torch.tensor([2.0]), torch.zeros(1)
    state = dict(step=torch.tensor(5e4), exp_avg=torch.tensor([2.0]), exp_avg_sq=torch.tensor([4.0]))
    for _ in range(100):
        adamw.update(weight, gradient, state, torch.zeros(1), torch.tensor(2.0), 3.0,
                     group(1.0, eps=0.0))
    assert (state["exp_avg"].item(), state["exp_avg_sq"].item()) == (2, 4)
    assert weight.item() == pytest.approx(-100, rel=1e-6) and state["step"] == 5e4 + 100


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_is_seen_in_the_weights(norm):
    weight = torch.ones(3)
    adamw.update(weight, torch.full((3,), norm), state_of(3), torch.ones(3), torch.tensor(norm), 1.0, group())
    assert weight.isnan().all()


# --- Master weights, scalers, checkpoints ---------------------------------------------------------------


def trainer_of(kernel, monkeypatch, **values):
    """A small trainer in float16, with our kernel or without."""
    kind = partial(KernelMasters, wide=True) if kernel else MasterWeights
    with monkeypatch.context() as patch:
        patch.setattr(tof, "optimized_weights", lambda model, dtype, *_: kind(model, dtype))
        return tiny.trainer_of(use_amp=True, amp_dtype="float16", enable_master_weights=True,
                               lr_warmup_steps=2, num_steps=9, **values)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_masters_without_a_scaler_step_as_torch_s_do(dtype):
    found, usual = [], SimpleNamespace(learning_rate=0.1, weight_decay=0.1)
    for kind in (partial(KernelMasters, wide=False), MasterWeights):
        torch.manual_seed(0)
        masters = kind(torch.nn.Linear(7, 5), dtype)
        optimizer = recipe.optimizer(masters, usual, False)
        for p in masters.parameters.values():
            p.grad = torch.randn(p.shape).to(dtype)
        masters.take_gradients()
        norm = masters.clip(0.5).clone()
        optimizer.step()
        found.append(dict(optimizer.state[masters.flat], flat=masters.flat, norm=norm))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


def test_a_step_with_an_infinite_gradient_changes_nothing_but_the_scale(monkeypatch):
    """Though it is the first."""
    trainer = trainer_of(True, monkeypatch)
    batch, weights, scale = SyntheticProteins(trainer.settings).batch(0), trainer.weights, 2.0 ** 16
    before = weights.flat.clone()
    hook = trainer.model.distogram_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    for steps in (0, 1):
        trainer.step(batch)
        state = trainer.optimizer.state[weights.flat]
        assert trainer.scaler.get_scale() == scale / 2 and state["step"] == steps
        assert torch.equal(weights.flat, before) == (not steps)
        assert torch.equal(weights.low, weights.flat.half()) and state["exp_avg"].any() == bool(steps)
        assert weights.gradient is weights.flat.grad is None  # memory that a step gives back
        hook.remove()


@pytest.mark.parametrize("kernel", [False, True])
def test_a_checkpoint_of_one_optimizer_continues_with_the_other(kernel, monkeypatch, tmp_path):
    weights = []
    for changes in (False, True):
        trainer = trainer_of(kernel, monkeypatch, ema_decay=0.5)
        source = SyntheticProteins(trainer.settings)
        for number in range(3):
            with trainer.preserved():
                trainer.step(source.batch(9))
            trainer.step(source.batch(number))
            trainer.step_number += 1
        if changes:
            checkpoints.save(trainer, tmp_path / "c.pt")
            trainer = trainer_of(not kernel, monkeypatch, ema_decay=0.5)
            checkpoints.restore(trainer, tmp_path / "c.pt")
            assert trainer.step_number == 3
        trainer.step(source.batch(3))
        assert trainer.optimizer.state[trainer.weights.flat]["step"] == 4
        assert type(trainer.optimizer) is (adamw.AdamW if kernel != changes else torch.optim.AdamW)
        weights.append([trainer.weights.flat, trainer.average.tensors[0], trainer.gradient_norm])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
