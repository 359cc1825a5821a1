"""Which implementation and dtype is chosen, and what is handed to kernels: by recorders in their place."""
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusion_lab.kernels import attention, limits, precision, triton
from fusion_lab.training import files, recipe
from fusion_lab.training.checkpoints import OF_A_SESSION

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")


@pytest.mark.parametrize("asked, device, found", [
    (None, CPU, torch.bfloat16), (None, GPU, torch.float16), ("bfloat16", GPU, torch.bfloat16),
    ("float16", CPU, torch.float16)])
def test_dtype_of_amp(asked, device, found):
    assert precision.amp_dtype(SimpleNamespace(use_amp=True, amp_dtype=asked), device) == found
    assert precision.amp_dtype(SimpleNamespace(use_amp=False, amp_dtype=asked), device) is None


def test_widths_that_kernels_take():
    for width in range(1, 300):
        assert limits.takes("enable_triton_transition", width) is (width in (16, 32, 64, 128, 256))
        assert limits.takes("enable_triton_attention", width) is (width <= 128)
        assert limits.takes("enable_triton_outer_product", (width, 64)) is (width in (4, 8, 16, 32, 64))
        assert limits.takes("enable_triton_outer_product", (16, width)) is (width in (16, 32, 64, 128, 256))
    assert limits.MESSAGE_CHANNELS == (16, 32, 64, 128) and limits.MOST_NEIGHBOURS == 64


def test_amds_architecture_goes_without_its_features(monkeypatch):
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.get)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    attention.amd_architecture.cache_clear()
    assert attention.architecture(True) == "gfx942" and attention.architecture(False) == ""
    attention.amd_architecture.cache_clear()
    cores = {name: attention.has_matrix_cores(name) for name in (
        "gfx906", "gfx908", "gfx90a", "gfx90c", "gfx942", "gfx950", "gfx1100", "")}
    assert [name for name, found in cores.items() if found] == ["gfx908", "gfx90a", "gfx942", "gfx950"]


def test_what_the_start_up_line_calls_it(monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    words = {"rows": (64, 32, True), "columns": (16, 32, False)}
    half = dict(dtype=torch.bfloat16, **words)
    assert attention.in_words("auto", False, False, **half) == "math on CPU; columns: sdpa: flash on CPU"
    both = "sdpa: math on CPU; columns: sdpa: flash on CPU"
    assert attention.in_words("sdpa", False, False, **half) == both
    assert attention.in_words("math", False, False, **half) == "math on CPU"
    assert attention.in_words("auto", False, True, **half) == "flex_attention"
    assert attention.in_words("sdpa", False, True, **half) == "sdpa"
    assert attention.in_words("auto", True, True, **half) == "triton_attention"
    wide = dict(dtype=torch.bfloat16, rows=(64, 129, True))
    assert attention.in_words("auto", True, True, **wide) == "sdpa"
    assert attention.in_words("auto", True, True, dtype=torch.float32, rows=(64, 32, True)) == "math"


def test_what_flex_attention_is_given(monkeypatch):
    calls = []

    def kernel(q, k, v, **options):
        calls.append((q, k, v, options))
        return q
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: kernel)
    monkeypatch.setattr(torch.version, "hip", None)
    q, k, v = torch.randn(3, 2, 3, 4, 5, 32, dtype=torch.bfloat16)
    bias = torch.randn(1, 4, 5, 5, dtype=torch.bfloat16)
    assert torch.equal(attention.flex_attend(q, k, v, bias), q)
    *given, options = calls.pop()
    assert all(torch.equal(flat, x.reshape(6, 4, 5, 32)) for flat, x in zip(given, (q, k, v), strict=True))
    tiles = dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4,
                 bwd_num_stages=2)
    assert options["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True, **tiles)
    bias = bias.expand(2, -1, -1, -1).clone()
    bias[1] += 1
    attention.flex_attend(q, k, v, bias)  # rows 0 to 2 are the first sample's
    score = calls.pop()[3]["score_mod"]
    assert score(torch.tensor(2.0), 4, 3, 1, 2) == 2 + bias[1, 3, 1, 2].float()
    for width, dtype, biased in ((64, torch.bfloat16, True), (32, torch.float32, False)):
        x = torch.zeros(1, 2, 1, 3, width, dtype=dtype)
        attention.flex_attend(x, x, x, torch.zeros(1, 1, 3, 3) if biased else None)
        options = calls.pop()[3]
        assert options["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True)
        assert (options["score_mod"] is None) is (not biased)


# --- What the model's modules become for the kernels ------------------------------------------------------


@pytest.fixture
def handed(monkeypatch):
    """Modules of kernels are recorders: {function: the arguments of its last call}."""
    found = {}

    def recorder(name, result):
        def call(*arguments):
            found[name] = arguments
            return result
        return call
    for module, functions in dict(
            attention_layer=["attention_layer"], projection=["norm_project"], outer_product=["outer_product"],
            transition=["transition"], triangle_multiplication=["triangle_multiplication"],
            biased_attention=["gated_attention"], messages=["messages", "incoming"]).items():
        made = SimpleNamespace(**{name: recorder(name, torch.zeros(6)) for name in functions})
        monkeypatch.setitem(sys.modules, f"fusion_lab.kernels.{module}", made)
        monkeypatch.setattr(f"fusion_lab.kernels.{module}", made, raising=False)
    return found


def is_given(found, *expected):
    assert len(found) == len(expected)
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        same = torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y
        assert same or x == y, number


def test_modules_become_arguments(handed):
    norm, output, head = nn.LayerNorm(4, eps=1e-3), nn.Linear(4, 4), nn.Linear(4, 2, bias=False)
    first, second = nn.Linear(4, 8), nn.Linear(8, 4)
    x, packed, gate_bias, bias, keys, drop = (torch.randn(4) for _ in range(6))
    for given in (head, None):
        triton.attention_layer(x, norm, packed, gate_bias, output, 2, 1, bias, given, keys, x, drop)
        is_given(handed["attention_layer"], x, norm.weight, norm.bias, packed, gate_bias, output.weight,
                 output.bias, 2, 1, bias, given and given.weight, keys, 1e-3, x, drop)
    triton.transition(x, norm, first, second, None)
    is_given(handed["transition"], x, norm.weight, norm.bias, first.weight, first.bias, second.weight,
             second.bias, 1e-3, None)
    center = nn.LayerNorm(4)
    triton.triangle_multiplication(x, norm, packed, gate_bias, center, output, head, keys, True, None, drop)
    is_given(handed["triangle_multiplication"], x, norm.weight, norm.bias, packed, gate_bias, center.weight,
             center.bias, output.weight, output.bias, head.weight, None, keys, True, 1e-3, None, drop)
    triton.gated_attention([x], 2, 1, bias, keys, gate_bias)
    is_given(handed["gated_attention"], [x], 2, 1, bias, keys, gate_bias)


def test_the_bias_of_pairs_is_the_second_result(handed, monkeypatch):
    norm, head = nn.LayerNorm(4), nn.Linear(4, 2, bias=False)
    monkeypatch.setattr("fusion_lab.kernels.projection.norm_project", lambda *given: given)
    assert triton.head_bias(head, torch.ones(4), norm) is norm.weight
    monkeypatch.undo()


def test_rows_of_an_outer_product_are_counted(handed):
    output = nn.Linear(9, 5)
    left, right = torch.randn(2, 2, 7, 4, 3)
    for rows, counts in ((7, [7, 7]), (torch.tensor([3.0, 6.0]).view(2, 1, 1, 1), [3, 6])):
        triton.outer_product(left, right, output, rows, None)
        is_given(handed["outer_product"], left, right, output.weight, output.bias,
                 torch.tensor(counts) + 1e-3, None)


def test_messages_are_flat(handed):
    own, table, second = torch.randn(2, 3, 1), torch.randn(6, 4), nn.Linear(4, 1)
    edges, index, mask = torch.randn(2, 3, 5, 4), torch.arange(30).view(2, 3, 5), torch.ones(2, 3, 5)
    assert triton.incoming(index, 6).shape == (6,)
    is_given(handed["incoming"], index.view(6, 5), 6)
    assert triton.messages(own, edges, table, index, mask, "first", second, "leading").shape == own.shape
    is_given(handed["messages"], own.view(6, 1), edges.view(6, 5, 4), table, index.view(6, 5),
             mask.view(6, 5), "first", second.weight, second.bias, "leading")


# --- Small things of training -----------------------------------------------------------------------------


def test_the_rate_stays_at_its_end():
    training = SimpleNamespace(learning_rate=1.0, lr_warmup_steps=2, num_steps=4, lr_schedule="linear")
    assert [recipe.learning_rate(training, step) for step in range(7)] == [0.5, 1, 1, 0.5, 0, 0, 0]
    assert recipe.learning_rate(SimpleNamespace(**{**vars(training), "num_steps": 3}), 3) == 0.0


def test_what_a_continuation_may_change_without_a_word():
    assert set(OF_A_SESSION) == {
        "num_steps", "warmup_steps", "log_every", "eval_every", "save_checkpoint", "save_every", "save_best",
        "early_stopping", "resume", "init_from", "device", "collective_timeout", "sequence_parallel",
        "shard_optimizer"}


def test_writing_leaves_the_mask_of_permissions_alone(tmp_path):
    before = os.umask(0o27)
    try:
        files.write_text(tmp_path / "x", "x")
        assert os.umask(0o27) == 0o27 and (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
