"""Options of training on proteins: what goes together, and which switches do nothing where."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from evoformer_kernels import limits
from tiny_openfold.proteins.options import TrainingConfig


@pytest.mark.parametrize("values, words", [
    (dict(holdout="A"), "holdout = 'A': needs --data"),
    (dict(data="d", holdout="A", holdout_fraction=0.0), "holdout = 'A': allowed without --holdout-fraction"),
    (dict(data="d", holdout_fraction=1.0), "holdout_fraction = 1.0: must be less than 1.0"),
    (dict(msa="x"), "msa = 'x': must come together with --structure"),
    (dict(structure="x"), "structure = 'x': must come together with --msa or --contacts or --fold"),
    (dict(output="o"), "output = 'o': needs --contacts or --fold"),
    (dict(query="q"), "query = 'q': needs --msa"),
    (dict(data="d", validate_fraction=0.0), "validate_fraction = 0.0: must be at least 1e-06"),
    (dict(data="d", save_best="b"), "save_best = 'b': needs --validate-fraction"),
    (dict(data="d", msa="x", structure="x"), "msa = 'x': allowed without --data only"),
    (dict(data="d", synthetic_world="natural"), "synthetic_world = 'natural': not with real proteins"),
    (dict(real_folds="f"), "real_folds = 'f': needs --synthetic-world natural")])
def test_what_does_not_go_together(values, words):
    with pytest.raises(ValueError) as caught:
        TrainingConfig(**values)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("sizes", [
    {}, dict(batch_size=1), dict(batch_size=1, num_seqs=17), dict(seq_len=128),
    dict(seq_len=128, num_seqs=32), dict(seq_len=128, num_seqs=33)], ids=str)
def test_opm_fusion_is_idle_where_the_plain_order_runs(sizes, on_gpu):
    """What the flags are judged by, and what the model does; float32 on a GPU counts multiplications."""
    settings = tof.PROGRAM.settings(**sizes)
    module = tof.FusedEvoformerBlock(settings.model, settings.fusion).outer_product_mean
    shape = settings.training.batch_size, settings.model.num_seqs, settings.model.seq_len, 32
    runs = module.weight_first(SimpleNamespace(shape=shape, is_cuda=on_gpu, dtype=torch.float32,
                                               device=torch.device("cpu")))
    assert settings.idle_reasons(on_gpu) == ([] if runs else ["opm-fusion changes nothing at these sizes"])
    assert ("enable_opm_fusion" in settings.in_use(on_gpu)) == runs


@pytest.mark.parametrize("switches, sizes, word", [
    (dict(enable_master_weights=True), dict(amp=False), "--use-amp"),
    (dict(attention_backend="sdpa", enable_flash_attention=False), {}, "attention"),
    (dict(enable_triton_attention=True), {}, ""), (dict(enable_triton_triangle=True), {}, ""),
    (dict(enable_triton_triangle=True), dict(amp=False), "--use-amp"),
    (dict(enable_triton_triangle=True), dict(pair_dim=96), "96"),
    (dict(enable_triton_relu=True), dict(pair_dim=96), "48 or 96"),
    (dict(enable_triton_attention=True), dict(pair_dim=96), ""),  # one between library projections
    (dict(enable_triton_attention=True), dict(msa_dim=256, pair_dim=512, heads=1), "256 or 512"),
    (dict(enable_triton_attention=True, attention_backend="sdpa"), {}, "gives way"),
    (dict(enable_triton_outer_layout=True, enable_opm_fusion=True), dict(rows=15), "re-associated"),
    (dict(enable_triton_outer_layout=True), dict(rows=15, side=12), ""),
    (dict(enable_triton_weight_gradients=True), {}, "torch.compile"),
    (dict(enable_triton_triangle=True), dict(gpu=False), "GPU")])
def test_a_switch_that_does_nothing_is_named(switches, sizes, word, monkeypatch):
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    given = dict(pair_dim=128, msa_dim=48, heads=4, side=32, rows=16, amp=True, gpu=True) | sizes
    heads = given["heads"]
    model = tof.TinyOpenFoldConfig(msa_dim=given["msa_dim"], pair_dim=given["pair_dim"], msa_heads=heads,
                                   pair_heads=heads, outer_product_dim=given["side"], num_seqs=given["rows"])
    chosen = dict(use_amp=given["amp"], batch_size=1, enable_opm_fusion=False) | switches
    found = replace(tof.PROGRAM.settings(**chosen), model=model).idle_reasons(given["gpu"])
    assert len(found) == bool(word) and word in "".join(found)
