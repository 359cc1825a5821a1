"""Contact precision and its maps: picture and table, the file's numbering."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.training.evaluations import Evaluation
from fusion_lab.training.files import UserError
from tests.support import require_shared
from tiny_openfold.proteins import contacts, files, maps
from tiny_openfold.proteins.contacts import contact_map, write_map


def hairpin(size=14, unseen=()):
    """probability, distances, coords, coord_mask: residues i and size-1-i are 5 Å apart, others 10 or more.
    Of the L/2 most probable pairs the ones on the hairpin are right: (0, 13), (1, 12) and (3, 10)."""
    place = np.arange(size)
    arm = np.minimum(place, size - 1 - place)
    coords = torch.tensor(np.stack([10.0 * arm, 5.0 * (place > arm), 0 * place], 1), dtype=torch.float32)
    probability = torch.zeros(size, size)
    for rank, (i, j) in enumerate([(0, 13), (0, 8), (1, 12), (2, 9), (3, 10), (5, 13), (6, 12)]):
        probability[i, j] = probability[j, i] = 0.9 - 0.1 * rank
    mask = torch.ones(size)
    mask[list(unseen)] = 0
    return probability, torch.full((size, size), 12.0), coords, mask


def a_map(name="x", protein=None, **kwargs):
    arrays = hairpin(**kwargs)
    return contact_map(name, protein, torch.arange(len(arrays[3])) % 20, arrays)


def a_protein(numbers):
    return files.Protein("x", np.zeros((1, len(numbers)), np.uint8), None, "B", tuple(numbers))


# --- Numbers as in the file ------------------------------------------------------------------------------

@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_residue_numbers_are_the_files_own(tmp_path, suffix):
    """Negative, with insertion codes, with a residue that the file lacks and one without CB."""
    pytest.importorskip("gemmi")
    from tests.proteins.structures import CODES, as_cif, atom, write_model
    numbers = ["-1", "0", "1", "2", "2A", "2B", "3", "6", "7", "8"]
    sequence = "MKVLAWDERQ"
    path = write_model(tmp_path / "x.pdb", *(
        atom(name, CODES[letter], "B", int(number.rstrip("AB")), (3.8 * place, dy, 0),
             number[-1] if number[-1] in "AB" else " ")
        for place, (number, letter) in enumerate(zip(numbers, sequence, strict=True))
        for name, dy in (("N", 1), ("CA", 0), ("C", -1), ("CB", 1.5)) if (place, name) != (8, "CB")))
    path = as_cif(path) if suffix == ".cif" else path
    (tmp_path / "x.a3m").write_text(f">q\nGG{sequence}\n")
    protein = files.load_protein(tmp_path / "x.a3m", path)
    assert protein.chain == "B" and protein.numbers == ("", "", *numbers)
    assert np.isnan(protein.coords[:, 0]).nonzero()[0].tolist() == [0, 1, 10]


@pytest.mark.parametrize("pair, chain, first, last", [
    (("1a3a_A.a3m", "1a3a.pdb"), "A", "4", "148"), (("3I2Z_A.a3m", "3I2Z_A.pdb"), None, "-1", "69"),
    (("4CUP_A.a3m", "4CUP.cif"), None, "1856", "1970")])
def test_real_structures_keep_their_numbers(pair, chain, first, last):
    pytest.importorskip("gemmi")
    protein = files.load_protein(*(require_shared("data", "pairs", name) for name in pair), chain)
    numbered = [number for number in protein.numbers if number]
    assert len(protein.numbers) == protein.length and (numbered[0], numbered[-1]) == (first, last)


def test_ticks_are_round_numbers_of_the_file():
    numbers = ["", "", *(str(n) for n in range(-1, 52)), "51A", "51B", *(str(n) for n in range(60, 70)), ""]
    places, labels = maps.ticks(numbers)
    assert labels == ["0", "10", "20", "30", "40", "50", "60"]
    assert all(numbers[place] == label for place, label in zip(places, labels, strict=True))
    odd = ["7A", "7B", "7C", "7D"]
    assert maps.ticks(odd) == ([0, 1, 2, 3], odd) and maps.ticks(["", ""]) == ([], [])


# --- Table and picture ----------------------------------------------------------------------------------

def test_table_holds_every_pair(tmp_path):
    protein = a_protein(["", "5", "6", "6A", *(str(n) for n in range(9, 19))])
    maps.write_table(tmp_path / "x.tsv", a_map(protein=protein, unseen=[0]))
    lines = (tmp_path / "x.tsv").read_text().splitlines()
    rows = {tuple(line.split("\t")[-2:]): line.split("\t")[:-2] for line in lines[1:]}
    assert lines[0].split("\t") == list(maps.COLUMNS) and len(rows) == len(lines) - 1 == 14 * 13 // 2
    assert rows["1", "14"] == ["", "18", "A", "Q", "0.9000", "12.00", "", "unknown"]
    assert rows["2", "13"] == ["5", "17", "C", "P", "0.7000", "12.00", "5.00", "yes"]
    assert rows["3", "4"] == ["6", "6A", "D", "E", "0.0000", "12.00", "10.00", "no"]


def test_marked_are_the_pairs_that_precision_counts():
    found = a_map()
    marked = list(zip(*(index.tolist() for index in found.chosen), strict=True))
    assert marked == [(0, 13), (0, 8), (1, 12), (2, 9), (3, 10), (5, 13), (6, 12)]
    assert found.precision["p_l2"] == pytest.approx(3 / 7) and not found.missing.any()
    assert found.numbers == tuple(str(number) for number in range(1, 15))  # a built-in protein has no others
    found = a_map(unseen=[0, 13])
    assert len(found.chosen[0]) == 6 and not {0, 13} & {*found.chosen[0], *found.chosen[1]}
    assert found.missing.nonzero()[0].tolist() == [0, 13]


def test_picture_shows_right_wrong_near_and_missing():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    found = a_map(protein=a_protein(["1", "2", *(str(n) for n in range(10, 22))]), unseen=[5, 6])
    axis = Figure().subplots()
    labels = [handle.get_label() for handle in maps.draw_contacts(axis, found)]
    assert [line.get_marker() for line in axis.lines] == ["o", "D"]
    right, wrong = (set(zip(line.get_ydata(), line.get_xdata(), strict=True)) for line in axis.lines)
    assert {(0, 13), (1, 12), (3, 10)} <= right and {(0, 8), (2, 9)} <= wrong and len(right | wrong) == 6
    assert labels == ["contact (CB < 8 Å)", "|i-j| < 6, not counted", f"top L/2, right: {len(right)}",
                      f"wrong: {len(wrong)}", "no coordinates"]
    image = np.asarray(axis.images[0].get_array())
    colours = [image[pair].tobytes() for pair in ((0, 13), (13, 0), (0, 3), (0, 7))]
    assert colours[0] == colours[1] and len(set(colours)) == 3
    maps.dress(axis, found, "x")
    assert [bool(patch.get_hatch()) for patch in axis.patches] == 2 * [True]  # row and column
    assert axis.get_xlabel() == "residue number in the structure file"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2", "10", "12", "14", "16", "18", "20"]


@pytest.fixture
def saved(monkeypatch):
    """[figure] of what is saved, which is not drawn."""
    figure, found = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **how: found.append(self))
    return found


def test_a_picture_has_contacts_and_distances_side_by_side(saved, tmp_path):
    numbers = ["1", "2", *(str(n) for n in range(10, 22))]
    maps.write_picture(tmp_path / "x.png", a_map("x\n", a_protein(numbers), unseen=[5, 6]))
    contacts, distances, _ = saved[0].axes  # and the colour bar
    title = saved[0].get_suptitle()
    assert "x\ufffd" in title and "chain B" in title and "P(L/2) 0.50" in title and "chance 0.13" in title
    assert len(saved[0].legends[0].get_texts()) == 5
    image, = distances.images
    shown = image.get_array()
    assert (shown[0, 13], shown[13, 0], shown[1, 0]) == (12, 5, 10)  # predicted above, true below
    assert shown.mask.sum() == 27 and shown.mask[5:7, :5].all() and not shown.mask[:5, 5:7].any()
    for axis in (contacts, distances):
        assert (axis.get_xlim(), axis.get_ylim()) == ((-0.5, 13.5), (13.5, -0.5))
        hatched = [patch.get_bbox().extents for patch in axis.patches if patch.get_hatch()]
        assert [hatched[0][[0, 2]].tolist(), hatched[1][[1, 3]].tolist()] == [[4.5, 6.5]] * 2
        assert [*axis.lines[-1].get_xdata(), *axis.lines[-1].get_ydata()] == [-0.5, 13.5] * 2  # the diagonal


def test_a_picture_without_a_structure_has_probabilities_in_grey(saved, tmp_path):
    found = replace(a_map(size=700), precision={}, true=np.full((700, 700), np.nan))
    maps.write_picture(tmp_path / "x.png", found)
    contacts, distances, _ = saved[0].axes
    assert len(contacts.lines[0].get_xdata()) == len(found.chosen[0]) and len(contacts.lines) == 2
    image = np.asarray(contacts.images[0].get_array())
    assert image[0, 13] == pytest.approx(1 - 0.7 * 0.9) and image[0, 300] == pytest.approx(1)
    assert np.array_equal(distances.images[0].get_array(), found.distances)


# --- Runs ------------------------------------------------------------------------------------------------

def test_a_name_in_any_script_has_its_picture(tmp_path, capsys, recwarn):
    pytest.importorskip("matplotlib")
    name = "$\\x$ 蛋\n白\udcff" + 300 * "n"
    write_map(str(tmp_path / "x"), name, None, torch.zeros(14, dtype=int), hairpin())
    assert capsys.readouterr() == ("", "") and not recwarn.list
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_failing_picture_is_a_line_and_the_numbers_are_there(tmp_path, capsys, monkeypatch):
    def fail():
        raise RuntimeError("no\n  font\nhere")
    monkeypatch.setattr(maps, "require_matplotlib", fail)
    write_map(str(tmp_path / "x"), "x\ny", None, torch.zeros(14, dtype=int), hairpin())
    error = capsys.readouterr().err
    assert "no font here" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.tsv"]


# --- What a run says of them -----------------------------------------------------------------------------

OTHER = dict(p_l2=1.0, p_l=0.75, chance=0.375, lddt=0.5)


class OneProtein:
    """A source whose proteins "y" and "x" are the hairpin, and a model that returns it."""
    probability, distances, coords, coord_mask = hairpin()

    def __init__(self):
        self.trained, self.structures = [], []

    def evaluation(self):
        batch = dict(target_tokens=torch.arange(14)[None], coords=self.coords[None],
                     coord_mask=self.coord_mask[None])
        return dict(training=iter(()), held_out=iter([("y", dict(batch)), ("x", dict(batch))]))

    def structure(self, name):
        self.structures.append(name)

    training = True

    def train(self, mode=True):
        self.training = mode

    def eval(self):
        self.training = False

    def __call__(self, target_tokens):
        return dict(contact_probability=self.probability[None], distances=self.distances[None])


@pytest.mark.parametrize("evaluated, asked, found, draws", [
    (1, None, True, False), (2, None, True, True), (2, "maps", True, False), (2, None, False, False)])
def test_the_end_of_a_run_draws_one_protein(evaluated, asked, found, draws, tmp_path, monkeypatch, capsys):
    drawn, source = [], OneProtein()
    monkeypatch.setattr(contacts, "write_map", lambda *given: drawn.append(given))
    monkeypatch.setattr(contacts, "find_spec", lambda name: found and name == "matplotlib")
    trainer = SimpleNamespace(
        model=source, device=torch.device("cpu"), step_number=7, sequences={},
        training=SimpleNamespace(plot_contacts=asked),
        settings=SimpleNamespace(profiler=SimpleNamespace(profile_dir=str(tmp_path))))
    for suffix in contacts.SUFFIXES:
        (tmp_path / f"contacts{suffix}").write_text("earlier")
    final, empty = (Evaluation("", {}, details=dict(held_out=held_out)) for held_out in (dict(x=OTHER), {}))
    evaluations = {"final": final, **({3: Evaluation("", {})} if evaluated > 1 else {})}
    contacts.closing(trainer, source, evaluations)
    *lines, last = capsys.readouterr().out.splitlines()
    assert "after step 7, 100% of" in last and "1 protein" in last and "chance 38%" in last
    path = str(tmp_path / "contacts")
    assert len(lines) == draws and all(f"{path}.png" in line for line in lines)
    assert source.training
    assert [given[:2] for given in drawn] == [(path, "x")] * draws and source.structures == ["x"] * draws
    for *_, tokens, arrays in drawn:
        assert tokens.tolist() == list(range(14)) and len(arrays) == 4
        assert all(torch.equal(a, b) for a, b in zip(arrays, hairpin(), strict=True))
    aside = sorted(p.name.partition(".old-")[0] for p in tmp_path.glob("*.old-*"))
    assert aside == sorted(f"contacts{suffix}" for suffix in contacts.SUFFIXES) * draws
    contacts.closing(trainer, source, {"final": empty})
    assert capsys.readouterr().out == ""


def test_the_end_of_a_run_names_held_out_families_whose_relatives_it_learned_from(capsys):
    rng = np.random.default_rng(0)
    own, other = (files._letters(rng.integers(0, 20, 60)) for _ in range(2))
    proteins = {name: files.Protein(name, files._tokens(letters.encode())[None], None)
                for name, letters in (("renamed", own), ("new", other))}
    trainer = SimpleNamespace(step_number=7, sequences=dict(known=[own]))
    final = Evaluation("", {}, details=dict(held_out=dict(renamed=OTHER, new=OTHER)))
    contacts.closing(trainer, SimpleNamespace(structure=proteins.get), dict(final=final))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "1 have a relative" in last and "renamed" in last and "new" not in last.split(":")[-1]
    contacts.closing(trainer, SimpleNamespace(structure=lambda name: None), dict(final=final))
    assert "relative" not in capsys.readouterr().out  # artificial proteins have none


def test_maps_that_cannot_be_drawn_are_refused_at_once(tmp_path):
    def require(held_out, place="maps"):
        contacts.require_plots(str(tmp_path / place), held_out)
    with pytest.raises(UserError, match="--plot-contacts .*maps: no protein is held out"):
        require([])
    require(["x"])
    (tmp_path / "maps" / "other.png").write_text("")
    require(["x"])
    for suffix in contacts.SUFFIXES:
        (tmp_path / "maps" / f"x{suffix}").write_text("")
        with pytest.raises(UserError, match=f"it holds x{suffix} already; name another one"):
            require(["x"])
        (tmp_path / "maps" / f"x{suffix}").unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        require(["x"], "file")
