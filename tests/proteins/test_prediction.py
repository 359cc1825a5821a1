"""--contacts: predictions for one alignment, their files, the model files they come from."""
import contextlib
import fcntl
import json
import os
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny_openfold_v2 as tof
from fusion_lab.measuring.counters import OpCounter
from fusion_lab.training.checkpoints import snapshot
from fusion_lab.training.errors import UserError
from fusion_lab.training.models import read_model
from tests.proteins import structures
from tests.support import code_of
from tests.tiny import model_of, save_model, trainer_of
from tiny_openfold.proteins import coevolution, contacts, files, folding, maps, prediction
from tiny_openfold.proteins.batches import RealProteins
from tiny_openfold.proteins.relatives import Depth

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVGH"
FLAGS = ["--resume", "m.pt", "--device", "cpu", "-o", "out"]
TESTED = dict(effective_rows=100, residues=[40, 409])
CARD = dict(about="for tests", scores=[0.5, None], tested=TESTED)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pictures but where a test wants them."""
    monkeypatch.setattr(prediction, "find_spec", lambda name: None)


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    model = model_of(num_blocks=2, dropout=0.5)  # of which predictions must see nothing
    for parameter in model.parameters():  # the last layers of residual branches begin at 0
        torch.nn.init.normal_(parameter, std=0.3)
    save_model(tmp_path / "m.pt", model, CARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "m.pt"


def an_alignment(path, rows=20, sequence=SEQUENCE):
    rng = np.random.default_rng(0)
    letters = np.array([*"ACDEFGHIKLMNPQRSTVWY-"])
    drawn = letters[rng.integers(0, 21, (rows - 1, len(sequence)))]
    path.write_text("".join(f">row{i}\n{''.join(row)}\n" for i, row in enumerate([[*sequence], *drawn])))
    return path


def run(*argv):
    return code_of(tof.main, *argv)


def refused(capsys, *argv):
    """The one line of a run that is refused."""
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def rr_pairs(path):
    lines = path.read_text().splitlines()
    body = [line.split() for line in lines if len(line.split()) == 5]
    return lines, [(int(i), int(j), float(p)) for i, j, low, high, p in body if (low, high) == ("0", "8")]


# --- Predictions ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_files_say_what_the_model_says(tmp_path, model_file, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.undo()  # quick
    alignment = an_alignment(tmp_path / "fam.1.a3m")
    monkeypatch.chdir(tmp_path)
    assert run("--contacts", alignment, "--resume", model_file, "--device", "cpu") == 0
    out, stem = capsys.readouterr().out, tmp_path / "contacts" / "fam.1"
    saved = read_model(model_file, tof.PROGRAM)
    model = tof.TinyOpenFoldV2(saved.config).eval()
    model.load_state_dict(saved.weights)
    with torch.no_grad():
        expected = model(torch.from_numpy(files.load_alignment(alignment).msa.astype(np.int64))[None])
    arrays = np.load(f"{stem}.npz")
    assert arrays["sequence"] == SEQUENCE and arrays["name"] == "fam.1"
    assert arrays["numbers"].tolist() == [str(n) for n in range(1, len(SEQUENCE) + 1)]
    for key, name in (("contact_probability", "probability"), ("distances", "distances")):
        assert arrays[name] == pytest.approx(expected[key][0].numpy(), abs=1e-5)

    lines, pairs = rr_pairs(stem.with_name("fam.1.rr"))
    assert lines[:2] == ["PFRMAT RR", "TARGET fam.1"] and lines[-1] == "END" and SEQUENCE in lines
    size = len(SEQUENCE)
    assert len(pairs) == len({(i, j) for i, j, _ in pairs}) == (size - 6) * (size - 5) // 2
    assert all(j - i >= 6 and p == pytest.approx(arrays["probability"][i - 1, j - 1], abs=1e-5)
               for i, j, p in pairs)
    assert all(before[2] >= after[2] for before, after in zip(pairs, pairs[1:], strict=False))
    result = json.loads(stem.with_name("fam.1.json").read_text())
    assert result["card"] == CARD and result["rows_used"] == 20 and "precision" not in result
    assert result["model_config"]["outer_product_dim"] == 4 and "fam.1.rr" in out
    said = json.loads(out.splitlines()[-1])
    assert said["summary_file"] == str(stem) + ".json" and said["files"] == result["files"]
    suffixes = {".npz", ".tsv", ".rr", ".json", ".png"}
    assert {path.name for path in stem.parent.iterdir()} == {f"fam.1{suffix}" for suffix in suffixes}
    assert (stem.with_name("fam.1.png")).read_bytes()[:4] == b"\x89PNG"


def with_structure(tmp_path):
    pytest.importorskip("gemmi")
    lines = structures.model(SEQUENCE, start=5, skip=(12, 13))
    return an_alignment(tmp_path / "x.a3m"), structures.write_model(tmp_path / "x.pdb", *lines)


def test_with_a_structure_there_is_precision_beside_dca(tmp_path, model_file, capsys, monkeypatch):
    monkeypatch.setattr(prediction, "YARDSTICK_ROWS", 3)
    monkeypatch.setattr(contacts, "CONTACT_DISTANCE", 40)  # Å: of a straight chain up to 10 residues touch
    alignment, structure = with_structure(tmp_path)
    assert run("--contacts", alignment, "--structure", f"{structure}:A", *FLAGS) == 0
    out = capsys.readouterr().out
    arrays = np.load(tmp_path / "out" / "x.npz")
    assert arrays["numbers"][0] == "5" and arrays["numbers"][12] == "" and arrays["numbers"][14] == "19"
    protein = files.load_protein(alignment, structure)
    coords = torch.from_numpy(np.nan_to_num(protein.coords))
    mask = torch.from_numpy(np.isfinite(protein.coords[:, 0])).float()
    found = json.loads((tmp_path / "out" / "x.json").read_text())["precision"]
    scores = {"model": torch.from_numpy(arrays["probability"]),
              "mean-field DCA": coevolution.mean_field_dca(prediction.some_rows(protein.msa, 3))}
    assert len(protein.msa) > 3
    assert list(found) == list(scores) and mask.sum() == len(SEQUENCE) - 2
    for method, values in scores.items():
        for separation in (6, 24):
            expected = contacts.contact_precision(values, coords, mask, separation)
            assert found[method][str(separation)] == pytest.approx(expected), method
    assert "L/2 = 16" in out
    assert "'B'" in refused(capsys, "--contacts", alignment, "--structure", f"{structure}:B", *FLAGS)


def test_precisions_stand_below_their_heads(capsys):
    found = contacts.Prediction(files.Protein("x", np.zeros((1, 30), np.uint8), np.zeros((30, 3))), {})
    figures = {"6": dict(p_l2=0.91, p_l=0.72, chance=0.13), "24": dict(p_l2=0.54, p_l=0.35, chance=0.06)}
    prediction.print_precisions(found, {"model": figures, "mean-field DCA": figures})
    _, above, heads, model, dca, chance = capsys.readouterr().out.splitlines()
    ends = [match.end() for match in re.finditer(r"P\(L(/2)?\)", heads)]
    for line, values in ((model, [0.91, 0.72, 0.54, 0.35]), (dca, [0.91, 0.72, 0.54, 0.35]),
                         (chance, [0.13, 0.13, 0.06, 0.06])):
        assert [float(line[end - 5:end]) for end in ends] == values
    assert heads.split() == 2 * ["P(L/2)", "P(L)"] and re.findall(r"\d+", above) == ["6", "24"]


def test_how_many_rows_the_model_saw_is_told(tmp_path, monkeypatch):
    alignment = an_alignment(tmp_path / "x.a3m")
    save_model(tmp_path / "m.pt", model_of(coevolution="couplings"), {})
    monkeypatch.chdir(tmp_path)
    asked = []  # for memory
    monkeypatch.setattr(prediction, "forewarn", lambda config, *given: asked.append(vars(config)))
    assert run("--contacts", alignment, *FLAGS, "--eval-seqs", 5) == 0
    found = json.loads((tmp_path / "out" / "x.json").read_text())
    for sizes in (*asked, found["model_config"]):
        assert (sizes["num_seqs"], sizes["seq_len"]) == (5, len(SEQUENCE)) and len(asked) == 1
    assert (found["rows"], found["rows_used"], found["extra_rows_used"]) == (20, 5, 20)
    assert "--eval-seqs 5" in found["command"] and "--seed" not in found["command"]  # what was given
    # depth is that of all rows that the model reads
    assert found["effective_rows"] == Depth.of(files.load_alignment(alignment).msa).effective
    assert "couplings of 20" in (tmp_path / "out" / "x.rr").read_text()


def test_several_alignments_are_predicted_by_one_model(tmp_path, model_file, capsys, monkeypatch):
    """Files and directories; one that is damaged does not stop the others."""
    (tmp_path / "some").mkdir()
    for name in ("b.a3m", "a.sto"):
        an_alignment(tmp_path / "some" / name)
    (tmp_path / "some" / "b.pdb").write_text("no alignment")
    (tmp_path / "bad.a3m").write_text(">q\nMKT\n>r\nMK\n")
    read = []
    monkeypatch.setattr(prediction, "read_model", lambda *given: read.append(given) or read_model(*given))
    given = ["--contacts", tmp_path / "bad.a3m", tmp_path / "some", an_alignment(tmp_path / "c.a3m")]
    assert run(*given, *FLAGS) == 1 and len(read) == 1
    said = capsys.readouterr()
    assert "bad.a3m: row 2" in said.err and "1 of 4 failed" in said.err.splitlines()[-1]
    last = json.loads(said.out.splitlines()[-1])
    assert (last["predicted"], last["failures"], last["failed"]) == (3, 1, [str(tmp_path / "bad.a3m")])
    lines = [json.loads(line) for line in open(last["summary_file"])]
    assert [line["name"] for line in lines] == ["bad", "a", "b", "c"] and "row 2" in lines[0]["error"]
    assert run("--contacts", tmp_path / "c.a3m", *FLAGS[:-1], tmp_path / "alone") == 0
    alone, among = ((tmp_path / place / "c.rr").read_bytes() for place in ("alone", "out"))
    assert alone == among
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    an_alignment(tmp_path / "stdin.a3m")
    for words, argv in {"would have one name": [tmp_path / "stdin.a3m", "-"],
                        "belongs to one alignment": [tmp_path / "some", "--structure", "x.pdb"],
                        "empty: no alignment": [tmp_path / "empty"]}.items():
        assert words in refused(capsys, "--contacts", *argv, *FLAGS)


def test_several_alignments_are_scored_beside_their_structures(tmp_path, model_file, capsys):
    """Two are; the third has no structure."""
    pytest.importorskip("gemmi")
    (tmp_path / "some").mkdir()
    for name in "abc":
        an_alignment(tmp_path / "some" / f"{name}.a3m")
    for name in "ab":
        structures.write_model(tmp_path / "some" / f"{name}.pdb", *structures.model(SEQUENCE))
    assert run("--contacts", "some", "--structure", "some", *FLAGS) == 1
    said = capsys.readouterr()
    assert "no structure for some/c.a3m" in said.err
    last = json.loads(said.out.splitlines()[-1])
    lines = [json.loads(line) for line in open(last["summary_file"])]
    scores = [line["precision"]["model"]["6"]["p_l2"] for line in lines[:2]]
    assert last["means"]["P(L/2) 6+"] == sum(scores) / 2 and last["failed"] == ["some/c.a3m"]
    assert run("--contacts", "some/a.a3m", "--structure", "some", *FLAGS) == 0
    folds = [dict(scores=dict(tm_score=score, residues_compared=80)) for score in (0.25, 0.75)]
    assert prediction.means_of([*folds, dict(error="row 2"), dict(scores=None)]) == dict(tm_score=0.5)


def test_a_seed_draws_the_rows(tmp_path, model_file):
    alignment, maps = an_alignment(tmp_path / "x.a3m"), []
    for number, seed in enumerate((1, 1, 2)):
        place = tmp_path / str(number)
        assert run("--contacts", alignment, *FLAGS[:-1], place, "--seed", seed, "--eval-seqs", 5) == 0
        maps.append(np.load(place / "x.npz")["probability"])
    assert np.array_equal(maps[0], maps[1]) and not np.array_equal(maps[0], maps[2])


def test_an_alignment_from_a_pipe_as_a_shell_s_process_substitution_gives_it(tmp_path, model_file):
    reading, writing = os.pipe()
    with open(reading):
        with open(writing, "w") as file:
            file.write(an_alignment(tmp_path / "x.a3m").read_text())
        assert run("--contacts", f"/dev/fd/{reading}", *FLAGS) == 0
    assert np.load(tmp_path / "out" / f"{reading}.npz")["sequence"] == SEQUENCE


def test_an_alignment_from_standard_input(tmp_path, model_file, monkeypatch, capsys):
    with open(an_alignment(tmp_path / "x.a3m")) as file:
        monkeypatch.setattr("sys.stdin", file)
        assert run("--contacts", "-", *FLAGS) == 0
    assert np.load(tmp_path / "out" / "stdin.npz")["sequence"] == SEQUENCE
    capsys.readouterr()
    for content, words in (("", "is empty"), (">q\nMKT\n>r\nMK\n", "row 2"), (">q\nACGTACGTACGT\n", "DNA")):
        (tmp_path / "x.a3m").write_text(content)
        with open(tmp_path / "x.a3m") as file:
            monkeypatch.setattr("sys.stdin", file)
            error = refused(capsys, "--contacts", "-", *FLAGS)
        assert "error: standard input: " in error and words in error


@pytest.mark.parametrize("mode", ["--contacts", "--fold"])
def test_a_directory_that_another_prediction_writes_into_is_refused(mode, tmp_path, model_file, capsys):
    alignment = an_alignment(tmp_path / "x.a3m")
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_DIRECTORY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "another run is writing" in refused(capsys, mode, alignment, *FLAGS)
    os.close(other)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("card", [
    dict(plddt=dict(slope=1.0)), dict(plddt=dict(intercept="x", slope=1.0, measured_on="")), dict(plddt=[1]),
    dict(tested=[1]), dict(tested=dict(effective_rows=100, residues=40)),
    dict(about=torch.zeros(1)), dict(trained_on=5), dict(trained_on=[5]), dict(sequences=5),
    dict(sequences=["MK"]), dict(sequences={"a": []}), dict(sequences={"a": ["mk"]})])
def test_a_card_that_says_nonsense_is_named(card, tmp_path, model_file, capsys):
    saved = torch.load(model_file, weights_only=True)
    torch.save(dict(saved, card=card), model_file)
    alignment = an_alignment(tmp_path / "x.a3m")
    assert f"model {model_file.name}: damaged" in refused(capsys, "--contacts", alignment, *FLAGS)
    assert not (tmp_path / "out").exists()


def test_an_earlier_prediction_is_set_aside_before_the_first_file_is_written(tmp_path):
    """Whatever kills a prediction between two files, no file of an earlier one, in either mode, stands beside
    the new ones; the result, which names the others, comes last."""
    stem, seen = tmp_path / "x.1", []

    def write(path, killed=False):
        seen.append({file.name for file in tmp_path.iterdir() if file.suffix in prediction.SUFFIXES})
        if len(seen) == 2 and killed:
            raise KeyboardInterrupt
        with open(path, "w") as file:
            file.write("new")
    for suffixes, killed in (((".rr", ".tsv"), False), ((".pdb", ".html"), True), ((".npz", ".tsv"), True),
                             ((".rr", ".npz"), False)):
        seen.clear()
        with contextlib.suppress(KeyboardInterrupt):
            writers = dict.fromkeys(suffixes, partial(write, killed=killed))
            prediction.finish(str(stem), dict(name="x"), writers, write)
        assert seen[:2] == [set(), {f"x.1{suffixes[0]}"}]
    assert len(list(tmp_path.iterdir())) == 3 + 1 + 1 + 3


def test_a_picture_that_fails_is_no_file_that_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prediction, "find_spec", lambda name: True)
    for draw, written in ((1 / 2, ["x.rr"]), (len, ["x.rr", "x.png"])):  # a number cannot be called
        headline, _ = prediction.finish(str(tmp_path / "x"), dict(name="x"), {".rr": len}, draw)
        assert [os.path.basename(file) for file in headline["files"]] == written
        assert ("x.png" in capsys.readouterr().out) is ("x.png" in written)


@pytest.mark.parametrize("content", ["{}", '{"files": 5}', "no JSON"])
def test_the_users_own_files_stay_and_what_moves_is_said(content, tmp_path, capsys):
    """The true structure may stand beside the alignment, where the results go."""
    for suffix in (".json", ".pdb"):
        (tmp_path / f"x{suffix}").write_text(content)

    def write(path):
        open(path, "w").close()
    prediction.finish(str(tmp_path / "x"), dict(name="x"), {".rr": write}, write)
    said, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Earlier"))
    assert "x.json.old-" in said and "x.pdb" not in said and (tmp_path / "x.pdb").read_text() == content
    prediction.finish(str(tmp_path / "x"), dict(name="x"), {".pdb": write}, write)
    assert "x.pdb.old-" in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.glob("x.pdb.old-*")] == [content]


def test_positions_count_the_residues_of_the_query(tmp_path, model_file, capsys):
    """Whatever its row holds: columns where it has a gap are left out, unknown letters are residues."""
    (tmp_path / "x.fasta").write_text(">other\nMKVWYGHILMTSA\n>q\nM-KX.TUOJ~BZA*\n")
    assert run("--contacts", tmp_path / "x.fasta", *FLAGS, "--query", "q") == 0
    out = capsys.readouterr().out
    assert out.count("3 columns") == 1 and "10 residues" in out
    sequence = "MKXTCXXDEA"
    lines, pairs = rr_pairs(tmp_path / "out" / "x.rr")
    assert sequence in lines and {(i, j) for i, j, _ in pairs} == {(1, 7), (1, 8), (1, 9), (1, 10), (2, 8),
                                                                   (2, 9), (2, 10), (3, 9), (3, 10), (4, 10)}
    for row in (tmp_path / "out" / "x.tsv").read_text().splitlines()[1:]:
        i, j, first, second, *_, place_i, place_j = row.split("\t")
        assert (i, j, first, second) == (place_i, place_j, sequence[int(i) - 1], sequence[int(j) - 1])


def test_residues_without_rows_are_named_on_the_screen_and_in_every_file(
        tmp_path, model_file, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    titles = []
    monkeypatch.setattr(prediction, "find_spec", lambda name: True)
    monkeypatch.setattr(maps, "save", lambda figure, path: titles.append(figure.get_suptitle().split()))
    rng, rows = np.random.default_rng(0), [SEQUENCE]
    for row in rng.integers(0, 20, (60, len(SEQUENCE))):
        rows.append("".join(files.LETTERS[token] for token in row[:20]) + "-" * 8
                    + "".join(files.LETTERS[token] for token in row[28:]))
    (tmp_path / "x.a3m").write_text("".join(f">{i}_consensus\n{row}\n" for i, row in enumerate(rows)))
    assert run("--contacts", tmp_path / "x.a3m", *FLAGS) == 0
    result = json.loads((tmp_path / "out" / "x.json").read_text())
    out, err = capsys.readouterr()
    assert err.startswith("warning: 61 effective rows (") and err.count("\n") == 1
    assert result["low_confidence"] == [*range(21, 29)] and "residues 21-28" in out
    assert out.count("0_consensus, is the consensus") == 1
    assert "8 of 34 columns have fewer than 30 effective rows" in out
    cautions = ("61 effective rows (tested: 100 or more) and 34 residues (tested: ", "wrong throughout",
                "residues 21-28")
    remarks = [line.split(" ", 1) for line in rr_pairs(tmp_path / "out" / "x.rr")[0] if "REMARK" in line]
    assert all(words in " ".join(line for _, line in remarks) for words in cautions)
    for name, value in dict(TRACES=4, CHOSEN=2, TRACE_STEPS=1, FOLD_STEPS=1).items():
        monkeypatch.setattr(folding, name, value)
    assert run("--fold", tmp_path / "x.a3m", *FLAGS) == 0
    assert len(titles) == 2 and all(words in " ".join(title) for title in titles for words in cautions)


@pytest.mark.parametrize("coevolution", ["none", "couplings"])
def test_long_alignments_are_subsampled_as_in_the_trainers_evaluation(tmp_path, coevolution):
    alignment, structure = with_structure(tmp_path)
    an_alignment(alignment, rows=600)
    protein = files.load_protein(alignment, structure)
    tokens = prediction.model_input(protein, tof.TinyOpenFoldConfig(), 512, 42)["msa_tokens"][0]
    assert tokens.shape == (512, len(SEQUENCE)) and torch.equal(tokens[0], torch.from_numpy(protein.msa[0]))
    settings = tof.PROGRAM.settings(msa=str(alignment), structure=str(structure), eval_seqs=100, seed=7,
                                    coevolution=coevolution)
    _, batch = next(RealProteins(settings).evaluation()["training"])
    found = prediction.model_input(protein, settings.model, 100, 7)
    assert found.keys() <= batch.keys() and torch.equal(found["msa_tokens"], batch["msa_tokens"])
    if coevolution != "none":  # all rows, of which the order does not matter
        assert sorted(found["extra_msa"][0].tolist()) == sorted(batch["extra_msa"][0].tolist())


@pytest.mark.parametrize("sequence", ["M", "MKTAYIA", 2 * SEQUENCE])
def test_chains_of_any_length(tmp_path, model_file, capsys, sequence):
    alignment = an_alignment(tmp_path / "a b.aln.a3m", rows=1, sequence=sequence)
    assert run("--contacts", alignment, *FLAGS) == 0
    path, = (tmp_path / "out").glob("*.rr")
    lines, pairs = rr_pairs(path)
    assert len(pairs) == sum(range(len(sequence) - 5)) and lines[1] == "TARGET a_b.aln"
    assert "".join(lines[lines.index("MODEL 1") + 1:-1 - len(pairs)]) == sequence
    assert ("No two residues are 6 apart" in capsys.readouterr().out) is (len(sequence) < 7)


def test_checkpoints_of_any_switches_serve(tmp_path):
    maps, alignment = [], an_alignment(tmp_path / "x.a3m")
    for number, fusion in enumerate(({}, dict(enable_projection_fusion=True, enable_flash_attention=False))):
        trainer = trainer_of(**fusion)
        trainer.step(tof.PROGRAM.data(trainer.settings).batch(0))
        torch.save(snapshot(trainer), tmp_path / f"{number}.pt")
        saved = read_model(tmp_path / f"{number}.pt", tof.PROGRAM)
        assert run("--contacts", alignment, "--resume", tmp_path / f"{number}.pt", "--device", "cpu", "-o",
                   tmp_path / str(number)) == 0
        maps.append(np.load(tmp_path / str(number) / "x.npz")["probability"])
        assert saved.card == dict(step=0, trained_on=[], sequences={}, chosen_by=[])
    assert maps[0] == pytest.approx(maps[1], abs=1e-4) and maps[0].std() > 0


def test_what_cannot_be_used_is_one_line(tmp_path, model_file, capsys, monkeypatch):
    alignment, usual = an_alignment(tmp_path / "x.a3m"), ["--resume", model_file, "--device", "cpu"]
    (tmp_path / "bad.a3m").write_text(">q\nMKT\n>r\nMK\n")
    (tmp_path / "bad.pt").write_bytes(model_file.read_bytes()[:-100])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prediction, "MODEL", "no-model.pt")
    for words, argv in {
            "bad.a3m: row 2": ["--contacts", "bad.a3m", *usual],
            "model bad.pt: damaged": ["--contacts", alignment, "--resume", "bad.pt"],
            "-o bad.a3m: results go into a directory": ["--contacts", alignment, *usual, "-o", "bad.a3m"],
            "no-model.pt; name a model file or a checkpoint by --resume": ["--contacts", alignment]}.items():
        assert words in refused(capsys, *argv)
    monkeypatch.setattr(prediction, "free_memory", lambda device: 1000)
    assert "GB are free" in refused(capsys, "--contacts", alignment, *usual, "-o", "o")
    assert not (tmp_path / "contacts").exists() and not list((tmp_path / "o").iterdir())


@pytest.mark.parametrize("mode", ["--contacts", "--fold"])
def test_predictions_that_are_not_finite_are_not_written(mode, tmp_path, model_file, capsys, monkeypatch):
    forward = tof.TinyOpenFoldV2.forward

    def spoilt(*inputs, **named):
        found = forward(*inputs, **named)
        return {**found, "distances": found["distances"] / 0 * 0}
    monkeypatch.setattr(tof.TinyOpenFoldV2, "forward", spoilt)
    assert run(mode, an_alignment(tmp_path / "x.a3m"), *FLAGS) == 1 and not list((tmp_path / "out").iterdir())
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("length, rows, coevolution", [(100, 512, "none"), (300, 64, "couplings")])
def test_the_memory_that_is_foretold_is_what_the_model_takes(length, rows, coevolution, dtype):
    config = tof.TinyOpenFoldConfig(msa_dim=64, pair_dim=128, num_blocks=2, num_seqs=rows, seq_len=length,
                                    coevolution=coevolution)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig()).eval()
    fake, autocast = FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", dtype, bool(dtype))
    with fake, torch.no_grad(), autocast:
        batch = dict(msa_tokens=torch.zeros(1, rows, length, dtype=torch.int64))
        if coevolution != "none":
            batch["extra_msa"] = torch.zeros(1, 1000, length, dtype=torch.uint8)
        with OpCounter() as counter:
            model(**batch)
    assert prediction.needs(config, dtype) == pytest.approx(counter.peak, rel=0.25)


def test_memory_that_a_cpu_keeps_counts(monkeypatch):
    config, gigabytes = tof.TinyOpenFoldConfig(seq_len=100, num_seqs=64), 10 * 2 ** 30
    monkeypatch.setattr(prediction, "needs", lambda config, dtype: gigabytes * config.num_seqs / 64)
    monkeypatch.setattr(prediction, "free_memory", lambda device: gigabytes)
    prediction.forewarn(config, torch.device("cuda"), None)
    with pytest.raises(UserError, match="lower --eval-seqs"):  # a CPU keeps what is freed, in pieces
        prediction.forewarn(config, torch.device("cpu"), None)
    monkeypatch.setattr(prediction, "free_memory", lambda device: gigabytes / 65)
    with pytest.raises(UserError) as refusal:  # fewer rows would not help
        prediction.forewarn(tof.TinyOpenFoldConfig(seq_len=100, num_seqs=1), torch.device("cuda"), None)
    assert "--eval-seqs" not in str(refusal.value)
