"""The Evoformer at sizes at which a CPU trains it in milliseconds."""
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.checkpoints import format_of
from fusion_lab.training.distributed import ALONE

CPU = torch.device("cpu")
TINY = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4, num_seqs=4,
            seq_len=8, batch_size=2, warmup_steps=1, device="cpu")


def flags_of(**values):
    """The words that say so on a command line."""
    return [word for name, value in (TINY | values).items()
            for word in ("--" + name.replace("_", "-"), str(value))]


def settings_of(**values):
    return tof.PROGRAM.settings(**TINY | values)


def trainer_of(world=ALONE, **values):
    torch.manual_seed(1)  # not the seed of the settings, which must be what counts
    return tof.Trainer(tof.PROGRAM, settings_of(**values), CPU, world)


def model_of(**values):
    """An untrained model, the same each time."""
    settings = settings_of(**values)
    torch.manual_seed(0)
    return tof.TinyOpenFoldV2(settings.model, settings.fusion)


def save_model(path, model, card):
    """Write a model file; card: plain values."""
    weights = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    torch.save(dict(format=format_of(tof.PROGRAM, "model"), config=vars(model.config), card=card,
                    model=weights), path)
