"""Folds: the geometry of built-in ones; which real chains are drawn, where they are cut, their tails."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.training.errors import UserError
from tests import tiny
from tiny_openfold.proteins import batches, folds, natural
from tiny_openfold.proteins.folds import APART, EVERY, MISSING, RealFolds
from tiny_openfold.proteins.geometry import CA
from tiny_openfold.proteins.orientations import IGNORED


def test_folds_are_chains_with_the_contacts_of_domains():
    source, rng = folds.Folds(3, 64), np.random.default_rng(0)
    pieces = np.stack([source.piece(rng) for _ in range(30)])
    assert pieces.shape == (30, 64, 3) and np.isfinite(pieces).all()
    bonds = np.linalg.norm(np.diff(pieces, axis=1), axis=2)
    assert 4.5 < np.median(bonds) < 6.5 and np.quantile(bonds, 0.99) < 9  # CB to CB, Å
    contact = [folds.contacts_per_residue(piece) for piece in pieces]
    assert 1.2 < np.median(contact) < 2.6
    again = folds.Folds(3, 64).piece(np.random.default_rng(0))
    assert np.array_equal(again, pieces[0])
    assert not np.allclose(folds.Folds(4, 64).piece(np.random.default_rng(0)), pieces[0])


def test_a_chain_goes_on_to_a_layers_next_helix_or_strand():
    """Of eight that stand 10 Å apart; steps in any order have a mean of 30 Å."""
    rng, positions = np.random.default_rng(0), [("e", 10.0 * i, 0.0) for i in range(8)]
    routes = [folds.route(rng, positions) for _ in range(200)]
    assert all(sorted(route) == [*range(8)] for route in routes)
    assert 10 * np.abs(np.diff(routes, axis=1)).mean() == pytest.approx(15.5, abs=0.5)


def test_helices_and_strands_are_centred_and_layouts_are_drawn_by_their_shares():
    assert [piece(7)[:, 1].mean() for piece in (folds.helix, folds.strand)] == pytest.approx([0, 0])
    rng, size = np.random.default_rng(0), 3000
    drawn_slots = [folds.slots(rng, 100) for _ in range(size)]
    assert max(abs(sum(x for _, x, _ in slots)) for slots in drawn_slots) < 1e-9
    layers = [{(z, kind) for kind, _, z in slots} for slots in drawn_slots]
    for layout in {*folds.LAYOUTS}:
        heights = (np.arange(len(layout)) - (len(layout) - 1) / 2) * folds.LAYER_GAP
        drawn = layers.count({*zip(heights.tolist(), layout, strict=True)}) / size
        share = sum(one for one, other in zip(folds.SHARES, folds.LAYOUTS, strict=True) if other == layout)
        assert drawn == pytest.approx(share, abs=0.04), layout


def test_strands_of_a_sheet_are_turned_by_20_degrees_each(monkeypatch):
    """Without noise and loops; neighbours run in opposite directions."""
    monkeypatch.setattr(folds, "slots", lambda *_: [("e", 4.8 * k, 0.0) for k in range(4)])
    monkeypatch.setattr(folds, "route", lambda *_: range(4))
    monkeypatch.setattr(folds, "loop", lambda *_: np.zeros((0, 3)))
    drawn = SimpleNamespace(integers=lambda *_: 5, normal=lambda *_: 0.0)
    strands = folds.backbone(drawn, 100).reshape(4, 5, 3)
    assert np.ptp(strands[..., 0], axis=1) == pytest.approx(0) and strands[3, 0, 0] == pytest.approx(14.4)
    _, y, z = ((strands[:, 4] - strands[:, 0]) * [[1], [-1], [1], [-1]]).T
    assert np.rad2deg(np.arctan2(z, y)) == pytest.approx([0, -20, -40, -60])


def test_side_chains_of_helices_point_back_to_their_beginning():
    """As nature's do. Ours are left-handed, of D-amino acids: a mirror image in both."""
    ca = folds.helix(9)
    assert ((folds.side_chains(ca) - ca)[1:-1] @ (ca[5] - ca[1]) < 0).all()


# --- Real chains ----------------------------------------------------------------------------------------

def chains(lengths, near=(), breaks=()):
    """Arrays of a file. Residue r of chain k: CA at x = 3.8 r, y = 8 k, so both can be read off a piece. A
    chain is broken in front of each (chain, residue) in breaks."""
    xyz, index = [], []
    for k, length in enumerate(lengths):
        ca = np.stack([3.8 * np.arange(length), np.full(length, 8.0 * k), np.zeros(length)], 1)
        around = [[-0.5, 1.3, 0], [0, 0, 0], [1.5, 0, 0], [2, -1, 0], [-0.5, -0.8, 1.2]]
        atoms = ca[:, None] + np.array(around)
        xyz.append(np.round(100 * atoms).astype(np.int16))
        numbers = np.arange(1, length + 1)
        for chain, residue in breaks:
            numbers[residue:] += 5 * (chain == k)
        index.append(numbers.astype(np.int32))
    marked = np.isin(np.arange(len(lengths)), near)
    return dict(offset=np.cumsum([0, *lengths]).astype(np.int32), xyz=np.concatenate(xyz),
                index=np.concatenate(index), near_families=marked)


def saved(path, **arrays):
    np.savez_compressed(path, **arrays)
    return str(path)


def drawn(source, count, held_out=False):
    """[(chain, first residue, residues known)] of so many pieces."""
    rng = np.random.default_rng(3)
    pieces = [source.piece(rng, held_out) for _ in range(count)]
    return [(round(p.backbone[0, CA, 1] / 8), round(p.backbone[0, CA, 0] / 3.8), int(p.known.sum()))
            for p in pieces]


def test_relatives_of_families_are_never_drawn_and_held_out_chains_are_others(tmp_path):
    near = (0, 5, 17, 33)
    source = RealFolds(saved(tmp_path / "f.npz", **chains([30] * 36, near)), 24)
    trained, unseen = ({chain for chain, *_ in drawn(source, 2000, held_out)} for held_out in (False, True))
    allowed = [k for k in range(36) if k not in near]
    assert unseen == set(allowed[::EVERY]) and trained == set(allowed) - unseen
    assert str(source) == "pieces of 30 real chains, 2 held out; 4 related to families are left out"


def test_a_crop_has_no_break_if_there_is_such_a_crop(tmp_path):
    """Chain 1 can be cut behind residue 20 alone; chain 2 is broken everywhere, so it is cut anywhere."""
    breaks = [(1, 5), (1, 20), *[(2, residue) for residue in range(4, 40, 4)]]
    source = RealFolds(saved(tmp_path / "f.npz", **chains([40, 40, 40], breaks=breaks)), 18)
    found = drawn(source, 600)
    assert {start for chain, start, _ in found if chain == 1} == {20, 21, 22}
    assert {start for chain, start, _ in found if chain == 2} == set(range(23))
    assert {known for *_, known in found} == {18}


def test_a_disordered_tail_couples_to_nothing_and_is_asked_for_nothing(tmp_path):
    source = RealFolds(saved(tmp_path / "f.npz", **chains([15, 15])), 24)
    piece = source.piece(np.random.default_rng(0))
    assert piece.known.tolist() == 15 * [1] + 9 * [0] and np.isfinite(piece.coords).all()
    apart = np.linalg.norm(piece.coords[:, None] - piece.coords, axis=-1)
    apart[np.eye(24, dtype=bool)] = APART
    assert piece.coords.dtype == np.float32
    assert piece.coords[14:17] == pytest.approx(piece.coords[:15].max(0) + APART * np.arange(3)[:, None])
    assert apart[15:].min() >= APART and np.isnan(piece.backbone[15:]).all()
    draw = natural.Draw(torch.Generator().manual_seed(0))
    coupling = natural.couplings(draw, torch.from_numpy(apart)[None] * (1 - torch.eye(24)))
    tables = coupling.unflatten(2, (24, 20)).unflatten(1, (24, 20))  # (1, S, A, S, A)
    assert torch.equal(coupling, coupling.mT) and tables.sum(2).abs().max() < 1e-4
    coupling = tables.abs().amax((0, 2, 4))  # (S, S)
    assert not coupling[torch.from_numpy(apart) >= natural.FAR].any() and not coupling.diagonal().any()
    assert coupling[:15, :15].max() > 0 and coupling[15:].max() == 0 == coupling[:, 15:].max()


def settings_of(path, **values):
    return tiny.settings_of(seq_len=24, batch_size=4, synthetic_world="natural", extra_seqs=8,
                            real_folds=path, **values)


def test_half_of_the_folds_are_real_and_a_step_is_always_the_same(tmp_path):
    path = saved(tmp_path / "f.npz", **chains([20] * 40))
    source, twin = (batches.open_source(settings_of(path, orientations=True)) for _ in range(2))
    assert "37 real chains, 3 held out" in source.describe()
    assert "learns nothing" in batches.open_source(settings_of(None, orientations=True)).describe()
    found = [source.batch(step) for step in range(8)]
    assert all(torch.equal(found[3][key], twin.batch(3)[key]) for key in found[3])
    real = torch.cat([batch["coord_mask"] for batch in found])[:, -1] == 0  # chains of 20 have a tail of 4
    bins = torch.cat([batch["orientations"] for batch in found])
    assert 8 <= real.sum() <= 24 and bins.dtype == torch.int8
    assert (bins[~real] == IGNORED).all() and (bins[real][:, 20:] == IGNORED).all()
    off = ~torch.eye(20, dtype=torch.bool)
    assert (bins[real][:, :20, :20][:, off] >= 0).all()
    unseen = [source.world.piece(np.random.default_rng(seed), True) for seed in range(99)]
    assert {round(p.backbone[0, CA, 1] / 8) for p in unseen if not p.known[-1]} == {0, 16, 32}
    plain = batches.open_source(settings_of(None)).batch(0)
    assert "orientations" not in plain and (plain["coord_mask"] == 1).all()


def test_what_cannot_be_used_is_one_line_each(tmp_path):
    good = chains([30] * 4)
    (tmp_path / "text.npz").write_bytes(b"a b c")
    changed = dict(lacking={"index": None}, residues={"index": good["index"][1:]},
                   offset={"offset": good["offset"][::-1]}, related={"near_families": np.ones(4, bool)},
                   **{f"atom{k}": {"xyz": np.where(np.arange(5)[:, None] == k, MISSING, good["xyz"])}
                      for k in range(5)})
    for name, change in changed.items():
        arrays = {key: value for key, value in (good | change).items() if value is not None}
        saved(tmp_path / f"{name}.npz", **arrays)
    assert RealFolds(str(tmp_path / "atom3.npz"), 24)  # O alone may be missing
    for name in {"absent", "text", *changed} - {"atom3"}:
        with pytest.raises(UserError, match=f"^--real-folds .*{name}.npz: [^\n]*$"):
            RealFolds(str(tmp_path / f"{name}.npz"), 24)
