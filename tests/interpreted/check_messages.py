"""Messages between neighbours: numbers, derivatives and mutants, in Triton's interpreter."""
import pathlib

import pytest
import torch
from rule import mutant, violations

from fusion_lab.kernels import messages
from fusion_lab.kernels import triton as kernels
from fusion_lab.measuring.accuracy import results_and_gradients, shake
from fusion_lab.training.program import load_program

CASES = {"whole tiles": (6, 16, 9, 16), "odd": (5, 7, 5, 32), "more rows than nodes": (3, 20, 11, 16)}
MUTANTS = {
    "first gelu's slope without its second term": ("dx = dg * slope(x)", "dx = dg * distribution(x)"),
    "last hidden units dropped": ("for f0 in range(0, C, BH)", "for f0 in range(0, C - BH, BH)"),
    "mask forgotten in backward": ("dy = m[:, None] * slope(y)", "dy = slope(y)"),
    "mask forgotten in forward": ("tl.sum(m[:, None] * (y", "tl.sum((y"),
    "neighbours beyond K": ("mask=k < K, other=0.0)", "mask=k < BK, other=0.0)"),
    "last edges of a row": ("tl.load(starts + row + 1), tl", "tl.load(starts + row + 1) - 1, tl"),
    "tanh's gelu": ("0.5 + 0.5 * tl.erf(x * 0.7071067811865476)",
                    "tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))"),
}


def problem(dtype, nodes, neighbours, rows, channels, module=messages):
    """(ours, plain, tensors)"""
    torch.manual_seed(0)
    c = channels
    index = torch.randint(rows, (nodes, neighbours))
    mask = torch.ones(nodes, neighbours)
    mask[-1, neighbours // 2:] = 0
    sizes = [(nodes, c), (nodes, neighbours, c), (rows, c), (c, c), (c, c), (c,)]
    scales = [1, 1, 1, c ** -0.5, c ** -0.5, 1]
    tensors = [(scale * torch.randn(size)).to(dtype) for size, scale in zip(sizes, scales, strict=True)]
    leading = module.incoming(index, rows)

    def ours(own, edges, table, we, w2, b2):
        return module.messages(own, edges, table, index, mask, we, w2, b2, leading)

    def plain(own, edges, table, we, w2, b2):
        return messages.reference(own, edges, table, index, mask.to(own.dtype), we, w2, b2)
    return ours, plain, tensors


@pytest.mark.parametrize("case, dtype", [(case, torch.float32) for case in CASES] + [("odd", torch.bfloat16)])
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("broken", MUTANTS)
def test_mutants_are_caught(broken, tmp_path):
    module = mutant(messages, *MUTANTS[broken], tmp_path)
    assert violations(*problem(torch.float32, *CASES["odd"], module))


@pytest.mark.slow
def test_compiles_in_one_piece():
    ours, plain, tensors = problem(torch.float32, *CASES["odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)


def test_edges_are_sorted_by_where_they_lead():
    index = torch.tensor([[2, 0], [2, 3]])
    found = messages.incoming(index, 5)
    assert found.order.tolist() == [1, 0, 2, 3] and found.starts.tolist() == [0, 1, 1, 3, 4, 4]


def test_what_does_not_fit_is_said():
    assert "48 channels" in messages.unsupported(48, 8) and "65 neighbours" in messages.unsupported(64, 65)
    assert messages.unsupported(128, 48) == ""


@pytest.mark.slow
def test_protein_mpnn_with_the_kernel_is_protein_mpnn(monkeypatch):
    """Encoder and decoder, forward and all gradients."""
    file = pathlib.Path(__file__).resolve().parents[2] / "companions" / "protein_mpnn.py"
    if not file.exists():
        pytest.skip("this companion was deleted")
    monkeypatch.setattr(kernels, "fits", lambda x: True)  # on the CPU, in the interpreter
    program = load_program(file)
    plain = program.settings(hidden_dim=16, num_layers=2, neighbors=5, seq_len=8, dropout=0.0, batch_size=2)
    batch, found = program.check_batch(plain, torch.device("cpu")), []
    for settings in (plain, plain.having(enable_message_kernel=True)):
        trainer = program.trainer(program, settings, torch.device("cpu"))
        shake(program, trainer.model)
        found.append(results_and_gradients(trainer, batch))
    for name, expected in found[0].items():
        scale = max(expected.abs().max().item(), 1e-2)
        assert (found[1][name] - expected).abs().max() < 2e-5 * scale, name
    assert not torch.equal(found[0]["log_probs"], found[1]["log_probs"])  # another order of sums
