"""patch() on layers of OpenFold's and OpenFold3's own, in what whole blocks (clients) do not show: widths,
checkpoints, autocast; what does not fit runs as it was; everything is undone."""
import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from evoformer_kernels.attention import function as attention
from evoformer_kernels.patches import patch, projects, triangle
from tests.kernels.clients import sources
from tests.kernels.rule import violations

C, HEADS, WIDTH, S = 32, 2, 16, 5  # OpenFold3 asks cuEquivariance for 32 channels or more
ATTENTION = "commits/openfold", "model.triangular_attention", "TriangleAttention"
MULTIPLICATION = "commits/openfold", "model.triangular_multiplicative_update", "TriangleMultiplicativeUpdate"
OPENFOLD3 = "openfold3-0.5.0", f"core.{MULTIPLICATION[1].replace('.', '.layers.')}", MULTIPLICATION[2]


@functools.cache
def own(where, module, name):
    """A project's own class."""
    with sources.project(where).loaded() as project:
        return getattr(project.load(module), name)


LAYERS = {  # how to make one, all with C channels
    "attention": lambda: own(*ATTENTION)(C, WIDTH, HEADS),
    "ending node": lambda: own(*ATTENTION)(C, WIDTH, HEADS, starting=False),
    "wider inside": lambda: own(*ATTENTION)(C, WIDTH, 2 * HEADS, starting=False),
    "multiplication": lambda: own(*MULTIPLICATION)(C, C),
    "OpenFold3 multiplication": lambda: own(*OPENFOLD3)(C, C, _outgoing=False),
}
CALLS = {  # how a block calls it
    "plainly": lambda layer, x, mask: layer(x, mask=mask).mul_(1),  # in place, as OpenFold's dropout
    "with a checkpoint": lambda layer, x, mask: checkpoint(layer, x, mask, use_reentrant=False),
}


def layer_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer.to(dtype)


def inputs(dtype=torch.float32, batch=(2,)):
    """A pair tensor, and a mask that is another one when it is turned."""
    mask = torch.ones(S, S, dtype=dtype)
    mask[-1], mask[:, -1], mask[0, 2], mask[3, 1] = 0, 0, 0, 0
    return torch.randn(*batch, S, S, C, dtype=dtype), mask.expand(*batch, S, S)


def problem(name, call, dtype=torch.float32, batch=(2,)):
    """(patched, as it was, tensors): functions of x and the parameters; what is masked counts for nothing."""
    layer = layer_of(name, dtype)
    x, mask = inputs(dtype, batch)
    names = [name for name, _ in layer.named_parameters()]

    def run(with_patch):
        def function(x, *parameters):
            own = copy.deepcopy(layer).to(x.dtype)
            if with_patch:
                patch(own)
            given = dict(zip(names, parameters, strict=True))
            there = mask.to(x.dtype)
            out = torch.func.functional_call(Called(own, call), {f"layer.{n}": p for n, p in given.items()},
                                             (x, there))
            return out * there[..., None]
        return function
    return run(True), run(False), [x, *(p.detach() for p in layer.parameters())]


class Called(nn.Module):
    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x, mask):
        return self.call(self.layer, x, mask)


@pytest.mark.interpreted
@pytest.mark.parametrize("name, call", [("wider inside", "plainly"), *(pytest.param(
    name, "with a checkpoint", marks=pytest.mark.slow) for name in ("attention", "multiplication"))])
def test_outputs_and_gradients(name, call, on_gpu):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*its own forward runs")
        assert not violations(*problem(name, CALLS[call]))


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["attention", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("multiplication", "wider inside"))])
def test_autocast_is_heard(name, on_gpu):
    layer, (x, mask) = layer_of(name), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x, mask)
        with patch(layer):
            out = layer(x, mask)
    out.float().sum().backward()
    assert out.dtype == before.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    keep = mask[..., None]
    assert torch.allclose(out * keep, before * keep, atol=0.06 * before.abs().max().item())


@pytest.mark.interpreted
def test_all_of_an_attention_layer_in_kernels(monkeypatch, on_gpu):
    monkeypatch.setattr(triangle, "WHOLE_FROM", 0)
    monkeypatch.setattr(attention, "gated_attention", None)
    assert not violations(*problem("ending node", CALLS["plainly"]))


@pytest.mark.interpreted
@pytest.mark.parametrize("name, flags", [
    ("multiplication", dict(inplace_safe=True)), ("multiplication", dict(_add_with_inplace=True)),
    ("OpenFold3 multiplication", dict(inplace_safe=True, _add_with_inplace=True,
                                      use_cueq_triangle_kernels=True))])
def test_not_in_place(name, flags, on_gpu):
    layer, (x, mask) = layer_of(name), inputs()
    with torch.no_grad():
        expected = layer(x.clone(), mask, **flags)
        with patch(layer):
            given = x.clone()
            found = layer(given, mask, **flags)
    keep = mask[..., None]
    assert torch.allclose(found * keep, expected * keep, atol=1e-5) and torch.equal(given, x)


def as_it_was(layer, x, mask, words, **more):
    """Whether a patched layer computes the same bits as before, and warns of it once, in these words."""
    expected = layer(x, mask, **more)
    with patch(layer), warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", ".*its own forward runs")
        same = [torch.equal(layer(x, mask, **more), expected) for _ in range(2)]
    found = [text for text in (str(each.message) for each in said) if "its own forward runs" in text]
    return all(same) and len(found) == 1 and words in found[0]


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_gpu_its_own_forward_runs(name):
    assert as_it_was(layer_of(name), *inputs(), "no GPU")


def hooked(layer):
    layer.mha.linear_q.register_forward_hook(lambda *_: None)


def adapted(layer):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x):
            return self.base(x)
    layer.mha.linear_q = Adapter(layer.mha.linear_q)


class LowRank(nn.Linear):
    """A Linear that adds something, as LoRA does."""

    def forward(self, x):
        return super().forward(x) + 1


CHANGES = {  # a layer, what is done to it, and what the warning says
    "hook": ("attention", hooked, "a hook"),
    "hook on a gradient": ("multiplication", lambda x: x.linear_z.register_full_backward_hook(
        lambda *_: None), "a hook"),
    "low rank": ("attention", lambda x: setattr(x.mha, "linear_q", LowRank(C, C, bias=False)),
                 "LowRank with a forward of its own"),
    "another norm": ("multiplication", lambda x: setattr(x, "layer_norm_in", nn.RMSNorm(C)),
                     "RMSNorm with a forward of its own"),
    "adapter": ("attention", adapted, "a projection is a Adapter"),
    "precision": ("attention", lambda x: setattr(x.mha.linear_q, "precision", torch.float32),
                  "precision of its own"),
    "no gate": ("attention", lambda x: setattr(x.mha, "linear_g", None), "without a gate"),
    "bias on heads": ("attention", lambda x: setattr(x, "linear", nn.Linear(C, HEADS)), "to heads"),
    "eps": ("multiplication", lambda x: setattr(x.layer_norm_out, "eps", 1e-3), "different eps"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_does_not_fit(change, on_gpu):
    name, do, words = CHANGES[change]
    layer, x = layer_of(name), inputs()[0]
    do(layer)
    with pytest.raises(triangle.Unfit, match=words):
        record(layer).update(x, None)


def record(layer):
    return projects.LAYERS["openfold"][type(layer).__name__](layer)


def test_shapes_that_do_not_fit(on_gpu):
    x = torch.randn(1, S, S, 24)
    assert as_it_was(own(*MULTIPLICATION)(24, 24), x, None, "24 channels")
    assert as_it_was(own(*MULTIPLICATION)(16, 32), x[..., :16], None, "another inner width")
    assert as_it_was(own(*ATTENTION)(24, 136, 1), x, None, "heads of 136 channels")
    half = own(*MULTIPLICATION)(16, 16).half()
    with pytest.raises(triangle.Unfit, match="float16"):
        record(half).update(x[..., :16].half(), None)


@pytest.mark.interpreted
def test_short_inputs_may_keep_their_own(on_gpu):
    layer, (x, mask) = layer_of("multiplication"), inputs()
    expected = layer(x, mask)
    with patch(layer, smallest=S):
        assert not torch.equal(layer(x, mask), expected)
    with patch(layer, smallest=S + 1), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*its own forward runs")
        assert torch.equal(layer(x, mask), expected)


def test_a_patch_changes_nothing_but_forward_and_is_undone():
    model = nn.ModuleList([LAYERS[name]() for name in LAYERS])
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    keys, repeated = list(model.state_dict()), repr(model)
    handle = patch(model)
    assert len(handle.layers) == len(LAYERS) and list(model.state_dict()) == keys and repr(model) == repeated
    with pytest.raises(ValueError, match="replaced already"):
        patch(model)
    twin = copy.deepcopy(model)
    assert all(vars(layer)["forward"].layer is layer for layer in twin)
    handle.undo(), handle.undo()
    assert not any("forward" in vars(layer) for layer in model) and patch(model).undo() is None
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1])
               for name, p in model.named_parameters())
    with pytest.raises(RuntimeError), patch(model):
        raise RuntimeError
    assert not any("forward" in vars(layer) for layer in model)


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="Linear has no triangle layer of openfold, openfold3, boltz"):
        patch(nn.Linear(2, 2))

    class Other(own(*ATTENTION)):
        def forward(self, x, mask):
            return x
    with pytest.raises(ValueError, match=r"Other is not a triangle layer") as caught:
        patch(nn.Sequential(LAYERS["multiplication"](), Other(C, WIDTH, HEADS)))
    assert "\n" not in str(caught.value)
    layer = LAYERS["multiplication"]()
    del layer.linear_a_p
    model = nn.Sequential(LAYERS["multiplication"](), layer)
    with pytest.raises(ValueError, match="has no 'linear_a_p': another release"):
        patch(model)
    assert not any("forward" in vars(each) for each in model)


def test_a_layer_that_computes_more(on_gpu):
    """Parameters that are not known are refused; a fork's argument leaves a call to its own forward."""
    wider = LAYERS["attention"]()
    wider.extra = nn.Linear(2, 2)
    model = nn.Sequential(LAYERS["multiplication"](), wider)
    with pytest.raises(ValueError, match="has 'extra.weight': another release") as caught:
        patch(model)
    assert "\n" not in str(caught.value) and not any("forward" in vars(each) for each in model)

    class Fork(own(*MULTIPLICATION)):
        __module__ = own(*MULTIPLICATION).__module__

        def forward(self, z, mask=None, residual=None):
            return super().forward(z, mask) + residual
    Fork.__name__ = MULTIPLICATION[2]
    x, mask = inputs()
    assert as_it_was(Fork(C, C), x, mask, "not known here, residual", residual=x)


def test_undo_leaves_what_somebody_else_put_there_since():
    model = nn.ModuleList([LAYERS["multiplication"](), LAYERS["multiplication"]()])
    handle = patch(model)
    model[0].forward = theirs = lambda x, mask: x
    handle.undo()
    assert model[0].forward is theirs and "forward" not in vars(model[1])
    with pytest.raises(ValueError, match="replaced already"):
        patch(model)
