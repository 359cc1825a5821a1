"""What the model tells the lab beside its numbers."""
import re
from dataclasses import replace

import torch

from tests.tiny import model_of


def test_what_masks_leave_defined():
    output = dict(msa_repr=torch.ones(1, 2, 3, 4), pair_repr=torch.ones(1, 3, 3, 5),
                  distances=torch.ones(1, 3, 3), loss=torch.tensor(7.0))
    batch = dict(seq_mask=torch.tensor([[1.0, 1, 0]]), row_mask=torch.tensor([[1.0, 0]]))
    found = model_of().defined(output, batch)
    assert found["msa_repr"][0].sum(-1).tolist() == [[4, 4, 0], [0, 0, 0]]
    assert found["pair_repr"][0].sum(-1).tolist() == [[5, 5, 0], [5, 5, 0], [0, 0, 0]]
    assert found["distances"][0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]] and found["loss"] == 7


def test_the_printed_sizes_are_those_of_the_model():
    """Blocks, channels of the MSA and of the pair representation, heads of the one and of the other."""
    model = model_of(num_blocks=3, msa_dim=16, pair_dim=24, msa_heads=2, pair_heads=4)
    assert re.findall(r"\d+", model.in_words(torch.float32)["sizes"]) == ["3", "16", "24", "2", "4"]


def test_sub_layers_are_told_apart_unless_they_are_compiled_as_one():
    model = model_of(num_blocks=2)
    names, layers = zip(*model.sublayers(), strict=True)
    assert names == 2 * model.SUBLAYERS and layers[0] is model.blocks[0].msa_row_attention
    model.fusion = replace(model.fusion, enable_torch_compile=True)
    assert model.sublayers() == []
