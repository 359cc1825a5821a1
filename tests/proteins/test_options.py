"""Options of training on proteins: what goes together, and which switches do nothing where."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.kernels import limits
from tiny_openfold.proteins.options import TrainingConfig


@pytest.mark.parametrize("values, words", [
    (dict(holdout="A"), "holdout = 'A': needs --data"),
    (dict(holdout_fraction=0.1), "holdout_fraction = 0.1: needs --data"),
    (dict(data="d", holdout="A", holdout_fraction=0.0), "holdout = 'A': allowed without --holdout-fraction"),
    (dict(data="d", holdout_fraction=1.0), "holdout_fraction = 1.0: must be less than 1.0"),
    (dict(msa="x"), "msa = 'x': must come together with --structure"),
    (dict(structure="x"), "structure = 'x': must come together with --msa or --contacts or --fold"),
    (dict(output="o"), "output = 'o': needs --contacts or --fold"),
    (dict(query="q"), "query = 'q': needs --msa"),
    (dict(validate_fraction=0.5), "validate_fraction = 0.5: needs --data"),
    (dict(data="d", validate_fraction=0.0), "validate_fraction = 0.0: must be at least 1e-06"),
    (dict(data="d", validate_fraction=1.0), "validate_fraction = 1.0: must be less than 1.0"),
    (dict(data="d", early_stopping=2), "early_stopping = 2: needs --validate-fraction"),
    (dict(data="d", save_best="b"), "save_best = 'b': needs --validate-fraction"),
    (dict(data="d", msa="x", structure="x"), "msa = 'x': allowed without --data only"),
    (dict(data="d", synthetic_world="natural"), "synthetic_world = 'natural': not with real proteins"),
    (dict(msa="x", structure="x", synthetic_world="natural"), "synthetic_world = 'natural': not with real "),
    (dict(real_folds="f"), "real_folds = 'f': needs --synthetic-world natural"),
    (dict(init_from="a", resume="b"), "init_from = 'a': allowed without --resume only")])
def test_what_does_not_go_together(values, words):
    with pytest.raises(ValueError) as caught:
        TrainingConfig(**values)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("values", [
    dict(data="d", holdout="A"),
    dict(data="d", holdout_fraction=0.1, validate_fraction=0.5, early_stopping=2, save_best="b"),
    dict(msa="x", structure="x", query="q", min_coordinates=1.0),
    dict(synthetic_world="natural", real_folds="f"),
    dict(contacts=["x"], structure="x", query="q", output="o"),
    dict(fold=["x"], structure="x", output="o"), dict(fold=["x"], query="q")])
def test_what_goes_together(values):
    assert vars(TrainingConfig(**values)).items() >= values.items()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("sizes", [
    {}, dict(batch_size=1), dict(batch_size=1, num_seqs=17), dict(seq_len=128),
    dict(seq_len=128, num_seqs=32), dict(seq_len=128, num_seqs=33)], ids=str)
def test_opm_fusion_is_idle_where_the_plain_order_runs(sizes, on_gpu):
    """What the flags are judged by, and what the model does; float32 on a GPU counts multiplications."""
    settings = tof.PROGRAM.settings(**sizes)
    module = tof.FusedEvoformerBlock(settings.model, settings.fusion).outer_product_mean
    shape = settings.training.batch_size, settings.model.num_seqs, settings.model.seq_len, 32
    runs = module.weight_first(SimpleNamespace(shape=shape, is_cuda=on_gpu, dtype=torch.float32))
    assert settings.idle(on_gpu) == ([] if runs else ["opm-fusion changes nothing at these sizes"])
    assert ("enable_opm_fusion" in settings.in_use(on_gpu)) == runs


def test_idle_triton_kernels_say_what_they_need(monkeypatch):
    def idle(pair_dim=128, use_amp=True, on_gpu=True, msa_dim=48, heads=4, rows=16, samples=4, **switches):
        model = tof.TinyOpenFoldConfig(msa_dim=msa_dim, pair_dim=pair_dim, msa_heads=heads, pair_heads=heads,
                                       num_seqs=rows)
        given = dict(use_amp=use_amp, batch_size=samples, enable_opm_fusion=False) | switches
        settings = tof.PROGRAM.settings(**given)
        return replace(settings, model=model).idle(on_gpu)
    attention, triangle = dict(enable_triton_attention=True), dict(enable_triton_triangle=True)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    assert idle() == idle(**attention) == idle(**triangle) == idle(48, **attention) == []
    relu = dict(enable_triton_relu=True)
    assert idle(**relu) == []  # for the pair tensor it has one
    assert idle(use_amp=False, **triangle) == [
        "Triton kernels need --use-amp: float32 is more exact without them"]
    assert idle(96, **attention, **triangle, **relu) == [  # attention has one between library projections
        "triton-triangle has no kernel for 96 channels",
        "triton-relu has no kernel for 48 or 96 channels"]
    assert idle(256, msa_dim=256, heads=1, **attention) == []  # the bias of MSA rows has one
    assert idle(512, msa_dim=256, heads=1, **attention) == [
        "triton-attention has no kernel for heads of 256 or 512 channels"]
    assert idle(msa_dim=128, heads=128, **attention) == []
    layout = dict(enable_triton_outer_layout=True)
    assert idle(96, **layout) == idle(rows=16, samples=1, **layout) == []
    assert idle(rows=15, samples=1, **layout) == []
    assert idle(rows=15, samples=1, enable_opm_fusion=True, **layout) == [
        "triton-outer-layout is for outer products that are not re-associated"]
    gradients = dict(enable_triton_weight_gradients=True)
    assert idle(**gradients) == ["triton-weight-gradients needs torch.compile"]
    assert idle(enable_torch_compile=True, **gradients) == []
    for switches in (dict(gradients, enable_torch_compile=True), layout, relu, triangle):
        assert idle(on_gpu=False, **switches) == ["Triton kernels need a GPU"]
    for other in (dict(attention_backend="sdpa"), dict(enable_flash_attention=False)):
        assert idle(**attention, **other) == [
            "triton-attention gives way to the attention that was asked for"]
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    assert idle(**attention) == ["Triton kernels need Triton (pip install triton)"]
