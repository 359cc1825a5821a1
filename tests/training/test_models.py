"""--init-from: what a new run begins with."""
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training import models
from fusion_lab.training.files import UserError

SIZES = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
             seq_len=8, batch_size=2, device="cpu")


@pytest.mark.parametrize("masters", [{}, dict(use_amp=True, enable_master_weights=True)])
def test_an_average_begins_with_the_weights_too(masters, tmp_path):
    """Not with the random ones of before, which the first evaluations would be of."""
    torch.manual_seed(0)
    settings = tof.PROGRAM.settings(**SIZES, **masters, ema_decay=0.99)
    given = tof.TinyOpenFoldV2(settings.model)
    models.save_model(tmp_path / "m.pt", tof.PROGRAM, given.state_dict(), settings.model, {})
    trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
    trainer.average.steps = 5
    models.load_weights(trainer, tmp_path / "m.pt", tof.PROGRAM.open_source(settings))
    weights = {name: weight.bfloat16() for name, weight in given.state_dict().items()}

    def begun():
        return all(torch.equal(weight.bfloat16(), weights[name])
                   for name, weight in trainer.model.state_dict().items())
    assert begun()
    with trainer.averaged():
        assert begun()
    assert trainer.average.steps == 0 and trainer.average.decay == 0.99


@pytest.mark.parametrize("weights", [None, [1], dict(a=1)])
def test_a_model_file_without_weights_says_what_is_wrong(weights, tmp_path):
    path = tmp_path / "m.pt"
    torch.save(dict(format=models.format_of(tof.PROGRAM), config={}, card={}, model=weights), path)
    with pytest.raises(UserError) as caught:
        models.read_model(path, tof.PROGRAM)
    assert str(caught.value) == f"model {path}: damaged, or of another version: model cannot be used"
