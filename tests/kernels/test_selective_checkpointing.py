"""A compiled block with selective checkpointing keeps less, and the compiler knows all operators in it."""
from dataclasses import replace

import pytest
import torch
from torch._inductor import lowering

import tiny_openfold_v2 as tof
from fusion_lab.kernels import limits
from fusion_lab.kernels.common import NAMESPACE
from fusion_lab.kernels.reductions import compile_pass
from fusion_lab.measuring import accuracy
from tests.kernels import test_whole_block as check_model
from tests.kernels.rule import saved_bytes

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]


def test_a_compiled_block_keeps_as_little_and_knows_its_operations(monkeypatch):
    """The compiler may not move what is made again into the forward pass, where it would be kept."""
    monkeypatch.setattr(limits, "runs", lambda x: True)
    config = tof.TinyOpenFoldConfig(msa_dim=16, pair_dim=32, msa_heads=2, pair_heads=2, outer_product_dim=8)
    given, known, results, kept = [t.bfloat16() for t in check_model.tensors()], set(), [], []

    class Watched(compile_pass.GatheredGradients):
        def __call__(self, graph):
            super().__call__(graph)
            ours = {node.target for node in graph.nodes if getattr(node.target, "namespace", "") == NAMESPACE}
            assert ours <= set(lowering.lowerings)
            known.update(ours)

        def uuid(self):
            return None  # compiled anew, so that it runs
    for recompute in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = tof.FusedEvoformerBlock(config, replace(tof.FusionConfig.ultra(),
                                                        enable_selective_checkpointing=recompute))
        accuracy.shake(block)
        block = block.bfloat16()
        call = torch.compile(block, fullgraph=True, dynamic=False, options=dict(
            post_grad_custom_post_pass=Watched(False, "cpu")))
        with saved_bytes() as saved:
            out = torch.cat([t.flatten() for t in call(*given)])
        results.append(torch.autograd.grad(out.float().square().sum(), list(block.parameters())))
        kept.append(sum(saved))
    assert all(map(torch.equal, *results)) and kept[1] < 0.5 * kept[0] and len(known) > 10
