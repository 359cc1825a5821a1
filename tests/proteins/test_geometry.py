"""Frames and ideal residues: lengths, angles, hands, against plain trigonometry."""
import math

import numpy as np
import pytest
import torch

from tests.proteins.folds_at_hand import chain, chirality, turned
from tests.support import require_shared
from tiny_openfold.proteins import files
from tiny_openfold.proteins import geometry as g
from tiny_openfold.proteins.secondary import secondary_structure

HELIX, STRAND = chain([(-57.8, -47)] * 14), chain([(-120, 130)] * 14)


def angle(a, b, c):
    u, v = g.unit(a - b), g.unit(c - b)
    return (u * v).sum(-1).clamp(-1, 1).acos().rad2deg()


def test_residues_have_the_textbooks_lengths_and_angles():
    """Engh and Huber (1991)."""
    n, ca, c, o, cb = STRAND.unbind(1)
    for a, b, length in ((n, ca, 1.458), (ca, c, 1.525), (c, o, 1.231), (ca, cb, 1.530),
                         (c[:-1], n[1:], 1.329)):
        assert (a - b).norm(dim=-1).tolist() == pytest.approx([length] * len(a), abs=0.005)
    for a, b, d, expected in ((n, ca, c, 111.2), (n, ca, cb, 110.5), (c, ca, cb, 110.1), (ca, c, o, 120.8),
                              (ca[:-1], c[:-1], n[1:], 116.2), (c[:-1], n[1:], ca[1:], 121.7)):
        assert angle(a, b, d).tolist() == pytest.approx([expected] * len(a), abs=1.0)
    assert angle(o[:-1], c[:-1], n[1:]).tolist() == pytest.approx([122.9] * 13, abs=0.6)
    flat = g.dihedral(o[:-1], c[:-1], n[1:], ca[1:])  # O and the next CA on one side of a trans bond
    assert flat.tolist() == pytest.approx([0] * 13, abs=1e-6)


def test_angles_come_back_from_the_chain_that_they_made():
    generator = torch.Generator().manual_seed(1)
    phi, psi = (torch.rand(2, 2, 9, dtype=torch.float64, generator=generator) * 6 - 3).unbind(0)
    found_phi, found_psi, omega = g.backbone_angles(g.extended(phi, psi))
    assert found_phi.flatten().tolist() == pytest.approx(phi[:, 1:].flatten().tolist(), abs=1e-6)
    assert found_psi.flatten().tolist() == pytest.approx(psi[:, :-1].flatten().tolist(), abs=1e-6)
    assert omega.abs().flatten().tolist() == pytest.approx([math.pi] * 16, abs=1e-6)
    cis = g.extended(phi, psi, omega=0.0)
    assert g.backbone_angles(cis)[2].flatten().tolist() == pytest.approx([0] * 16, abs=1e-6)


def test_the_dihedral_angles_sign_is_iupacs():
    a, b, c = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1]])
    turns = torch.tensor([30.0, -60.0, 170.0]).deg2rad()
    d = torch.stack([turns.cos(), turns.sin(), torch.ones(3)], -1)
    assert g.dihedral(a, b, c, d).rad2deg().tolist() == pytest.approx([30, -60, 170], abs=1e-4)
    assert (g.placed(a, b, c, 1.0, math.pi / 2, math.radians(30)) - d[0]).abs().max() < 1e-6


def test_residues_are_l_amino_acids_and_helices_right_handed():
    """CORN: seen from H, which is opposite of the others, CO, R and N go clockwise."""
    n, ca, c, o, cb = HELIX.unbind(1)
    h = ca + g.unit(3 * ca - n - c - cb)
    eye = g.unit(h - ca)
    clockwise = (torch.linalg.cross(c - ca, cb - ca) * eye).sum(-1)
    assert (clockwise < 0).all() and (chirality(HELIX) > 2).all()
    assert (chirality(HELIX * torch.tensor([1, 1, -1])) < -2).all()
    step = ca[1:] - ca[:-1]
    assert ((torch.linalg.cross(step[:-2], step[1:-1]) * step[2:]).sum(-1) > 0).all()
    rise = (ca[11] - ca[0]).norm() / 11  # 1.5 Å a residue, and a hydrogen bond to the fourth
    assert rise == pytest.approx(1.5, abs=0.06)
    assert (o[:-4] - n[4:]).norm(dim=-1).tolist() == pytest.approx([2.95] * 10, abs=0.2)


def test_atoms_in_one_place_have_no_direction_and_spoil_no_gradient():
    point = torch.zeros(3, requires_grad=True)
    g.unit(point).sum().backward()
    assert g.unit(point).tolist() == [0, 0, 0] and point.grad.isfinite().all()


def test_frames_move_with_the_chain():
    for atoms in (STRAND, turned(STRAND)):
        found = g.backbone(*g.frames_of(*(atoms[:, k] for k in range(3))))
        assert (found - atoms).abs().max() < 1e-9  # the last O too: it is made alike


def test_rotations_are_rotations_and_their_gradients_true():
    first, second = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = g.rotations(first, second)
    assert (found.mT @ found - torch.eye(3)).abs().max() < 1e-12 and (found.det() - 1).abs().max() < 1e-12
    place = torch.randn(5, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (first, second, place)]
    assert torch.autograd.gradcheck(lambda a, b, p: g.backbone(g.rotations(a, b), p), inputs)


# --- Helices and strands --------------------------------------------------------------------------------

def test_strands_are_those_of_a_files_records():
    pytest.importorskip("gemmi")
    path = require_shared("data", "nasty", "1pko.pdb")
    chain, = files.read_structure(path, "A")
    recorded = {str(number) for line in path.read_text().splitlines() if line.startswith("SHEET ")
                for number in range(int(line[22:26]), int(line[33:37]) + 1)}
    expected = np.isin(chain.numbers[chain.seen], [*recorded])
    sequence = "".join(files.LETTERS[token] for token in chain.sequence[chain.seen])
    found = np.array([*secondary_structure(sequence, chain.backbone[chain.seen].astype(float))]) == "E"
    assert expected.sum() > 40 and found[expected].mean() >= 0.95 and expected[found].mean() >= 0.95


def test_a_helix_is_bonds_four_residues_apart():
    backbone = HELIX[:, :4].numpy()
    assert secondary_structure("A" * 14, backbone) == "-HHHHHHHHHHHH-"
    assert secondary_structure("P" * 14, backbone) == 14 * "-"  # proline gives no bond
    assert secondary_structure("A" * 14, STRAND[:, :4].numpy()) == 14 * "-"  # it has no partner
    for size in (1, 2, 4):
        assert secondary_structure("A" * size, backbone[:size]) == size * "-"


def test_the_last_carbonyl_lies_as_in_a_strand():
    """No next N says where it is: psi 140 degrees, and O opposite."""
    n, ca, c, o, _ = g.extended(torch.zeros(3), torch.zeros(3))[-1]
    assert g.dihedral(n, ca, c, o).rad2deg().item() == pytest.approx(-40, abs=0.01)
