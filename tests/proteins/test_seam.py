"""What the lab asks of the Evoformer beside its numbers."""
import torch

import tiny_openfold_v2 as tof


def test_what_masks_leave_defined():
    output = dict(msa_repr=torch.ones(1, 2, 3, 4), pair_repr=torch.ones(1, 3, 3, 5),
                  distances=torch.ones(1, 3, 3), loss=torch.tensor(7.0))
    batch = dict(seq_mask=torch.tensor([[1.0, 1, 0]]), row_mask=torch.tensor([[1.0, 0]]))
    config = tof.TinyOpenFoldConfig(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2)
    found = tof.TinyOpenFoldV2(config).defined(output, batch)
    assert found["msa_repr"][0].sum(-1).tolist() == [[4, 4, 0], [0, 0, 0]]
    assert found["pair_repr"][0].sum(-1).tolist() == [[5, 5, 0], [5, 5, 0], [0, 0, 0]]
    assert found["distances"][0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]] and found["loss"] == 7
