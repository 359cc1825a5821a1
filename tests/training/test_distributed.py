"""What a rank knows of the others; tests/programs/test_distributed.py has several at work."""
import pytest

from fusion_lab.training import torchrun
from fusion_lab.training.errors import UserError
from fusion_lab.training.torchrun import Place


@pytest.mark.parametrize("environment, place, first", [
    ({}, Place(0, 1, 0, 1), True), (dict(RANK="0 1 0 1"), Place(0, 1, 0, 1), True),
    (dict(RANK="3 4 1 2"), Place(3, 4, 1, 2), False), (dict(RANK="2"), None, True),
    (dict(WORLD_SIZE="2"), None, True), (dict(RANK="1 x 0 1"), None, False)])
def test_what_torchrun_says(environment, place, first, monkeypatch):
    counts = environment.pop("RANK", "").split()
    environment |= dict(zip(torchrun.COUNTS, counts, strict=False))
    for name in torchrun.COUNTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert torchrun.first() is first
    if place:
        assert torchrun.place() == place
    else:
        with pytest.raises(UserError, match="torchrun"):
            torchrun.place()
