"""What machine this is: which device a name means, what a process is set to, where a number was measured."""
import ctypes
import io
import platform
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training import machine
from fusion_lab.training.files import UserError
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
                                                                     "cuda:0:1", "-1", "mps")),
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


def test_freed_memory_is_kept_by_the_right_words_to_the_c_library(monkeypatch):
    """malloc.h: M_MMAP_MAX, of which there shall be none, is -4; M_TRIM_THRESHOLD, never, is -1."""
    said = []
    libc = SimpleNamespace(mallopt=lambda option, value: said.append((option, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc if name is None else None)
    machine.keep_freed_memory()
    assert said == [(-4, 0), (-1, -1)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    machine.keep_freed_memory()  # another C library


@pytest.fixture
def matmul():
    """torch's settings for products, which monkeypatch cannot bring back."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_settings_change_for_the_process(deterministic, monkeypatch, matmul):
    kept, asked = [], []
    matmul.allow_tf32 = False
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # comes back afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: kept.append("memory"))
    monkeypatch.setattr(machine, "runs_in_tf32", lambda training, device: training.use_tf32)
    settings = tof.PROGRAM.settings(use_tf32=True, deterministic=deterministic)
    for device, expected in (("cpu", (["memory"], False)), ("cuda", (["memory"], True))):
        machine.process_settings(settings, torch.device(device))
        assert (kept, matmul.allow_tf32) == expected
    assert asked == [True] * 2 * deterministic
    assert machine.os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_where_a_number_was_measured(monkeypatch):
    asked, git = [], SimpleNamespace(stdout="abc\n", returncode=0)
    monkeypatch.setattr(machine.subprocess, "run", lambda command, **how: asked.append((command, how)) or git)
    monkeypatch.setattr(machine.shutil, "which", lambda name: {"git": "there"}[name])
    monkeypatch.setattr(machine, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(platform, "platform", lambda: "a system")  # which may run a program, too
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    expected = dict(
        device="cpu", gpu_name=None, torch_version=torch.__version__, cuda_version=torch.version.cuda,
        hip_version=torch.version.hip, host_cpu="a CPU", cpu_threads=torch.get_num_threads(),
        python_version=platform.python_version(), platform="a system", git_commit="abc")
    assert machine.system_info(CPU) == expected
    (command, how), = asked
    assert command == ["git", "-C", machine.os.path.dirname(machine.__file__), "rev-parse", "HEAD"]
    assert how == dict(capture_output=True, text=True, check=False)
    git.returncode = 128  # no repository
    assert machine.system_info(torch.device("cuda", 1)) == expected | dict(
        device="cuda:1", gpu_name="name of cuda:1", git_commit=None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.system_info(CPU)["git_commit"] is None and len(asked) == 2


def absent(*_, **__):
    raise FileNotFoundError


@pytest.mark.parametrize("meminfo, group, expected", [
    ("MemTotal: 9 kB\nMemAvailable: 2 kB\n", {}, 2048), ("MemTotal: 9 kB\n", {}, None),
    ("MemAvailable: 2 kB\n", dict(current="300", max="1000", stat="anon 5\nfile 100\n"), 800),
    ("MemAvailable: 2 kB\n", dict(current="300", max="1000", stat="anon 5\n"), 700),
    ("MemAvailable: 2 kB\n", dict(current="300", max="max", stat=""), 2048),
    (None, dict(current="300", max="1000", stat="file 100\n"), 800), (None, {}, None)])
def test_free_memory_is_the_control_groups_share_if_that_is_less(meminfo, group, expected, monkeypatch):
    files = {f"/sys/fs/cgroup/memory.{name}": text for name, text in group.items()}
    monkeypatch.setattr(machine, "text_of", lambda path: files[path] if files else absent())
    monkeypatch.setattr(machine, "open", lambda path, **_: io.StringIO({"/proc/meminfo": meminfo}[path])
                        if meminfo else absent(), raising=False)
    assert machine.free_memory(CPU) == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert machine.free_memory(torch.device("cuda")) == 5


def test_the_name_of_a_cpu(monkeypatch):
    lines = ["processor : 0\nmodel name\t: A: B\n", "no name\n"]
    monkeypatch.setattr(machine, "open", lambda path, **_: io.StringIO(lines.pop(0)) if lines else absent(),
                        raising=False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert [machine.cpu_name() for _ in range(3)] == ["A: B", platform.machine(), platform.machine()]
