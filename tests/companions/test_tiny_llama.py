"""TinyLlama: against transformers' model in float64, what it reads, bits per byte, one kernel a block."""
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from companions import text, ultra_block
from evoformer_kernels.limits import HAS_TRITON
from fusion_lab.measuring import accuracy
from fusion_lab.measuring.counters import gpu_kernels
from fusion_lab.measuring.flops import counts_by_sublayer
from fusion_lab.measuring.roofline import total_bytes
from fusion_lab.training.checkpoints import unpacked
from fusion_lab.training.errors import UserError
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import process_settings
from fusion_lab.training.program import load_program
from tests.support import GOING_ON, ROOT, require_shared

FILE = ROOT / "companions" / "tiny_llama.py"
PROGRAM = load_program(FILE)
llama = __import__("tiny_llama")

CPU = torch.device("cpu")
SWITCHES = ("enable_qkv_fusion", "enable_flash_attention", "enable_swiglu_fusion", "enable_norm_fusion")
COMBINATIONS = [llama.LlamaSwitches(**dict(zip(SWITCHES, on, strict=True)))
                for on in itertools.product((False, True), repeat=len(SWITCHES))]
SIZES = dict(hidden_size=32, intermediate_size=80, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def reference():
    """{key: tensor} of transformers' LlamaForCausalLM, with tied embeddings."""
    with np.load(require_shared("reference", "companions", "llama_tied.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def model_of(reference, fusion):
    config = llama.LlamaConfig(**SIZES, seq_len=11, vocab_size=64, tie_word_embeddings=True)
    model = llama.TinyLlama(config, fusion).double()
    model.load_state_dict({key[6:]: x for key, x in reference.items() if key.startswith("param/")})
    return model


def errors(reference, fusion):
    """Largest differences from the reference, of all that it has."""
    model, hidden = model_of(reference, fusion), []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    ids = reference["ids"]
    output = model(ids[:, :-1])
    pairs = [(output["logits"], reference["logits"]), *zip(
        [*hidden[:2], output["hidden"]], [reference[f"hidden/{i}"] for i in range(3)], strict=True)]
    loss = model(ids[:, :-1], ids[:, 1:])["loss"]
    loss.backward()
    gradients = unpacked(model, {name: p.grad for name, p in model.named_parameters()})
    expected = {key[5:]: x for key, x in reference.items() if key.startswith("grad/")}
    assert gradients.keys() == expected.keys()
    pairs += [(loss, reference["loss"]), *((gradients[name], x) for name, x in expected.items())]
    return [(mine - theirs).abs().max().item() for mine, theirs in pairs]


def test_equals_transformers_under_all_switches(reference):
    for fusion in COMBINATIONS:
        assert max(errors(reference, fusion)) < 1e-12, fusion


def test_labels_are_the_next_bytes_and_no_logit_sees_a_later_one():
    settings = PROGRAM.settings(**SIZES, seq_len=16, batch_size=2, data=str(ROOT / "README.md"))
    source = PROGRAM.data(settings)
    batch = source.batch(0)
    assert torch.equal(batch["ids"][:, 1:], batch["targets"][:, :-1])
    whole = source.seen.tobytes()
    assert all(bytes([*row.tolist(), last]) in whole for row, last in zip(
        batch["ids"], batch["targets"][:, -1].tolist(), strict=True))
    torch.manual_seed(0)
    model = PROGRAM.model(settings.model, settings.fusion).double()
    changed = batch["ids"].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    difference = (model(changed)["logits"] - model(batch["ids"])["logits"]).abs().amax((0, 2))
    assert difference[:9].max() == 0 and difference[9:].min() > 0


def test_bytes_and_flops_of_each_part_by_hand():
    """x has 32 positions of 32 channels, 4,096 bytes; Q, K, V 64 channels, 8,192 bytes; two blocks."""
    settings = PROGRAM.settings(**SIZES, seq_len=16, batch_size=2, data=str(ROOT / "README.md"))
    cost = PROGRAM.model(settings.model, settings.fusion).costs(settings.training)
    norm = (2 * 4096 + 128) + (3 * 4096 + 256)
    attention = (4 * 4096 + 2 * 8192 + 12288) + (7 * 4096 + 3 * 8192 + 24576)
    assert {name: total_bytes(c) for name, c in cost.items()} == dict(
        input_layernorm=2 * norm, post_attention_layernorm=2 * norm, norm=norm, self_attn=2 * attention,
        mlp=2 * ((2 * 4096 + 30720) + (3 * 4096 + 61440)), lm_head=(4096 + 32768) + (2 * 4096 + 65536))
    flops = counts_by_sublayer(PROGRAM, settings, on_gpu=False)
    assert flops["self_attn"] == 3 * 2 * (2 * 32 * 32 * 64 + 2 * 32 * 32 * 32 + 4 * 32 * 16 * 32)
    assert flops["mlp"] == 3 * 2 * (6 * 32 * 32 * 80) and flops["lm_head"] == 3 * (2 * 32 * 32 * 256)
    assert flops["norm"] == flops["input_layernorm"] == flops["rest"] == 0
    half = PROGRAM.model(settings.model, settings.fusion).costs(settings.having(use_amp=True).training)
    assert all(2 * total_bytes(half[name]) == total_bytes(c) for name, c in cost.items())


# The corpus and its measures


def test_held_out_files_are_never_read_in_training(tmp_path):
    names = [f"text{i}" for i in range(60)]
    held_out = [name for name in names if text.is_held_out(name)]
    assert 0 < len(held_out) < 15
    for name in names:
        (tmp_path / name).write_bytes(bytes([1 if name in held_out else 2]) * 50)
    source = PROGRAM.data(PROGRAM.settings(**SIZES, seq_len=16, data=str(tmp_path)))
    assert sorted(source.held_out) == sorted(held_out) and not set(source.names) & set(held_out)
    assert (source.seen == 2).all() and (source.unseen == 1).all()
    assert all((source.batch(step)["ids"] == 2).all() for step in range(5))
    [batch] = source.evaluation(source.unseen, 512)
    assert (batch["targets"] == 1).all()
    one = tmp_path / "one"
    one.write_bytes(bytes(range(250)))
    source = PROGRAM.data(PROGRAM.settings(**SIZES, seq_len=16, data=str(one)))
    assert source.seen.tolist() == [*range(225)] and source.unseen.tolist() == [*range(225, 250)]
    starts = torch.cat([source.batch(step)["ids"][:, 0] for step in range(1000)])
    assert {*starts.tolist()} == {*range(225 - 16)}  # every window is drawn
    evaluated = torch.cat([batch["targets"] for batch in source.evaluation(source.seen, 5)])
    assert (evaluated[0, 0], evaluated[-1, -1]) == (1, 224)


def test_what_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 30)
    for values, words in ((dict(data=str(tmp_path / "absent")), "No such file"),
                          (dict(data=str(tmp_path / "short")), "only 3 bytes held out"),
                          (dict(vocab_size=64), "256 kinds")):
        with pytest.raises(UserError, match=words):
            PROGRAM.data(PROGRAM.settings(**SIZES, **values, seq_len=16))


def test_the_standard_library_is_there_and_the_same_every_time():
    settings = PROGRAM.settings(**SIZES, seq_len=16)
    first, second = PROGRAM.data(settings), PROGRAM.data(settings)
    assert first.sha256 == second.sha256 and len(first.seen) > 5e6 and len(first.unseen) > 3e5
    assert not any("test" in name.split("/") or "site-packages" in name for name in first.names)
    assert {"ast.py", "json/decoder.py"} <= {*first.names, *first.held_out}


def test_bits_per_byte_by_hand():
    class Half:
        device = CPU

        def forward(self, batch):  # two equal choices for each byte
            return dict(loss=torch.tensor(math.log(2)))
    batches = [dict(targets=torch.zeros(2, 5)), dict(targets=torch.zeros(1, 5))]
    assert text.bits_per_byte(Half(), batches, GOING_ON) == pytest.approx(1.0)
    assert text.bits_per_byte(Half(), batches, SimpleNamespace(signal=2)) == 0  # and none is counted


# One kernel a block, on a GPU; in the interpreter: tests/companions/kernels/test_ultra_block.py


def on_gpu(**values):
    return PROGRAM.settings(**{**dict(hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
                                      num_kv_heads=2, seq_len=128, batch_size=2, use_amp=True,
                                      amp_dtype="bfloat16", enable_ultra_block=True,
                                      data=str(ROOT / "README.md")), **values})


@pytest.mark.gpu
@pytest.mark.parametrize("values", [{}, dict(batch_size=1, seq_len=77), dict(
    enable_master_weights=True, batch_size=4, seq_len=512, enable_qkv_fusion=False)])
def test_ultra_fused_blocks_keep_every_gradient(values):
    found, failures = accuracy.compare_numerics(PROGRAM, on_gpu(**values), torch.device("cuda"))
    assert failures == [] and found["tensors"] > 20


@pytest.mark.gpu
def test_an_ultra_fused_block_is_one_kernel():
    device = torch.device("cuda")
    counts = []
    for layers in (1, 3):
        settings = on_gpu(num_layers=layers, enable_master_weights=True)
        trainer = PROGRAM.trainer(PROGRAM, settings, device)
        batch = to_device(PROGRAM.data(settings).check_batch(), device)
        with torch.no_grad():
            trainer.forward(batch)
            counts.append(len(gpu_kernels(lambda t=trainer, b=batch: t.forward(b))))
    assert counts[1] - counts[0] == 2


@pytest.mark.gpu
def test_a_grid_that_does_not_fit_is_refused():
    from companions.kernels import ultra_block as kernels
    trainer = PROGRAM.trainer(PROGRAM, on_gpu(enable_master_weights=True), torch.device("cuda"))
    block, x = trainer.model.model.layers[0], torch.zeros(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    with mock.patch.object(kernels, "processors", lambda *_: 100_000), pytest.raises(RuntimeError):
        ultra_block.launch(block, x)


@pytest.mark.parametrize("graph, word", [(0.5, "2.00x"), (0.9, "nothing is faster")])
def test_verdicts_on_one_kernel_a_block(graph, word):
    times = {ultra_block.ULTRA: 1.0, ultra_block.EAGER: 4.0, "graph": graph}
    said = ultra_block.verdict([dict(name=name, median=t, p20=0.9 * t, p80=1.1 * t)
                                for name, t in times.items()])
    assert "4.00x as fast as eager" in said and word in said


def test_a_contest_counts_launches_and_tokens_and_sums_up_over_shapes(monkeypatch):
    """On a CPU, where both ways are eager code, of 2 x 16 tokens."""
    monkeypatch.setattr(ultra_block, "WAYS", {ultra_block.ULTRA: {}, ultra_block.EAGER: {}})
    monkeypatch.setattr(ultra_block, "ROUNDS", 2)
    settings = PROGRAM.settings(**SIZES, seq_len=16, batch_size=2, data=str(ROOT / "README.md"))
    forward = ultra_block.rows_of(ultra_block.Forward, PROGRAM, settings, CPU)
    step = ultra_block.rows_of(PROGRAM.trainer, PROGRAM, settings, CPU)
    assert forward[0]["launches"] == forward[1]["launches"] < step[0]["launches"]
    assert forward[0]["tokens_per_second"] == pytest.approx(32 / forward[0]["median"])
    shapes = [dict(forward=dict(rows=[dict(name=name, median=t, tokens_per_second=8 / t) for name, t in (
        (ultra_block.ULTRA, 1.0), (ultra_block.EAGER, gain))])) for gain in (4.0, 2.0)]
    assert ultra_block.over_all(shapes, "forward") == (4.0, 3.0, 8.0)
    shapes[0]["forward"]["rows"].pop()
    assert ultra_block.over_all(shapes, "forward") is None


def test_one_kernel_a_block_needs_a_gpu_and_says_so(capsys):
    assert llama.main(["--compare-ultra", "--device", "cpu"], program=PROGRAM) == 4
    assert "needs a GPU" in capsys.readouterr().err
    idle = on_gpu().idle_reasons(False)
    assert "the ultra-fused block needs a GPU" in idle[0]
    if HAS_TRITON:
        assert "32, 64, 128 channels" in on_gpu(num_heads=16, num_kv_heads=2).idle_reasons(True)[0]


def test_the_pointwise_kernel_says_what_it_needs(monkeypatch):
    def idle(on_gpu=True, **switches):
        given = dict(use_amp=True, enable_pointwise_kernel=True)
        return PROGRAM.settings(**SIZES, **given | switches).idle_reasons(on_gpu)
    monkeypatch.setattr(llama, "HAS_TRITON", True)
    assert idle() == idle(enable_qkv_fusion=False) == idle(enable_swiglu_fusion=False) == []
    [said] = idle(enable_qkv_fusion=False, enable_swiglu_fusion=False)
    assert "packed projections" in said
    assert len(idle(False)) == len(idle(use_amp=False)) == 1


def results(**switches):
    """Outputs and all gradients, of a sequence shorter than the model was made for."""
    settings = PROGRAM.settings(**{**SIZES, "intermediate_size": 40}, seq_len=16, batch_size=2, **switches)
    trainer = PROGRAM.trainer(PROGRAM, settings, CPU)
    accuracy.shake(trainer.model)
    batch = {name: x[:, :11] for name, x in PROGRAM.data(settings).check_batch().items()}
    return accuracy.results_and_gradients(trainer, batch)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("switches, kernels", [
    ({}, ["swiglu", "rotary"]), (dict(enable_flash_attention=False), ["swiglu", "rotary"]),
    (dict(enable_activation_checkpointing=True), ["swiglu", "rotary"]),
    (dict(enable_qkv_fusion=False), ["swiglu"]), (dict(enable_swiglu_fusion=False), ["rotary"])], ids=str)
def test_the_pointwise_kernel_changes_nothing(switches, kernels, monkeypatch):
    gated_rotary = pytest.importorskip("companions.kernels.gated_rotary")  # needs Triton
    monkeypatch.setattr(llama, "runs", lambda x: True)  # on the CPU, in the interpreter
    places = dict(swiglu=llama, rotary=gated_rotary)
    for name, place in places.items():
        monkeypatch.setattr(place, name, mock.Mock(wraps=getattr(place, name)))
    plain, ours = results(**switches), results(enable_pointwise_kernel=True, **switches)
    assert [name for name, place in places.items() if getattr(place, name).called] == kernels
    for name, expected in plain.items():
        scale = max(expected.abs().max().item(), 1e-2)
        assert (ours[name] - expected).abs().max() < 2e-5 * scale, name


def test_angles_are_rounded_to_float32_at_most():
    """In float32 for 16 bits and float32, in float64 for float64; those of the positions that there are."""
    model = llama.TinyLlama(llama.LlamaConfig(**SIZES, seq_len=11), llama.LlamaSwitches())
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for p in model.parameters():
            p.data = p.data.to(dtype)
        model(torch.zeros(1, 7, dtype=torch.int64))
    assert [x.dtype for x in seen] == [torch.float32, torch.float32, torch.float64]
    assert all(torch.equal(x, model.angles[:, :7].to(x.dtype)) for x in seen)


POINTWISE = dict(enable_ultra_block=False, enable_pointwise_kernel=True)


@pytest.mark.gpu
@pytest.mark.parametrize("values", [
    {}, dict(enable_torch_compile=True), dict(batch_size=1, seq_len=77), dict(
        enable_master_weights=True, enable_torch_compile=True, num_heads=8),
    dict(enable_flash_attention=False),
    dict(enable_activation_checkpointing=True)], ids=str)
def test_the_pointwise_kernel_keeps_every_gradient(values):
    settings = on_gpu(**POINTWISE, **values)
    assert settings.idle_reasons(True) == []
    found, failures = accuracy.compare_numerics(PROGRAM, settings, torch.device("cuda"))
    assert failures == [] and found["tensors"] > 20


@pytest.mark.gpu
def test_compiled_graphed_steps_with_the_pointwise_kernel_are_eager_steps():
    device, losses = torch.device("cuda"), []
    for fast in (False, True):
        settings = on_gpu(enable_ultra_block=False, enable_pointwise_kernel=fast, enable_torch_compile=fast,
                          enable_cuda_graphs=fast, enable_master_weights=True)
        process_settings(settings, device)
        source, trainer = PROGRAM.data(settings), PROGRAM.trainer(PROGRAM, settings, device)
        losses.append([trainer.step(to_device(source.batch(n), device)).item() for n in range(5)])
        assert (trainer.graph is not None) == fast
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.slow
def test_it_learns():
    small = dict(hidden_size=64, intermediate_size=128, num_layers=2, seq_len=64)
    settings = PROGRAM.settings(**{**PROGRAM.demo, **small}, device="cpu")
    source, trainer = PROGRAM.data(settings), PROGRAM.trainer(PROGRAM, settings, CPU)
    for step in range(100):
        trainer.step(source.batch(step))
    assert source.evaluate(trainer, GOING_ON).details["held_out"] < 4.2
