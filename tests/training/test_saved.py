"""Files that torch.save() wrote: wrong bits are found, and what is read is what lies in the file."""
import math
import zipfile

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training import checkpoints, models, saved
from fusion_lab.training.files import UserError
from fusion_lab.training.saved import read_saved, write_saved
from proteins import prediction

CONTENT = dict(format="x", numbers=torch.arange(6.0).view(2, 3), deep=dict(half=[torch.ones(4).bfloat16()]),
               empty=torch.zeros(0), one=torch.tensor(7))
INFINITE = torch.tensor([1.0, math.inf])


def refusal(read, path, *rest):
    with pytest.raises(UserError) as caught:
        read(path, *rest)
    assert caught.value.code == 2 and "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    write_saved(tmp_path / "c.pt", CONTENT)
    return tmp_path / "c.pt"


def directory_of(whole):
    """Where in the bytes of a zip file the central directory begins, and where each of its entries does."""
    starts, at = [], whole.index(b"PK\1\2")
    while at >= 0:
        starts.append(at)
        at = whole.find(b"PK\1\2", at + 4)
    return starts


@pytest.mark.parametrize("at, bits", [(38, 0x10), (38, 1), (10, 8), (20, 1), (24, 1), (8, 1), (9, 1)])
def test_no_entry_can_be_called_a_directory_or_anything_else(at, bits, path):
    """torch.load() takes a directory's bytes from memory that nobody wrote. The rest: compressed, of two
    sizes, encrypted, with its header elsewhere."""
    whole = path.read_bytes()
    for start in directory_of(whole):
        flipped = bytearray(whole)
        flipped[start + at] ^= bits
        path.write_bytes(flipped)
        assert "is not as torch.save writes one" in refusal(read_saved, path)


def test_every_wrong_bit_of_the_directory_is_found_or_changes_nothing(path):
    whole = path.read_bytes()
    first, second = directory_of(whole)[-2:]  # that of a tensor, and the last one
    for at in range(first, second):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = read_saved(path)
            except UserError:
                continue
            assert saved.digest(found) == found["digest"] == saved.digest(CONTENT), (at - first, bit)


def test_an_entry_of_another_kind_is_not_unpacked(path):
    """A few kilobytes can hold gigabytes of zeros."""
    with zipfile.ZipFile(path.with_name("z.pt"), "w", zipfile.ZIP_DEFLATED) as packed, \
            zipfile.ZipFile(path) as plain:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert "is not as torch.save writes one" in refusal(read_saved, path.with_name("z.pt"))


@pytest.mark.parametrize("older", [False, True])
def test_memory_that_nobody_wrote_is_found(path, older, monkeypatch):
    """Whatever torch.load() read instead of the file; where there is no digest, by checksums."""
    if older:
        torch.save(CONTENT, path)
    load = torch.load

    def unwritten(*given, **named):
        found = load(*given, **named)
        found["deep"]["half"][0][2] = 5
        return found
    monkeypatch.setattr(torch, "load", unwritten)
    assert "a tensor is not what lies in the file" in refusal(read_saved, path)


@pytest.mark.parametrize("change", [
    dict(numbers=torch.arange(6.0)), dict(numbers=torch.arange(6.0).view(2, 3).double()), dict(one=None),
    dict(other=CONTENT["one"]), dict(deep=dict(half=[torch.zeros(4).bfloat16()])), dict(one=torch.tensor(8)),
    dict(digest=saved.digest({}))])
def test_other_tensors_than_those_of_the_digest_are_refused(change, path):
    found = read_saved(path)
    torch.save({**found, **change}, path)
    assert refusal(read_saved, path).endswith("damaged: its tensors are not those of its digest")
    torch.save(dict(reversed(found.items())), path)  # their order says nothing
    assert read_saved(path)["one"] == 7


def test_a_digest_is_of_values_and_not_of_where_they_lie():
    numbers = torch.arange(6.0).view(2, 3)
    assert saved.digest([numbers.T]) == saved.digest([numbers.T.contiguous()]) != saved.digest([numbers])
    assert saved.digest([numbers[1]]) == saved.digest([torch.tensor([3.0, 4.0, 5.0])])


def test_what_holds_itself_ends(path):
    ring = dict(CONTENT)
    ring["ring"] = [[ring]]
    torch.save(ring, path)
    found = read_saved(path)
    assert found["ring"][0][0] is found and saved.tensors_in(found).keys() == {
        "/numbers", "/deep/half/0", "/empty", "/one"}


def test_older_files_are_read_and_it_is_said(path, capsys):
    saved.say_if_older(read_saved(path), path)
    assert capsys.readouterr().out == ""
    torch.save(CONTENT, path)
    saved.say_if_older(read_saved(path), path)
    assert capsys.readouterr().out.startswith(f"{path} has no digest")


def test_the_shipped_model_has_a_digest(capsys):
    card = models.read_model(prediction.MODEL, tof.PROGRAM).card
    assert set(card["sequences"]) == set(card["trained_on"]) and capsys.readouterr().out == ""
    assert "plddt" in card


@pytest.mark.parametrize("kind", ["weights", "average", "exp_avg", "exp_avg_sq"])
def test_nothing_is_saved_that_could_not_be_read(kind, tmp_path):
    sizes = dict(num_blocks=1, msa_dim=8, pair_dim=8, num_seqs=3, seq_len=8, batch_size=1, ema_decay=0.5)
    settings = tof.PROGRAM.settings(**sizes)
    trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
    trainer.step(tof.PROGRAM.open_source(settings).batch(0))
    checkpoints.save(trainer, tmp_path / "c.pt")
    whole, last = (tmp_path / "c.pt").read_bytes(), trainer.updated[-1]
    tensors = dict(weights=last.data, average=trainer.average.weights[-1], **trainer.optimizer.state[last])
    tensors[kind].view(-1)[0] = math.inf
    with pytest.raises(UserError, match=f"{kind} are not finite at step 0: not saved") as caught:
        checkpoints.save(trainer, tmp_path / "c.pt")
    assert caught.value.code == 1 and (tmp_path / "c.pt").read_bytes() == whole


# --- --contacts -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", ["contact_probability", "distances"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_predictions_that_are_not_finite_are_refused(key, dtype, monkeypatch):
    config = tof.PROGRAM.settings(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=1, pair_heads=1, num_seqs=3,
                                  seq_len=8).model
    model = tof.PROGRAM.model(config, tof.PROGRAM.fusion_config())
    batch = dict(tof.PROGRAM.open_source(tof.PROGRAM.settings(num_seqs=3, seq_len=8)).batch(0))
    given = tof.PROGRAM, model.state_dict(), config, {"msa_tokens": batch["msa_tokens"]}, torch.device("cpu")
    assert all(part.isfinite().all() for part in prediction.run_model(*given, dtype).values())
    forward = tof.TinyOpenFoldV2.forward

    def spoilt(*inputs, **named):
        found = forward(*inputs, **named)
        return {**found, key: found[key] / 0 * 0}
    monkeypatch.setattr(tof.TinyOpenFoldV2, "forward", spoilt)
    with pytest.raises(UserError, match="the model's predictions are not finite") as caught:
        prediction.run_model(*given, dtype)
    assert caught.value.code == 1 and ("--use-amp" in str(caught.value)) == (dtype is not None)
