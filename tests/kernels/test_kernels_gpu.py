"""Triton kernels on a GPU: outputs and gradients by the 3x rule, the model with them, CUDA graphs."""
import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
from triton.runtime.errors import OutOfResources

import tiny_openfold_v2 as tof
from evoformer_kernels import adamw, outer_product, projections, tuner
from evoformer_kernels.attention import bias_gradient, plan
from evoformer_kernels.precision import HALF
from evoformer_kernels.reductions import compile_pass, sums, weight_gradients
from evoformer_kernels.triangle_multiplication import products
from fusion_lab.measuring import accuracy
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import process_settings
from tests.kernels import problems
from tests.kernels import test_adamw as optimizer
from tests.kernels import test_exact as exact
from tests.kernels import test_families as families
from tests.kernels.attention import test_drop_in as called
from tests.kernels.attention import test_function as extremes
from tests.kernels.reductions import test_weight_gradients as weights
from tests.kernels.rule import equal, gradients, violations
from tests.kernels.test_families import tiles_of
from tests.support import ROOT
from tiny_openfold.proteins.batches import SyntheticProteins

if COMPANIONS := (ROOT / "companions").exists():  # they may go
    from tests.companions.kernels import test_gated_rotary as gated
    from tests.companions.kernels import test_messages as messages

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SIZES = (77, 128, 385)
PROBLEMS = {  # (what makes a problem, what it is given behind the dtype, at size S)
    "attention, starting node": (problems.attention, lambda S: (1, 5, S, 4, 32, 2, True, True, True)),
    "attention, ending node": (problems.attention, lambda S: (2, S, 3, 2, 16, 1, True, True, False)),
    "attention, columns": (problems.attention, lambda S: (1, S, 7, 4, 16, 1, False, True, True)),
    "attention, one row": (problems.attention, lambda S: (1, 1, S, 4, 16, 2, True, True, True)),
    "attention, from Python": (problems.attention_from_python, lambda S: (
        S, True, 2, 5, 4, 32, torch.float32)),
    "attention without a mask, from Python": (problems.attention_from_python, lambda S: (S, False)),
    "heads of 48, from Python": (problems.attention_from_python, lambda S: (S, True, 1, 5, 2, 48)),
    "outgoing": (problems.multiplication, lambda S: (1, S, 128, True, 2, True, 1, True)),
    "incoming": (problems.multiplication, lambda S: (1, S, 64, False, 2, True, 2, True)),
    "multiplication, from Python": (problems.multiplication_from_python, lambda S: (S, 128, "incoming")),
    "two layers": (problems.two_layers, lambda S: ((2, 5, S, 128), 512)),
    "two layers, wide": (problems.two_layers, lambda S: ((1, 3, S, 256), 1024)),
    "transition sub-layer": (problems.transition_layer, lambda S: ((2, 5, S, 128), 512)),
    "sub-layer, starting node": (problems.sub_layer, lambda S: (1, S, S, 128, 4, 2, "own", True, True, 1)),
    "sub-layer, ending node": (problems.sub_layer, lambda S: (1, S, S, 64, 4, 1, "own", True, True, 2)),
    "sub-layer, MSA rows": (problems.sub_layer, lambda S: (2, 3, S, 64, 4, 2, "given", True, True, 1)),
    "outer layout": (problems.outer_first, lambda S: (1, 128, S, 32, 128, True)),
    "outer layout, odd": (problems.outer_first, lambda S: (2, 37, S, 12, 72, True)),
    "outer layout, added": (problems.outer_first, lambda S: (1, 64, S, 32, 128, True, 0.1, True)),
    "sides": (problems.sides, lambda S: ((1, 64, S, 64), 32)),
    "sides, two samples, many channels": (problems.sides, lambda S: ((2, 5, S, 128), 32)),
}
if COMPANIONS:
    PROBLEMS.update({
        "messages, first layer": (messages.problem, lambda S: ("first", S, 48, 2 * S, 128)),
        "messages, GELU": (messages.problem, lambda S: ("gelu", S, 37, 1, 64)),
        "messages, sum": (messages.problem, lambda S: ("sum", S, 37, 1, 64)),
        "SwiGLU": (gated.problem, lambda S: ("swiglu", (3, S), 1376)),
        "SwiGLU, odd": (gated.problem, lambda S: ("swiglu", (2,), S)),
        "rotary": (gated.problem, lambda S: ("rotary", 2, S, 8, 2, 64)),
        "rotary, odd": (gated.problem, lambda S: ("rotary", 3, S, 3, 1, 6))})
LONG = (1, 70, 256, 4, 32, 2, True, True, True)  # attention of rows for which ds may be stored
EVERY_TILE = {  # kernels of candidates: (how many, problems)
    "outer product": (len(outer_product.TILES), [  # of whole tiles, several of them a program, and of others
        (problems.outer_first, each) for each in (
            (1, 128, 64, 32, 128, True), (2, 16, 128, 32, 128, True), (1, 37, 64, 32, 72, True),
            (1, 37, 65, 12, 72, True))]),
    "norm": (len(projections.NORM_PROJECT), [  # also where weights stay
        each for shape in ((1, 128, 256, 128), (2, 93, 127, 128), (2, 64, 128, 64)) for each in (
            (problems.head_bias, (shape, 4)), (problems.transition_layer, (shape, 4 * shape[-1])))]),
    "output": (len(projections.OUTPUT_PROJECT), [
        (problems.sub_layer, (1, 64, 128, 128, 4, 2, None, False, True, 1)),
        (problems.transition_layer, ((2, 37, 65, 128), 512)),
        (problems.transition_layer, ((2, 37, 64, 64), 256)),
        (problems.outer_first, (2, 37, 65, 32, 128, True, 0.1, True))]),
    "products": (len(products.CANDIDATES), [
        (problems.multiplication, (32, length, 16, outgoing, 2, True, None, True))
        for length in (1, 23, 48, 64) for outgoing in (True, False)]),
    "attention": (9, [(problems.attention, LONG), (problems.attention, (1, 70, 200, *LONG[3:])),
                      (problems.attention, (2, 70, 64, *LONG[3:])),
                      (problems.sub_layer, (2, 64, 64, 128, 4, 1, "own", True, True, 2))]),
    "multiplication": (8, [(problems.multiplication, (1, S, 128, True, 2, True, 1, True))
                           for S in (77, 128)]),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_three_times_the_error_of_plain_pytorch(name, size, dtype):
    problem, case = PROBLEMS[name]
    with torch.device(DEVICE):
        assert not violations(*problem(dtype, *case(size)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind, number", [(kind, number) for kind, (count, _) in EVERY_TILE.items()
                                          for number in range(count)])
def test_with_every_tile(kind, number, dtype, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", tiles_of(number))
    with torch.device(DEVICE):
        for problem, case in EVERY_TILE[kind][1]:
            with contextlib.suppress(OutOfResources):  # which the tuner leaves out
                assert not violations(*problem(dtype, *case)), case


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("changes, length", [
    (dict(STORED=[dict(STORED=1 << 40)]), 256), (dict(STORED=[dict(STORED=1 << 20)]), 200),
    (dict(MOST_SCORES=1 << 40), 23), (dict(MOST_SCORES=1 << 18), 64)])
def test_attention_in_rounds_of_rows(changes, length, dtype, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setattr(plan, name, value)
    with torch.device(DEVICE):
        for problem, case in ((problems.attention, (2, 70, length, 4, 32, 2, True, True, True)),
                              (problems.sub_layer, (1, length, length, 128, 4, 1, "own", True, True, 2))):
            assert not violations(*problem(dtype, *case))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("length", [5, 130, 520])
def test_rows_without_any_key_and_a_bias_that_masks(length, dtype):
    """GPUs fuse what the interpreter rounds twice."""
    with torch.device(DEVICE):
        extremes.test_rows_without_any_key_are_finite_and_have_no_gradient(length, dtype)
        for lowest in (-1e10, -1e30, -torch.inf):
            extremes.test_a_bias_that_masks(length, dtype, lowest)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [64, 77, 256, 300])
@pytest.mark.parametrize("problem", [problems.attention_from_python, problems.multiplication_from_python])
def test_kept_launches_give_the_bits_of_operators(problem, size, dtype):
    """Which compiled code runs. Also on another stream, of addresses that 16 does not divide, and of data in
    other places."""
    with torch.device(DEVICE):
        ours, _, tensors = problem(dtype, size)
        torch._dynamo.reset()
        expected = gradients(torch.compile(ours, fullgraph=True, backend="aot_eager"), tensors)
        stream = torch.cuda.Stream()
        for turn in range(3):
            given = [t.clone() for t in tensors]
            if turn == 1:
                given = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in tensors]
            stream.wait_stream(torch.cuda.current_stream())  # for the copies
            with torch.cuda.stream(stream if turn == 2 else torch.cuda.current_stream()):
                found = gradients(ours, given)
            torch.cuda.synchronize()
            assert equal(found, expected), turn


@pytest.mark.parametrize("length", [1, 64, 200])
def test_calls_from_python_as_in_the_interpreter(length):
    with torch.device(DEVICE):
        called.test_where_one_key_is_present_q_and_k_have_no_gradient(length)
        called.test_views_are_read_as_they_lie(length + 1, torch.bfloat16)
        for family in ("attention from Python", "multiplication from Python"):
            families.test_there_are_no_second_derivatives(family)


@pytest.mark.parametrize("name", ["sub-layer, starting node", "outgoing", "outer layout", "sides",
                                  "SwiGLU", "rotary", "attention, from Python",
                                  "multiplication, from Python"])
def test_a_cuda_graph_replays_the_same_bits_on_new_data(name):
    problem, case = PROBLEMS[name]
    with torch.device(DEVICE):
        ours, _, tensors = problem(torch.bfloat16, *case(77))

    def step(batch):
        given = [batch[n].detach().requires_grad_() for n in sorted(batch)]
        out = ours(*given)
        grads = torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True)
        return torch.cat([t.flatten().float() for t in (out, *grads) if t is not None])
    batch = {f"{n:02}": t for n, t in enumerate(tensors)}
    graph = GraphedStep(step, batch, torch.device(DEVICE))
    new = {n: t + 0.25 * torch.randn_like(t) for n, t in batch.items()}
    for data in (batch, new):
        assert torch.equal(graph(data), step(data))


def settings(amp, **sizes):
    """With every kernel on."""
    return tof.PROGRAM.settings(**{**dict(num_blocks=1, batch_size=2, seq_len=96, num_seqs=24),
                                   **dataclasses.asdict(tof.FusionConfig.ultra()), **sizes},
                                use_amp=True, amp_dtype=amp)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{}, dict(batch_size=1, seq_len=161, num_seqs=1),
                                   dict(batch_size=1, seq_len=161, num_seqs=49, enable_torch_compile=False)])
def test_the_model_with_ultra(amp, sizes):
    """Also of so many rows that the outer product is laid out, not re-associated."""
    assert accuracy.compare_numerics(tof.PROGRAM, settings(amp, **sizes), torch.device(DEVICE))[1] == []


def trained(given, steps=5):
    """(losses, trainer) of these settings."""
    torch._dynamo.reset()
    process_settings(given, torch.device(DEVICE))
    source, losses = SyntheticProteins(given), []
    trainer = tof.Trainer(tof.PROGRAM, given, torch.device(DEVICE))
    for number in range(steps):
        losses.append(trainer.step(to_device(source.batch(number), trainer.device)).item())
        trainer.step_number += 1
    return losses, trainer


def alike(losses):
    """Whether two runs learn, and the same."""
    return losses[0] == pytest.approx(losses[1], rel=2e-2) and losses[0][0] > losses[0][-1]


def test_graphed_steps_with_kernels_are_eager_steps():
    losses = []
    for graphs in (False, True):
        found, trainer = trained(settings("bfloat16", enable_cuda_graphs=graphs, dropout=0.0))
        losses.append(found)
        assert (trainer.graph is not None) == graphs
    assert alike(losses)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("number", range(len(weight_gradients.CANDIDATES)))
def test_gradients_of_many_weights_with_every_tile(number, dtype, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", tiles_of(number))
    with torch.device(DEVICE):
        for case in weights.CASES:
            assert weights.wrong(*weights.problem(case, dtype)) == []
        sizes = [(16384, 128, 512), (16384, 640, 128), (16384, 64, 1024), (4096, 64, 256)] * 9
        given = [[torch.randn(each[0], each[side]).to(dtype) for each in sizes] for side in (1, 2)]
        assert weights.wrong(*given) == []
        assert torch.equal(*(weight_gradients.OP(*given) for _ in range(2)))


EXACT = {  # larger cases of test_exact.py
    "padded bias": [(1, 4, 512, 512, 1, torch.bool)],
    "gradient of a bias": [(64, 4, 4, 64, 64), (64, 1, 4, 64, 51), (8, 1, 4, 256, 256), (1, 2, 4, 512, 499)],
    "sums": [((2048, 384), (1024, 640), (777, 3, 40), (256, 1 << 17), (2, 1 << 20), (0, 5), (1, 1)) * 6]}


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("family", EXACT)
def test_numbers_that_are_exact(family, dtype):
    with torch.device(DEVICE):
        for case in (*exact.FAMILIES[family][1].values(), *EXACT[family]):
            assert exact.wrong(family, dtype, case) == [], case


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
def test_sums_have_the_same_bits_in_every_run(dtype):
    with torch.device(DEVICE):
        problems = [torch.randn(size) for size in EXACT["sums"][0]]
        assert torch.equal(*(sums.GATHERED_OP(problems, dtype) for _ in range(2)))
        partial_sums = torch.randn(77, 2, 4, 64, 64).to(dtype)
        for transpose in (False, True):
            assert torch.equal(*(bias_gradient.launch(partial_sums, 51, dtype, transpose) for _ in range(2)))


def test_graphed_steps_that_gather_gradients_are_those_that_do_not(monkeypatch):
    """And the pass finds them: in every compiled graph but those of forward."""
    losses, gathered, gather = [], [], compile_pass.gather
    monkeypatch.setattr(compile_pass, "gather", lambda graph, found, op, *given: (
        gathered.append((op, len(found))) or gather(graph, found, op, *given)))
    monkeypatch.setattr(compile_pass.GatheredGradients, "uuid", lambda self: None)
    for on in (False, True):
        losses.append(trained(settings("bfloat16", dropout=0.0, seq_len=64,
                                       enable_triton_weight_gradients=on))[0])
        assert bool(gathered) == on
    assert alike(losses)
    for op, most in ((weight_gradients.OP.op, 17), (sums.GATHERED_OP.op, 23)):  # a block's
        assert max(count for each, count in gathered if each == op) == most


def test_graphed_steps_with_selective_checkpointing_are_those_without():
    """From far less memory, and with the same dropout."""
    losses, peaks = [], []
    for on in (False, True):
        found, trainer = trained(settings("bfloat16", dropout=0.1, seq_len=128, num_blocks=3,
                                          enable_selective_checkpointing=on))
        losses.append(found)
        peaks.append(trainer.graph.peak)
        assert trainer.weights.joined.used
    assert alike(losses) and peaks[1] < 0.85 * peaks[0]


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_with_the_kernel_for_adamw_are_those_without(graphs, amp):
    """Nearly: Adam divides a gradient by its own size, so a rounding in one that is next to nothing moves its
    weight by the learning rate."""
    def run(kernel, steps=5):
        trainer = trained(settings(amp, enable_triton_adamw=kernel, enable_torch_compile=False, dropout=0.0,
                                   num_steps=20, enable_cuda_graphs=graphs), steps)[1]
        assert isinstance(trainer.optimizer, adamw.AdamW) == kernel
        return trainer
    found, before = [run(kernel) for kernel in (False, True)], run(False, 0).weights.flat
    plain, ours = (trainer.weights.flat for trainer in found)
    assert (ours - plain).norm() < 0.1 * (plain - before).norm()
    assert torch.equal(found[1].weights.low, ours.to(found[1].weights.low.dtype))
    assert found[0].gradient_norm.item() == pytest.approx(found[1].gradient_norm.item(), rel=0.05)
    steps = [trainer.optimizer.state[trainer.weights.flat]["step"].item() for trainer in found]
    assert steps[0] == steps[1] and (found[1].graph is not None) == graphs


@pytest.mark.parametrize("name", [*optimizer.CASES, "many numbers"])
def test_adamw_is_torch_s(name, monkeypatch):
    monkeypatch.setitem(optimizer.CASES, "many numbers", (3_000_001, torch.bfloat16, 1.0, 0.1, False))
    with torch.device(DEVICE):
        optimizer.test_ten_steps_are_torch_s(name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    with torch.device("cuda:1"):
        assert not violations(*problems.sub_layer(torch.bfloat16, *PROBLEMS["sub-layer, MSA rows"][1](77)))
