"""TinyLlama's first weights: drawn, or those of --weights."""
import pytest
import torch

from tests.support import ROOT

pytest.importorskip("companions.kernels", reason="this companion was deleted")
from fusion_lab.training.program import load_program

FILE = ROOT / "companions" / "tiny_llama.py"
if not FILE.exists():
    pytest.skip("this companion was deleted", allow_module_level=True)
PROGRAM = load_program(FILE)
SIZES = dict(hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2, seq_len=8,
             vocab_size=256, device="cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_what_adds_to_the_residual_is_scaled(packed):
    """Eight layers add to it: each by 8 ** -0.5 of what others write."""
    torch.manual_seed(0)
    settings = PROGRAM.settings(**SIZES, enable_qkv_fusion=packed)
    for block in PROGRAM.model(settings.model, settings.fusion).model.layers:
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            spread = (8 * layer.weight.shape[1]) ** 0.5 * layer.weight.std().item()
            assert spread == pytest.approx(1, rel=0.06)


def test_an_average_begins_with_the_weights_too(tmp_path):
    settings = PROGRAM.settings(**SIZES, ema_decay=0.9, weights=str(tmp_path / "w.pt"))
    given = PROGRAM.model(settings.model, PROGRAM.fusion_config.preset(False)).state_dict()
    torch.save(given, tmp_path / "w.pt")
    trainer = PROGRAM.trainer(PROGRAM, settings, torch.device("cpu"))
    with trainer.averaged():
        state = trainer.model.state_dict()
        assert state.keys() == given.keys() and all(torch.equal(state[name], given[name]) for name in given)
