"""What the model and its trainer hand on, to recorders: to kernels, to attention's choice, to a graph."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from test_numbers_by_hand import CPU, TINY, model_of, trainer_of

import tiny_openfold_v2 as tof
from fusion_lab.training.files import UserError
from proteins.batches import SyntheticProteins

SMALL = tof.TinyOpenFoldConfig(num_blocks=1, msa_dim=8, pair_dim=12, msa_heads=2, pair_heads=3,
                               outer_product_dim=4)
ALL_TRITON = tof.FusionConfig(**{f"enable_triton_{name}": True for name in (
    "attention", "projection", "outer_product", "transition", "triangle")})


# --- To kernels -------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """Every sub-layer has a kernel, which adds 1 to the residual. calls: [(its name, its arguments)]; asked:
    the same of what the model asks before."""
    calls, asked = [], []

    def recorder(name, result):
        return lambda *given: calls.append((name, given)) or result(*given)
    residuals = dict(attention_layer=10, triangle_multiplication=9, transition=4, outer_product=4)
    for name, residual in residuals.items():
        monkeypatch.setattr(tof.triton, name, recorder(name, lambda *given, at=residual: given[at] + 1))
    monkeypatch.setattr(tof.triton, "head_bias", recorder("head_bias", tof.head_bias))
    for name in ("fits", "projects", "projects_bias", "attends", "multiplies_out"):
        monkeypatch.setattr(tof.triton, name, lambda *given, name=name: asked.append((name, given)) or True)
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


def test_every_sub_layer_hands_its_modules_and_masks_to_its_kernel(kernels):
    block = block_of()
    msa, pair = inputs(2)
    seq_mask, row_mask = torch.ones(2, 7), torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    seq_mask[1, 6] = 0
    found = block(msa, pair, seq_mask, row_mask)
    assert torch.equal(found[0], msa + 3) and torch.equal(found[1], pair + 6)
    row, column, triangle = block.msa_row_attention, block.msa_column_attention, block.triangle_attn_starting
    names, given = zip(*kernels.calls, strict=True)
    assert names == ("head_bias", *2 * ("attention_layer",), "transition", "outer_product",
                     *2 * ("triangle_multiplication",), *2 * ("attention_layer",), "transition")

    def packed(layer):
        return layer.packed("q_proj", "k_proj", "v_proj", "gate_proj")
    same(given[0], (row.pair_bias_proj, pair, row.pair_norm))
    bias, _ = tof.head_bias(row.pair_bias_proj, pair, row.pair_norm)
    same(given[1], (msa, row.layer_norm, *packed(row), row.o_proj, 2, 2, bias, None, seq_mask, msa, None,
                    False))
    same(given[2], (msa + 1, column.layer_norm, *packed(column), column.o_proj, 2, 1, None, None, row_mask,
                    msa + 1, None, False))
    layer = block.msa_transition
    same(given[3], (msa + 2, layer.layer_norm, layer.linear1, layer.linear2, msa + 2, False))
    layer = block.outer_product_mean
    left, right = layer.project(layer.layer_norm(msa + 3))
    same(given[4], (left * row_mask[:, :, None, None], right, layer.output_proj,
                    torch.tensor([4.0, 2.0]).view(2, 1, 1, 1), pair))
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
    assert widths == {("projects", 2), ("projects", 3), ("projects_bias", 2), ("fits",), ("multiplies_out",)}


def test_without_masks_all_rows_count(kernels):
    layer = block_of().outer_product_mean
    msa, pair = inputs(2)
    layer(msa, residual=pair)
    left, right = layer.project(layer.layer_norm(msa))
    same(kernels.calls.pop()[1], (left, right, layer.output_proj, 5, pair))


def test_where_an_outer_product_is_laid_out_by_its_own_kernel(kernels, monkeypatch):
    """Not where it is re-associated, by ranks that share a sample, nor where no kernel runs."""
    made = []
    monkeypatch.setattr(tof.triton, "outer_layout", lambda *given: made.append(given) or torch.ones(1))
    monkeypatch.setattr(tof.triton, "runs", lambda x: True)
    layer = block_of(tof.FusionConfig(enable_triton_outer_layout=True)).outer_product_mean  # of narrow sides
    plain = block_of(tof.FusionConfig()).outer_product_mean
    (msa, pair), row_mask = inputs(), torch.tensor([[1.0, 1, 1, 1, 0]])
    assert layer.adds(pair) and not plain.adds(pair)
    found = layer(msa, row_mask)
    left, right = layer.project(layer.layer_norm(msa))
    same(made.pop(), (left * row_mask[:, :, None, None], right, layer.output_proj, False))
    assert found.item() == pytest.approx(1 / 4.001)
    assert torch.equal(layer(msa, row_mask, residual=pair), pair + found)
    made.pop()
    assert layer(msa, residual=pair).item() == 1.0  # divided and added within
    same(made.pop(), (left, right, layer.output_proj, False, pytest.approx(1 / 5.001), pair))
    few = layer(msa[:, :1], row_mask[:, :1])  # 4 N <= S
    assert torch.equal(layer(msa[:, :1], row_mask[:, :1], residual=pair), pair + few)
    plain(msa, row_mask)
    layer.ranks = SimpleNamespace(size=2, gather=lambda x, dim: x)
    layer(msa, row_mask)
    del layer.ranks
    monkeypatch.setattr(tof.triton, "runs", lambda x: False)
    layer(msa, row_mask)
    assert made == kernels.calls == []


def test_where_the_sides_of_an_outer_product_have_a_kernel(kernels, monkeypatch):
    """Where their product is laid out; what follows then reads the MSA that it hands on."""
    made, asked, handed_on = [], [], []
    monkeypatch.setattr(tof.triton, "runs", lambda x: True)
    monkeypatch.setattr(tof.triton, "projects_sides", lambda msa, h: asked.append(h) or True)
    monkeypatch.setattr(tof.triton, "outer_layout", lambda left, right, *_: left - right)
    monkeypatch.setattr(tof.triton, "sides", lambda *given: made.append(given) or (
        given[0] + 1, given[0] - 1, given[0] + 2))
    block = block_of(tof.FusionConfig(enable_triton_outer_layout=True, enable_projection_fusion=True))
    layer, (msa, pair) = block.outer_product_mean, inputs()
    assert torch.equal(layer(msa, None, handed_on), torch.full_like(msa, 2.0))
    assert torch.equal(handed_on.pop(), msa + 2) and set(asked) == {4}
    weights = layer.left_right_proj.weight, layer.left_right_proj.bias
    same(made.pop(), (msa, layer.layer_norm, *weights))
    results = []
    for more in (2, 0):
        monkeypatch.setattr(layer, "forward", lambda msa, row_mask, handed_on, residual, drop, more=more:
                            handed_on.append(msa + more) or residual)
        results.append(block(msa, pair)[0])
    assert torch.equal(results[0], results[1] + 2)
    del layer.forward
    layer(msa[:, :1])  # re-associated
    layer.ranks = SimpleNamespace(size=2, gather=lambda x, dim: x)
    layer(msa)
    del layer.ranks
    layer.triton = True
    layer(msa, residual=pair)
    monkeypatch.setattr(tof.triton, "projects_sides", lambda msa, h: False)
    layer.triton = False
    layer(msa, None, handed_on)
    assert made == [] and handed_on == [msa]


def test_kernels_are_asked_only_where_a_switch_wants_them(kernels):
    msa, pair = inputs()
    block_of(tof.FusionConfig())(msa, pair)
    assert kernels.asked == kernels.calls == []


def test_a_shape_without_a_kernel_runs_the_model_s_own_code(kernels, monkeypatch):
    msa, pair = inputs()
    torch.manual_seed(0)
    block = block_of()
    plain = block_of(tof.FusionConfig())
    plain.load_state_dict(block.state_dict())
    for name in ("fits", "projects", "projects_bias", "attends", "multiplies_out"):
        monkeypatch.setattr(tof.triton, name, lambda *_: False)
    found, expected = block(msa, pair), plain(msa, pair)
    assert kernels.calls == [] and all(map(torch.equal, found, expected))


def test_ranks_that_share_a_sample_turn_it_so_that_attention_finds_its_axis_whole():
    """(places along axis 1, the axis that was split, the one to split, rows in all) between sub-layers."""
    block, order = block_of(tof.FusionConfig()), []
    msa, pair = inputs()
    block.ranks = SimpleNamespace(turn=lambda x, *how: order.append((x.shape[1], *how)) or x)
    for name in tof.SUBLAYERS:
        getattr(block, name).register_forward_hook(lambda *_, name=name: order.append(name))
    block(msa, pair)
    row, column, transition, outer, *triangles, ending, last = tof.SUBLAYERS
    assert order == [(5, 2, 1), row, (5, 1, 2, 5), column, transition, outer, *triangles, (7, 1, 2), ending,
                     (7, 2, 1), last]


def test_ranks_that_share_a_sample_own_columns_of_tokens_and_rows_of_pairs():
    model, owned, others = model_of(coevolution="covariance", num_seqs=4, seq_len=7), [], []
    model.ranks = SimpleNamespace(own=lambda x, dim: owned.append((*x.shape, dim)) or x, sum=lambda x: 2 * x,
                                  turn=lambda x, *how: others.append((*x.shape, *how)) or x)
    tokens = torch.randint(0, 20, (1, 4, 7))
    batch = dict(msa_tokens=tokens, msa_targets=tokens, coords=torch.zeros(1, 7, 3),
                 coord_mask=torch.ones(1, 7))
    loss = model(**batch)["masked_msa_loss"].item()
    features, target, rows, place, *targets = owned
    assert features[:3] + features[-1:] == (1, 7, 7, 1)
    assert (target, rows, place) == ((1, 7, 1), (1, 4, 7, 2), (7, 0))
    assert targets == [(1, 7, 3, 1), (1, 7, 1), (1, 4, 7, 2)] and others == [(1, 7, 7, 64, 1, 2)]
    del model.ranks
    assert loss == pytest.approx(2 * model(**batch)["masked_msa_loss"].item())  # of all letters, not its own


@pytest.mark.parametrize("seq_len, combos", [(128, True), (129, False)])
def test_what_is_compiled(seq_len, combos, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: calls.append((type(module), how)))
    monkeypatch.setattr(torch, "compile",
                        lambda function, **how: calls.append((function.__name__, how)) or "end")
    config = dataclasses.replace(SMALL, seq_len=seq_len, num_blocks=2)
    model = tof.TinyOpenFoldV2(config, tof.FusionConfig())
    assert calls == [] and model.gpu_ends == (model.embed, model.heads) and len(model.sublayers()) == 18
    monkeypatch.setattr(tof.triton, "gathered_gradients", lambda *which: dict(gathers=which))
    fusion = tof.FusionConfig(enable_torch_compile=True, enable_combo_kernels=True,
                              enable_triton_weight_gradients=combos,
                              torch_compile_mode="max-autotune-no-cudagraphs")
    model = tof.TinyOpenFoldV2(config, fusion)
    how = dict(fullgraph=True, dynamic=False, options=dict(
        torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), combo_kernels=combos,
        gathers=(combos, False)))
    assert calls == [*2 * [(tof.FusedEvoformerBlock, how)], ("embed", how), ("heads", how)]
    assert model.gpu_ends == ("end", "end") and model.sublayers() == []


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
    assert {name: getattr(block, name).active for name in NONE} == {**NONE, **packed}


def test_attention_between_the_library_s_projections(monkeypatch):
    """With triton-attention alone: packed with the gate or not, and the bias turned for the ending node."""
    calls = []
    monkeypatch.setattr(tof.triton, "attends", lambda x, heads: calls.append(heads) or True)
    monkeypatch.setattr(tof.triton, "gated_attention",
                        lambda *given: calls.append(given) or given[0][0][..., :12])
    pair, keys = torch.randn(2, 7, 7, 12), torch.ones(2, 7)
    for wide in (False, True):
        fusion = tof.FusionConfig(enable_triton_attention=True, enable_projection_fusion=wide)
        for starting in (True, False):
            layer = tof.FusedTriangleAttention(SMALL, fusion, starting)
            layer(pair, keys)
            heads, (parts, count, axis, bias, mask, gate_bias) = calls.pop(0), calls.pop(0)
            x = layer.layer_norm(pair)
            if wide:
                same([*parts, gate_bias], [layer.qkv_gate_proj(x), layer.qkv_gate_proj.bias])
            else:
                same([*parts, gate_bias], [*layer.project(x), None])
            expected, _ = tof.head_bias(layer.triangle_bias_proj, x)
            assert torch.equal(bias, expected if starting else expected.mT) and mask is keys
            assert (heads, count, axis) == (3, 3, 2 if starting else 1) and calls == []


# --- To the choice of attention, to losses ----------------------------------------------------------------


def test_what_the_choice_of_attention_hears(monkeypatch):
    heard, plain = [], dict(on_gpu=False, dtype=torch.float32, strict=True, width=4, length=5, biased=True,
                            training=True, arch="arch of False")
    monkeypatch.setattr(tof.attention, "architecture", lambda on_gpu: f"arch of {on_gpu}")
    monkeypatch.setattr(tof.attention, "attention_backend",
                        lambda *given, **named: heard.append((*given, named)) or "math")
    q = torch.randn(1, 2, 3, 5, 4)
    tof.attend(q, q, q, torch.zeros(1, 3, 5, 5), backend="flex")
    with torch.no_grad():
        tof.attend(q.bfloat16(), q.bfloat16(), q.bfloat16())
    assert heard == [("flex", plain), ("auto", {**plain, "dtype": torch.bfloat16, "strict": False,
                                                "biased": False, "training": False})]


@pytest.mark.parametrize("chosen", ["math", "sdpa", "flex"])
def test_the_chosen_attention_is_what_runs(chosen, monkeypatch):
    ran, sdpa = [], tof.F.scaled_dot_product_attention
    q, k, v = torch.randn(3, 2, 3, 4, 5, 8)
    monkeypatch.setattr(tof.attention, "attention_backend", lambda *_, **__: chosen)
    monkeypatch.setattr(tof.attention, "flex_attend", lambda *given: ran.append(("flex", given)) or given[0])
    monkeypatch.setattr(tof.F, "scaled_dot_product_attention",
                        lambda *given: ran.append(("sdpa",)) or sdpa(*given))
    out = tof.attend(q, k, v)
    assert ran == {"math": [], "sdpa": [("sdpa",)], "flex": [("flex", (q, k, v, None))]}[chosen]
    expected = q if chosen == "flex" else (q @ k.mT / 8 ** 0.5).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    tof.attend(q, k, v, torch.zeros(2, 4, 5, 5))
    assert len(ran) == {"math": 0, "sdpa": 1 + 2, "flex": 2}[chosen]  # with a bias sample by sample


def test_defaults_of_the_command_line():
    assert [f.name for f in dataclasses.fields(tof.FusionConfig) if not f.metadata["alone"]] == [
        "enable_torch_compile", "enable_triton_adamw", "enable_triton_weight_gradients", "enable_triton_sums",
        "enable_combo_kernels"]
    assert tof.COMMAND_LINE.study_sizes == dict(batch_size=(2, 4), seq_len=(32, 64))


def test_of_how_many_pairs_and_letters_losses_are_means():
    coords = dict(coords=torch.zeros(2, 4, 3), coord_mask=torch.tensor([[1.0, 1, 1, 0], [0, 1, 0, 0]]))
    letters = dict(msa_targets=torch.tensor([[[0, 22, -100, -100], [5, -100, -100, -100]]]))
    count = tof.TinyOpenFoldV2.loss_counts
    assert count(**coords).tolist() == [10] and count(**letters).tolist() == [3]
    assert count(**coords, **letters, seq_mask=None).tolist() == [10, 3]


def test_which_attention_a_model_names(monkeypatch):
    heard = []

    def in_words(*given, **parts):
        heard.append((given, parts))
        return words
    monkeypatch.setattr(tof.attention, "in_words", in_words)
    sizes = dict(msa_dim=8, pair_dim=12, msa_heads=2, pair_heads=3, seq_len=9, num_seqs=5)
    model, words = model_of(**sizes), "sdpa"
    parts = dict(pair=(9, 4, True), rows=(9, 4, True), columns=(5, 4, False))
    assert model.attention_kernel() == model.attention_kernel(torch.bfloat16) == "sdpa"
    assert heard == [(("auto", False, False, dtype), parts) for dtype in (torch.float32, torch.bfloat16)]
    model = tof.TinyOpenFoldV2(tof.TinyOpenFoldConfig(**sizes, num_blocks=1), ALL_TRITON)
    assert model.attention_kernel() == "sdpa" and heard[-1][0][1] is True
    words = "triton_attention"
    assert model.attention_kernel() == "triton_attention; MSA, pair: projections by the library"


# --- To a graph, to what a run begins with ----------------------------------------------------------------


def test_a_graph_is_captured_once_and_marks_every_phase(monkeypatch):
    trainer, events = trainer_of(ema_decay=0.5), []
    trainer.use_graph, batch = True, SyntheticProteins(trainer.settings).batch(0)

    def captured(run, inputs, device):
        assert run == trainer.eager_step and inputs is batch and device == CPU
        run(inputs)  # to be taken back
        events.append("captured")
        return lambda inputs: events.append("replayed") or torch.tensor(2.5)
    monkeypatch.setattr(tof, "GraphedStep", captured)
    before = [weight.detach().clone() for weight in trainer.updated]
    for _ in range(2):
        assert trainer.step(batch, lambda: events.append("mark")) == 2.5
    assert events == ["captured", *2 * ["replayed", *3 * ["mark"]]] and trainer.average.steps == 2
    assert all(map(torch.equal, before, trainer.updated))


class Stop(Exception):
    pass


def settings_of(tmp_path, **values):
    return tof.PROGRAM.settings(**{**TINY, "device": "cpu", "profile_dir": str(tmp_path), **values})


@pytest.mark.parametrize("values, expected", [
    (dict(resume="r.pt"), ["load_run", "r.pt"]), (dict(init_from="i.pt"), ["load_weights", "i.pt"])])
def test_what_a_run_continues(values, expected, tmp_path, monkeypatch):
    calls = []

    def stop(name):
        def record(trainer, path, source):
            assert isinstance(trainer, tof.Trainer) and isinstance(source, SyntheticProteins)
            calls.extend([name, path])
            raise Stop
        return record
    for name in ("load_run", "load_weights"):
        monkeypatch.setattr(tof, name, stop(name))
    with pytest.raises(Stop):
        tof.train(tof.PROGRAM, settings_of(tmp_path, **values))
    assert calls == expected


def flags(tmp_path):
    return ["--device", "cpu", "--profile-dir", str(tmp_path), "--num-blocks", "1"]


def test_what_a_program_does_instead_of_training(tmp_path, monkeypatch):
    seen, codes = [], [7, 0, None]
    program = dataclasses.replace(
        tof.PROGRAM, instead=lambda program, settings: seen.append(settings) or codes.pop(0))
    monkeypatch.setattr(tof, "train", lambda program, settings, earlier: (settings is seen[-1], earlier))
    assert [tof.run(flags(tmp_path), program) for _ in range(2)] == [7, 0]
    assert tof.run([*flags(tmp_path), "--compare-with-v1", "v1.json"], program) == (True, "v1.json")


def test_modes_are_given_the_program_and_its_settings(tmp_path, monkeypatch):
    def note(name):
        return lambda program, settings, *given: (name, settings.model.num_blocks, *given)
    for module, name in ((tof.accuracy, "validate_setup"), (tof.accuracy, "verify_accuracy"),
                         (tof.retune, "retune"), (tof.comparison, "compare_fusion")):
        monkeypatch.setattr(module, name, note(name))
    program = dataclasses.replace(tof.PROGRAM, modes={"--contacts": note("contacts")})
    asked = ["--validate-setup", "--verify-accuracy", "--retune"]
    assert [tof.run([*flags(tmp_path), mode], program) for mode in asked] == [
        (name, 1) for name in ("validate_setup", "verify_accuracy", "retune")]
    assert tof.run(["--contacts", "x.a3m"], program) == ("contacts", 4)
    compare = [*flags(tmp_path), "--compare-fusion"]
    assert tof.run(compare, program) == ("compare_fusion", 1, None, False)
    assert tof.run([*compare, "--combinations"], program) == ("compare_fusion", 1, None, True)
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "0202", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match="^--retune is for one process, and torchrun started 2"):
        tof.run([*flags(tmp_path), "--retune"], program)
