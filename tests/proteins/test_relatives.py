"""What an alignment can tell is said before a model reads it; what is no protein is refused; relatives are
found by alignment, and others are not."""
import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.errors import UserError
from fusion_lab.training.models import read_model
from tests.proteins import structures
from tests.support import require_shared
from tests.tiny import flags_of, model_of, save_model
from tiny_openfold.models import UNCERTAIN_SHARE, completed
from tiny_openfold.proteins import files, prediction, relatives
from tiny_openfold.proteins.confidence import line_of
from tiny_openfold.proteins.files import AMINO_ACIDS, GAP, LETTERS, UNKNOWN
from tiny_openfold.proteins.relatives import Depth, learned_from, local_scores, nearest, profile, relative

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
MYOGLOBIN = "VLSEGEWQLVLHVWAKVEADVAGHGQDILIRLFKSHPETLEKFDRFKHLKTEAEMKASEDLKKHGVTVLTALGAILKKKGHHEAELKP"


def tokens(letters):
    return np.array([LETTERS.index(letter) for letter in letters], np.uint8)


@pytest.mark.parametrize("query, refused", [
    ("ACGTTGCAACGTACGGT", True), ("ACGGCCAAGGCC", True), ("ACGTNNACGTACGTACGTAA", True), ("X" * 30, True),
    ("MKT" + "X" * 4, True), (UBIQUITIN, False), ("M", False), ("ACGTACGTA", False), ("MKXX", False),
    ("GAGAGAGAGAGAGAGAGA", False), ("DTASDAAAAAALTAANAKAAAELTAANAAAAAAATAR", False)])  # silk, antifreeze
def test_what_is_no_protein_is_refused_and_proteins_of_few_letters_pass(query, refused):
    with pytest.raises(UserError, match="^x.a3m: ") if refused else contextlib.nullcontext():
        relatives.require_protein(tokens(query), "x.a3m")


def test_depth_by_hand():
    """Three rows alike count as one, a fourth is another; of 10 columns one is filled by the query alone."""
    msa = np.stack([tokens("ACDEFGHIKL"), tokens("ACDEFGHIK-"), tokens("ACDEFGHIK-"), tokens("WWWWWYYYY-")])
    depth = Depth.of(np.concatenate([msa, np.repeat(msa[3:], 16, axis=0)]))
    assert depth == Depth(20, pytest.approx(2), pytest.approx(181 / 200), tuple(range(10)), 10)
    assert "2.0 effective rows of 20" in str(depth)
    assert depth.effective == pytest.approx(relatives.sequence_weights(msa).sum()) and GAP in msa


def test_columns_that_few_rows_fill_are_thin():
    """40 rows, all different, fill the first three columns, 29 of them the fourth, the query the fifth; 30
    fill the sixth, which are enough."""
    msa = np.random.default_rng(0).integers(0, 20, (40, 50)).astype(np.uint8)
    msa[29:, 3] = GAP
    msa[1:, 4] = msa[30:, 5] = GAP
    depth = Depth.of(msa)
    assert depth.effective == 40 and depth.thin == (3, 4) and "2 of 50 columns" in str(depth)
    assert depth.uncertain == []  # these are too few
    msa[1:, 40:45] = GAP
    assert Depth.of(msa).uncertain == [*range(40, 45)]
    assert relatives.stretches([1, 2, 3, 8, 10, 11]) == "1-3, 8, 10-11"


def test_many_rows_that_are_all_fragments_leave_every_residue_uncertain(capsys):
    """104 rows are enough as a whole, but no column is filled by more than 27 of them."""
    msa, rng = np.full((104, 200), GAP, np.uint8), np.random.default_rng(0)
    for quarter in range(4):
        msa[quarter::4, 50 * quarter:50 * quarter + 50] = rng.integers(0, 20, (26, 50))
    msa[0] = np.arange(200) % 20
    batch = dict(msa_tokens=torch.from_numpy(msa)[None])
    depth, untested, _ = prediction.judge(files.Protein("x", msa, None), batch, {}, (100.0, 40, 409))
    assert untested == "" and depth.uncertain == [*range(200)]
    assert "residues 1-200" in capsys.readouterr().out


@pytest.mark.parametrize("effective, residues, words", [
    (100, 40, []), (250.5, 409, []), (99.9, 100, ["100 effective rows"]), (200, 410, ["410 residues"]),
    (1.2, 1, ["1 effective row ", "1 residue "]),
    (12, 12, ["12 effective rows", "12 residues"])])
def test_what_was_not_tested_is_named(effective, residues, words):
    depth = Depth(300, effective, 1.0, (), residues)
    untested = depth.untested((100.0, 40, 409))
    assert bool(untested) is bool(words) and all(word in untested for word in words)
    assert depth.untested(relatives.tested_on({})) == ""  # of a model whose card does not say it


def test_a_relative_is_found_by_its_sequence_whatever_its_name():
    rng = np.random.default_rng(0)
    card = dict(trained_on=["other"], sequences=dict(a=[MYOGLOBIN], ubiquitin=["A" * 50, UBIQUITIN]))
    homologue = tokens(UBIQUITIN)
    homologue[rng.permutation(len(homologue))[:35]] = rng.integers(0, 20, 35)  # about half identical
    found = relative(homologue[None], "query", card)
    assert found["name"] == "ubiquitin" and found["trained"] and found["e_value"] < 1e-3
    stranger = relative(rng.permutation(homologue)[None], "ubiquitin", card)  # the name says nothing
    assert not stranger["trained"] and stranger["e_value"] > 1e-3
    assert nearest(tokens(MYOGLOBIN[10:60])[None], card["sequences"])[0] == "a"


def test_an_e_value_counts_what_chance_finds_among_as_many(monkeypatch):
    """P(score > 50) of one of 10 residues is 1 - exp(-0.01 * 10 * exp(-0.3 * 50)) = 3.059e-8."""
    monkeypatch.setattr(relatives, "fitted", lambda *given: (0.3, 0.01))
    monkeypatch.setattr(relatives, "local_scores", lambda profile, sequences: np.array(
        [20.0] * 2 + [50.0] + [5.0] * (len(sequences) - 3)))
    for count in (3, 30):
        own = {f"f{i}": ["ACDEFGHIKL"] for i in range(count)}
        name, e_value = relatives.nearest(np.arange(10, dtype=np.uint8)[None], own)
        assert (name, e_value) == ("f2", pytest.approx(count * 3.059e-8, rel=1e-3))


def test_the_distribution_of_scores_by_chance_is_fitted():
    """P(score > x) is 1 - exp(-0.02 * length * exp(-0.3 * x))."""
    rng, lengths = np.random.default_rng(0), np.repeat([50, 200], 10_000)
    scores = -np.log(-np.log(rng.random(20_000)) / (0.02 * lengths)) / 0.3
    assert relatives.fitted(scores, lengths) == pytest.approx((0.3, 0.02), rel=0.03)


def test_families_without_sequences_leave_it_open_whether_there_is_a_relative():
    query, known = tokens(UBIQUITIN)[None], dict(ubiquitin=[UBIQUITIN])
    for card, expected in (({}, (None, False)), (dict(trained_on=["q"]), ("q", True)),
                           (dict(trained_on=["z"]), (None, None)),
                           (dict(trained_on=["z", "ubiquitin"], sequences=known), ("ubiquitin", True)),
                           (dict(trained_on=["z", "m"], sequences=dict(m=[MYOGLOBIN])), ("m", None)),
                           (dict(trained_on=["m"], sequences=dict(m=[MYOGLOBIN])), ("m", False))):
        found = relative(query, "q", card)
        assert (found["name"], found["trained"]) == expected, card


def test_a_family_is_known_by_its_query_and_its_consensus():
    family = files.Protein("f", np.stack([tokens("ACDX"), tokens("GCD-"), tokens("GCE-")]), None)
    assert learned_from([family]) == dict(f=["ACDX", "GCDX"])


def test_the_shipped_model_knows_its_families_by_sequence():
    card = completed(read_model(prediction.MODEL, tof.PROGRAM).card)
    assert set(card["sequences"]) == set(card["trained_on"])
    assert relative(tokens(UBIQUITIN)[None], "x", card)["trained"]  # 2BWF_A is a ubiquitin-like domain
    assert {"bins", "error", "pairs"} <= set(card["calibration"])
    assert relatives.tested_on(card) == (100, 40, 409) and line_of(card)[2] == UNCERTAIN_SHARE == 0.84
    assert line_of({}) == (0, 1, 1, None)


# --- Alignment of a profile ------------------------------------------------------------------------------

def test_the_table_is_blosum62():
    table = relatives.blosum62()
    score = {a + b: table[i, j] for i, a in enumerate(AMINO_ACIDS) for j, b in enumerate(AMINO_ACIDS)}
    assert [score[pair] for pair in ("WW", "CC", "AA", "YF", "IV", "WP", "DE")] == [11, 9, 4, 3, 3, -4, 2]
    assert np.array_equal(table, table.T) and table.sum() == -426
    odds = np.exp(relatives.SCALE * table) * np.outer(relatives.BACKGROUND, relatives.BACKGROUND)
    assert odds.sum() == pytest.approx(1, abs=1e-3)  # which is what its scale means


def slow_score(columns, sequence):
    """Smith and Waterman's recurrence with gaps of every length tried, one cell at a time."""
    best = np.zeros((len(columns) + 1, len(sequence) + 1))
    for i, j in itertools.product(range(1, len(columns) + 1), range(1, len(sequence) + 1)):
        gaps = [best[i - k, j] - relatives.OPEN - k * relatives.EXTEND for k in range(1, i + 1)]
        gaps += [best[i, j - k] - relatives.OPEN - k * relatives.EXTEND for k in range(1, j + 1)]
        best[i, j] = max(0, best[i - 1, j - 1] + columns[i - 1, sequence[j - 1]], *gaps)
    return best.max() / relatives.UNIT


def test_scores_are_those_of_smith_and_waterman():
    """Sequences that lie one behind the other do not touch each other, and gaps on both sides are tried."""
    rng = np.random.default_rng(0)
    query = rng.integers(0, 20, 40)
    columns = profile(query[None].astype(np.uint8))
    of_one_row = relatives.blosum62()[query]
    assert columns[:, :20] / relatives.UNIT == pytest.approx(of_one_row, abs=0.6)
    inserted = np.insert(query, 20, rng.integers(0, 20, 3))
    sequences = [query, inserted, np.delete(query, [18, 19, 20]), query[::-1], rng.integers(0, 20, 30),
                 query[20:], query[:20], np.array([UNKNOWN, GAP]), query[5:6]]
    found = local_scores(columns, sequences)
    assert found == pytest.approx([slow_score(columns, sequence) for sequence in sequences])
    assert found[1] > found[5] + 10 and found[2] > found[5] + 10  # across the gap
    assert found[0] - found[1] == 11 + 3  # what BLAST asks for a gap of three
    assert local_scores(columns, [*[query[:1]] * 30_000, inserted])[-1] == found[1]  # whatever comes before


def halves(family):
    """Two families of the rows of one, with other queries."""
    order = np.argsort((family.msa[1:] == GAP).sum(axis=1), kind="stable") + 1  # whole ones first
    parts = []
    for k in range(2):
        msa = family.msa[order[k::2]]
        msa = msa[:, msa[0] != GAP]
        parts.append(dataclasses.replace(family, name=f"{family.name}/{k}", msa=msa))
    return parts


def test_halves_of_real_families_find_each_other():
    pytest.importorskip("gemmi")
    names = ["1WVN_A", "2O9S_A", "1GUU_A", "1UCS_A", "1U2H_A", "2PND_A"]
    stems = [require_shared("data", "families", f"{name}.a3m") for name in names]
    first, second = zip(*(halves(files.load_protein(stem, stem.with_suffix(".pdb"))) for stem in stems),
                        strict=True)
    others = {half.name: [half.sequence] for half in second}
    for half, name in zip(first, names, strict=True):
        found, e_value = nearest(half.msa, others)
        assert found == f"{name}/1" and e_value < relatives.RELATED, name
    strangers = {name: own for name, own in others.items() if name[:4] not in ("1U2H", "2PND")}
    assert nearest(first[0].msa, dict(list(others.items())[1:]))[1] > relatives.RELATED
    immunoglobulin = first[4].msa  # of the I-set; the V-set is a relative
    assert nearest(immunoglobulin, strangers)[1] > relatives.RELATED
    assert nearest(immunoglobulin, strangers | {"2PND_A/1": others["2PND_A/1"]})[1] < relatives.RELATED


# --- The whole of --contacts ------------------------------------------------------------------------------


@pytest.fixture
def setup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prediction, "find_spec", lambda name: None)  # no picture
    save_model("m.pt", model_of(), dict(trained_on=["z"], sequences=dict(z=[UBIQUITIN])))
    (tmp_path / "x.a3m").write_text(f">q\n{UBIQUITIN}\n")


def test_a_tuned_model_knows_the_relatives_of_both_trainings(setup, tmp_path, capsys):
    """Those that its first model was trained on, and its own under any file name; so does a resumed run."""
    pytest.importorskip("gemmi")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.a3m").write_text(f">q\n{MYOGLOBIN}\n")
    structures.write_model(tmp_path / "mine" / "own.pdb", *structures.model(MYOGLOBIN))
    usual = flags_of(data="mine", seq_len=16, num_seqs=1, batch_size=1, warmup_steps=0,
                     save_checkpoint="tuned.pt")
    assert tof.main([*usual, "--num-steps", "1", "--init-from", "m.pt"]) == 0
    assert tof.main([*usual, "--num-steps", "2", "--resume", "tuned.pt"]) == 0
    (tmp_path / "y.a3m").write_text(f">other\n{MYOGLOBIN}\n")
    for path, name in (("x.a3m", "z"), ("y.a3m", "own")):
        capsys.readouterr()
        assert tof.main(["--contacts", path, "--resume", "tuned.pt", "--device", "cpu"]) == 0
        assert f"trained on a relative, {name} (E-value" in capsys.readouterr().out
        result = json.loads((tmp_path / "contacts" / f"{path[0]}.json").read_text())
        assert result["trained_on"] is True and result["relative"]["name"] == name and result["coverage"] == 1
