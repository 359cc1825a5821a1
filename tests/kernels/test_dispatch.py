"""Which implementation and dtype is chosen, and what is handed to kernels: by recorders in their place."""
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from fusion_lab.kernels import dispatch, limits, precision
from fusion_lab.kernels.library import attention_choice

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")


@pytest.mark.parametrize("asked, device, found", [
    (None, CPU, torch.bfloat16), (None, GPU, torch.float16), ("bfloat16", GPU, torch.bfloat16),
    ("float16", CPU, torch.float16)])
def test_dtype_of_amp(asked, device, found):
    assert precision.amp_dtype(SimpleNamespace(use_amp=True, amp_dtype=asked), device) == found
    assert precision.amp_dtype(SimpleNamespace(use_amp=False, amp_dtype=asked), device) is None


def test_widths_that_kernels_take():
    for width in range(1, 300):
        for name in ("triangle", "relu"):
            assert limits.takes(f"enable_triton_{name}", width) is (width in (16, 32, 64, 128, 256))
        assert limits.takes_layer(width, 64) is (width in (16, 32, 64, 128))
        assert limits.takes("enable_triton_attention", width) is (width <= 128)
        for name in ("outer_layout", "weight_gradients"):
            assert limits.takes(f"enable_triton_{name}", width)


def test_amds_architecture_goes_without_its_features(monkeypatch):
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.get)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    attention_choice.amd_architecture.cache_clear()
    assert attention_choice.architecture(True) == "gfx942" and attention_choice.architecture(False) == ""
    attention_choice.amd_architecture.cache_clear()
    cores = {name: attention_choice.has_matrix_cores(name) for name in (
        "gfx906", "gfx908", "gfx90a", "gfx90c", "gfx942", "gfx950", "gfx1100", "")}
    assert [name for name, found in cores.items() if found] == ["gfx908", "gfx90a", "gfx942", "gfx950"]


def test_what_the_start_up_line_calls_it(monkeypatch):
    monkeypatch.setattr(attention_choice, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    words = {"rows": (64, 32, True), "columns": (16, 32, False)}
    half = dict(dtype=torch.bfloat16, **words)
    both = "math on CPU; columns: sdpa: flash on CPU"
    assert attention_choice.in_words("auto", False, False, **half) == both
    both = "sdpa: math on CPU; columns: sdpa: flash on CPU"
    assert attention_choice.in_words("sdpa", False, False, **half) == both
    assert attention_choice.in_words("math", False, False, **half) == "math on CPU"
    assert attention_choice.in_words("auto", False, True, **half) == "flex_attention"
    assert attention_choice.in_words("sdpa", False, True, **half) == "sdpa"
    assert attention_choice.in_words("auto", True, True, **half) == "triton_attention"
    wide = dict(dtype=torch.bfloat16, rows=(64, 129, True))
    assert attention_choice.in_words("auto", True, True, **wide) == "sdpa"
    assert attention_choice.in_words("auto", True, True, dtype=torch.float32, rows=(64, 32, True)) == "math"


def test_what_flex_attention_is_given(monkeypatch):
    calls = []

    def kernel(q, k, v, **options):
        calls.append((q, k, v, options))
        return q
    monkeypatch.setattr(attention_choice, "compiled_flex_attention", lambda: kernel)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_choice, "NO_BLOCK_MASK", {CPU: "a mask"})
    q, k, v = torch.randn(3, 2, 3, 4, 5, 32, dtype=torch.bfloat16)
    bias = torch.randn(1, 4, 5, 5, dtype=torch.bfloat16)
    assert torch.equal(attention_choice.flex_attend(q, k, v, bias), q)
    *given, options = calls.pop()
    assert all(torch.equal(flat, x.reshape(6, 4, 5, 32)) for flat, x in zip(given, (q, k, v), strict=True))
    tiles = dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4,
                 bwd_num_stages=2)
    assert options["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True, **tiles)
    assert options["block_mask"] == "a mask" and len(options) == 3
    attention_choice.flex_attend(q, k, v, None)
    assert calls.pop()[3]["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True, **tiles)
    bias = bias.expand(2, -1, -1, -1).clone()
    bias[1] += 1
    attention_choice.flex_attend(q, k, v, bias)  # rows 0 to 2 are the first sample's
    score = calls.pop()[3]["score_mod"]
    assert score(torch.tensor(2.0), 4, 3, 1, 2) == 2 + bias[1, 3, 1, 2].float()
    for width, dtype, biased in ((64, torch.bfloat16, True), (32, torch.float32, False)):
        x = torch.zeros(1, 2, 1, 3, width, dtype=dtype)
        attention_choice.flex_attend(x, x, x, torch.zeros(1, 1, 3, 3) if biased else None)
        options = calls.pop()[3]
        assert options["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True)
        assert (options["score_mod"] is None) is (not biased)
    monkeypatch.setattr(torch.version, "hip", "7.0")  # where no tiles were measured
    x = torch.zeros(1, 2, 1, 3, 32, dtype=torch.bfloat16)
    attention_choice.flex_attend(x, x, x, torch.zeros(1, 1, 3, 3))
    assert calls.pop()[3]["kernel_options"] == dict(FORCE_USE_FLEX_ATTENTION=True)


def test_the_start_up_line_on_amd(monkeypatch):
    monkeypatch.setattr(attention_choice, "HAS_TRITON", True)
    words = dict(dtype=torch.bfloat16, rows=(64, 32, True), columns=(64, 32, False))
    for arch, said in (("gfx942", "flex_attention; columns: sdpa; gfx942: CDNA, not measured"),
                       ("gfx1100", "sdpa; gfx1100: not CDNA, so no FlexAttention, not measured")):
        monkeypatch.setattr(attention_choice, "architecture", lambda on_gpu, arch=arch: arch)
        assert attention_choice.in_words("auto", False, True, **words) == said
        assert attention_choice.remark(arch) == said.rpartition("; ")[2]


def test_which_kernel_causal_attention_runs(monkeypatch):
    calls = []

    def choice(*tensors, **options):
        calls.append((*tensors, options))
        return SDPBackend.FLASH_ATTENTION.value
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.Tensor, "shown", lambda x: (*x.shape, x.dtype, x.device.type, x.requires_grad),
                        raising=False)
    found = attention_choice.causal_kernel((8, 2, 3), 16, 64, torch.device("meta"), torch.bfloat16)
    *tensors, options = calls.pop()
    assert found == "flash attention" and options == dict(is_causal=True, enable_gqa=True)
    assert [x.shown() for x in tensors] == [(1, heads, 16, 64, torch.bfloat16, "meta", True)
                                            for heads in (8, 2, 3)]


def test_a_block_mask_is_made_once_for_a_gpu_with_triton(monkeypatch):
    gpu, made = torch.device("cuda"), {}
    monkeypatch.setattr(attention_choice, "NO_BLOCK_MASK", made)
    for name in ("ones", "zeros"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, device=None, real=real, **more: real(*size, **more)
                            if device is gpu else pytest.fail("not there"))
    monkeypatch.setattr(attention_choice, "HAS_TRITON", False)
    attention_choice.prepare_flex_attention(gpu)
    monkeypatch.setattr(attention_choice, "HAS_TRITON", True)
    attention_choice.prepare_flex_attention(CPU)
    with FakeTensorMode():
        attention_choice.prepare_flex_attention(gpu)
    assert made == {}
    attention_choice.prepare_flex_attention(gpu)
    mask = made[gpu]
    assert mask.BLOCK_SIZE == (2 ** 30, 2 ** 30) and mask.kv_num_blocks.tolist() == [[[1]]]
    assert mask.kv_indices.tolist() == [[[[0]]]] and mask.kv_indices.dtype == torch.int32
    assert mask.kv_num_blocks.dtype == torch.int32
    attention_choice.prepare_flex_attention(gpu)
    assert made == {gpu: mask}


def test_flex_attention_is_compiled_once_for_many_shapes(monkeypatch):
    attention_choice.compiled_flex_attention.cache_clear()
    calls = []
    monkeypatch.setattr(torch, "compile", lambda *given, **named: calls.append((*given, named)) or "compiled")
    for before, after in ((8, 64), (100, 100)):
        with torch._dynamo.config.patch(recompile_limit=before):  # monkeypatch would hide it afterwards
            found = [attention_choice.compiled_flex_attention() for _ in range(2)]
            assert found == ["compiled"] * 2
            assert torch._dynamo.config.recompile_limit == after
        assert calls.pop() == (attention_choice.flex_attention, dict(dynamic=False)) and calls == []
        attention_choice.compiled_flex_attention.cache_clear()


def sizes(tensors):
    return [x if x is None else (*x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("biased", [True, False])
def test_what_flex_attention_keeps_for_backward(biased):
    half, single = torch.bfloat16, torch.float32
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, 3, 4, 5, width, dtype=half, requires_grad=True) for width in (16, 17, 18))
        bias = torch.zeros(1, 1, 5, 5, dtype=half, requires_grad=True) if biased else None
        out = attention_choice.flex_attend(q, k, v, bias)
        kept = out.grad_fn.saved_tensors
        assert sizes(kept) == [(2, 3, 4, 5, 16, half), (2, 3, 4, 5, 17, half), (2, 3, 4, 5, 18, half),
                               (1, 4, 5, 5, single) if biased else None, (2, 3, 4, 5, 16, half),
                               (2, 3, 4, 5, single)]
        out.sum().backward()
        assert sizes(x.grad for x in (q, k, v)) == sizes((q, k, v))
        assert not biased or sizes([bias.grad]) == sizes([bias])


def test_compiled_code_calls_flex_attention_itself(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(attention_choice, "flex_attention", lambda q, k, v, **options: q + 1)
    monkeypatch.setattr(attention_choice, "compiled_flex_attention", pytest.fail)
    q = torch.zeros(2, 3, 4, 5, 16)
    assert torch.equal(attention_choice.flex_attend(q, q, q, None), q + 1)


def there(*shape, gpu=True, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=gpu, device=GPU if gpu else CPU, shape=shape, dtype=dtype)


@pytest.mark.parametrize("ask, fits, does_not", [
    (dispatch.runs, [(7,)], []), (dispatch.fits, [(7, 64), (7, 256)], [(64, 7), (64, 512)]),
    (lambda x: dispatch.takes_attention(x, 4), [(7, 512)], [(512, 520)]),
    (lambda x: dispatch.takes_attention_layer(x, 4), [(7, 128)], [(128, 7), (128, 256)]),
    (lambda x: dispatch.takes_attention_layer(x, 64), [(7, 64)], []),
    (lambda x: dispatch.takes_attention_layer(x, 65), [], [(7, 64)]),
    (lambda x: dispatch.takes_head_bias(x, 64), [(7, 256)], [(256, 7)]),
    (lambda x: dispatch.takes_head_bias(x, 65), [], [(7, 64)]),
    (lambda x: dispatch.takes_outer_sides(x, 32), [(7, 16), (7, 128)], [(16, 7), (7, 256)]),
    (lambda x: dispatch.takes_outer_sides(x, 16), [(7, 64)], []),
    (lambda x: dispatch.takes_outer_sides(x, 8), [], [(7, 64)]),
    (lambda x: dispatch.takes_outer_sides(x, 64), [], [(7, 64)])])
def test_which_sub_layers_are_given_to_kernels(ask, fits, does_not, monkeypatch):
    for module in (attention_choice, dispatch):
        monkeypatch.setattr(module, "HAS_TRITON", True)
    fits, does_not = ([(2, 3, *shape) for shape in shapes] for shapes in (fits, does_not))
    assert all(ask(there(*shape)) for shape in fits) and not any(ask(there(*shape)) for shape in does_not)
    assert not any(ask(there(*shape, gpu=False)) or ask(there(*shape, dtype=torch.float32)) for shape in fits)
    for module in (attention_choice, dispatch):
        monkeypatch.setattr(module, "HAS_TRITON", False)
    assert not any(ask(there(*shape)) for shape in fits)


def test_autocast_says_in_which_precision_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.float16}.get)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    assert dispatch.fits(there(2, 128, dtype=torch.float32))


def test_which_projections_stay_with_the_library():
    parts = dict(MSA=(64, 4), pair=(256, 4), table=(64, 65))
    assert dispatch.projections_by_library(**parts) == "; pair, table: projections by the library"
    assert dispatch.projections_by_library(MSA=(64, 4)) == ""


# --- What the model's modules become for the kernels ------------------------------------------------------
