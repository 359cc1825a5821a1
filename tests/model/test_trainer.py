"""What the model and its trainer hand on: to a compiler, to the attention that was chosen, to a graph."""
import dataclasses

import pytest
import torch

import tiny_openfold_v2 as tof
from tests.model.test_layers import CPU, trainer_of
from tiny_openfold.proteins.batches import SyntheticProteins

SMALL = tof.TinyOpenFoldConfig(num_blocks=1, msa_dim=8, pair_dim=12, msa_heads=2, pair_heads=3,
                               outer_product_dim=4)


def block_of(fusion):
    return tof.FusedEvoformerBlock(SMALL, fusion)


@pytest.mark.parametrize("seq_len, combos", [(128, True), (129, False)])
def test_what_is_compiled(seq_len, combos, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: calls.append((type(module), how)))
    monkeypatch.setattr(torch, "compile",
                        lambda function, **how: calls.append((function.__name__, how)) or "end")
    config = dataclasses.replace(SMALL, seq_len=seq_len, num_blocks=2)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig())
    assert calls == [] and model.gpu_ends == (model.embed, model.heads) and len(model.sublayers()) == 18
    monkeypatch.setattr(tof.fast_evoformer, "compiler_options",
                        lambda fusion: dict(gathers=fusion.enable_triton_weight_gradients))
    fusion = tof.FusionConfig(enable_torch_compile=True, enable_triton_weight_gradients=combos,
                              torch_compile_mode="reduce-overhead")
    model = tof.TinyOpenFoldV2(config, fusion)
    how = dict(fullgraph=True, dynamic=False, options=dict(
        torch._inductor.list_mode_options("reduce-overhead"), combo_kernels=combos,
        gathers=combos))
    assert model.gpu_ends == ("end", "end") and model.sublayers() == []
    assert calls == [*2 * [(tof.FusedEvoformerBlock, how)], ("embed", how), ("heads", how)]


NONE = dict(msa_row_attention=(), msa_column_attention=(), outer_product_mean=(), triangle_mult_outgoing=(),
            triangle_mult_incoming=(), triangle_attn_starting=(), triangle_attn_ending=())
MSA = ("msa_row_attention", "msa_column_attention")
TRIANGLES = ("triangle_attn_starting", "triangle_attn_ending")
PRODUCTS = ("triangle_mult_outgoing", "triangle_mult_incoming")


@pytest.mark.parametrize("switches, packed", [
    ("", {}), ("qkv_fusion_msa", dict.fromkeys(MSA, ("qkv_proj",))),
    ("qkv_fusion_triangle", dict.fromkeys(TRIANGLES, ("qkv_proj",))),
    ("triangle_fusion", dict.fromkeys(PRODUCTS, ("left_right_proj", "left_right_gate"))),
    ("projection_fusion", dict(outer_product_mean=("left_right_proj",))),
    ("projection_fusion qkv_fusion_msa qkv_fusion_triangle triangle_fusion", dict(
        dict.fromkeys((*MSA, *TRIANGLES), ("qkv_gate_proj",)), outer_product_mean=("left_right_proj",),
        **dict.fromkeys(PRODUCTS, ("left_right_all",))))])
def test_which_projections_are_one_gemm(switches, packed):
    fusion = dataclasses.replace(tof.FusionConfig.preset(False), **{
        f"enable_{name}": True for name in switches.split()})
    block = block_of(fusion)
    assert {name: tuple(getattr(block, name).packings) for name in NONE} == {**NONE, **packed}


@pytest.mark.parametrize("chosen", ["math", "sdpa", "flex"])
def test_the_chosen_attention_is_what_runs(chosen, monkeypatch):
    ran, sdpa = [], tof.F.scaled_dot_product_attention
    q, k, v = torch.randn(3, 2, 3, 4, 5, 8)
    monkeypatch.setattr(tof.attention_choice, "attention_backend", lambda *_, **__: chosen)
    monkeypatch.setattr(tof.attention_choice, "flex_attend",
                        lambda *given: ran.append(("flex", given)) or given[0])
    monkeypatch.setattr(tof.F, "scaled_dot_product_attention",
                        lambda *given: ran.append(("sdpa",)) or sdpa(*given))
    out = tof.attend(q, k, v)
    assert ran == {"math": [], "sdpa": [("sdpa",)], "flex": [("flex", (q, k, v, None))]}[chosen]
    expected = q if chosen == "flex" else (q @ k.mT / 8 ** 0.5).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    tof.attend(q, k, v, torch.zeros(2, 4, 5, 5))
    assert len(ran) == {"math": 0, "sdpa": 1 + 2, "flex": 2}[chosen]  # with a bias sample by sample


def test_of_how_many_pairs_and_letters_losses_are_means():
    coords = dict(coords=torch.zeros(2, 4, 3), coord_mask=torch.tensor([[1.0, 1, 1, 0], [0, 1, 0, 0]]))
    letters = dict(msa_targets=torch.tensor([[[0, 22, -100, -100], [5, -100, -100, -100]]]))
    count = tof.TinyOpenFoldV2.loss_counts
    assert count(**coords).tolist() == [10] and count(**letters).tolist() == [3]
    assert count(**coords, **letters, seq_mask=None).tolist() == [10, 3]


def test_a_graph_is_captured_once_and_marks_every_phase(monkeypatch):
    trainer, events = trainer_of(ema_decay=0.5), []
    trainer.use_graph, batch = True, SyntheticProteins(trainer.settings).batch(0)

    def captured(run, inputs, device):
        assert run == trainer.eager_step and inputs is batch and device == CPU
        run(inputs)  # to be taken back
        events.append("captured")
        return lambda inputs: events.append("replayed") or torch.tensor(2.5)
    monkeypatch.setattr(tof, "GraphedStep", captured)
    before = [weight.detach().clone() for weight in trainer.weights.tensors]
    for _ in range(2):
        assert trainer.step(batch, lambda: events.append("mark")) == 2.5
    assert events == ["captured", *2 * ["replayed", *3 * ["mark"]]] and trainer.average.steps == 2
    assert all(map(torch.equal, before, trainer.weights.tensors))
