"""Statistics of alignments: weights of rows by hand; mean-field DCA on real families against known figures;
what the model reads of them."""
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from evoformer_kernels.precision import set_tf32_products, strict_float32, tf32_products
from tests.support import require_shared
from tests.tiny import trainer_of
from tiny_openfold.proteins import batches, coevolution, files
from tiny_openfold.proteins.contacts import contact_precision
from tiny_openfold.proteins.files import GAP

A, C, D = range(3)


@pytest.mark.parametrize("block", [2, 4096])  # rows that are compared with all others at a time
def test_rows_that_are_alike_share_their_weight(block, monkeypatch):
    monkeypatch.setattr(coevolution, "BLOCK", block)
    rows = torch.tensor([[[A, A, A, A, A, D], [A, A, A, A, C, D], [A, A, C, C, C, D], [GAP] * 6]])
    mask = torch.tensor([[1.0, 1, 1, 1, 1, 0]])  # the last column does not count: 4 of 5 are alike
    assert coevolution.row_weights(rows, mask).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    assert coevolution.row_weights(rows, torch.ones(1, 6)).tolist() == [[0.5, 0.5, 1.0, 0.0]]  # 5 of 6
    narrow = torch.tensor([[1.0, 0, 1, 1, 1, 0]])  # 3 of 4
    assert coevolution.row_weights(rows, narrow).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_rows_of_gaps_share_no_weight_with_rows_that_are_nearly_such():
    """Padding is rows of gaps alone; a fragment is a gap nearly everywhere, too."""
    fragment = torch.full((1, 1, 10), GAP)
    fragment[..., 0] = 3
    padded = torch.cat([fragment, fragment, torch.full((1, 6, 10), GAP)], dim=1)
    assert coevolution.row_weights(padded, torch.ones(1, 10)).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0]]


# --- Direct coupling analysis ----------------------------------------------------------------------------

def test_indirect_couplings_are_explained_away_and_tables_are_symmetric():
    """Column 1 copies column 0 and column 2 copies column 1, each nine times in ten."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 20, 4000)]
    for _ in range(2):
        columns.append(np.where(rng.random(4000) < 0.9, columns[-1], rng.integers(0, 20, 4000)))
    msa = np.stack([*columns, rng.integers(0, 22, 4000)], axis=1)
    found = coevolution.pair_features(torch.from_numpy(msa)[None])[0]
    tables, strength = found[..., :-1].unflatten(-1, (21, 21)), found[..., -1]
    assert strength[0, 1] > strength[0, 2] + 1 and strength[0, 2] < strength[1, 2]
    assert torch.allclose(tables, tables.permute(1, 0, 3, 2), atol=1e-2) and not tables.diagonal().any()


@pytest.mark.parametrize("name, expected", [("1WVN_A", (0.595, 0.541)), ("1PTF_A", (0.744, 0.651))])
def test_precision_of_dca_on_real_families_is_that_of_another_program(name, expected):
    """P(L/2) of pairs at least 6 and 24 apart, as ../shared/learning/yardstick.py prints it."""
    pytest.importorskip("gemmi")
    stem = require_shared("data", "families", f"{name}.a3m")
    protein = files.load_protein(stem, stem.with_suffix(".pdb"))
    scores, coords = coevolution.mean_field_dca(protein.msa), torch.from_numpy(protein.coords)
    seen = coords.isfinite().all(dim=1).float()
    found = [contact_precision(scores, coords.nan_to_num(), seen, apart)["p_l2"] for apart in (6, 24)]
    assert found == pytest.approx(expected, abs=5e-4)


# --- In the model -----------------------------------------------------------------------------------------

def test_the_model_reads_them_and_alone_is_what_it_was():
    assert "coevolution_embedding.weight" not in trainer_of().model.state_dict()
    reading = trainer_of(seq_len=12, extra_seqs=16, coevolution="couplings")
    batch = batches.open_source(reading.settings).batch(0)
    rows = batch["extra_msa"].clone()
    first = reading.model(**batch)["pair_repr"]
    batch["extra_msa"] = rows.flip(1)  # the order of rows does not matter
    assert torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-3)
    batch["extra_msa"] = rows.roll(1, 2)
    assert not torch.allclose(reading.model(**batch)["pair_repr"], first, atol=1e-2)
    reading.step(batch), reading.step(batch)  # heads begin with zeros
    weight = reading.model.coevolution_embedding.weight
    assert reading.optimizer.state[weight]["exp_avg"].abs().sum() > 0


@pytest.fixture(params=[(torch.backends.cuda.matmul, "allow_tf32", True),
                        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
                        (torch.backends, "fp32_precision", "tf32")])
def tf32_on(request):
    """TF32, switched on in one of torch's three ways: it refuses to tell the first after the others."""
    setattr(*request.param)
    yield
    torch.backends.fp32_precision, torch.backends.cuda.matmul.allow_tf32 = "none", False
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_whoever_switched_tf32_on_finds_it_on(tf32_on):
    assert not strict_float32(torch.float32)
    test_inverse_by_newton_is_the_inverse()  # its last steps run without
    negated = torch.compile(lambda x: x if tf32_products() else -x, fullgraph=True, backend="eager")
    assert tf32_products() and negated(torch.ones(1)) == 1
    set_tf32_products(False)
    assert strict_float32(torch.float32) and negated(torch.ones(1)) == -1


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
    there = coevolution.pair_features(rows.cuda()).cpu()
    assert torch.allclose(there, coevolution.pair_features(rows), atol=5e-3, rtol=1e-3)
