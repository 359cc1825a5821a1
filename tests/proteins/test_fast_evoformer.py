"""Twins of the Evoformer's layers: when they are swapped in, what they hand to kernels."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.kernels import dispatch
from tiny_openfold.proteins import fast_evoformer
from tiny_openfold.proteins.fast_evoformer import Plan

SMALL = tof.TinyOpenFoldConfig(num_blocks=1, msa_dim=8, pair_dim=12, msa_heads=2, pair_heads=3,
                               outer_product_dim=4)
ALL_TRITON = tof.FusionConfig(**{f"enable_triton_{name}": True for name in (
    "attention", "outer_layout", "relu", "triangle")})
ASKED = ("runs", "fits", "takes_transition", "takes_attention_layer", "takes_head_bias",
         "takes_attention")  # whether there is a kernel


@pytest.fixture
def kernels(monkeypatch):
    """Every sub-layer has a kernel, which adds 1 to the residual. calls: [(its name, its arguments)]; asked:
    the same of what the twins ask before."""
    calls, asked = [], []

    def recorder(name, result):
        return lambda *given: calls.append((name, given)) or result(*given)
    residuals = dict(attention_layer=10, triangle_multiplication=9, transition_layer=4, outer_layout=5)
    for name, at in residuals.items():
        monkeypatch.setattr(dispatch, name, recorder(name, lambda *given, at=at: given[at] + 1))
    monkeypatch.setattr(dispatch, "head_bias", recorder("head_bias", lambda head, pair, norm: (
        tof.head_bias(head, norm(pair)), pair)))
    for name in ASKED:
        monkeypatch.setattr(dispatch, name, lambda *given, name=name: asked.append((name, given)) or True)
    monkeypatch.setattr(dispatch, "takes_outer_sides", lambda msa, h: False)
    return SimpleNamespace(calls=calls, asked=asked)


def block_of(fusion=ALL_TRITON, dropout=0.0):
    return tof.FusedEvoformerBlock(dataclasses.replace(SMALL, dropout=dropout), fusion)


def same(found, expected):
    assert len(found) == len(expected)
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        assert torch.equal(x, y) if tensors else x is y or x == y, number


def inputs(samples=1):
    """MSA and pair tensor of whole numbers, which add exactly."""
    return (torch.randint(-9, 9, (samples, *shape)).float() for shape in ((5, 7, 8), (7, 7, 12)))


# --- Which twins ------------------------------------------------------------------------------------------

def test_sub_layers_are_twins_only_where_something_is_asked():
    """All blocks share their classes, or the compiler would compile each of them."""
    for fusion in (tof.FusionConfig(), tof.FusionConfig.preset(False), tof.FusionConfig.preset(True)):
        block = block_of(fusion)
        assert not block.fast and type(block.outer_product_mean) is tof.OuterProductMean
    blocks = [block_of() for _ in range(2)]
    assert blocks[0].fast
    for name in tof.SUBLAYERS:
        layer, plain = getattr(blocks[0], name), getattr(block, name)
        assert isinstance(layer, type(plain)) and isinstance(layer, fast_evoformer.SubLayerTwin)
        assert type(layer) is type(getattr(blocks[1], name))
        assert layer.__dict__.keys() - plain.__dict__.keys() == {"plan"}
    assert block.state_dict().keys() == blocks[0].state_dict().keys()


def test_a_plan_is_what_switches_ask_for():
    assert Plan.of(tof.FusionConfig()) == Plan()
    assert Plan.of(ALL_TRITON) == Plan(*4 * [True])
    for other in (dict(attention_backend="sdpa"), dict(enable_flash_attention=False)):
        assert Plan.of(dataclasses.replace(ALL_TRITON, **other)) == Plan(False, *3 * [True])
    assert Plan.of(tof.FusionConfig(enable_selective_checkpointing=True)) == Plan(recompute=True)
    assert Plan.of(tof.FusionConfig(enable_activation_checkpointing=True)) == Plan()


def test_kernels_are_asked_only_where_a_switch_wants_them(kernels):
    msa, pair = inputs()
    block_of(tof.FusionConfig())(msa, pair)
    block_of(tof.FusionConfig(enable_selective_checkpointing=True))(msa, pair)
    assert kernels.asked == kernels.calls == []


def test_a_shape_without_a_kernel_runs_the_plain_code(kernels, monkeypatch):
    msa, pair = inputs()
    torch.manual_seed(0)
    block, plain = block_of(), block_of(tof.FusionConfig())
    plain.load_state_dict(block.state_dict())
    for name in ASKED:
        monkeypatch.setattr(dispatch, name, lambda *_: False)
    found, expected = block(msa, pair), plain(msa, pair)
    assert kernels.calls == [] and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fusion", [ALL_TRITON, tof.FusionConfig(enable_selective_checkpointing=True)],
                         ids=["kernels", "recomputed"])
def test_sub_layers_called_alone_return_their_update(fusion, kernels, monkeypatch):
    """With masks by place, by name or not at all."""
    for name in ASKED:
        monkeypatch.setattr(dispatch, name, lambda *_: False)
    (msa, pair), block, plain = inputs(), block_of(fusion), block_of(tof.FusionConfig())
    plain.load_state_dict(block.state_dict())
    seq_mask, row_mask = torch.tensor([[1.0] * 6 + [0]]), torch.tensor([[1.0, 1, 1, 0, 0]])
    seq, row = dict(seq_mask=seq_mask), dict(row_mask=row_mask)
    for name, given, masks in (
            ("msa_row_attention", (msa, pair), seq), ("msa_column_attention", (msa,), row),
            ("msa_transition", (msa,), {}), ("outer_product_mean", (msa,), row),
            ("triangle_mult_outgoing", (pair,), seq), ("triangle_attn_ending", (pair,), seq)):
        layer, other = getattr(block, name), getattr(plain, name)
        assert torch.equal(layer(*given), other(*given))
        assert torch.equal(layer(*given, **masks), other(*given, *masks.values()))


# --- To kernels -------------------------------------------------------------------------------------------

def test_every_sub_layer_hands_its_modules_and_masks_to_its_kernel(kernels):
    block = block_of()
    msa, pair = inputs(2)
    seq_mask = torch.ones(2, 7)
    seq_mask[1, 6] = 0
    found = block(msa, pair, seq_mask)
    assert torch.equal(found[0], msa + 3) and torch.equal(found[1], pair + 6)
    row, column, triangle = block.msa_row_attention, block.msa_column_attention, block.triangle_attn_starting
    names, given = zip(*kernels.calls, strict=True)
    assert names == ("head_bias", *2 * ("attention_layer",), "transition_layer", "outer_layout",
                     *2 * ("triangle_multiplication",), *2 * ("attention_layer",), "transition_layer")

    def packed(layer):
        return layer.packed("q_proj", "k_proj", "v_proj", "gate_proj")
    same(given[0], (row.pair_bias_proj, pair, row.pair_norm))
    same(given[1], (msa, row.layer_norm, *packed(row), row.o_proj, 2, 2, row.bias(pair), None, seq_mask, msa,
                    None, False))
    same(given[2], (msa + 1, column.layer_norm, *packed(column), column.o_proj, 2, 1, None, None, None,
                    msa + 1, None, False))
    layer = block.msa_transition
    same(given[3], (msa + 2, layer.layer_norm, layer.linear1, layer.linear2, msa + 2, False))
    layer = block.outer_product_mean
    left, right = layer.project(layer.layer_norm(msa + 3))
    same(given[4], (left, right, layer.output_proj, False, pytest.approx(1 / 5.001), pair))
    for number, (layer, outgoing) in enumerate(((block.triangle_mult_outgoing, True),
                                                (block.triangle_mult_incoming, False))):
        weights, x = layer.packed("left_proj", "right_proj", "left_gate", "right_gate"), pair + 1 + number
        same(given[5 + number], (x, layer.layer_norm, *weights, layer.center_norm, layer.output_proj,
                                 layer.output_gate, seq_mask, outgoing, x, None, False))
    for number, axis in ((0, 2), (1, 1)):
        layer, x = (triangle, block.triangle_attn_ending)[number], pair + 3 + number
        same(given[7 + number], (x, layer.layer_norm, *packed(layer), layer.o_proj, 3, axis, None,
                                 layer.triangle_bias_proj, seq_mask, x, None, False))
    layer = block.pair_transition
    same(given[9], (pair + 5, layer.layer_norm, layer.linear1, layer.linear2, pair + 5, False))
    widths = {(name, *(g for g in given[1:] if isinstance(g, int))) for name, given in kernels.asked}
    assert widths == {("takes_attention_layer", 2), ("takes_attention_layer", 3), ("takes_head_bias", 2),
                      *((name,) for name in ("fits", "takes_transition", "runs"))}


def test_a_transition_too_wide_for_a_kernel_has_its_products_in_one(kernels, monkeypatch):
    (msa, _), layer, heard = inputs(), block_of().msa_transition, []
    monkeypatch.setattr(dispatch, "takes_transition", lambda x: False)
    monkeypatch.setattr(dispatch, "two_layers", lambda *given: heard.append(given) or given[0])
    assert torch.equal(layer(msa), layer.layer_norm(msa))
    same(heard[0], (layer.layer_norm(msa), layer.linear1, layer.linear2))


def test_a_mask_of_rows_reaches_attention_over_them(kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "outer_layout", lambda *given: torch.ones(1))
    (msa, pair), row_mask = inputs(), torch.tensor([[1.0, 1, 1, 1, 0]])
    block_of()(msa, pair, None, row_mask)
    masks = [given[9] for name, given in kernels.calls if name == "attention_layer"]
    assert masks[1] is row_mask and masks[0] is masks[2] is masks[3] is None


def test_what_a_kernel_hands_on_is_read_next(kernels, monkeypatch):
    """The pair tensor behind its bias by the outer product's residual, the MSA behind its sides by the next
    block; their gradients then pass through those kernels."""
    monkeypatch.setattr(dispatch, "takes_outer_sides", lambda msa, h: True)
    monkeypatch.setattr(dispatch, "head_bias", lambda head, pair, norm: (torch.zeros(1), pair + 100))
    monkeypatch.setattr(dispatch, "sides", lambda msa, *_: (msa, msa, msa + 1000))
    msa, pair = inputs()
    found = block_of()(msa, pair)
    assert torch.equal(found[0], msa + 1003) and torch.equal(found[1], pair + 106)


def test_where_an_outer_product_is_laid_out_by_its_own_kernel(kernels, monkeypatch):
    """Not where it is re-associated, nor where no kernel runs."""
    made = []
    monkeypatch.setattr(dispatch, "outer_layout", lambda *given: made.append(given) or torch.ones(1))
    layout = tof.FusionConfig(enable_triton_outer_layout=True)
    layer, (msa, pair) = block_of(layout).outer_product_mean, inputs()
    row_mask = torch.tensor([[1.0] * 4 + [0]])
    found = layer(msa, row_mask)
    left, right = layer.project(layer.layer_norm(msa))
    same(made.pop(), (left * row_mask[:, :, None, None], right, layer.output_proj, False))
    assert found.item() == pytest.approx(1 / 4.001)
    same(layer(msa, row_mask, onto=pair), (pair + found, msa))
    made.pop()
    assert layer(msa, onto=pair)[0].item() == 1.0  # divided and added within
    same(made.pop(), (left, right, layer.output_proj, False, pytest.approx(1 / 5.001), pair))
    few = layer(msa[:, :1], row_mask[:, :1])  # 4 N < S
    same(layer(msa[:, :1], row_mask[:, :1], onto=pair), (pair + few, msa[:, :1]))
    monkeypatch.setattr(dispatch, "runs", lambda x: False)
    layer(msa, row_mask)
    assert made == kernels.calls == []


@pytest.mark.parametrize("samples, rows, residues, ours, plain", [
    (1, 1, 4, False, True), (1, 1, 5, True, True), (2, 31, 128, True, True), (2, 32, 128, False, True),
    (2, 31, 127, False, False)])
def test_kernels_take_over_where_reassociating_draws_level(samples, rows, residues, ours, plain, monkeypatch):
    layer = block_of(tof.FusionConfig(enable_triton_outer_layout=True)).outer_product_mean
    sides = torch.empty(samples, rows, residues, 2)
    for runs, expected in ((True, ours), (False, plain)):
        monkeypatch.setattr(dispatch, "runs", lambda x, runs=runs: runs)
        assert layer.weight_first(sides) is expected


def test_where_the_sides_of_an_outer_product_have_a_kernel(kernels, monkeypatch):
    made, asked = [], []
    monkeypatch.setattr(dispatch, "takes_outer_sides", lambda msa, h: asked.append(h) or True)
    monkeypatch.setattr(dispatch, "outer_layout", lambda left, right, *_: left - right)
    monkeypatch.setattr(dispatch, "sides", lambda *given: made.append(given) or (
        given[0] + 1, given[0] - 1, given[0] + 2))
    fusion = tof.FusionConfig(enable_triton_outer_layout=True, enable_projection_fusion=True)
    layer, (msa, pair) = block_of(fusion).outer_product_mean, inputs()
    update, handed_on = layer(msa, onto=pair)
    assert torch.equal(update, torch.full_like(msa, 2.0)) and torch.equal(handed_on, msa + 2)
    assert set(asked) == {4}
    same(made.pop(), (msa, layer.layer_norm, layer.left_right_proj.weight, layer.left_right_proj.bias))
    layer(msa[:, :1])  # re-associated
    monkeypatch.setattr(dispatch, "takes_outer_sides", lambda msa, h: False)
    assert layer(msa, onto=pair)[1] is msa and made == []


def test_dropout_goes_to_kernels_as_factors(kernels):
    """Shared along rows, or along columns for the ending node; none of columns of the MSA and transitions."""
    block = block_of(dropout=0.5)
    msa, pair = inputs()
    block(msa, pair)
    at = dict(attention_layer=11, triangle_multiplication=10)
    drops = [given[at[name]] for name, given in kernels.calls if name in at]
    assert [None if drop is None else (*drop.shape,) for drop in drops] == [
        (1, 1, 7, 8), None, *3 * [(1, 1, 7, 12)], (1, 7, 1, 12)]
    assert {x for drop in drops if drop is not None for x in drop.unique().tolist()} == {0, 2}
    kernels.calls.clear()
    block.eval()(msa, pair)
    assert all(given[at[name]] is None for name, given in kernels.calls if name in at)


def test_dropout_is_the_plain_blocks_where_no_kernel_runs():
    msa, pair = inputs()
    block, plain = (block_of(tof.FusionConfig(enable_selective_checkpointing=on), dropout=0.5)
                    for on in (True, False))
    for layer in plain.modules():  # updates that are not 0
        for weight in layer.parameters(recurse=False):
            torch.nn.init.normal_(weight)
    block.load_state_dict(plain.state_dict())
    results = []
    for each in (block, plain):
        torch.manual_seed(3)
        results.append(each(msa, pair))
    assert all(map(torch.equal, *results)) and not torch.equal(results[0][0], msa)


def test_attention_between_the_library_s_projections(monkeypatch):
    """Where only heads fit: packed with the gate or not, the bias turned for the ending node."""
    calls = []
    monkeypatch.setattr(dispatch, "takes_attention_layer", lambda x, heads: False)
    monkeypatch.setattr(dispatch, "takes_attention", lambda x, heads: calls.append(heads) or True)
    monkeypatch.setattr(dispatch, "gated_attention",
                        lambda *given: calls.append(given) or given[0][0][..., :12])
    pair, keys = torch.randn(2, 7, 7, 12), torch.ones(2, 7)
    for wide in (False, True):
        block = block_of(tof.FusionConfig(enable_triton_attention=True, enable_projection_fusion=wide))
        for layer in (block.triangle_attn_starting, block.triangle_attn_ending):
            layer(pair, keys)
            heads, (parts, count, axis, bias, mask, gate_bias) = calls.pop(0), calls.pop(0)
            x = layer.layer_norm(pair)
            if wide:
                same([*parts, gate_bias], [layer.qkv_gate_proj(x), layer.qkv_gate_proj.bias])
            else:
                same([*parts, gate_bias], [*layer.project(x), None])
            expected = tof.head_bias(layer.triangle_bias_proj, x)
            assert torch.equal(bias, expected if layer.starting else expected.mT) and mask is keys
            assert (heads, count, axis) == (3, 3, 2 if layer.starting else 1) and calls == []


# --- Recomputation ----------------------------------------------------------------------------------------

def test_what_backward_begins_with_is_not_recomputed():
    config = dataclasses.replace(SMALL, num_blocks=2)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig(enable_selective_checkpointing=True))
    kept = [(number, name) for number, block in enumerate(model.blocks) for name in tof.SUBLAYERS
            if not getattr(block, name).plan.recompute]
    assert kept == [(1, "triangle_attn_ending"), (1, "pair_transition")]


@pytest.mark.parametrize("blocks, recomputed", [(1, [True]), (3, [True, True, False])])
def test_which_blocks_are_recomputed(blocks, recomputed, monkeypatch):
    asked = []
    monkeypatch.setattr(tof, "recomputed", lambda on, block, *given, random: (
        asked.append((on, random)) or block(*given)))
    config = dataclasses.replace(SMALL, num_blocks=blocks, dropout=0.1)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig(enable_activation_checkpointing=True))
    model(torch.zeros(1, 2, 7, dtype=torch.long))
    assert asked == [(on, True) for on in recomputed]
