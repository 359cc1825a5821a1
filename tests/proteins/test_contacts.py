"""Contact precision and its maps: picture and table, the file's numbering."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation
from tiny_openfold.proteins import evaluation, files, maps
from tiny_openfold.proteins.contacts import Prediction
from tiny_openfold.proteins.evaluation import write_map

OTHER = dict(p_l2=1.0, p_l=0.75, chance=0.375, lddt=0.5)  # what an evaluation says of one protein


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


def a_map(name="x", numbers=(), structure=True, **kwargs):
    probability, distances, coords, mask = hairpin(**kwargs)
    coords = np.where(mask[:, None] > 0, coords, np.nan) if structure else np.full((14, 3), np.nan)
    protein = files.Protein(name, np.arange(14)[None] % 20, coords, "B", tuple(numbers))
    return Prediction(protein, dict(contact_probability=probability, distances=distances))


# --- Table and picture ----------------------------------------------------------------------------------

def test_table_holds_every_pair(tmp_path):
    numbers = ["", "5", "6", "6A", *(str(n) for n in range(9, 19))]
    maps.write_table(tmp_path / "x.tsv", a_map(numbers=numbers, unseen=[0]))
    lines = (tmp_path / "x.tsv").read_text().splitlines()
    rows = {tuple(line.split("\t")[-2:]): line.split("\t")[:-2] for line in lines[1:]}
    assert lines[0].split("\t") == [  # what stands where in the rows below
        "number_i", "number_j", "residue_i", "residue_j", "contact_probability",
        "predicted_distance_angstrom", "true_distance_angstrom", "contact", "position_i", "position_j"]
    assert len(rows) == len(lines) - 1 == 14 * 13 // 2
    assert rows["1", "14"] == ["", "18", "A", "Q", "0.9000", "12.00", "", "unknown"]
    assert rows["2", "13"] == ["5", "17", "C", "P", "0.7000", "12.00", "5.00", "yes"]
    assert rows["3", "4"] == ["6", "6A", "D", "E", "0.0000", "12.00", "10.00", "no"]
    assert rows["3", "10"] == ["6", "14", "D", "L", "0.6000", "12.00", "20.62", "no"]  # likely, and wrong
    assert rows["6", "9"] == ["10", "13", "G", "K", "0.0000", "12.00", "5.00", "yes"]  # unlikely, and right


def test_a_picture_marks_right_and_wrong_pairs_and_what_is_missing():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    numbers = ["1", "2", *(str(n) for n in range(10, 22))]
    found = a_map(numbers=numbers, unseen=[5, 6])
    axis, beside = Figure().subplots(1, 2)
    maps.draw_contacts(axis, found)
    right, wrong = (set(zip(line.get_ydata(), line.get_xdata(), strict=True)) for line in axis.lines)
    assert {(0, 13), (1, 12), (3, 10)} <= right and {(0, 8), (2, 9)} <= wrong and len(right | wrong) == 6
    shown = maps.draw_distances(beside, found).get_array()
    assert (shown[0, 13], shown[13, 0], shown[1, 0]) == (12, 5, 10)  # predicted above, true below
    assert shown.mask.sum() == 27 and shown.mask[5:7, :5].all() and not shown.mask[:5, 5:7].any()
    maps.dress(axis, found, "x")
    assert [bool(patch.get_hatch()) for patch in axis.patches] == 2 * [True]  # row and column
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2", "10", "12", "14", "16", "18", "20"]
    labels = [handle.get_label() for handle in maps.draw_contacts(Figure().subplots(), a_map())]
    assert [label[-3:] for label in labels if "right" in label or "wrong" in label] == [": 3", ": 4"]
    maps.draw_contacts(beside, a_map(structure=False))
    assert not a_map(structure=False).missing.any()  # or all of it would be hatched
    assert np.asarray(beside.images[1].get_array())[0, 13] == pytest.approx(1 - 0.7 * 0.9)


# --- Runs ------------------------------------------------------------------------------------------------

def test_a_name_in_any_script_has_its_picture_and_a_failing_one_costs_no_numbers(
        tmp_path, capsys, recwarn, monkeypatch):
    pytest.importorskip("matplotlib")
    name = "$\\x$ 蛋\n白\udcff" + 300 * "n"
    write_map(str(tmp_path / "x"), a_map(name))
    assert capsys.readouterr() == ("", "") and not recwarn.list
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"

    def fail():
        raise ImportError("for another\nnumpy")  # of a broken matplotlib
    monkeypatch.setattr(maps, "require_matplotlib", fail)
    write_map(str(tmp_path / "y"), a_map(name))
    error = capsys.readouterr().err
    assert "for another numpy" in error and error.count("\n") == 1 and (tmp_path / "y.tsv").exists()


@pytest.mark.parametrize("evaluated, asked, draws", [(1, False, False), (2, False, True), (2, True, False)])
def test_the_end_of_a_run_draws_one_protein(evaluated, asked, draws, tmp_path, capsys):
    """One that is held out, if the run was evaluated while it went on; all where maps are asked for."""
    pytest.importorskip("matplotlib")
    probability, distances, coords, coord_mask = hairpin()
    batch = dict(target_tokens=torch.arange(14)[None], coords=coords[None], coord_mask=coord_mask[None])

    class Model(torch.nn.Module):
        def forward(self, target_tokens):
            return dict(contact_probability=probability[None], distances=distances[None])
    source = SimpleNamespace(sequences={}, evaluation=lambda: dict(
        training=iter(()), held_out=iter([(a_map(name).protein, dict(batch)) for name in "yx"])))
    trainer = SimpleNamespace(
        model=Model(), device=torch.device("cpu"), step_number=7, sequences={},
        settings=tof.PROGRAM.settings(plot_contacts=str(tmp_path) if asked else None,
                                      profile_dir=str(tmp_path)))
    (tmp_path / "contacts.tsv").write_text("earlier")
    final = Evaluation("", {}, details=dict(held_out=dict(x=OTHER)))
    on_its_way = {3: Evaluation("", {})} if evaluated > 1 else {}
    evaluation.closing(trainer, source, on_its_way | {"final": final})
    assert "chance 38%" in capsys.readouterr().out.splitlines()[-1] and trainer.model.training
    assert (tmp_path / "contacts.png").exists() is draws and (tmp_path / "x.png").exists() is asked
    assert [path.read_text() for path in tmp_path.glob("*.old-*")] == ["earlier"] * draws


def test_evaluations_are_ranked_by_the_precision_of_validation_families(monkeypatch):
    """Each of the other figures, and of the other families, would choose the second."""
    figures = dict(early=dict(p_l2=0.8, p_l=0.5, chance=0.1, lddt=0.5),
                   late=dict(p_l2=0.7, p_l=0.9, chance=0.2, lddt=0.9))
    batch = dict(coord_mask=torch.ones(1, 14))
    monkeypatch.setattr(evaluation, "run_model", lambda *given: dict(distances=None))
    monkeypatch.setattr(evaluation, "distance_lddt", lambda distances, name: figures[name]["lddt"])
    monkeypatch.setattr(evaluation, "Prediction", lambda name, output: SimpleNamespace(
        precision=figures[name.name], output=output, coords=[name.name]))
    trainer, found = SimpleNamespace(model=torch.nn.Identity(), device=None), {}
    for name in figures:
        proteins = [(a_map(name).protein, batch)]
        source = SimpleNamespace(evaluation=lambda given=proteins: dict(validation=given))
        found[name] = evaluation.evaluate(trainer, source, SimpleNamespace(signal=None))
    assert [found[name].score for name in figures] == [0.8, 0.7]
    assert found["early"].scores == {"validation P(L/2)": 0.8, "validation lDDT": 0.5}
    batch["coord_mask"] = torch.ones(1, 6)  # of which no two are six apart
    assert evaluation.evaluate(trainer, source, SimpleNamespace(signal=None)).scores == {}


def test_the_end_of_a_run_names_held_out_families_whose_relatives_it_learned_from(capsys):
    rng = np.random.default_rng(0)
    own, other = (files._letters(rng.integers(0, 20, 60)) for _ in range(2))
    families = [files.Protein(name, files._tokens(letters.encode())[None], None)
                for name, letters in (("renamed", own), ("new", other), ("skipped", own))]
    trainer = SimpleNamespace(step_number=7, sequences=dict(known=[own]),
                              settings=tof.PROGRAM.settings())
    final = Evaluation("", {}, details=dict(held_out=dict(renamed=OTHER, new=OTHER)))
    evaluation.closing(trainer, SimpleNamespace(sequences=dict(f=[own]), unseen=families), dict(final=final))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "1 have a relative" in last and "renamed" in last and "new" not in last.split(":")[-1]
    evaluation.closing(trainer, SimpleNamespace(sequences={}), dict(final=final))
    assert "relative" not in capsys.readouterr().out  # artificial proteins have none


def test_maps_that_cannot_be_drawn_are_refused_at_once(tmp_path):
    def require(held_out):
        evaluation.require_plots(str(tmp_path / "maps"), held_out)
    with pytest.raises(UserError, match="maps: no protein is held out"):
        require([])
    require(["x"])
    (tmp_path / "maps" / "x.png").write_text("")
    with pytest.raises(UserError, match="x.png"):
        require(["x"])
