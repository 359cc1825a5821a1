"""The count of FLOPs: that of PyTorch's counter, at half of its cost."""
import os
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fusion_lab.measuring import flops as counting
from fusion_lab.training.program import load_program
from tests.second_program import PROGRAM as SECOND
from tests.support import ROOT


def small(program, **switches):
    settings = program.settings(device="cpu", **{k: v for k, v in program.demo.items() if k != 'num_steps'})
    return replace(settings, fusion=replace(program.fusion_config.preset(False), **switches))


def of_pytorch(program, settings):
    """FLOPs of a step as PyTorch counts them on fake tensors, as this project did before."""
    def product(bias, left, right, **_):
        return 2 * left[0] * left[1] * right[1]
    batch = program.data(settings).batch(0)
    model = program.model(settings.model, settings.fusion)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        given = {key: fake.from_tensor(value) for key, value in batch.items()}
        counter = FlopCounterMode(display=False,
                                  custom_mapping={torch.ops.aten._addmm_activation: product})
        with counter, sdpa_kernel(SDPBackend.MATH):
            model.for_loss(**given)["loss"].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("switches", [{}, dict(enable_flash_attention=True),
                                      dict(enable_activation_checkpointing=True)])
def test_it_is_pytorch_s_count(switches):
    program = load_program(os.path.join(ROOT, "tiny_openfold_v2.py"))
    settings = small(program, **switches)
    assert sum(counting.flops_by_sublayer(program, settings).values()) == of_pytorch(program, settings) > 0


def test_a_model_that_asks_for_its_device_s_autocast_is_counted():
    settings = replace(small(SECOND), fusion=SECOND.fusion_config.preset(True))
    found = counting.flops_by_sublayer(SECOND, settings)
    eager = replace(settings, fusion=replace(settings.fusion, **counting.EAGER))
    assert sum(found.values()) == of_pytorch(SECOND, eager) > 0
