"""RealProteins: shares of a batch, families for validation; depth of built-in alignments."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from tiny_openfold.proteins import batches
from tiny_openfold.proteins.files import GAP


def settings_of(**values):
    sizes = dict(num_blocks=1, num_seqs=4, seq_len=16, batch_size=4, device="cpu")
    return tof.PROGRAM.settings(**{**sizes, **values})


@pytest.fixture
def source_of(monkeypatch):
    """A source of so many families, which differ in their residues."""
    def make(count=12, **values):
        place = np.arange(16)
        families = [SimpleNamespace(
            name=f"f{i}", length=16, msa=((np.arange(5)[:, None] + place + i) % 20).astype(np.uint8),
            coords=np.stack([place, 4.0 * place, 0 * place + i], 1).astype(np.float32)) for i in range(count)]
        monkeypatch.setattr(batches.files, "load_families", lambda path, strays: families)
        return batches.RealProteins(settings_of(data="x", **values))
    return make


def test_ranks_share_a_batch(source_of):
    source = source_of()
    for step in range(3):
        whole, parts = source.batch(step), [source.part(step, rank, 2) for rank in range(2)]
        assert not torch.equal(parts[0]["coords"], parts[1]["coords"])
        for key in ("coords", "msa_tokens"):
            assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


def test_the_seed_draws_the_families_for_validation(source_of):
    drawn = {tuple(family.name for family in source_of(validate_fraction=0.25, seed=seed).validation)
             for seed in range(8)}
    assert len(drawn) > 4 and all(len(names) == 3 for names in drawn)
    again = source_of(validate_fraction=0.25, seed=3).validation
    assert tuple(family.name for family in again) in drawn


@pytest.mark.parametrize("validated, held_out, others, seen", [
    (0.25, None, 10, 10), (0.3, "f0,f1", 14, 14), (0.05, None, 2, 8)])
def test_an_evaluation_looks_at_as_many_training_families(validated, held_out, others, seen, source_of):
    """As for validation and held out together, at least eight."""
    source = source_of(40, validate_fraction=validated, holdout=held_out)
    assert len(source.validation) + len(source.unseen) == others
    assert len(list(source.evaluation()["training"])) == seen


def test_built_in_alignments_have_all_rows_to_an_eighth_equally_often():
    source = batches.NaturalProteins(settings_of(num_seqs=2, synthetic_world="natural", extra_seqs=64,
                                                 coevolution="couplings"))
    source.align = lambda seed, coords, rows: torch.zeros(len(coords), rows, 16, dtype=torch.uint8)
    depths = [int((source.draw([number])[0][0] != GAP).any(1).sum()) for number in range(200)]
    assert set(depths) == {64, 32, 16, 8} and min(map(depths.count, set(depths))) > 25
