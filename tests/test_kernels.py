"""Triton kernels without a GPU: numbers in Triton's interpreter, compilation for GPUs that are not here."""
import os
import pathlib
import re
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
import triton
import triton.language as tl

with warnings.catch_warnings():  # Triton 3.9 announces 3.10's default for contracting multiplications
    warnings.simplefilter("ignore")
    from triton_targets import SHARED, compiled_for

from fusion_lab.kernels import adamw, ahead_of_time, norm_projection, tuner
from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import layer as attention_layer
from fusion_lab.kernels.attention import operator as attention_operator
from fusion_lab.kernels.outer_product_mean import layout as outer_layout
from fusion_lab.kernels.outer_product_mean import sides as outer_sides
from fusion_lab.kernels.reductions import sums, weight_gradients
from fusion_lab.kernels.transition import hidden_gradient
from fusion_lab.kernels.transition import layer as transition_layer
from fusion_lab.kernels.triangle_multiplication import operator as triangle_operator
from fusion_lab.kernels.triangle_multiplication import products as triangle_products

HERE = pathlib.Path(__file__).parent
if COMPANIONS := (HERE.parent / "companions").exists():  # they may go
    from companions.kernels import gated_rotary, messages, ultra_block


CHECKS = sorted(p.stem for p in (HERE / "interpreted").glob("check_*.py"))
UNWRITTEN = "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"  # new memory: -1.7e38, no old result
IN_NO_PRESET = {"check_messages", "check_patterns", "check_ultra_block"}


NONE_SLOW = {"check_adamw", "check_arguments", "check_hidden_gradient"}


@pytest.mark.parametrize("name, which", [
    pytest.param(name, which, marks=[pytest.mark.slow] * (which == "slow" or name in IN_NO_PRESET))
    for name in CHECKS for which in ("not slow", "slow") if not (which == "slow" and name in NONE_SLOW)])
def test_in_the_interpreter(name, which):
    """In a process of its own, because kernels are interpreted or compiled from their definition on."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which,
               str(HERE / "interpreted" / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": UNWRITTEN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "this companion was deleted" in done.stdout:
        pytest.skip("this companion was deleted")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


SASS = """
.L_x_2:
        /*0010*/                   FADD R1, R2, R3 ;
.L_x_1:
        /*0020*/                   MUFU.EX2 R1, R2 ;
        /*0030*/              @!P0 FFMA R1, R2, R3, R4 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/               @P2 BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
"""
AMD = """
\ts_branch .LBB0_2
.LBB0_1:                                ; =>This Inner Loop Header
\t.loc\t1 131 5
\tv_exp_f32_e32 v1, v2
\ts_cbranch_scc1 .LBB0_1
.LBB0_2:
"""


def test_innermost_loops_of_machine_code():
    """Not the loop round them, nor the jump to itself in which code for NVIDIA ends."""
    assert ahead_of_time.innermost_loops(SASS) == [["MUFU.EX2", "FFMA", "BRA"]]
    assert ahead_of_time.innermost_loops(AMD) == [["v_exp_f32_e32", "s_cbranch_scc1"]]


@pytest.mark.slow
@pytest.mark.skipif(not COMPANIONS, reason="companions were deleted")
def test_instructions_of_a_loop_are_counted():
    done = subprocess.run([sys.executable, str(HERE.parent / "benchmarks/instructions.py"),
                           "message_gelu_kernel"], capture_output=True, text=True)
    found = [line.split("|")[2:8] for line in done.stdout.splitlines() if "SUM=False, C=128" in line]
    assert [row[0].strip() for row in found] == ["gfx942", "sm_90"], done.stderr
    for row in found:
        instructions, matrix, special, float32, memory = map(int, row[1:])
        assert matrix == 0 < memory and special % 8 == 0 < special  # two a number, 8 or 16 numbers
        assert special + float32 + memory < instructions < 40 * 16


def test_kernels_on_a_cpu_say_what_they_need():
    x, vector = torch.zeros(1, 3, 5, 16), torch.zeros(16)
    with pytest.raises(RuntimeError, match="norm_project is .* needs a GPU, or TRITON_INTERPRET=1"):
        norm_projection.norm_project(x, vector, vector, torch.zeros(32, 16), None, 1e-5)


def attention(length, width, axis, biased, masked, dtype=torch.bfloat16):
    """Launch every kernel of attention on memory that holds nothing."""
    heads, rows = 4, 600 if length <= 64 else 3  # so many that a program of whole rows has several
    size = (1, length, rows) if axis == 1 else (1, rows, length)
    packed = torch.empty(*size, 4 * heads * width, dtype=dtype, requires_grad=True)
    gate_bias = torch.empty(heads * width, dtype=dtype, requires_grad=True)
    bias = torch.empty(1, heads, length, length, dtype=dtype, requires_grad=True) if biased else None
    keys = torch.ones(1, length) if masked else None
    attention_operator.gated_attention([packed], heads, axis, bias, keys, gate_bias).sum().backward()


def stored_scores(length):
    """The same where backward stores gradients of scores."""
    with mock.patch.object(attention_operator, "STORED", attention_operator.STORED[1:]):
        attention(length, 32, 2, True, False)


def multiplication(channels, length):
    """The same for triangle multiplication with a mask, dropout and a residual; of whole tiles, or not."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, pair = channels, empty(1, length, length, channels)
    weights = [empty(c), empty(c), empty(4 * c, c), empty(4 * c), empty(c), empty(c), empty(c, c), empty(c),
               empty(c, c), empty(c)]
    for recompute in (False, True):
        triangle_operator.triangle_multiplication(
            pair, *weights, torch.ones(1, length), residual=pair, drop=torch.ones(1, 1, length, c),
            recompute=recompute).sum().backward()


def short_products(side):
    """The same for its products, of either kind, where sides are short."""
    each = torch.empty(48, side, side, dtype=torch.bfloat16)
    for outgoing in (True, False):
        triangle_products.multiply(each, each, outgoing)
        triangle_products.multiply_backward(*[each] * 5, outgoing)


def two_layers(channels, positions=4096):
    """The same for two layers with a ReLU between them."""
    x, units = torch.empty(positions, channels, dtype=torch.bfloat16), 4 * channels
    hidden_gradient.launch(x, x.new_empty(channels, units), x.new_empty(positions, units), 1)


def wrapped_layers(channels):
    """The same for a whole transition, whose hidden layer lies in memory."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, units, x = channels, 4 * channels, empty(1, 64, 64, channels)
    weights = empty(c), empty(c), empty(units, c), empty(units), empty(c, units), empty(c)
    transition_layer.transition_layer(x, *weights, residual=x).sum().backward()


def many_weights(positions, widths):
    """The same for gradients of weights; widths of the left operands, reversed those of the right ones."""
    lefts, rights = ([torch.empty(positions, n, dtype=torch.bfloat16) for n in side]
                     for side in (widths, widths[::-1]))
    weight_gradients.launch(lefts, rights)


def many_sums(rows, widths):
    """The same for sums of parts, of so many numbers each."""
    sums.gathered([torch.empty(rows + number, width) for number, width in enumerate(widths)], torch.bfloat16)


def bias_sums(n, length, dtype):
    """The same for sums of partial sums of a bias's gradient, with and without the transpose."""
    LP = attention_operator.padded_length(length)
    for transpose in (False, True):
        bias_gradient.launch(torch.empty(n, 1, 4, LP, LP, dtype=dtype), length, torch.bfloat16, transpose)


def heads_of(width):
    """The same for heads that are alone in their tensors."""
    q, bias = (torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in (
        (1, 3, 2, 256, width), (1, 2, 256, 256)))
    attention_operator.row_attention(q, q, q, bias).sum().backward()


def layer(channels, dropped=True):
    """The same for an attention sub-layer; and for a bias from another tensor."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, x = channels, empty(1, 64, 64, channels)
    weights = empty(c), empty(c), empty(4 * c, c), empty(c), empty(c, c), empty(c)
    attention_layer.attention_layer(x, *weights, 4, 2, head_weight=empty(4, c), residual=x,
                                    drop=torch.ones(1, 1, 64, c) if dropped else None).sum().backward()
    norm_projection.norm_project(x, *weights[:2], None, empty(4, c), 1e-5)[1].sum().backward()


def odd_projections(channels):
    """The same for an attention sub-layer, of tiles that are not whole."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, x = channels, empty(2, 7, 7, channels)
    weights = empty(c), empty(c), empty(4 * c, c), empty(c), empty(c, c), empty(c)
    attention_layer.attention_layer(x, *weights, 4, 1, head_weight=empty(4, c), residual=x,
                                    drop=torch.ones(1, 7, 1, c)).sum().backward()


def laid_out(rows, length=64, dtype=torch.bfloat16):
    """The same for the outer product's layout, of sides that are one tensor."""
    outer_layout.forward(*torch.empty(1, rows, length, 64, dtype=dtype).chunk(2, -1))


def laid_out_backward(channels, length=64, dtype=torch.bfloat16):
    """The same for that of its gradient, whose rows it adds up."""
    outer_layout.backward(torch.empty(1, length, length, channels, dtype=dtype),
                          torch.empty(channels, 1024, dtype=dtype), 0.5, 1)


def laid_out_and_added(channels, h):
    """The same for all of its forward, with a residual."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)
    c = channels
    outer_layout.outer_layout(empty(1, 16, 64, h), empty(1, 16, 64, h), empty(c, h * h), empty(c), 0.1,
                              empty(1, 64, 64, c))


def sides(channels, h):
    """The same for its sides."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c = channels
    left, right, x = outer_sides.side_projection(empty(1, 16, 64, c), empty(c), empty(c), empty(2 * h, c),
                                                 empty(2 * h))
    (left.sum() + right.sum() + x.sum()).backward()


def neighbours(channels, count, nodes=100):
    """The same for messages from so many neighbours."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, index = channels, torch.zeros(nodes, count, dtype=torch.int64)
    edges = messages.first_layer(empty(nodes, c), empty(nodes, count, c), empty(2 * nodes, c), index,
                                 messages.incoming(index, 2 * nodes))
    edges = messages.biased_gelu(edges, empty(c))
    messages.sum_over_neighbours(edges, empty(c), torch.ones(index.shape)).sum().backward()


def gated_and_turned(channels, heads, kv_heads, width, dtype=torch.bfloat16):
    """The same for what stands between a LLaMA block's projections."""
    packed = torch.empty(64, 2 * channels, dtype=dtype, requires_grad=True)
    gated_rotary.swiglu(packed).sum().backward()
    packed = torch.empty(2, 32, (heads + 2 * kv_heads) * width, dtype=dtype, requires_grad=True)
    q, k, v = gated_rotary.rotary(packed, torch.empty(2, 32, width // 2), heads, kv_heads)
    (q.sum() + k.sum() + v.sum()).backward()


def block(hidden, length):
    """The same for a LLaMA block in one kernel, two heads of keys for four."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)
    c, f, width = hidden, 4 * hidden, hidden // 8
    weights = ultra_block.Weights(empty(c), empty(2 * c, c), empty(c, c), empty(c), empty(2 * f, c),
                                  empty(c, f))
    turns, counters = torch.empty(2, length, width // 2), torch.zeros(4, dtype=torch.int32)
    ultra_block.ultra_block(empty(2, length, c), weights, turns, 8, 4, 1e-6, counters)


def optimizer_step(dtype, on_device, scaled, length=1 << 20):
    """The same for AdamW with gradients in this dtype."""
    flat, gradient, low = (torch.empty(length, dtype=kind) for kind in (torch.float32, dtype, torch.bfloat16))
    number = torch.empty(())
    adamw.update(flat, gradient, dict(step=number, exp_avg=flat, exp_avg_sq=flat), low, number, 1.0,
                 dict(lr=number if on_device else 0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
                 number if scaled else None)
    adamw.Joined([length], [0], length, flat.device)([gradient], dtype)


SUMS = [384, 128, 512, 640, 128] * 4
WEIGHTS = [64, 64, 256, 64, 128, 512, 128, 640, 128] * 2
LAUNCHES = {
    "attention, S 256": (attention, 256, 32, 2, True, False),
    "attention, S 77": (attention, 77, 16, 1, True, True),
    "attention, S 64": (attention, 64, 32, 2, True, False),
    "attention, stored scores, S 256": (stored_scores, 256),
    "attention, stored scores, S 200": (stored_scores, 200),
    "columns, N 128": (attention, 128, 32, 1, False, False),
    "columns, N 16": (attention, 16, 16, 1, False, True),
    **{f"multiplication, c {c}, S {S}": (multiplication, c, S) for c in (64, 128, 256) for S in (64, 70)},
    **{f"short products, side {side}": (short_products, side) for side in (16, 48, 64)},
    **{f"attention, heads of {width}": (heads_of, width) for width in (64, 128)},
    **{f"attention sub-layer, c {c}": (layer, c) for c in (64, 128, 256)},
    "attention sub-layer without dropout": (layer, 128, False),
    "odd projections, c 128": (odd_projections, 128),
    **{f"two layers, c {c}": (two_layers, c) for c in (64, 128, 256)},
    **{f"transition sub-layer, c {c}": (wrapped_layers, c) for c in (64, 128)},
    "two layers, odd": (two_layers, 128, 77),
    **{f"outer layout, N {rows}, S {S}": (laid_out, rows, S) for rows, S in ((128, 64), (16, 64), (77, 77))},
    **{f"its gradient, c {c}, S {S}": (laid_out_backward, c, S) for c, S in ((128, 64), (64, 77), (72, 77))},
    **{f"outer product added, c {c}, h {h}": (laid_out_and_added, c, h) for c, h in ((128, 32), (64, 12))},
    **{f"sides, c {c}, h {h}": (sides, c, h) for c, h in ((64, 32), (128, 32), (16, 16))},
    "weights of a block": (many_weights, 4096, WEIGHTS),
    "weights of two layers, odd": (many_weights, 77, [23, 64]),
    "sums of a block": (many_sums, 1024, SUMS),
    "sums, odd": (many_sums, 77, [23, 64]),
    "sums of ones": (many_sums, 1, [1]),
    "sums of one and others": (many_sums, 1, [1, 64]),
    "bias's gradient, S 64": (bias_sums, 64, 64, torch.bfloat16),
    "bias's gradient, S 51": (bias_sums, 77, 51, torch.float16),
    **{f"bias's gradient, {n} parts": (bias_sums, n, 256, torch.float32) for n in (1, 2, 8, 100)},
    "AdamW": (optimizer_step, torch.bfloat16, True, False),
    "AdamW, several ranks": (optimizer_step, torch.float32, True, False),
    "AdamW, a scaler, no graph, odd": (optimizer_step, torch.float32, False, True, 1001),
    "attention, float32": (attention, 256, 32, 2, True, False, torch.float32),
    "outer layout, float32": (laid_out, 128, 64, torch.float32),
    "its gradient, float32": (laid_out_backward, 128, 64, torch.float32),
}
if COMPANIONS:
    LAUNCHES.update({
        "LLaMA block, c 512": (block, 512, 256),
        **{f"messages, c {c}": (neighbours, c, 48) for c in (16, 128, 256)},
        "LLaMA's elements, c 1024": (gated_and_turned, 4096, 16, 8, 64),
        "LLaMA's elements, odd": (gated_and_turned, 77, 3, 1, 6),
        "LLaMA's elements, float32": (gated_and_turned, 4096, 8, 2, 128, torch.float32)})
WITHOUT = ("attention, float32", "outer layout, float32",
           "its gradient, float32")  # matrix instructions, which only AMD has for float32
WITHOUT_PRODUCTS = (
    "sum_kernel", "sums_kernel", "attention_bias_gradient_kernel", "attention_padded_bias_kernel",
    "attention_gate_backward", "message_", "adamw_", "swiglu_", "rotary_kernel",
    "triangle_multiplication_back_kernel RESIDUAL=False, SAVE=True, OUT=False")  # which stops before them
SPILLS = {  # where tiles are not whole
    ("sm_90", "triangle_multiplication_front_backward_kernel",
     "NO_PADDING=False, LINES=0, BC=64, BM=64, num_stages=2, num_warps=4"): 8,
    ("sm_80", "triangle_multiplication_front_backward_kernel",
     "NO_PADDING=False, LINES=0, BM=64, BC=32, num_warps=4, num_stages=2"): 40,
    ("sm_90", "norm_project_backward_kernel",
     "WHOLE_TILES=False, C=128, BM=64, BN=64, num_stages=4, num_warps=4"): 6}


def spills_too_often(target, kernel, used):
    return used["spills"] > max([0, *(most for (where, name, tile), most in SPILLS.items() if where == target
                                      and kernel.startswith(name) and kernel.endswith(tile))])


def described(kernel):
    return dict(ahead_of_time.resources(kernel), overwritten=ahead_of_time.overwritten(kernel))


def check_resources(target, launches):
    """Every configuration that is shipped for the widths of these launches compiles without spills and fits
    shared memory, and no loop overwrites what is still read. Returns the keys of tiles.json that this was
    said of."""
    faults, met = [], set()
    for name in launches:
        function, *arguments = LAUNCHES[name]
        with compiled_for(target, met, described) as found:
            function(*arguments)
        assert found
        faults += [f"{name}: {kernel}: {used}" for kernel, used in found.items()
                   if spills_too_often(target, kernel, used) or used["shared"] > SHARED[target]
                   or used["overwritten"]
                   or name not in WITHOUT and (used["mma"] == 0) != kernel.startswith(WITHOUT_PRODUCTS)]
    assert not faults, "\n".join(faults)
    return met


def test_compiles_for_a_gpu_of_amd():
    check_resources("gfx942", ["columns, N 16"])


@triton.jit
def added_product(acc, a, b, sums, K, SUM: tl.constexpr, BM: tl.constexpr):
    """acc (BM, BM) + a b, and parts of sums (16, K) of a's columns, as no kernel must make them."""
    i, r = tl.arange(0, BM), tl.arange(0, 16)
    for k0 in range(0, K, BM):
        left, right = tl.load(a + i[:, None] * K + k0 + i), tl.load(b + (k0 + i[:, None]) * BM + i)
        if SUM:
            tl.store(sums + k0 + r[:, None] * K + i, tl.dot(tl.full((16, BM), 1, left.dtype), left))
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def products_kernel(a, b, out, sums, K, FIRST: tl.constexpr, SECOND: tl.constexpr, EITHER: tl.constexpr,
                    BM: tl.constexpr):
    """Two loops, or either of two."""
    acc, i = tl.zeros((BM, BM), tl.float32), tl.arange(0, BM)
    if EITHER:
        if tl.program_id(0) == 0:
            acc = added_product(acc, a, b, sums, K, FIRST, BM)
        else:
            acc = added_product(acc, b, a, sums, K, SECOND, BM)
    else:
        acc = added_product(acc, a, b, sums, K, FIRST, BM)
        acc = added_product(acc, b, a, sums, K, SECOND, BM)
    tl.store(out + i[:, None] * BM + i, acc)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("either", [False, True])
def test_what_a_loop_overwrites_too_early_is_seen(either, stages):
    a, out, sums = (torch.empty(64, 256, dtype=dtype) for dtype in (torch.bfloat16, *[torch.float32] * 2))
    kinds = [(False, False), (True, False), (False, True)]
    with ahead_of_time.compiling("sm_90") as found:
        for first, second in kinds:
            ahead_of_time.start(products_kernel, (1,), a, a, out, sums, 256, FIRST=first, SECOND=second,
                                EITHER=either, BM=64, num_stages=stages)
    assert [ahead_of_time.overwritten(each.compiled) for each in found] == [first + second
                                                                            for first, second in kinds]


@pytest.mark.parametrize("target, load, store, wide, narrow", [
    ("sm_90", "LDG.E.", "STG.E.", "128", "64"),
    ("gfx942", "(buffer|global)_load_", "(buffer|global)_store_", "dwordx4", "dwordx2")])
def test_adamw_moves_four_numbers_at_once(target, load, store, wide, narrow):
    """16 bytes of weights and moments, 8 of gradients and the copy, and none through shared memory."""
    with compiled_for(target, describe=lambda kernel: kernel) as found:
        optimizer_step(torch.bfloat16, True, False)
    kernel, = (found[name] for name in found if name.startswith("adamw_kernel"))
    code = ahead_of_time.machine_code(kernel)
    assert [len(re.findall(access + size, code)) for access in (load, store) for size in (wide, narrow)] == [
        3, 1, 3, 1]
    assert kernel.metadata.shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_every_tile_for_gradients_of_weights_compiles_for(target, monkeypatch):
    """Into the memory that there is: gfx950 has more than other GPUs of AMD, and copies straight into it.
    Since all sizes and addresses are known to be aligned, NVIDIA's load 16 bytes at a time."""
    found, tiles = {}, weight_gradients.CANDIDATES[:6]  # others differ in the number of programs alone
    for tile in tiles:
        with compiled_for(target, describe=lambda kernel: (kernel, ahead_of_time.resources(kernel))) as made:
            monkeypatch.setattr(tuner, "launch", lambda kernel, shape, candidates, run, tile=tile: run(tile))
            many_weights(4096, WEIGHTS)
        found.update(made)
    found = {name: each for name, each in found.items() if name.startswith("weight_gradients_kernel")}
    assert len(found) == len(tiles)
    for name, (kernel, used) in found.items():
        assert used["spills"] == 0 < used["mma"] and used["shared"] <= ahead_of_time.MEMORY[target], name
        narrow = re.findall(r"ld\.global(?!\.v4)\S*|cp\.async\.ca\S*", kernel.asm.get("ptx", ""))
        assert not narrow, name


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_sums_are_loaded_16_bytes_at_a_time_for(target):
    for name, (function, *arguments) in LAUNCHES.items():
        if function is bias_sums or name == "sums of a block":
            with compiled_for(target, describe=lambda kernel: kernel) as found:
                function(*arguments)
            assert found
            for kernel in found.values():
                used, code = ahead_of_time.resources(kernel), kernel.asm.get("ptx") or kernel.asm["amdgcn"]
                assert used["spills"] == 0 and used["shared"] <= ahead_of_time.MEMORY[target], name
                loads = re.findall(r"ld\.global\S*|cp\.async\.c[ag]\S*|(?:global|buffer)_load_\S*", code)
                assert loads and all(re.search(r"v4|async\.cg|x4|b128", each) for each in loads), name


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_compiles_for(target):
    assert check_resources(target, LAUNCHES) == set(tuner.read(tuner.SHIPPED).get(target, {}))
