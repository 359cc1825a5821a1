"""What a model of bytes says at its end: measured figures, and one that follows from its vocabulary."""
from types import SimpleNamespace

import numpy as np
import pytest

text = pytest.importorskip("companions.text", reason="this companion was deleted")


@pytest.mark.parametrize("held_out, word", [(2.5, "below"), (3.5, "above")])
def test_closing_words(held_out, word, monkeypatch, capsys):
    monkeypatch.setattr(text, "continued", lambda trainer, prompt, count, length: prompt + b" world")
    trainer = SimpleNamespace(step_number=7, settings=SimpleNamespace(model=SimpleNamespace(vocab_size=256)))
    source = SimpleNamespace(unseen=np.frombuffer(b"____hello", np.uint8), length=5)
    text.closing(trainer, source, dict(final=dict(held_out=held_out, five_gram=3.0)))
    assert capsys.readouterr().out.splitlines() == [
        f"In words: after step 7 a byte of files it never saw takes {held_out:.3f} bits, {word} a 5-gram's "
        "3.000; a guess among 256 equally likely ones takes 8.", "It continues 'hello' so: ' world'"]
    text.closing(trainer, source, {})
    assert capsys.readouterr().out == ""
