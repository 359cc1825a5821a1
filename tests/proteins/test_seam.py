"""What the lab asks of the Evoformer beside its numbers: errors, masks, words about kernels."""
import torch

import tiny_openfold_v2 as tof

SIZES = dict(msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4)


def model_of(fusion=None, **sizes):
    config = tof.TinyOpenFoldConfig(**{"num_blocks": 1, **sizes})
    return tof.TinyOpenFoldV2(config, fusion or tof.FusionConfig())


def test_what_masks_leave_defined():
    output = dict(msa_repr=torch.ones(1, 2, 3, 4), pair_repr=torch.ones(1, 3, 3, 5),
                  distances=torch.ones(1, 3, 3), loss=torch.tensor(7.0))
    batch = dict(seq_mask=torch.tensor([[1.0, 1, 0]]), row_mask=torch.tensor([[1.0, 0]]))
    found = model_of(**SIZES).defined(output, batch)
    assert found["msa_repr"][0].sum(-1).tolist() == [[4, 4, 0], [0, 0, 0]]
    assert found["pair_repr"][0].sum(-1).tolist() == [[5, 5, 0], [5, 5, 0], [0, 0, 0]]
    assert found["distances"][0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]] and found["loss"] == 7


def test_kinks_are_moved_half_to_either_side():
    model = model_of(**SIZES)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.shake()
    moved = {name: x - before[name] for name, x in model.state_dict().items()}
    inner = [moved.pop(name) for name in before if name.endswith("transition.linear1.bias")]
    assert [x.tolist() for x in inner] == [len(x) // 2 * [8, -8] for x in inner] and len(inner) == 2
    assert not any(x.any() for x in moved.values())


def test_start_lines_name_sizes_kernels_and_counts():
    trainer = tof.Trainer(tof.PROGRAM, tof.PROGRAM.settings(**SIZES, num_blocks=3), torch.device("cpu"))
    lines = trainer.model.in_words(trainer.amp_dtype)
    assert lines["sizes"] == "3 blocks, c_m 8, c_z 8, heads 2 and 2"
    assert lines["last"] == "Kernel Reduction: 80.0% (36 fewer kernels) [nominal]"
    assert lines["remarks"] == dict(enable_flash_attention="math on CPU; columns: sdpa: flash on CPU")
    assert trainer.model.statistics() == trainer.model.get_fusion_statistics()
