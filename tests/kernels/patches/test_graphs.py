"""patch(model, graphs=True): real blocks in CUDA graphs give what they give without. On a CPU graphs are
emulated, and hold the blocks' own code."""
import copy
import functools
import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from evoformer_kernels import patch
from evoformer_kernels.patches import graphs, triangle
from tests.kernels.clients.blocks import Problem, errors
from tests.kernels.patches import emulated
from tests.kernels.rule import equal

BLOCKS = [("boltz-2.2.1", "pair"), ("openfold3-0.5.0", "pair"), ("protenix-2.0.0", "MSA")]
MODES = {"kept": lambda call, *x: call(*x),
         "recomputed": lambda call, *x: checkpoint(call, *x, use_reentrant=False),
         "recomputed, with more": lambda call, *x: checkpoint(
             lambda *x: tuple(y.sin() for y in call(*(y.cos() for y in x))), *x, use_reentrant=False),
         "recomputed, reentrant": lambda call, *x: checkpoint(call, *x, use_reentrant=True)}


class Called:
    """A block of a project with its inputs, called again and again, as a step of training."""

    def __init__(self, where, kind, device, dropout=0.0):
        self.problem = Problem(where, kind, 64 if device == "cuda" else 9, True, device)
        self.model = self.problem.model
        for module in self.model.modules():
            for name in ("dropout", "p", "p_drop"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, dropout)
        self.names = [name for name, key in self.problem.block.tensors.items() if key]
        self.tensors = [self.problem.tensors[self.problem.block.tensors[name]].clone().requires_grad_()
                        for name in self.names]
        self.masks = self.problem.masks(torch.float32)

    def outputs(self, model, mode="kept"):
        given, masks = {name: None for name in self.problem.block.tensors}, self.masks

        def call(*tensors):
            out = model(**given | dict(zip(self.names, tensors, strict=True)), **masks)
            return tuple(x for x in (out if isinstance(out, tuple) else (out,)) if x is not None)
        on_gpu = self.tensors[0].is_cuda
        with self.problem.project.loaded(), torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            return MODES[mode](call, *self.tensors)

    def step(self, model, mode="kept", scale=1.0):
        """{name: outputs, gradients}; those of parameters are added up over steps."""
        for tensor in self.tensors:
            tensor.grad = None
        outs = self.outputs(model, mode)
        sum((scale * x.float() * self.there(x)).square().mean() for x in outs).backward()
        found = {f"output {n}": x.detach() * self.there(x) for n, x in enumerate(outs)}
        found |= {name: tensor.grad for name, tensor in zip(self.names, self.tensors, strict=True)}
        return found | {name: None if p.grad is None else p.grad.clone()
                        for name, p in model.named_parameters()}

    def there(self, x):
        key = next(k for k in "zsm" if self.problem.there[k].shape == x.shape[:-1])
        return self.problem.there[key][..., None]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        emulated.emulate(monkeypatch)
    return request.param


@pytest.fixture
def as_in_graphs(monkeypatch):
    """Layers without a graph run the kernels that they run within one."""
    monkeypatch.setattr(triangle, "in_graph", True)


def far(found, truth):
    """Rounded to 16 bits on a GPU."""
    allowed = 2e-2 if next(iter(truth.values())).is_cuda else 1e-4
    return {name: error for name, error in errors(found, truth).items() if not error <= allowed}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("where, kind", BLOCKS)
def test_steps_as_without_graphs(where, kind, dropout, mode, device, as_in_graphs):
    """The same random numbers, too; weights that an optimizer changes in place; gradients that add up."""
    called = Called(where, kind, device, dropout)
    models = [copy.deepcopy(called.model) for _ in range(2)]
    patches = [patch(model, graphs=graphs) for model, graphs in zip(models, (False, True), strict=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    for number in range(4):
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            found.append(called.step(model, mode, scale=1.0 + number))
            if number == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert not far(found[1], found[0]), number
    assert patches[1].report()["model"] == f"graph, {mode.partition(',')[0]}"


def test_two_calls_before_their_backward_keep_apart(device, as_in_graphs):
    """As weights that are shared, or recycling with gradients."""
    called = Called(*BLOCKS[0], device)
    patched = patch(called.model, graphs=True)
    for _ in range(3):
        expected = called.step(called.model)
    first, second = called.outputs(called.model), called.outputs(called.model)
    losses = [sum((x.float() * called.there(x)).square().mean() for x in outs) for outs in (first, second)]
    grads = torch.autograd.grad(losses[0] + losses[1], called.tensors)
    for name, gradient in zip(called.names, grads, strict=True):
        assert not far({name: gradient / 2}, {name: expected[name]})
    patched.undo()
    assert "forward" not in vars(called.model)


@pytest.mark.parametrize("mode", ["kept", "recomputed"])
def test_a_second_backward_of_one_forward_is_refused(mode, device):
    """Its activations are gone."""
    called = Called(*BLOCKS[0], device)
    patch(called.model, graphs=True)
    for _ in range(2):
        called.step(called.model, mode)
    loss = sum(x.float().sum() for x in called.outputs(called.model, mode))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_inference_is_a_graph_of_its_own(without, device, as_in_graphs):
    called = Called(*BLOCKS[1], device)
    called.model.eval()
    with without():
        own = called.outputs(called.model)
        patched = patch(called.model, graphs=True)
        for _ in range(3):
            found = called.outputs(called.model)
    assert patched.report()["model"] == "graph, forward only"
    for f, o in zip(found, own, strict=True):
        assert not far({"x": f * called.there(f)}, {"x": o * called.there(o)})


@pytest.mark.parametrize("spoiled, why", [
    (lambda model: model.register_forward_hook(lambda *_: None), "a hook"),
    (lambda model: setattr(model.tri_mul_in, "forward", Asking(model.tri_mul_in)), "cannot be captured")])
def test_what_cannot_be_captured_runs_as_before_and_is_said_once(spoiled, why, device):
    called = Called(*BLOCKS[0], device, dropout=0.25)
    patched = patch(called.model, graphs=True)
    spoiled(called.model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            called.step(called.model)  # random numbers go on, too
    assert sum(why in str(each.message) for each in said) == 1 and why in patched.report()["model"]
    other = Called(*BLOCKS[2], device)
    patched = patch(other.model, graphs=True)
    for _ in range(3):
        other.step(other.model)
    assert patched.report()["model"] == "graph, kept"


class Asking:
    """A layer that asks the GPU for a number."""

    def __init__(self, layer):
        self.own = layer.forward

    def __call__(self, x, *rest, **named):
        return self.own(x, *rest, **named) if x.sum().item() < 1e30 else x


def test_weights_that_move_are_captured_anew_and_no_more_than_thrice(device):
    called = Called(*BLOCKS[0], device)
    patched = patch(called.model, graphs=True)
    for moves in range(6):
        for parameter in called.model.parameters():
            parameter.data = parameter.data.clone() * 1.01
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = called.step(called.model)
        assert patched.report()["model"] == ("graph, kept" if moves < 4 else "own code: its weights move, as "
                                             "sharded ones do")
    assert all(x is None or x.isfinite().all() for x in found.values())


def test_graphs_that_go_before_their_recomputation_still_run_it(device, as_in_graphs, monkeypatch):
    """Two signatures in turn, of which one alone is held: what a checkpoint saves goes by order."""
    monkeypatch.setattr(graphs, "MOST", 1)
    called = Called(*BLOCKS[0], device)
    blocks = [called.model, copy.deepcopy(called.model)]
    patch(blocks[0])
    patch(blocks[1], graphs=True)

    def losses(block):
        for dtype in (torch.float32, torch.bfloat16):
            called.masks = {name: mask.to(dtype) for name, mask in called.masks.items()}
            outs = called.outputs(block, "recomputed, with more")
            yield sum((x.float() * called.there(x)).square().mean() for x in outs)
    for _ in range(3):
        own, replayed = (torch.autograd.grad(sum(losses(block)), called.tensors) for block in blocks)
        assert not far(dict(enumerate(replayed)), dict(enumerate(own)))


@pytest.mark.parametrize("kind", ["kept", "forward only"])
def test_a_forward_that_is_replaced_later_is_seen(kind, device):
    """Its graphs go, and new ones come; of those without gradients none is left in their pool."""
    called = Called(*BLOCKS[0], device)
    called.model.train(kind == "kept")
    patched = patch(called.model, graphs=True)
    for forward in (called.model.transition_z.forward, torch.zeros_like):
        called.model.transition_z.forward = forward
        for _ in range(3):
            called.model.zero_grad()
            with torch.set_grad_enabled(kind == "kept"):
                outs = called.outputs(called.model)
            if kind == "kept":
                outs[1].sum().backward()
        assert patched.report()["model"] == f"graph, {kind}"
    assert called.model.transition_z.fc1.weight.grad is None


def test_a_counter_round_the_forward_of_a_checkpoint_alone(device, as_in_graphs):
    called = Called(*BLOCKS[0], device)
    patch(called.model, graphs=True)
    for _ in range(3):
        expected = called.step(called.model, "recomputed, with more")
        called.model.zero_grad()
    with FlopCounterMode(display=False):
        outs = called.outputs(called.model, "recomputed, with more")
        loss = sum((x.float() * called.there(x)).square().mean() for x in outs)
    found = dict(zip(called.names, torch.autograd.grad(loss, called.tensors), strict=True))
    assert not far(found, {name: expected[name] for name in called.names})


def test_a_copy_of_a_captured_model_has_graphs_of_its_own(device, as_in_graphs):
    """As a moving average of its weights."""
    called = Called(*BLOCKS[0], device)
    patch(called.model, graphs=True)
    for _ in range(3):
        expected = called.step(called.model)
        called.model.zero_grad()
    other = copy.deepcopy(called.model)
    with torch.no_grad():
        for parameter in called.model.parameters():
            parameter.zero_()
    for _ in range(3):
        found = called.step(other)
        other.zero_grad()
    assert other.forward.why == "graph, kept" and not far(found, expected)


def test_threads_and_any_hooks_for_saved_tensors(device):
    """The tensors that go in and out of graphs are shared: threads wait for each other."""
    called, wrong = Called(*BLOCKS[0], device), []
    called.model.eval()
    patch(called.model, graphs=True)
    tensors = [{name: t.detach() * scale for name, t in zip(called.names, called.tensors, strict=True)}
               for scale in (1.0, -1.0)]

    def outputs(given):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            return called.model(**given, **called.masks)
    with called.problem.project.loaded():
        for _ in range(2):
            expected = [outputs(given) for given in tensors]

        def run(given, truth):
            for _ in range(20):
                if not all(map(torch.equal, outputs(given), truth)):
                    wrong.append(given)
        threads = [threading.Thread(target=run, args=each) for each in zip(tensors, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    keep = functools.partial(lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        called.step(called.model)


def test_on_a_cpu_blocks_run_as_they_were():
    called = Called("boltz-2.2.1", "pair", "cpu")
    expected = called.step(called.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patch(called.model, graphs=True) as patched:
            for _ in range(3):
                called.model.zero_grad()
                found = called.step(called.model)
            assert patched.blocks == [called.model] and "own code" in patched.report()["model"]
    assert equal(found.values(), expected.values())
    assert "forward" not in vars(called.model)
