"""The ultra-fused block in Triton's interpreter against the plain block. One program: the barriers are
passed, but nothing waits at them."""
import sys
from unittest import mock

import pytest
import torch

from companions import ultra_block as ultra
from fusion_lab.training.program import load_program
from tests.kernels.rule import violations
from tests.support import ROOT

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

FILE = ROOT / "companions" / "tiny_llama.py"
PROGRAM = load_program(FILE)
llama = sys.modules["tiny_llama"]

SMALL = dict(hidden_size=64, num_heads=2, num_kv_heads=1)
CASES = {  # hidden size, heads, of keys, intermediate size, B, S
    "grouped, odd sizes": (64, 2, 1, 80, 2, 11), "two tiles of queries": (64, 2, 2, 96, 1, 40),
    "four heads in two groups": (128, 4, 2, 80, 1, 11),
}


def problem(case, dtype):
    """(ours, plain, [x]): a block by one kernel, and as it is."""
    torch.manual_seed(0)
    hidden, heads, kv_heads, wide, B, S = CASES[case]
    config = llama.LlamaConfig(hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, num_layers=1,
                               intermediate_size=wide, seq_len=S)
    block = llama.FusedTransformerBlock(config, llama.LlamaSwitches())
    angles = llama.rotary(S, hidden // heads, 1e4)
    ultra.prepare(block, angles, False)
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return (lambda x: ultra.run(block.to(x.dtype), x, angles),
            lambda x: block.to(x.dtype).plain(x, angles), [torch.randn(B, S, hidden).to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradient(case, dtype):
    assert not violations(*problem(case, dtype))


def trained(fusion, steps=2):
    settings = PROGRAM.settings(**SMALL, intermediate_size=80, num_layers=2, seq_len=11, batch_size=2,
                                device="cpu", enable_ultra_block=fusion)
    trainer = PROGRAM.trainer(PROGRAM, settings, torch.device("cpu"))
    batch = PROGRAM.data(settings).check_batch()
    with mock.patch.object(llama, "runs", lambda x: True):
        trainer.forward(batch)["loss"].backward()
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        return gradients, [trainer.step(batch).item() for _ in range(steps)], trainer


def test_a_model_of_ultra_fused_blocks_trains_every_parameter():
    (plain, losses, _), (ours, fused, trainer) = trained(False), trained(True)
    assert ours.keys() == plain.keys() and len(ours) > 10
    for name, gradient in ours.items():
        assert gradient.any() and torch.allclose(gradient, plain[name], rtol=1e-4, atol=1e-6), name
    assert fused == pytest.approx(losses, rel=1e-5)
    trainer.model.enable_ultra_mode(False)
    assert not any(block.ultra for block in trainer.model.model.layers)
