"""Counters against hand counts, directories, tables."""

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.tables import aligned, markdown
from fusion_lab.training.files import UserError, fresh_directory, set_aside

CPU = torch.device("cpu")
SMALL = dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, outer_product_dim=4, num_blocks=1,
             num_seqs=6, seq_len=16, batch_size=2)


def setup(**values):
    settings = tof.PROGRAM.settings(**{**SMALL, **values})
    return tof.Trainer(tof.PROGRAM, settings, CPU), tof.PROGRAM.open_source(settings).batch(0)


def plain(**switches):
    """A trainer and a batch of the baseline, these switches apart."""
    return setup(**{**vars(tof.FusionConfig.preset(False)), **switches})


# Counters


def test_layer_norm_and_linear_save_exactly_these_bytes():
    layer = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    x = torch.randn(5, 8, requires_grad=True)
    names = [("norm", layer[0]), ("linear", layer[1])]
    # The norm keeps its input and a mean and a factor per row; the linear layer keeps its input.
    saved = saved_activations(layer, names, lambda: layer(x).sum())
    assert saved == {"norm": 4 * (40 + 5 + 5), "linear": 4 * 40}


def test_a_transition_launches_exactly_these_operations():
    trainer, _ = setup()
    pair = torch.randn(1, 3, 3, 16)
    with OpCounter() as counter:
        trainer.model.blocks[0].pair_transition(pair)
    assert counter.launches == 4  # layer norm, linear, relu, linear


def test_saved_activations_of_a_transition_within_one_percent_of_a_hand_count():
    trainer, batch = plain()
    saved = probe(trainer, batch).saved
    pairs, c = 2 * 16 * 16, 16
    # Norm: input, mean, factor. linear1: the norm's output. relu: its output, which linear2 keeps as well.
    by_hand = 4 * pairs * (c + 2 + c + 4 * c)
    assert saved["pair_transition"] == pytest.approx(by_hand, rel=0.01)


def test_nothing_is_saved_by_a_fusion_that_saves_nothing():
    trainer, batch = plain()
    packed, _ = plain(enable_qkv_fusion_msa=True)
    before, after = (probe(t, batch) for t in (trainer, packed))
    assert after.saved_mb == pytest.approx(before.saved_mb, rel=0.002) and after.launches < before.launches


def test_range_sums_leave_out_what_is_nested():
    ticks = iter([0, 1, 4, 10])
    sums = RangeSums(lambda: next(ticks))
    sums.enter("outer")
    sums.enter("inner")
    sums.leave()
    sums.leave()
    assert sums.sums == {"inner": 3, "outer": 7}


def test_hooks_close_a_range_that_an_exception_leaves():
    layer, names = torch.nn.Linear(2, 2), []
    with pytest.raises(RuntimeError), ranges([("layer", layer)], names.append, names.pop):
        layer(torch.zeros(3, 3))
    assert names == []


# Command line and files


def test_directories_are_refused_or_set_aside(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "result").write_text("old")
    with pytest.raises(UserError, match="--force"):
        fresh_directory(full, named=True, force=False)
    fresh_directory(full, named=True, force=True)
    assert (full / "result").exists()
    fresh_directory(full, named=False, force=False)
    assert list(full.iterdir()) == [] and len(list(tmp_path.glob("full.old-*/result"))) == 1
    for _ in range(2):
        (tmp_path / "file").write_text("x")
        set_aside(tmp_path / "file")
    assert len(list(tmp_path.glob("file.old-*"))) == 2


def test_tables():
    rows = [["name", "a"], ["long name", "1"], ["short", "a row that overhangs"]]
    assert aligned(rows)[1] == "long name  1" and markdown(rows)[1] == "|---|---|"
    assert aligned([["n", "a", "b"], ["x", "the reason"]])[1] == "x  the reason"
