"""Built-in folds: the geometry of their pieces, how a chain runs through them, how dense they are."""
import numpy as np
import pytest

from tiny_openfold.proteins import folds


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


def test_a_helix_and_a_strand_have_their_distances():
    helix, strand = folds.helix(12), folds.strand(8)
    assert np.linalg.norm(np.diff(helix, axis=0), axis=1) == pytest.approx(np.full(11, 3.8), abs=0.1)
    assert np.linalg.norm(helix[4:] - helix[:-4], axis=1) == pytest.approx(np.full(8, 6.2), abs=0.2)
    assert np.linalg.norm(np.diff(strand, axis=0), axis=1) == pytest.approx(np.full(7, 3.76), abs=0.02)
    assert np.linalg.norm(folds.side_chains(helix)[1:-1] - helix[1:-1], axis=1) == pytest.approx(
        np.full(10, folds.CB_LENGTH), rel=0.25)


def test_layers_are_the_layouts_with_their_gaps():
    """Sheets of strands and layers of helices, each centred, 9.8 Å apart, for about so many residues."""
    rng, found, room = np.random.default_rng(0), [], dict(e=9.5, h=17.0)
    for _ in range(400):
        positions = folds.slots(rng, 150)
        levels = sorted({z for _, _, z in positions})
        assert np.diff(levels) == pytest.approx(9.8) and np.mean(levels) == pytest.approx(0)
        layout = []
        for level in levels:
            kinds, places = zip(*((kind, x) for kind, x, z in positions if z == level), strict=True)
            layout.append(kinds[0])
            assert set(kinds) == {kinds[0]} and np.mean(places) == pytest.approx(0) and len(places) > 1
            assert np.diff(places) == pytest.approx(dict(e=4.8, h=9.6)[kinds[0]])
        residues, rounding = sum(room[kind] for kind, *_ in positions), sum(map(room.get, layout)) / 2
        assert abs(residues - 150) < 1.01 * rounding
        found.append(tuple(layout))
    assert [found.count(layout) / 400 for layout in folds.LAYOUTS] == pytest.approx(folds.SHARES, abs=0.06)


def test_a_chain_visits_every_position_and_mostly_one_that_is_near():
    rng, steps = np.random.default_rng(0), []
    positions = [("e", 5.0 * i, 0.0) for i in range(12)]
    for _ in range(100):
        order = folds.route(rng, positions)
        assert sorted(order) == list(range(12))
        steps += np.abs(np.diff(order)).tolist()
    assert 0.4 < np.mean(np.array(steps) == 1) < 0.9
    assert {folds.route(rng, positions)[0] for _ in range(99)} == {*range(12)}
    behind = [("e", 0.0, 0.0), ("e", 0.0, 9.8), ("e", 9.8, 0.0)]  # another layer is nearer than it looks
    second = [folds.route(rng, behind)[1] for _ in range(900)]
    assert second.count(1) > second.count(2)


def test_side_chains_of_a_helix_point_outwards_and_those_of_a_strand_in_turn():
    ca = folds.helix(12)
    cb = folds.side_chains(ca)
    assert (np.hypot(*cb[1:-1, [0, 2]].T) > np.hypot(*ca[1:-1, [0, 2]].T) + 0.5).all()
    ca = folds.strand(8)
    assert (np.sign((folds.side_chains(ca) - ca)[1:-1, 2]) == np.sign(ca[1:-1, 2])).all()


@pytest.mark.parametrize("density, tries", [(0.89, 6), (2.21, 1)])
def test_a_piece_is_as_dense_as_domains_if_a_few_tries_find_one(density, tries, monkeypatch):
    asked, source = [], folds.Folds(0, 20)
    monkeypatch.setattr(folds, "contacts_per_residue", lambda cb: density)
    chain = 10.0 * np.arange(90).reshape(30, 3)
    monkeypatch.setattr(source, "chain", lambda number: asked.append(number) or chain)
    rng, ways = np.random.default_rng(0), []
    for _ in range(50):
        piece = source.piece(rng)
        ways.append(piece[-1, 0] > piece[0, 0])
        assert piece.shape == (20, 3) and piece.dtype == np.float32
        assert np.abs(np.diff(piece, axis=0)) == pytest.approx(30, abs=2)
    assert len(asked) == 50 * tries and 15 < sum(ways) < 35 and max(asked) < source.CHAINS


def test_contacts_of_a_residue_by_hand():
    """Six or more apart along the chain and nearer than 8 Å: of eight residues on a line, none; on a circle
    with sides of 3 Å, the pairs six and seven apart."""
    line = np.arange(8.0)[:, None] * [9.0, 0, 0]
    angle = np.arange(8) * np.pi / 4
    circle = 1.5 / np.sin(np.pi / 8) * np.stack([np.cos(angle), np.sin(angle), 0 * angle], axis=1)
    assert folds.contacts_per_residue(line) == 0 and folds.contacts_per_residue(circle) == 3 / 8
