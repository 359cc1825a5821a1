"""--contacts: memory that is asked for beforehand, rows that the yardsticks see."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion_lab.training.files import UserError
from proteins import prediction

CONFIG = SimpleNamespace(seq_len=100, num_seqs=64)


def test_memory_that_a_cpu_keeps_counts(monkeypatch, capsys):
    monkeypatch.setattr(prediction, "needs", lambda *given: (10 * 2 ** 30, 5e10))
    monkeypatch.setattr(prediction, "matmul_ceiling", lambda device, dtype: 1e10)
    free = prediction.CPU_HOLES * 10 * 2 ** 30
    assert prediction.CPU_HOLES > 1
    monkeypatch.setattr(prediction, "free_memory", lambda device: free)
    prediction.forewarn(None, CONFIG, None, torch.device("cpu"), None)
    assert capsys.readouterr().out == "It takes about 17.0 GB and 10 s on cpu\n"
    monkeypatch.setattr(prediction, "free_memory", lambda device: free - 1)
    with pytest.raises(UserError, match="100 residues and 64 rows need 17.0 GB, 17.0 GB are free on cpu"):
        prediction.forewarn(None, CONFIG, None, torch.device("cpu"), None)
    monkeypatch.setattr(prediction, "free_memory", lambda device: 10 * 2 ** 30)
    prediction.forewarn(None, CONFIG, None, torch.device("cuda"), None)
    assert capsys.readouterr().out == "It takes about 10.0 GB on cuda\n"


def test_yardsticks_see_the_same_drawn_rows(monkeypatch):
    """The first rows of an alignment are the most similar ones, which tell least."""
    seen = {}

    def noted(method):
        def score(msa, weights, **_):
            seen[method] = (msa, weights)
            return np.zeros((30, 30))
        return score
    monkeypatch.setattr(prediction, "mutual_information", noted("mi"))
    monkeypatch.setattr(prediction, "mean_field_dca", lambda msa, weights: noted("dca")(msa, weights))
    monkeypatch.setattr(prediction, "YARDSTICK_ROWS", 8)
    msa = (np.arange(40)[:, None] + np.zeros(30, int)).astype(np.uint8) % 20
    place = 4.0 * np.arange(30)
    coords = torch.from_numpy(np.stack([place, 0 * place, 0 * place], 1)).float()
    found = SimpleNamespace(protein=SimpleNamespace(msa=msa, length=30), probability=torch.rand(30, 30),
                            coords=(coords, torch.ones(30)))
    assert list(prediction.precisions(found)) == ["model", "MI-APC", "mean-field DCA"]
    for rows, weights in seen.values():
        assert np.array_equal(rows, prediction.some_rows(msa, 8)) and not np.array_equal(rows, msa[:8])
        assert np.array_equal(weights, prediction.sequence_weights(rows)) and len(rows) == 8
