"""The model against numbers worked out by hand: a wrong constant, sign, axis or mask shows here, where other
tests compare the code with itself."""
import dataclasses
import math

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import accuracy
from fusion_lab.training.models import read_model
from tests.support import ROOT
from tests.tiny import model_of, trainer_of
from tiny_openfold.proteins.costs import costs

MEAN_CENTRE, FIRST_CENTRE, STEP = 12.0, 2.15625, 0.3125  # Å, of the 64 bins


# --- Embedding -----------------------------------------------------------------------------------------

def test_embedding_of_tokens_and_of_clipped_relative_positions():
    model = model_of(msa_dim=1, pair_dim=1, msa_heads=1, pair_heads=1)
    with torch.no_grad():
        for name, factor in (("msa", 1), ("target", 100), ("left", 1e4), ("right", 1e6), ("position", 1)):
            weight = getattr(model, f"{name}_embedding").weight
            weight.copy_(factor * torch.arange(float(len(weight)))[:, None])
    target = torch.tensor([[5, 7, *38 * [0]]])
    rows = torch.stack([target[0] + 1, target[0] + 2])[None]
    msa, pair = model.embed(rows, target)
    assert msa[0, :, :3, 0].tolist() == [[506, 708, 1], [507, 709, 2]]
    # left of i, right of j, and i - j within -32..32, counted from 0
    expected = {(0, 1): 7_050_031, (1, 0): 5_070_033, (2, 7): 27, (7, 2): 37, (39, 2): 64, (2, 39): 0}
    assert {(i, j): pair[0, i, j, 0].item() for i, j in expected} == expected


def test_forward_takes_the_target_and_else_the_first_row():
    model = model_of()
    tokens = torch.randint(0, 20, (1, 4, 8))
    first, given, other = (model(tokens, *target)["pair_repr"]
                           for target in ((), (tokens[:, 0],), (tokens[:, 1],)))
    assert torch.equal(first, given) and not torch.equal(first, other)


# --- Heads and losses ----------------------------------------------------------------------------------

def heads_of_identity():
    """A model whose logits are pair + its transpose, and whose letters' logits are msa."""
    model = model_of(msa_dim=23, pair_dim=64, msa_heads=1, pair_heads=1)
    with torch.no_grad():
        model.distogram_head.weight.copy_(torch.eye(64))
        model.masked_msa_head.weight.copy_(torch.eye(23))
    return model.heads, torch.zeros(2, 2, 3, 23), torch.zeros(2, 3, 3, 64)


def test_distances_and_contacts_against_a_hand_count():
    heads, msa, pair = heads_of_identity()
    pair[0, 0, 2, 5] = math.log(3)       # one of 66 parts becomes three: bin 5 is 3/66, the others 1/66
    pair[0, 0, 1, 18] = pair[0, 1, 2, 19] = 50.0  # bin 18 ends at 7.9375 Å, bin 19 beyond 8 Å
    pair[1, 0, 1, 0] = pair[1, 0, 2, 63] = 50.0   # the first and the last bin
    output = heads(msa, pair)
    assert output["distogram_logits"][0, 2, 0, 5].item() == pytest.approx(math.log(3))
    distances, contact = output["distances"], output["contact_probability"]
    close = dict(rtol=0, atol=1e-5)
    torch.testing.assert_close(distances, distances.mT, **close)
    mixed = (64 * MEAN_CENTRE + 2 * (FIRST_CENTRE + 5 * STEP)) / 66
    torch.testing.assert_close(distances[0, 0], torch.tensor([MEAN_CENTRE, FIRST_CENTRE + 18 * STEP, mixed]),
                               **close)
    torch.testing.assert_close(distances[1, 0, 1:], torch.tensor([FIRST_CENTRE, 21.84375]), **close)
    torch.testing.assert_close(contact[0], torch.tensor([
        [19 / 64, 1, 21 / 66], [1, 19 / 64, 0], [21 / 66, 0, 19 / 64]]), **close)
    assert distances.requires_grad and contact.requires_grad and set(output) == {
        "msa_repr", "pair_repr", "distogram_logits", "distances", "contact_probability"}


def test_losses_against_a_hand_count():
    """Of sample 0 residues 0 and 1 are known, 5 Å apart (bin 9); of sample 1 residue 2 alone."""
    heads, msa, pair = heads_of_identity()
    coords = torch.tensor([[[0.0, 0, 0], [3, 4, 0], [0, 0, 30]], [[9, 9, 9], [8, 8, 8], [0, 0, 0]]])
    known = torch.tensor([[1.0, 1, 0], [0, 0, 1]])
    pair[0, 0, 1, 9] = math.log(3)
    pair[0, :, 2], pair[1, 0] = torch.arange(64.0), torch.arange(64.0)  # of pairs that nobody knows
    output = heads(msa, pair, coords=coords, coord_mask=known)
    expected = (2 * math.log(66 / 3) + 3 * math.log(64)) / 5  # (0, 1) and (1, 0); three on the diagonal
    assert output["distogram_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert output["loss"] is output["distogram_loss"] and output["loss"].requires_grad
    assert not output["distances"].requires_grad  # a by-product in training
    one = heads(msa, pair, coords=coords, coord_mask=torch.tensor([[0.0, 0, 0], [0, 0, 1]]))
    assert one["loss"].item() == pytest.approx(math.log(64))
    assert heads(msa, pair, coords=coords, coord_mask=torch.zeros(2, 3))["loss"].item() == 0

    msa[0, 1, 2, 0] = math.log(2)  # 2 of 24 parts
    msa[1, 0, 0] = torch.arange(23.0)  # of a position that nobody asks for
    targets = torch.full((2, 2, 3), -100)
    targets[0, 1, 2], targets[1, 1, 1] = 0, 22
    both = heads(msa, pair, msa_targets=targets, coords=coords, coord_mask=known)
    letters = (math.log(24 / 2) + math.log(23)) / 2
    assert both["masked_msa_loss"].item() == pytest.approx(letters, rel=1e-5)
    assert both["loss"].item() == pytest.approx(expected + 0.1 * letters, rel=1e-5)
    assert [(loss.count.item(), loss.weight) for loss in both["losses"].values()] == [(5, 1), (2, 0.1)]
    alone = heads(msa, pair, msa_targets=targets, coords=coords, coord_mask=known, only_loss=True)
    assert set(alone) == {"loss", "distogram_loss", "masked_msa_loss", "losses"}
    torch.testing.assert_close(alone, {name: both[name] for name in alone}, rtol=0, atol=0)
    assert heads(msa, pair, msa_targets=targets)["loss"].item() == pytest.approx(0.1 * letters, rel=1e-5)
    targets[1, 1, 1] = -100  # one is left
    assert heads(msa, pair, msa_targets=targets)["masked_msa_loss"].item() == pytest.approx(math.log(12))
    assert heads(msa, pair, msa_targets=torch.full((2, 2, 3), -100))["loss"].item() == 0


def test_true_distances_fall_into_the_bin_whose_upper_end_they_reach():
    heads, msa, pair = heads_of_identity()
    for distance, number in ((2.3125, 0), (2.313, 1), (21.6875, 62), (21.69, 63), (400.0, 63)):
        coords = torch.tensor([[[0.0, 0, 0], [distance, 0, 0], [0, 0, 0]]])
        logits = torch.zeros(1, 3, 3, 64)
        logits[0, 0, 1, number] = 30.0
        loss = heads(msa[:1], logits, None, coords, torch.tensor([[1.0, 1, 0]]))["loss"].item()
        assert loss == pytest.approx(math.log(64) / 2, rel=1e-4), distance  # the diagonal's, no more


@pytest.mark.parametrize("coevolution, fusion, near", [
    ("none", tof.FusionConfig.baseline(), 1e-10),
    ("none", tof.FusionConfig(attention_backend="sdpa"), 1e-10),
    ("couplings", tof.FusionConfig(), 1e-2)])  # these in float32
def test_padding_changes_nothing_valid(coevolution, fusion, near):
    """Two residues and one row too many, full of garbage, against the same sample without them."""
    model = model_of(**vars(fusion), num_blocks=2, coevolution=coevolution).double()
    accuracy.shake(model)
    tokens, coords = torch.randint(0, 20, (1, 4, 8)), 5 * torch.randn(1, 8, 3).double()
    seq_mask, row_mask = torch.tensor([[1.0] * 6 + [0] * 2]), torch.tensor([[True] * 3 + [False]])
    targets, extra = tokens.clone(), torch.randint(0, 20, (1, 9, 8))
    targets[:, 3], targets[:, :, 6:] = -100, -100
    padded = model(tokens, None, seq_mask, row_mask, extra, msa_targets=targets, coords=coords,
                   coord_mask=seq_mask.double())
    alone = model(tokens[:, :3, :6], extra_msa=extra[:, :, :6], msa_targets=targets[:, :3, :6],
                  coords=coords[:, :6], coord_mask=torch.ones(1, 6).double())
    for name in ("distances", "contact_probability", "pair_repr"):
        torch.testing.assert_close(padded[name][:, :6, :6], alone[name], rtol=0, atol=near)
    torch.testing.assert_close(padded["msa_repr"][:, :3, :6], alone["msa_repr"], rtol=0, atol=near)
    assert padded["loss"].item() == pytest.approx(alone["loss"].item(), rel=near)


def test_a_masked_row_of_very_low_scores_stays_finite():
    """-2545 would leave float16's range if it were added to the lowest number."""
    q = torch.full((1, 1, 1, 4, 8), 30.0, dtype=torch.float16)
    v = torch.arange(4.0, dtype=torch.float16)[:, None].expand(1, 1, 1, 4, 8)
    for bias in (None, torch.zeros(1, 1, 4, 4, dtype=torch.float16)):
        assert (tof.attend(q, -q, v, bias, torch.zeros(1, 4), "math") == 1.5).all()  # the mean of all keys


def test_the_shipped_model_loads_and_says_what_it_said():
    """Distances in Å of a made-up alignment; whoever changes a layer, a bin or a name changes these."""
    saved = read_model(ROOT / "tiny_openfold" / "models" / "families.pt", tof.PROGRAM)
    model = tof.TinyOpenFoldV2(saved.config).eval()
    model.load_state_dict(saved.weights)
    place = torch.arange(24)
    tokens = (5 * place + torch.arange(12)[:, None] // 3 * (place % 5 == 0)) % 20
    with torch.no_grad():
        distances = model(tokens[None])["distances"][0, 2, [5, 9, 14, 22]]
    torch.testing.assert_close(distances, torch.tensor([10.258, 18.199, 15.774, 8.285]), rtol=0, atol=0.02)


# --- Weights at the start ------------------------------------------------------------------------------

def test_initial_weights():
    torch.manual_seed(0)
    for kind, deviation in (("default", 0.05), ("relu", 0.05 * 2 ** 0.5)):
        layer = tof.linear(400, 500, init=kind)
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.01) and not layer.bias.any()
        assert layer.weight.abs().max().item() == pytest.approx(2 * deviation / 0.8796, rel=1e-3)  # truncated
    assert tof.linear(3, 3, bias=False).bias is None
    model = model_of()
    assert not any(weight.any() for head in (model.distogram_head, model.masked_msa_head)
                   for weight in head.parameters())
    for name, weight in model.blocks[0].named_parameters():
        layer, kind = name.split(".")[-2:]
        if layer in ("o_proj", "linear2", "output_proj"):
            assert not weight.any(), name  # the last layers of residual branches
        elif "gate" in layer:
            assert weight.unique().tolist() == [float(kind == "bias")], name  # open
        elif layer not in ("layer_norm", "pair_norm", "center_norm"):
            assert weight.any() == (kind == "weight"), name
            deviation = ((2 if layer == "linear1" else 1) / weight.shape[-1]) ** 0.5
            chance = 3 / (2 * weight.numel()) ** 0.5  # three standard deviations of what is measured
            assert kind == "bias" or weight.std().item() == pytest.approx(deviation, rel=chance), name


def test_the_seed_alone_decides_the_weights():
    expected = model_of().state_dict()
    for seed, equal in ((0, True), (1, False)):
        weights = trainer_of(seed=seed).model.state_dict()
        assert all(torch.equal(weights[name], expected[name]) for name in expected) == equal


# --- Dropout -------------------------------------------------------------------------------------------

AXES = dict(msa_row_attention=1, triangle_mult_outgoing=1, triangle_mult_incoming=1, triangle_attn_starting=1,
            triangle_attn_ending=2)


@pytest.mark.parametrize("name", tof.SUBLAYERS)
def test_dropout_axes_of_every_sub_layer_in_the_block(name, monkeypatch):
    """Each sub-layer alone returns ones, so that what the block adds is its dropout mask."""
    block = tof.FusedEvoformerBlock(tof.TinyOpenFoldConfig(msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2,
                                                           outer_product_dim=4, dropout=0.75))
    msa, pair = torch.zeros(2, 5, 6, 8), torch.zeros(2, 6, 6, 8)
    into = msa if name.startswith("msa") else pair
    for other in tof.SUBLAYERS:
        update = torch.zeros_like(msa if other.startswith("msa") else pair) + (other == name)

        def forward(*given, update=update, other=other):
            if isinstance(given[-1], list):  # row attention hands on pair, the outer product msa
                given[-1].append(given[other.startswith("msa")])
            return update
        monkeypatch.setattr(getattr(block, other), "forward", forward)
    torch.manual_seed(0)
    added = block(msa, pair)[0 if into is msa else 1]
    if name not in AXES:
        assert (added == 1).all()
        return
    assert added.unique().tolist() == [0, 4]  # kept with probability 1/4, four times as large
    assert 0.1 < (added > 0).float().mean() < 0.4
    assert [bool((added == added.narrow(dim, 0, 1)).all()) for dim in range(4)] == [
        dim == AXES[name] for dim in range(4)]
    assert (block.eval()(msa, pair)[0 if into is msa else 1] == 1).all()


# --- Sizes, switches, counts ---------------------------------------------------------------------------

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
    fusion = dataclasses.replace(tof.FusionConfig.baseline(), **{
        f"enable_{name}": True for name in switches.split()})
    block = tof.FusedEvoformerBlock(tof.TinyOpenFoldConfig(), fusion)
    assert {name: tuple(getattr(block, name).packings) for name in NONE} == {**NONE, **packed}


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(tof.TinyOpenFoldConfig()) == dict(
        msa_dim=64, pair_dim=128, num_blocks=4, num_seqs=16, seq_len=64, msa_heads=4, pair_heads=4,
        outer_product_dim=32, dropout=0.0, coevolution="none", orientations=False)
    on = {name for name, value in dataclasses.asdict(tof.FusionConfig()).items() if value is True}
    assert on == {"enable_qkv_fusion_msa", "enable_qkv_fusion_triangle", "enable_flash_attention",
                  "enable_triangle_fusion", "enable_opm_fusion"}
    assert list(tof.FusionConfig.titles()) == [  # in the order in which users grep them
        "MSA QKV Fusion", "Triangle QKV Fusion", "Flash Attention", "Triangle Gate/Proj Fusion",
        "Torch Compile"]
    preset = tof.FusionConfig.preset()
    checkpointing = [f"enable_{which}_checkpointing" for which in ("activation", "selective")]
    left_out = [name for name in preset.names() if not getattr(preset, name)]
    assert sorted(left_out) == [*checkpointing, *(f"enable_triton_{name}" for name in (
        "adamw", "attention", "outer_layout", "relu", "triangle", "weight_gradients"))]
    ultra = tof.FusionConfig.ultra()  # what won on an H200
    assert [name for name in ultra.names() if not getattr(ultra, name)] == checkpointing
    assert tof.FusionConfig().attention_backend == "auto"


@pytest.mark.parametrize("on, kernels, gemms", [
    ((), 15, 20), (("qkv_fusion_msa",), 11, 16), (("flash_attention", "projection_fusion"), 15, 20),
    (("triangle_fusion", "projection_fusion"), 11, 14),
    (("qkv_fusion_msa", "qkv_fusion_triangle", "triangle_fusion", "projection_fusion"), 3, 6)])
def test_fusion_statistics_against_a_hand_count(on, kernels, gemms):
    fusion = dataclasses.replace(tof.FusionConfig.baseline(), **{f"enable_{name}": True for name in on})
    model = tof.TinyOpenFoldV2(tof.TinyOpenFoldConfig(num_blocks=3), fusion)
    found = model.get_fusion_statistics()
    titles = ("qkv_fusion_msa", "qkv_fusion_triangle", "flash_attention", "triangle_fusion", "torch_compile")
    assert found == dict({f"{name}_enabled": name in on for name in titles}, baseline_kernels_per_block=15,
                         fused_kernels_per_block=kernels,
                         kernel_reduction_percent=round(100 * (15 - kernels) / 15, 1),
                         total_kernel_reduction=3 * (15 - kernels), projection_gemms_per_block_unfused=20,
                         projection_gemms_per_block=gemms)


def costs_of(num_blocks=1, **sizes):
    settings = tof.PROGRAM.settings(num_blocks=num_blocks, **sizes)
    return costs(settings.model, settings.fusion, settings.training)


def test_costs_of_every_sub_layer_by_hand():
    """12 positions of the MSA tensor and 18 of the pair tensor, 4 bytes each: a pass over them is 192 and 432
    bytes, over the outer product's hidden tensor 240, over the biases of rows 144 and of pairs 216."""
    sizes = dict(batch_size=2, num_seqs=2, seq_len=3, msa_dim=4, pair_dim=6, msa_heads=2, pair_heads=3,
                 outer_product_dim=5)
    by_name = costs_of(**sizes)
    multiplication = (8424, 9 * 432, 15 * 432)
    attention = (8424, 11 * 432 + 2 * 216, 18 * 432 + 3 * 216)
    assert {name: dataclasses.astuple(cost) for name, cost in by_name.items()} == dict(
        msa_row_attention=(2928, 11 * 192 + 432 + 2 * 144, 18 * 192 + 2 * 432 + 3 * 144),
        msa_column_attention=(2304, 11 * 192, 18 * 192), msa_transition=(3072, 2 * 192, 3 * 192),
        outer_product_mean=(8160, 432 + 192 + 4 * 240, 432 + 3 * 192 + 6 * 240),
        triangle_mult_outgoing=multiplication, triangle_mult_incoming=multiplication,
        triangle_attn_starting=attention, triangle_attn_ending=attention,
        pair_transition=(10368, 2 * 432, 3 * 432), heads=(16032, None, None))
    half = costs_of(**sizes, use_amp=True)  # two bytes instead of four
    assert all(2 * half[name].forward_bytes == by_name[name].forward_bytes for name in tof.SUBLAYERS)
    few = costs_of(**dict(sizes, batch_size=1, num_seqs=1, seq_len=4))  # re-associated
    assert few["outer_product_mean"].flops == 4 * 4 * 4 * 5 + 2 * 4 * 25 * 6 + 2 * 16 * 5 * 6
    twice = costs_of(**sizes, num_blocks=2)
    assert all(twice[name].flops == (1 if name == "heads" else 2) * by_name[name].flops for name in by_name)


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


def test_probabilities_of_plain_attention_are_made_in_float32(monkeypatch):
    asked, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax",
                        lambda x, dim, dtype=None: asked.append(dtype) or softmax(x, dim, dtype=dtype))
    tof.attend(*torch.randn(3, 1, 2, 2, 5, 8).bfloat16(), backend="math")
    assert asked == [torch.float32]


@pytest.mark.parametrize("residues, shared", [(128, True), (129, False)])
def test_what_the_compiler_is_asked_for(residues, shared):
    model = tof.TinyOpenFoldV2(tof.TinyOpenFoldConfig(num_blocks=1, seq_len=residues), tof.FusionConfig(
        enable_torch_compile=True, torch_compile_mode="reduce-overhead"))
    options = model.compile_options()["options"]
    asked = torch._inductor.list_mode_options("reduce-overhead").items()
    assert asked and asked <= options.items() and options["combo_kernels"] is shared
