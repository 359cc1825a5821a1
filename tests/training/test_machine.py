"""What machine this is: which device a name means, what a process is set to, where a number was measured."""
import io
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import machine
from fusion_lab.training.errors import UserError
from fusion_lab.training.machine import choose_device

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, ...) makes it so, and returns a list of the devices that are set then."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def there(count, size=1, local_size=1, local_rank=0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(machine, "place", lambda: SimpleNamespace(
            size=size, local_size=local_size, local_rank=local_rank))
        return chosen
    return there


@pytest.mark.parametrize("name, count, expected", [
    ("auto", 0, "cpu"), ("auto", 1, "cuda:0"), ("cpu", 1, "cpu"), ("cuda", 1, "cuda:0"), ("1", 2, "cuda:1"),
    ("cuda:1", 2, "cuda:1")])
def test_devices(name, count, expected, gpus):
    chosen = gpus(count)
    assert choose_device(name) == torch.device(expected)
    assert chosen == [torch.device(expected)] * (expected != "cpu")


@pytest.mark.parametrize("name, count, words", [
    *((name, 2, "must be auto, cpu, cuda, cuda:N or N") for name in ("tpu", "cuda:", "cuda:x", "tpu:0",
                                                                     "cuda:0:1", "-1", "mps", "\u0663")),
    *((name, 2, "there is no such GPU; torch .* sees 2 GPUs") for name in ("2", "cuda:2")),
    ("cuda", 0, "there is no such GPU; torch .* sees 0 GPUs")])
def test_devices_that_are_not_there(name, count, words, gpus):
    chosen = gpus(count)
    with pytest.raises(UserError, match=f"^--device {name}: {words}$") as caught:
        choose_device(name)
    assert caught.value.code == (2 if "must" in words else 4) and chosen == []


def test_every_rank_has_a_gpu_of_its_own(gpus):
    gpus(2, size=2, local_size=2, local_rank=1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="--device cuda:1: 2 ranks cannot share a GPU"):
        choose_device("cuda:1")
    gpus(1, size=2, local_size=2, local_rank=1)
    with pytest.raises(UserError, match="2 ranks on this host, but torch .* sees 1 GPU") as caught:
        choose_device("auto")
    assert caught.value.code == 4 and choose_device("cpu").type == "cpu"


AVAILABLE = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\n"}


def in_a_group(limit):
    return {**AVAILABLE, "/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": "300",
            "/sys/fs/cgroup/memory.stat": "anon 5\nfile 100\n"}


@pytest.mark.parametrize("files, expected", [
    (AVAILABLE, 2048), ({"/proc/meminfo": "MemTotal: 9 kB\n"}, None), ({}, None),  # {}: no Linux
    (in_a_group("1000"), 800), (in_a_group("9000"), 2048), (in_a_group("max"), 2048)])
def test_free_memory(files, expected, monkeypatch):
    def opened(path, **_):
        if path not in files:
            raise FileNotFoundError
        return io.StringIO(files[path])
    monkeypatch.setattr(machine, "open", opened, raising=False)
    assert machine.free_memory(CPU) == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert machine.free_memory(torch.device("cuda")) == 5
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)  # by earlier runs of the process
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    assert machine.free_memory(torch.device("cuda")) == 8


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    machine.require_cache()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="TRITON_CACHE_DIR") as caught:
        machine.require_cache()
    assert str(tmp_path / "file" / "cache") in str(caught.value) and caught.value.code == 2
