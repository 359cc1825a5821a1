"""What real alignments are learned from: validation families, batches of the world `natural`, coevolution."""
import math

import pytest
import torch
from torch.nn.functional import one_hot

import tiny_openfold_v2 as tof
from tests.support import require_shared
from tiny_openfold.proteins import batches, coevolution, files

SMALL = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
             seq_len=12, batch_size=2, extra_seqs=16)
COUPLINGS = dict(coevolution="couplings")


def settings_of(**values):
    return tof.PROGRAM.settings(**{**SMALL, **values})


def trainer_of(**values):
    return tof.Trainer(tof.PROGRAM, settings_of(**values), torch.device("cpu"))


def test_validation_families_are_neither_trained_on_nor_held_out():
    source = batches.open_source(settings_of(
        data=str(require_shared("data", "families")), holdout="1PTF_A", validate_fraction=0.25,
        **COUPLINGS))
    validation = {family.name for family in source.validation}
    assert len(validation) == 8 and "1PTF_A" not in validation and not validation & set(source.names)
    assert len(source.names) == 23
    groups = source.evaluation()
    assert list(groups) == ["training", "validation", "held_out"]
    assert {name for name, _ in groups["validation"]} == validation
    name, batch = next(iter(source.evaluation()["held_out"]))
    family = source.structure(name)
    assert batch["extra_msa"].shape == (1, min(len(family.msa), 4096), family.length)
    extra = {row.tobytes() for row in batch["extra_msa"][0].numpy()}
    assert {row.astype(np.uint8).tobytes() for row in batch["msa_tokens"][0].numpy()} <= extra


def test_natural_batches_are_a_function_of_their_step():
    settings = settings_of(**COUPLINGS, synthetic_world="natural")
    source = batches.open_source(settings)
    first, again = source.batch(3), batches.open_source(settings).batch(3)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert first["extra_msa"].shape == (2, 16, 12) and first["extra_msa"].dtype == torch.uint8
    assert not torch.equal(first["coords"], source.batch(4)["coords"])
    depths = {int((batch["extra_msa"] != files.GAP).any(2).sum(1).max())
              for batch in map(source.batch, range(20))}
    assert depths == {4, 8, 16}  # never fewer rows than the MSA representation has
    held_out = dict(source.evaluation()["held_out"])
    assert list(held_out) == [f"synthetic-{i}" for i in range(16)]
    held_out["synthetic-0"].pop("coords")  # as an evaluation does
    assert "coords" in dict(source.evaluation()["held_out"])["synthetic-0"]


def test_padding_changes_no_feature():
    msa = torch.randint(0, 22, (1, 30, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.full((1, 34, 12), files.GAP)
    padded[:, :30, :9] = msa
    mask = (torch.arange(12) < 9).float()[None]
    plain, more = coevolution.pair_features(msa), coevolution.pair_features(padded, mask)
    assert torch.allclose(plain, more[:, :9, :9], atol=2e-3)
    assert not more[:, 9:].any() and not more[:, :, 9:].any()


def test_the_model_reads_them_and_alone_is_what_it_was():
    plain, reading = trainer_of(), trainer_of(**COUPLINGS)
    batch = batches.open_source(reading.settings).batch(0)
    rows = batch["extra_msa"].clone()
    first = reading.model(**batch)["pair_repr"]
    batch["extra_msa"] = rows.flip(1)  # the order of rows does not matter
    assert torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-3)
    batch["extra_msa"] = rows.roll(1, 2)
    assert not torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-2)
    with pytest.raises(KeyError):
        plain.model.state_dict()["coevolution_embedding.weight"]
    reading.step(batch), reading.step(batch)  # heads begin with zeros
    weight = reading.model.coevolution_embedding.weight
    assert reading.optimizer.state[weight]["exp_avg"].abs().sum() > 0


def test_inverse_by_newton_is_the_inverse():
    """The GPU's way, on a CPU: matrix products alone."""
    class Elsewhere(torch.Tensor):
        is_cuda = True

    letters = torch.randint(0, 21, (200, 8), generator=torch.Generator().manual_seed(0))
    matrix = 0.5 * torch.cov(one_hot(letters, 21).flatten(1).float().T) + 0.02 * torch.eye(168)
    found = coevolution.inverse(matrix[None].as_subclass(Elsewhere)).as_subclass(torch.Tensor)[0]
    assert (found @ matrix - torch.eye(168)).abs().max() < 1e-3
    assert math.isclose(found.trace().item(), torch.linalg.inv(matrix).trace().item(), rel_tol=1e-4)


@pytest.mark.gpu
def test_statistics_on_a_gpu_are_those_of_a_cpu():
    rows = torch.randint(0, 21, (2, 64, 24), generator=torch.Generator().manual_seed(0))
    before = torch.backends.cuda.matmul.allow_tf32
    there = coevolution.pair_features(rows.cuda()).cpu()
    assert torch.allclose(there, coevolution.pair_features(rows), atol=5e-3, rtol=1e-3)
    assert torch.backends.cuda.matmul.allow_tf32 is before
