"""The structure module: what moves with the frames, what does not, and the same by one product."""
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fusion_lab.training.cuda_graphs import GraphedStep
from proteins import geometry
from proteins.structure_module import (
    CLAMP,
    UNIT,
    InFloat32,
    StructureModule,
    fape,
    rotation_of,
    structure_loss,
)
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from compare_structure import CLIP, SAMPLE, WARM_UP, Run

SAMPLES, RESIDUES, C_M, C_Z = 2, 10, 8, 12


@pytest.fixture
def case():
    """(module in float64 whose frames move, its inputs, a backbone)"""
    torch.manual_seed(0)
    module = StructureModule(C_M, C_Z).double()
    for weight in module.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    mask = torch.ones(SAMPLES, RESIDUES, dtype=torch.float64)
    mask[0, 7:] = 0
    single = torch.randn(SAMPLES, RESIDUES, C_M, dtype=torch.float64)
    pair = torch.randn(SAMPLES, RESIDUES, RESIDUES, C_Z, dtype=torch.float64)
    return module, (single, pair, mask), 8 * torch.randn(SAMPLES, RESIDUES, 3, 3, dtype=torch.float64)


def moved():
    """A rotation and a shift."""
    turn, shift = torch.tensor([[0.3, -1.2, 0.7], [5.0, -3.0, 9.0]], dtype=torch.float64)
    return rotation_of(turn), shift


def test_fused_attention_is_the_papers(case):
    module, inputs, backbone = case
    found = []
    for fused in (True, False):
        module.attention.fused = fused
        module.zero_grad()
        loss = structure_loss(*module(*inputs), backbone, inputs[2])
        loss.sum().backward()
        found.append([loss.detach()] + [weight.grad.clone() for weight in module.parameters()])
    for ours, papers in zip(*found, strict=True):
        torch.testing.assert_close(ours, papers, rtol=1e-9, atol=1e-9)


def test_absent_residues_change_nothing(case):
    module, (single, pair, mask), backbone = case
    before = structure_loss(*module(single, pair, mask), backbone, mask)
    for part in (single[0, 7:], pair[0, :, 7:], pair[0, 7:], backbone[0, 7:]):
        part += torch.randn_like(part)  # LayerNorm would not see a constant
    torch.testing.assert_close(structure_loss(*module(single, pair, mask), backbone, mask), before)


def test_attention_and_loss_do_not_see_where_all_of_it_stands(case):
    module, (single, pair, mask), backbone = case
    turn, shift = moved()
    (rotation, place), logits = module(single, pair, mask)
    attention = module.attention
    x, of_pairs = torch.randn(SAMPLES, RESIDUES, 128).double(), attention.of_pairs(pair, mask)
    torch.testing.assert_close(attention(x, pair, of_pairs, turn @ rotation[-1], place[-1] @ turn.T + shift),
                               attention(x, pair, of_pairs, rotation[-1], place[-1]))
    torch.testing.assert_close(structure_loss((rotation, place), logits, backbone @ turn.T + shift, mask),
                               structure_loss((rotation, place), logits, backbone, mask))


def test_fape_by_hand(case):
    """One frame off by 3 Å, one by more than is counted; a mirror image is not forgiven."""
    backbone = case[2][:1, :2]
    rotation, place = geometry.frames_of(*backbone.unbind(-2))
    for away, error in ((3.0, 3.0), (50.0, CLAMP)):
        atoms = place[:, :, None] + torch.tensor([[[[0.0]], [[away]]]]).double() * rotation[:, :1, None, :, 0]
        found = fape((rotation, place), (rotation, place), atoms, place[:, :, None], torch.ones(1, 2), 0.0)
        torch.testing.assert_close(found, torch.tensor([error / 2 / UNIT]).double(), atol=1e-3, rtol=0)
    true = geometry.frames_of(*case[2].unbind(-2))
    image = case[2] * torch.tensor([1.0, 1.0, -1.0]).double()
    mirrored = geometry.frames_of(*image.unbind(-2))
    assert (fape(mirrored, true, image, case[2], case[1][2], 1.0) > 0.3).all()


@pytest.mark.parametrize("turn", ([0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [2.0, -1.0, 0.5]))
def test_quaternions_are_rotations(turn):
    turn = torch.tensor(turn, dtype=torch.float64)
    found = rotation_of(turn)
    torch.testing.assert_close(found @ found.mT, torch.eye(3).double())
    torch.testing.assert_close(torch.linalg.det(found), torch.tensor(1.0).double())
    torch.testing.assert_close(found @ turn, turn)  # the axis stays
    angle = 2 * torch.atan(turn.norm())
    torch.testing.assert_close(found.diagonal().sum(), 1 + 2 * angle.cos())


def test_an_update_stays_on_its_device():
    """Once constants are kept, the host reads nothing and makes nothing: a CUDA graph can hold it."""
    class Strays(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_flatten((args, kwargs, found))[0] if isinstance(x, torch.Tensor)]
            strays.extend(str(function) for x in tensors if x.device.type != "meta")
            return found
    module = StructureModule(C_M, C_Z).to("meta")
    shapes = (SAMPLES, RESIDUES, C_M), (SAMPLES, RESIDUES, RESIDUES, C_Z), (SAMPLES, RESIDUES)
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    for _ in range(2):
        strays = []
        with Strays():  # the meta device refuses what reads a value
            backbone = torch.empty(SAMPLES, RESIDUES, 3, 3, device="meta")
            loss = structure_loss(*module(*inputs), backbone, inputs[2])
            loss.mean().backward()
    assert not strays


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replayed_updates_are_plain_ones(device):
    """Gradients stay where they are, as a CUDA graph needs it; weights are those of a loop that frees it."""
    torch.manual_seed(1)
    run = object.__new__(Run)
    run.a = SimpleNamespace(learning_rate=1e-2, trunk_rate=0.0)
    run.device, run.progress, run.updates, run.average = torch.device(device), 0.5, 0, None
    run.trunk, run.module = torch.nn.Linear(1, 1), InFloat32(StructureModule(C_M, C_Z)).to(device)
    run.updated, run.graphed = list(run.module.parameters()), run.gradients
    run.optimizer = torch.optim.AdamW(run.updated, weight_decay=0.0, fused=True)
    plain = InFloat32(StructureModule(C_M, C_Z)).to(device)
    plain.load_state_dict(run.module.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0, fused=True)
    places = None
    for update in range(4):
        sample = (torch.randn(2, 6, C_M).bfloat16(), torch.randn(2, 6, 6, C_Z).bfloat16(), torch.ones(2, 6),
                  5 * torch.randn(2, 6, 3, 3), torch.ones(2, 6))
        sample = [x.to(device) for x in sample]
        if device == "cuda" and not update:
            run.graphed = GraphedStep(run.gradients, dict(zip(SAMPLE, sample, strict=True)), run.device)
        loss = run.replay(sample)
        optimizer.zero_grad(set_to_none=True)
        expected = structure_loss(*plain(*sample[:3]), *sample[3:]).mean()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = 0.5 * 1e-2 * (update + 1) / WARM_UP
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4 * (device == "cuda"), atol=0)
        found = [weight.grad.data_ptr() for weight in run.module.parameters()]
        assert places in (None, found)
        places = found
    for ours, other in zip(run.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-4 * (device == "cuda"))
