"""What a study's command line asks for."""
from types import SimpleNamespace

import pytest

from fusion_lab.study import arguments, design
from fusion_lab.training.program import load_program
from tests.support import ROOT


@pytest.mark.parametrize("device, use_amp, left_out", [
    ("cuda", False, []), ("cpu", True, ["cuda-graphs"]), ("cpu", False, ["cuda-graphs", "master-weights"])])
def test_an_ablation_combines_what_changes_something_there(device, use_amp, left_out):
    vocabulary = design.Vocabulary(load_program(ROOT / "tiny_openfold_v2.py"))
    options = SimpleNamespace(switches=None, ablation=True, all_combinations=False, device=device)
    found = arguments.combined_switches(options, vocabulary, use_amp)
    assert set(found) == vocabulary.everything - {*left_out}
