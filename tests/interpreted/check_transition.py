"""The transition in Triton's interpreter: output and gradients by the 3x rule, and mutants that must fail."""
import pytest
import torch
from rule import mutant, violations

from fusion_lab.kernels import transition

CASES = {  # shape of x, hidden units, residual
    "two tiles, odd": ((2, 5, 7, 32), 128, "own"),
    "fewest channels": ((1, 2, 65, 16), 64, "own"),
    "update alone": ((1, 3, 5, 64), 256, None),
    "another residual": ((3, 5, 16), 192, "other"),
    "one position": ((1, 1, 1, 128), 512, "own"),
}
MUTANTS = {
    "no residual": ("acc += rows(residual", "acc += 0 * rows(residual"),
    "last hidden units dropped": ("range(0, units, BH)", "range(0, units - BH, BH)"),
    "first bias dropped": ("relu(h + tl.load(b1 + f).to(tl.float32)[None, :])", "relu(h)"),
    "ReLU's derivative ignored": ("tl.where(h > 0, dh, 0.0)", "dh"),
    "residual's gradient forgotten": ("if ADD:", "if False:"),
    "sums of the first program alone": ("add_up(parts, sums)", "sums.copy_(parts[0])"),
    "bias gradients exchanged": ("dnorm_bias, db2, db1 = sums", "db2, dnorm_bias, db1 = sums"),
    "eps as an afterthought": ("len(w1), eps, ADD", "len(w1), 2 * eps + 0.01, ADD"),
}


def problem(dtype, shape, units, kind, module=transition):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    c = shape[-1]
    sizes = [shape, (c,), (c,), (units, c), (units,), (c, units), (c,), shape]
    scales = [1, 0.1, 0.1, c ** -0.5, 1, units ** -0.5, 1, 1]
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]
    tensors[1] += 1
    tensors = [t.to(dtype) for t in tensors][:8 if kind == "other" else 7]

    def with_residual(function):
        def run(x, *rest):
            return function(x, *rest[:6], 1e-5, residual={"own": x, "other": rest[-1], None: None}[kind])
        return run
    return with_residual(module.transition), with_residual(transition.reference), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("broken", MUTANTS)
def test_mutants_are_caught(broken, tmp_path):
    module = mutant(transition, *MUTANTS[broken], tmp_path)
    assert violations(*problem(torch.float32, *CASES["two tiles, odd"], module))


@pytest.mark.parametrize("kind", ["own", "other", None])
def test_compiles_in_one_piece(kind):
    ours, plain, tensors = problem(torch.float32, (2, 5, 16), 64, kind)
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)


def test_autocast_rounds_products_and_not_the_residual():
    ours, plain, tensors = problem(torch.float32, (2, 5, 32), 128, "own")
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*tensors) for function in (ours, plain)]
    assert results[0].dtype == results[1].dtype == torch.float32
    errors = [(result - exact).abs().max() for result in results]
    assert 1e-4 < errors[0] <= 3 * errors[1]
