"""--fold: files and figures of a whole run, the page in a browser, what is refused."""
import base64
import json
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from tests.proteins.folds_at_hand import SEQUENCE, a_fold, certain
from tests.proteins.structures import CODES, atom, write_model
from tests.support import PATIENCE, ROOT, code_of, require_shared
from tests.tiny import model_of, save_model
from tiny_openfold.proteins import (
    files,
    fold_pictures,
    fold_prediction,
    folding,
    maps,
    prediction,
    structure_files,
    structure_metrics,
)

LINE = dict(intercept=0.0, slope=1.0, uncertain_share=0.84, measured_on="some")


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """In a directory with x.a3m and m.pt; a model that knows the fold, few steps."""
    monkeypatch.chdir(tmp_path)
    for name, value in dict(TRACES=4, CHOSEN=2, TRACE_STEPS=40, FOLD_STEPS=120).items():
        monkeypatch.setattr(folding, name, value)
    (tmp_path / "x.a3m").write_text(f">x\n{SEQUENCE}\n>y\n{SEQUENCE[:9]}{'-' * 15}\n")
    save_model(tmp_path / "m.pt", model_of(), dict(about="for tests"))
    run_model = prediction.run_model

    def knowing(*given):
        found = run_model(*given)
        whole = len(found["distances"]) == len(SEQUENCE)
        return found | (dict(distogram_logits=certain(a_fold(), SEQUENCE)) if whole else {})
    monkeypatch.setattr(prediction, "run_model", knowing)
    return tmp_path


def run(*argv):
    return code_of(tof.main, "--fold", *argv, "--resume", "m.pt", "--device", "cpu")


def write_truth(path):
    """x.pdb, with a residue left out."""
    lines = [atom(name, CODES[SEQUENCE[number]], "A", number + 5, xyz)
             for number, residue in enumerate(a_fold().tolist()) if number != 3
             for name, xyz in zip(("N", "CA", "C", "O", "CB"), residue, strict=True)
             if (SEQUENCE[number], name) != ("G", "CB")]
    return write_model(path, *lines)


@pytest.mark.parametrize("tm_score, said", [(0.7, "probably have the same fold"), (0.4, "differ")])
def test_a_score_is_said_in_words(tm_score, said, capsys):
    scores = dict(tm_score=tm_score, lddt_ca=0.5, rmsd=3.0, residues_compared=24)
    fold_prediction.print_scores(scores, a_map()[0])
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_run_with_a_structure(setup, capsys):
    pytest.importorskip("gemmi")
    pytest.importorskip("matplotlib")
    write_truth(setup / "x.pdb")
    assert run("x.a3m", "--structure", "x.pdb:A", "-o", "out") == 0
    out = capsys.readouterr().out
    result = json.loads((setup / "out" / "x.json").read_text())
    assert {path.name for path in (setup / "out").iterdir()} == {f"x.{kind}" for kind in
                                                                 ("pdb", "png", "html", "json")}
    assert set(result["files"]) == {f"out/x.{kind}" for kind in ("pdb", "png", "html")}
    found, = files.read_structure("out/x.pdb")
    known = np.arange(len(SEQUENCE)) != 3
    expected = structure_metrics.compared(found.backbone[known, 1].astype(float),
                                          a_fold()[known, 1].numpy())
    assert result["scores"] == pytest.approx(expected, abs=2e-3) and expected["lddt_ca"] > 0.8
    assert result["scores"]["residues_compared"] == 23 and "TM-score" in out
    assert result["mode"] == "fold" and result["other_hand"] > 0.2
    assert result["longest_peptide_bond"] < 1.4 and result["worst_overlap"] < 0.5
    assert result["plddt"] == pytest.approx(np.mean(result["plddt_by_residue"]), abs=0.01)
    assert result["plddt_calibrated_on"] is None and "not measured" in out
    with open("out/x.pdb", encoding="ascii") as file:
        factors = [float(line[60:66]) for line in file if line[:4] == "ATOM" and line[13:15] == "CA"]
    assert factors == pytest.approx(result["plddt_by_residue"], abs=0.01)
    assert json.loads(out.splitlines()[-1])["scores"] == result["scores"]
    assert (setup / "out" / "x.png").read_bytes()[:4] == b"\x89PNG"

    first = (setup / "out" / "x.pdb").read_bytes()
    assert run("x.a3m", "-o", "other", "--seed", 7) == 0 and run("x.a3m", "-o", "again") == 0
    assert (setup / "other" / "x.pdb").read_bytes() != first  # a seed is a fold
    assert (setup / "again" / "x.pdb").read_bytes() == first


def test_a_fold_never_takes_the_place_of_the_structure_that_it_is_compared_with(setup, capsys):
    pytest.importorskip("gemmi")
    write_truth(setup / "x.pdb")
    before = (setup / "x.pdb").read_bytes()
    assert run("x.a3m", "--structure", "x.pdb:A", "-o", ".") == 2
    assert "place of x.pdb" in capsys.readouterr().err and (setup / "x.pdb").read_bytes() == before


@pytest.mark.parametrize("sequence", ["M", "MK", "MKT"])
def test_the_shortest_chains(setup, sequence, capsys):
    (setup / "s.a3m").write_text(f">s\n{sequence}\n")
    assert run("s.a3m") == 0
    lines = (setup / "fold" / "s.pdb").read_text().splitlines()
    assert sum(line[:4] == "ATOM" for line in lines) == 5 * len(sequence)
    result = json.loads((setup / "fold" / "s.json").read_text())
    assert result["residues"] == len(result["plddt_by_residue"]) == len(sequence)
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("does not say what this model was tested on") == 1
    assert result["untested"] == "" and "OUTSIDE" not in "".join(lines)  # which only its card could say
    assert json.loads(said.out.splitlines()[-1])["mode"] == "fold"


def test_a_fold_that_is_not_finite_is_not_written(setup, monkeypatch):
    monkeypatch.setattr(folding, "folded", lambda *given: SimpleNamespace(atoms=a_fold() * float("nan")))
    assert run("x.a3m") == 1 and not list((setup / "fold").iterdir())


# --- What is said and written ----------------------------------------------------------------------------


def test_plddt_is_lower_at_the_residues_of_low_confidence(monkeypatch):
    """Residues 3, 4 and 24, counted from 1, keep what the card says of what the others' distances promise."""
    found, _ = a_map()
    found.output.update(distogram_logits=certain(a_fold(), SEQUENCE))
    made = SimpleNamespace(atoms=a_fold().float(), energy=-2.0, terms={}, gap=0.5)
    monkeypatch.setattr(folding, "folded", lambda *given: made)
    sure, unsure = (dict(low_confidence=low, rows_used=2, untested="", seconds={}, card=dict(plddt=LINE))
                    for low in ([], [3, 4, 24]))
    for result in (sure, unsure):
        fold_prediction.fold_one(torch.arange(64) / 3 + 2, 0, found, result)
    shares = np.array(unsure["plddt_by_residue"]) / np.array(sure["plddt_by_residue"])
    assert shares == pytest.approx([0.84 if n in (3, 4, 24) else 1 for n in range(1, 25)], abs=1e-3)


def test_what_can_be_checked_of_a_chain():
    made = SimpleNamespace(atoms=a_fold().float(), energy=-2.0, terms=dict(a=1.0), gap=0.5)
    said = fold_prediction.quality(made, SEQUENCE)
    assert said["longest_peptide_bond"] == pytest.approx(1.33, abs=0.01) and said["worst_overlap"] < 0.5
    made.atoms[12:] += 3.0  # the second half into the air, and its end onto the beginning
    made.atoms[-1] = made.atoms[0]
    said = fold_prediction.quality(made, SEQUENCE)
    assert said["longest_peptide_bond"] > 3 and said["worst_overlap"] > 2.5


def test_a_pdb_file_is_read_back_and_has_the_formats_columns(tmp_path):
    path, atoms, plddt = tmp_path / "x.pdb", a_fold().numpy(), np.linspace(3, 97, len(SEQUENCE))
    structure_files.write_pdb(path, "a name, 'quoted'\n" + 99 * "\u00e9", SEQUENCE, atoms, plddt, ["y" * 99])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all(len(line) <= 80 for line in lines) and lines[-1] == f"{'END':80}"
    assert "\u00c9" in "".join(lines) and lines[-2].startswith("TER")  # a name keeps its letters
    assert [line[6:19] for line in lines if line[:6] == "SEQRES"] == ["   1 A   24  ", "   2 A   24  "]
    serials = [int(line[6:11]) for line in lines if line.startswith(("ATOM", "TER"))]
    assert serials == [*range(1, len(serials) + 1)]
    first = next(line for line in lines if line.startswith("ATOM"))
    assert first[12:16] == " N  " and first[60:66] == "  3.00" and first[76:78] == " N"
    pytest.importorskip("gemmi")
    found, = files.read_structure(path)
    assert files._letters(found.sequence) == SEQUENCE and found.predicted
    assert found.backbone == pytest.approx(atoms[:, :4], abs=1e-3)
    assert found.numbers.tolist() == [str(number) for number in range(1, 25)]
    structure_files.write_pdb(path, "x", "XG", -999.5 + 0 * atoms[:2], [7.0, 100.0])
    first, *_, last = [line for line in path.read_text().splitlines() if line.startswith("ATOM")]
    assert first[17:20] == "UNK" and first[30:54] == "-999.500" * 3 and last[60:66] == "100.00"


# --- The page -------------------------------------------------------------------------------------------


def a_map(size=24, name="DATA NOTES </script><b>"):
    """(Prediction without a structure, atoms (L, 5, 3)) of a fold."""
    from tiny_openfold.proteins.contacts import Prediction
    atoms, msa = a_fold().numpy()[:size], files._tokens(SEQUENCE[:size].encode())[None]
    distances = torch.from_numpy(np.linalg.norm(atoms[:, None, 4] - atoms[:, 4], axis=-1))
    protein = files.Protein(name, msa, np.full((size, 3), np.nan))
    return Prediction(protein, dict(contact_probability=torch.eye(size), distances=distances)), atoms


def a_page(path, size=24, **changes):
    """(text, atoms, distances)"""
    m, atoms = a_map(size)
    result = dict(residues=size, rows=2, rows_used=2, extra_rows_used=0, effective_rows=1.5, plddt=50.0,
                  untested="<few> rows", low_confidence=[2, 3], remarks=["a <prediction>"], trained_on=True,
                  relative=dict(name="<i>", e_value=1e-9, trained=True),
                  scores=dict(tm_score=0.51, lddt_ca=0.61, rmsd=2.0), model="/home/me/m.pt",
                  command="python '<x>' '/home/me/a b/x.a3m' /home/me/b.pdb:A")
    fold_pictures.write_page(path, m, atoms, np.linspace(20, 95, size), result | changes)
    return path.read_text(encoding="utf-8"), atoms, m.distances


def test_a_page_holds_the_fold_and_needs_no_network(tmp_path):
    text, atoms, distances = a_page(tmp_path / "x.html")
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1])
    places = np.array(data["places"])
    assert structure_metrics.rmsd(places, atoms[:, 1]) < 0.01  # turned, and not mirrored
    for seed in range(8):  # half of these need one axis turned round, lest the page shows a mirror image
        points = np.random.default_rng(seed).normal(size=(5, 3))
        assert np.linalg.det(fold_pictures.turned(points)[1:4] - fold_pictures.turned(points)[0]) == \
            pytest.approx(np.linalg.det(points[1:4] - points[0]))
    spread = places.std(axis=0)
    assert spread[0] > spread[1] > spread[2] and np.abs(places.mean(axis=0)).max() < 0.01
    tenths = np.frombuffer(base64.b64decode(data["distances"]), np.uint8).reshape(24, 24)
    assert tenths == pytest.approx(10 * distances.clip(0, 25.5), abs=0.51)
    assert data["plddt"] == pytest.approx(np.linspace(20, 95, 24), abs=0.051)
    assert data["low"] == [2, 3] and data["numbers"] == [str(n) for n in range(1, 25)]
    assert data["secondary"].count("H") >= 12 and data["sequence"] == SEQUENCE
    assert "DATA NOTES &lt;/script&gt;&lt;b&gt;" in text and text.count("</script>") == 1
    assert "&lt;x&gt;" in text and " x.a3m b.pdb:A<" in text and "&lt;i&gt;" in text
    assert "/home/me" not in text  # a page is passed on
    assert data["near_to_far"] == [*maps.NEAR_TO_FAR]
    assert text.index("Roughly right overall") < text.index("mean pLDDT 50")
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_a_fold_is_drawn_coloured_by_plddt(monkeypatch):
    """Near over far, through every residue, with outlines that overlap; a gap where residues are missing."""
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure
    (m, atoms), axis = a_map(), Figure().subplots()
    monkeypatch.setattr(fold_pictures, "secondary_structure", lambda _, backbone: (
        12 * "H" + 12 * "-" if np.array_equal(backbone, atoms[:, :4]) else 24 * "-"))
    places, plddt = fold_pictures.turned(atoms[:, 1].astype(float)), np.repeat([95.0, 75, 55, 30], 6)
    fold_pictures.draw_fold(axis, "a fold", m.protein.sequence, atoms, places, fold_pictures.colours(plddt))
    strokes = axis.collections[1::2]  # each upon its wider outline; five between two residues
    shades = [to_hex(stroke.get_color()[0]).upper() for stroke in strokes]
    assert [stroke.get_linewidths()[0] for stroke in strokes].count(4.5) == 3 + 5 * 11  # of twelve residues
    expected = {"#0053D6": 28, "#65CBF3": 30, "#FFDB13": 30, "#FF7D45": 27}
    assert {shade: shades.count(shade) for shade in expected} == expected
    curve = fold_pictures.smooth(places)

    def drawn(collection):
        """Where the curve a stroke begins, and how many points it has."""
        points = collection.get_segments()[0]
        return int(np.abs(curve[:, :2] - points[0]).sum(1).argmin()), len(points)
    pieces = [drawn(outline) for outline in axis.collections[::2]]
    depth = [curve[k + 1:k + 3, 2].mean() for k, points in pieces if points == 4]
    assert sorted(k for k, _ in pieces) == [0, *range(len(curve) - 2)] and len(depth) == len(curve) - 3
    assert (np.diff(depth) >= -1e-9).all()
    assert [points for k, points in map(drawn, strokes) if 0 < k < len(curve) - 6] == [6] * (len(curve) - 7)
    assert {note.get_text(): note.xy[0] for note in axis.texts} == dict(N=places[0, 0], C=places[-1, 0])
    broken, axis = np.where(np.isin(np.arange(24), [8, 9])[:, None], np.nan, places), Figure().subplots()
    fold_pictures.draw_fold(axis, "a gap", m.protein.sequence, atoms, broken, ["#000000"] * 24)
    assert len(axis.collections) == 2 * 5 * (7 + 13)


def test_a_picture_has_the_map_the_fold_and_the_experiment(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    m, atoms = a_map()
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    known = atoms[:, :4] @ (turn * np.sign(np.linalg.det(turn))) + 7
    known[:2] = np.nan
    m.protein.backbone, figures = known, []
    monkeypatch.setattr(maps, "save", lambda figure, path: figures.append(figure))
    fold_pictures.write_picture(tmp_path / "x.png", m, atoms, np.repeat([95.0, 55.0], 12))
    figure, = figures
    assert [axis.get_title() for axis in figure.axes][1:] == ["predicted fold", "experiment; TM-score 1.00"]
    assert [len(axis.images) for axis in figure.axes] == [1, 0, 0]  # the map
    ours, theirs = (axis.collections[-1].get_segments()[0] for axis in figure.axes[1:])
    assert ours == pytest.approx(theirs, abs=1e-3)  # turned alike
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-2:] == ["pLDDT above 90: very high", "pLDDT 50 to 70: low"]
    monkeypatch.undo()
    fold_pictures.write_picture(tmp_path / "x.png", *a_map(1), np.array([50.0]))  # one residue has no curve
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_warns(tmp_path):
    kinds = [re.findall(r'<p class="(\w*)">', a_page(tmp_path / "x.html", **changes)[0]) for changes in (
        {}, dict(untested="", trained_on=False, scores=None, low_confidence=[], remarks=[],
                 relative=dict(name="a", e_value=1.0, trained=False)))]
    assert kinds == [["", "warning", "warning", "warning", "warning", ""], ["", ""]]


STAND_IN = """
const handlers = {}, strokes = [], made = {};
const any = new Proxy(() => any, {set: () => true, get: (own, key) =>
  key === Symbol.toPrimitive ? () => 300 : key === "lineTo" ? (...given) => strokes.push(given) : any});
const element = name => made[name] ||= {style: {}, clientWidth: 300, getContext: () => any, append() {},
  replaceChildren() {}, setPointerCapture() {}, addEventListener: (kind, act) => handlers[name + kind] = act,
  getBoundingClientRect: () => ({left: 0, top: 0, width: 300, height: 300})};
globalThis.document = {getElementById: element, createElement: element, body: {dataset: {}}};
globalThis.window = {addEventListener() {}};
globalThis.requestAnimationFrame = () => {};
"""
ASKED = """
const count = strokes.length, event = {clientX: 0, clientY: 0, preventDefault() {}};
handlers.foldpointerdown(event);
for (const act of ["foldpointermove", "foldkeydown", "foldwheel", "mappointermove"])
  handlers[act]({...event, clientX: 290, clientY: 10, key: "ArrowLeft", deltaY: 100});
const words = made.pair.textContent, [a, b, c] = turn;
handlers.spanpointerenter();  // the last letter of the sequence
const hand = (a[1] * b[2] - a[2] * b[1]) * c[0] + (a[2] * b[0] - a[0] * b[2]) * c[1]
  + (a[0] * b[1] - a[1] * b[0]) * c[2];
console.log(JSON.stringify({count, hand, turned: a[0] < 0.9, words, one: made.pair.textContent}));
"""


def test_the_pages_script_draws_and_turns_in_node(tmp_path):
    """Without a browser: the script against a stand-in of the page, which counts strokes."""
    node = shutil.which("node") or pytest.skip("needs Node.js: apt-get install nodejs")
    for size in (1, 24):
        text, *_ = a_page(tmp_path / "x.html", size=size)
        script = tmp_path / "x.js"
        script.write_text(STAND_IN + re.search(r"<script>(.*)</script>", text, re.DOTALL)[1] + ASKED)
        done = subprocess.run([node, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["count"] == 2 * 6 * (size - 1) and found["turned"] and found["hand"] > 0.99
        assert f"{SEQUENCE[size - 1]}{size}: pLDDT" in found["one"]
        assert size == 1 or "predicted" in found["words"]


# --- The whole of it ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_alignment_as_a_user_does_it(tmp_path):
    """Of a domain that the model was not trained on, its first 80 residues: all take twice as long."""
    alignment, structure = (require_shared("data", "pairs", name) for name in ("1a3a_A.a3m", "1a3a.pdb"))
    lines = alignment.read_text().splitlines()
    (tmp_path / "1a3a_A.a3m").write_text("\n".join(
        line if line.startswith(">") else re.match("[a-z]*([A-Z-][a-z]*){80}", line)[0] for line in lines))
    command = [sys.executable, ROOT / "tiny_openfold_v2.py", "--fold", "1a3a_A.a3m", "--structure",
               f"{structure}:A", "-o", tmp_path / "o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads((tmp_path / "o" / "1a3a_A.json").read_text())
    assert found["trained_on"] is False and found["residues"] == 80
    assert found["plddt_calibrated_on"].startswith("126 families")
    assert found["scores"]["tm_score"] > 0.5 and found["other_hand"] > 0.5
    assert found["longest_peptide_bond"] < 1.36 and found["worst_overlap"] < 0.6


@pytest.mark.slow
def test_an_interrupt_while_it_folds_ends_it_and_leaves_nothing(setup):
    (setup / "x.a3m").write_text(f">x\n{SEQUENCE * 10}\n")
    command = [sys.executable, ROOT / "tiny_openfold_v2.py", "--fold", "x.a3m", "--resume", "m.pt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("Folding 240 residues") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
        assert process.stderr.read().endswith("interrupted\n")
    assert not list((setup / "fold").iterdir())
