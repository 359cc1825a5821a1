"""What a training step needs at least, beside what steps take."""
import os
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny_openfold_v2 as tof
from fusion_lab.measuring.probe import probe
from fusion_lab.training import machine
from tiny_openfold.proteins.costs import costs, least_bytes

SIZES = dict(device="cpu", seq_len=8, num_seqs=6, batch_size=2, num_blocks=2, msa_dim=24, pair_dim=16)


@pytest.mark.parametrize("fused", [False, True])  # the outer product sums in another order
def test_flops_are_those_that_torch_counts(fused):
    settings = tof.PROGRAM.settings(**{**SIZES, "batch_size": 1, "seq_len": 24})
    fusion = replace(tof.PROGRAM.fusion_config.baseline(), enable_opm_fusion=fused)
    assert fusion.weight_first(1, 6, 24, settings.model.outer_product_dim, None) is fused
    batch = tof.PROGRAM.data(settings).batch(0)
    with FlopCounterMode(display=False) as counter:
        tof.TinyOpenFoldV2(settings.model, fusion).for_loss(**batch)
    counted = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    found = costs(settings.model, fusion, settings.training)
    heads = found.pop("heads").flops
    assert heads == counted["TinyOpenFoldV2.distogram_head"] + counted["TinyOpenFoldV2.masked_msa_head"]
    assert {name: cost.flops for name, cost in found.items()} == {
        name: 2 * counted[f"TinyOpenFoldV2.blocks.0.{name}"] for name in found}


def test_bytes_are_those_of_the_passes_of_ideal_kernels():
    """A kernel with the projections, one with the core, one with the output, gate and residual; of the MSA
    tensor (9,216 bytes), the pair tensor (8,192), biases of four heads (2,048) and the outer product's sides
    (32 wide, 12,288)."""
    settings = tof.PROGRAM.settings(**SIZES)
    found = costs(settings.model, tof.PROGRAM.fusion_config.baseline(), settings.training)
    msa, pair, bias, sides = 9216, 8192, 2048, 12288
    attention = [4 + 4 + 3, 5 + 8 + 5]  # x, q k v | q k v, o | o, x twice; backward with gradients of each
    expected = dict(
        msa_row_attention=[attention[0] * msa + pair + 2 * bias, attention[1] * msa + 2 * pair + 3 * bias],
        msa_column_attention=[attention[0] * msa, attention[1] * msa],
        msa_transition=[2 * msa, 3 * msa],
        outer_product_mean=[pair + msa + 4 * sides, pair + 3 * msa + 6 * sides],
        triangle_mult_outgoing=[(3 + 3 + 3) * pair, (5 + 5 + 5) * pair],
        triangle_attn_starting=[attention[0] * pair + 2 * bias, attention[1] * pair + 3 * bias],
        pair_transition=[2 * pair, 3 * pair])
    for name, (forward, backward) in expected.items():
        assert (found[name].forward_bytes, found[name].backward_bytes) == (2 * forward, 2 * backward), name
    half = costs(settings.model, settings.fusion, settings.having(use_amp=True).training)
    assert half["pair_transition"].forward_bytes == 2 * pair


@pytest.mark.parametrize("blocks, flags, tensors", [
    (1, {}, 337_920), (3, {}, 3 * 337_920), (3, dict(enable_activation_checkpointing=True), 337_920 + 52_224),
    (3, dict(enable_selective_checkpointing=True), 337_920 + 52_224)])
def test_the_least_memory_by_hand(blocks, flags, tensors):
    """30 pair tensors of 8,192 bytes and 10 MSA tensors of 9,216 are kept for each block, or for one, and of
    each the two that it begins with. A weight and its gradient are 8 bytes."""
    settings = tof.PROGRAM.settings(**{**SIZES, "num_blocks": blocks}, **flags)
    weights = 18 * 24 ** 2 + 30 * 16 ** 2 + 32 ** 2 * 16
    assert least_bytes(settings) == 8 * blocks * weights + tensors


@pytest.mark.parametrize("sizes", [
    dict(num_blocks=1), dict(num_blocks=2, num_seqs=64),
    dict(num_blocks=3, enable_activation_checkpointing=True),
    dict(num_blocks=3, enable_selective_checkpointing=True)], ids=str)
def test_a_step_takes_more_than_its_least_memory_and_fits_where_one_says_so(sizes):
    settings = tof.PROGRAM.settings(device="cpu", seq_len=32, batch_size=1, **sizes)
    trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
    peak = probe(trainer, tof.PROGRAM.data(settings).batch(0)).peak
    least = tof.TinyOpenFoldV2.least_bytes(settings)
    assert least < peak < machine.ROOM * least


@pytest.mark.parametrize("size, mode", [
    ("--seq-len", []), ("--pair-dim", []), ("--num-blocks", ["--compare-fusion"]),
    ("--batch-size", ["--verify-accuracy"])])
def test_what_cannot_fit_is_refused_before_anything_is_made_or_moved(size, mode, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "earlier").touch()
    where = ["--device", "cpu", "--profile-dir", str(tmp_path / "out"), "--force"]
    assert tof.main([size, "100000000", *mode, *where]) == 2
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["earlier"]
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.count(size) == 2
    fitting = line.rpartition(f"{size} ")[2].split()[0]
    settings = tof.PROGRAM.settings(**{size[2:].replace("-", "_"): int(fitting)})
    machine.require_memory(tof.PROGRAM, torch.device("cpu"), settings)
