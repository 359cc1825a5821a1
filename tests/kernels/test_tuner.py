"""With which tile sizes kernels run: what wins, what is kept, what is looked up; --retune."""
import dataclasses
import json
import pathlib
from functools import cache
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
from triton import CompilationError
from triton.runtime.errors import OutOfResources

import tiny_openfold_v2 as tof
from evoformer_kernels import tuner
from evoformer_kernels.attention.plan import AttentionPlan, Inputs
from evoformer_kernels.family import Plan
from fusion_lab.measuring import retune
from fusion_lab.training.errors import UserError
from tests.support import last_json

FIRST, SECOND = dict(BM=64, num_warps=4), dict(BM=128, num_warps=8)


@pytest.fixture(autouse=True)
def nothing_looked_up(monkeypatch):
    monkeypatch.setattr(tuner, "ranked", {})


def launched(shape="bfloat16 L256"):
    """The configuration that a launch of "k" runs with last."""
    ran = []
    tuner.launch("k", shape, [FIRST, SECOND], ran.append)
    return ran[-1]


def test_a_candidate_wins_only_beyond_the_spread_of_both():
    assert tuner.winner({0: [5, 6, 7, 8, 9], 1: [1, 2, 3, 4, 5]}) == 1  # 4 < 6
    assert tuner.winner({0: [5, 6, 7, 8, 9], 1: [1, 2, 3, 4, 9]}) == 1  # the slowest counts nothing
    assert tuner.winner({0: [5, 6, 7, 8, 9], 1: [4, 5, 6, 7, 8]}) == 0  # 7 > 6
    assert tuner.winner({1: [5, 6, 7, 8, 9], 2: [5, 5, 6, 6, 7]}) == 1  # the first that fits, 6 = 6


@pytest.mark.parametrize("tables, shape, expected", [
    ([], "bfloat16 L256", FIRST), ([{"k bfloat16 L256": SECOND}], "bfloat16 L256", SECOND),
    ([{"k bfloat16 L256": SECOND}], "float16 L256", SECOND),  # the other dtype of 16 bits
    ([{"k bfloat16 L256": SECOND}], "float32 L256", FIRST),
    ([{"k bfloat16 L256": dict(BM=7)}], "bfloat16 L256", FIRST),  # no candidate
    *(([{f"k bfloat16 {n}256 C128": SECOND}], f"bfloat16 {n}1024 C128", SECOND) for n in "LPSR"),
    *(([{f"k bfloat16 L256 {n}256": SECOND}], f"bfloat16 L256 {n}512", FIRST) for n in "CDHN"),
    ([{"k bfloat16 L128": SECOND}], "bfloat16 L256", FIRST),  # a tile of 128 may not fit twice as many
    ([{"k bfloat16 L256 D32 ragged": SECOND}], "bfloat16 L256 D32", FIRST),
    ([{"k bfloat16 L256 R512": SECOND}], "bfloat16 L256", FIRST),  # another kind of class
    ([{"k bfloat16 L256": SECOND, "k bfloat16 L4096": FIRST}], "bfloat16 L512", SECOND),  # 1 and 3 away
    ([{"k bfloat16 L256": FIRST, "k bfloat16 L1024": SECOND}], "bfloat16 L512", SECOND),  # the larger
    ([{"k bfloat16 P1024 R1024": SECOND, "k bfloat16 P256 R8192": FIRST}], "bfloat16 P256 R1024", SECOND),
    ([{"k bfloat16 L512": FIRST}, {"k bfloat16 L256": SECOND}], "bfloat16 L256", SECOND),  # exact
    ([{"k bfloat16 L256": SECOND}], "bfloat16 L256 R64 bias gate", SECOND),  # without a look at these
    ([{"k bfloat16 L256": SECOND}], "bfloat16 L256 R512", SECOND),
    ([{"k bfloat16 L256": SECOND, "k bfloat16 L256 R64 bias": FIRST}], "bfloat16 L256 R64 bias", FIRST),
    ([{"k bfloat16 L256 R64 bias": SECOND}], "bfloat16 L256 R64", FIRST),
    ([{"k float16 L256": FIRST}, {"k bfloat16 L256": SECOND}], "bfloat16 L512", SECOND),  # its dtype
    ([{"k bfloat16 L256": SECOND}, {"k bfloat16 L256": FIRST}], "bfloat16 L512", SECOND)])
def test_a_class_takes_what_was_measured_of_it_or_of_the_nearest_of_its_widths(tables, shape, expected,
                                                                               monkeypatch):
    monkeypatch.setattr(tuner, "tables", lambda: tables)
    assert launched(shape) == expected


def test_no_shipped_tile_is_longer_than_the_counts_that_must_match():
    sides = [tile.get(side, 0) for table in tuner.read(tuner.SHIPPED).values() for tile in table.values()
             for side in ("BM", "BN", "BK", "BC")]
    assert max(sides) == tuner.LARGEST


def test_winners_are_kept_beside_what_was_known_and_serve_from_then_on(monkeypatch, tmp_path):
    path = tmp_path / "evoformer_kernels" / "gpu.json"
    tuner.write(path, {"other": SECOND, "k bfloat16 L256": FIRST})
    monkeypatch.setattr(tuner, "cache_file", lambda: path)
    monkeypatch.setattr(tuner, "SHIPPED", tmp_path / "absent.json")
    monkeypatch.setattr(tuner, "gpu", lambda: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuner, "fastest", lambda key, candidates, run: candidates[1])
    monkeypatch.setattr(tuner, "tables", cache(tuner.tables.__wrapped__))
    assert launched() == FIRST and tuner.ranked
    with tuner.retuning() as found:
        assert launched() == SECOND == launched() and found == {"k bfloat16 L256": SECOND}
    assert launched() == SECOND and tuner.found is None
    assert json.loads(path.read_text()) == {"other": SECOND, "k bfloat16 L256": SECOND}
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_calls_that_are_kept_measure_tiles_too_and_are_made_anew_for_the_winners(monkeypatch, tmp_path):
    class Made(Plan):
        def __init__(self, tensors):
            pass
    monkeypatch.setattr(tuner, "cache_file", lambda: tmp_path / "gpu.json")
    x, kept = torch.zeros(1), Made.of([torch.zeros(1)])
    assert Made.of([x]) is kept
    with tuner.retuning():
        assert Made.of([x]) is not kept
    assert Made.of([x]) is not kept


def test_attention_is_tuned_apart_by_rows_bias_and_gate():
    """Rows of an MSA choose no tiles for triangles, nor attention without a bias for one that has it."""
    def key(rows, biased, axis):
        with torch.device("meta"):
            q = torch.empty((1, rows, 64, 32) if axis else (1, rows, 2, 64, 16)).bfloat16()
            bias = torch.empty(1, 2, 64, 64) if biased else None
        made = AttentionPlan(Inputs(q, q, q, q if axis else None, bias=bias), 2, axis, 1.0)
        return made.looked_up("attention_forward_kernel")[:2]
    keys = [key(*each) for each in ((16, True, 0), (32, True, 0), (16, False, 0), (16, True, 2))]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_table_that_cannot_be_used_is_none(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    assert tuner.read(tmp_path / "t.json") == tuner.read(tmp_path / "absent.json") == {}


def test_no_candidate_that_fits_is_an_error_in_one_line(monkeypatch):
    def run(candidate):
        raise tuner.triton.runtime.errors.OutOfResources(100_000, 65_536, "shared memory")
    monkeypatch.setattr(tuner.torch.cuda, "get_device_name", lambda: "Small GPU")
    with pytest.raises(RuntimeError, match="k bfloat16: none of 2 tile sizes fits Small GPU$"):
        tuner.fastest("k bfloat16", [FIRST, SECOND], run)


def test_a_gpu_has_its_tables(monkeypatch, tmp_path):
    """What was measured here stands above what is shipped for the architecture; a file a GPU and release."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200/x")
    monkeypatch.setattr(tuner, "architecture", lambda on_gpu: "gfx942" if on_gpu else "")
    assert tuner.gpu() == "gfx942"
    monkeypatch.setattr(tuner, "architecture", lambda on_gpu: "")
    assert tuner.gpu() == "sm_90"
    name = f"NVIDIA_H200_x_torch_{torch.__version__}_triton_{tuner.triton.__version__}.json"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuner.cache_file() == pathlib.Path.home() / ".cache" / "evoformer_kernels" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuner.cache_file() == tmp_path / "cache" / "evoformer_kernels" / name
    shipped = tmp_path / "tiles.json"
    shipped.write_text(json.dumps({"sm_90": {"a": FIRST, "b": FIRST}, "sm_80": {"c": FIRST}}))
    tuner.write(tuner.cache_file(), {"b": SECOND})
    monkeypatch.setattr(tuner, "SHIPPED", shipped)
    assert tuner.tables.__wrapped__() == []  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tuner.tables.__wrapped__() == [{"b": SECOND}, {"a": FIRST, "b": FIRST}]
    monkeypatch.setattr(tuner, "gpu", lambda: "sm_100")
    assert tuner.tables.__wrapped__() == [{"b": SECOND}, {}]


def test_candidates_take_turns_and_those_that_do_not_fit_are_left_out(monkeypatch):
    candidates, warm, timed = [dict(n=n) for n in range(4)], [], []
    faults = {0: OutOfResources(1, 2, "shared memory"), 2: CompilationError("", SimpleNamespace(), "no")}

    def run(candidate):
        warm.append(candidate["n"])
        if fault := faults.get(candidate["n"]):
            raise fault

    def milliseconds(launch):
        launch()
        timed.append(warm.pop())
        return 1.0 if timed[-1] == 3 else 2.0
    monkeypatch.setattr(tuner, "milliseconds", milliseconds)
    assert tuner.fastest("k", candidates, run) == dict(n=3)
    assert warm == [0, 1, 2, 3] and timed == [1, 3] * 9


def test_winners_are_forgotten_where_retuning_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "cache_file", lambda: tmp_path / "gpu.json")
    with pytest.raises(ZeroDivisionError), tuner.retuning():
        raise ZeroDivisionError
    assert tuner.found is None and not (tmp_path / "gpu.json").exists()


# --- --retune -------------------------------------------------------------------------------------------


def ultra(tmp_path, **values):
    return tof.PROGRAM.settings(**{**dict(enable_triton_relu=True, enable_torch_compile=True,
                                          enable_cuda_graphs=True, profile_dir=str(tmp_path)), **values})


@pytest.mark.parametrize("values, kind, triton, code, words", [
    (dict(enable_triton_relu=False), "cuda", True, 2, "no Triton kernel is on; add --enable-ultra"),
    (dict(enable_triton_relu=False, enable_triton_adamw=True), "cuda", True, 2, "kernel is on"),
    ({}, "cpu", True, 4, "--retune needs a GPU"), ({}, "cuda", False, 3, "--retune needs Triton")])
def test_retune_says_what_it_lacks(values, kind, triton, code, words, tmp_path, monkeypatch):
    monkeypatch.setattr(retune, "choose_device", lambda name: torch.device(kind))
    monkeypatch.setattr(retune, "HAS_TRITON", triton)
    with pytest.raises(UserError, match=words) as caught:
        retune.retune(tof.PROGRAM, ultra(tmp_path, **values))
    assert caught.value.code == code


def test_retune_finds_out_that_it_cannot_keep_its_result_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(retune, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(retune, "HAS_TRITON", True)
    monkeypatch.setattr(retune, "require_memory", lambda *_: None)
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuner, "cache_file", lambda: tmp_path / "file" / "cache.json")
    with pytest.raises(UserError, match=r"cannot write .*cache\.json"):
        retune.retune(dataclasses.replace(tof.PROGRAM, trainer=None), ultra(tmp_path / "run"))


def test_retune_runs_one_step_and_keeps_what_wins(tmp_path, monkeypatch, capsys):
    """Without CUDA graphs, in which nothing can be timed."""
    class Trainer:
        def __init__(self, program, settings, device):
            assert not settings.fusion.enable_cuda_graphs

        def step(self, batch):
            tuner.launch(f"up{batch}", "bfloat16 L64", [FIRST, SECOND], lambda chosen: None)
    monkeypatch.setattr(retune, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(retune, "process_settings", lambda settings, device: None)
    monkeypatch.setattr(retune, "require_memory", lambda *_: None)
    monkeypatch.setattr(retune, "to_device", lambda batch, device: batch)
    monkeypatch.setattr(tuner, "cache_file", lambda: tmp_path / "cache.json")
    monkeypatch.setattr(tuner, "gpu", lambda: "sm_90")
    monkeypatch.setattr(tuner, "fastest", lambda key, candidates, run: candidates[1])
    program = dataclasses.replace(tof.PROGRAM, trainer=Trainer, data=lambda settings: SimpleNamespace(
        batch=lambda number: number))
    assert retune.retune(program, ultra(tmp_path / "run")) == 0
    tiles = {"up0 bfloat16 L64": SECOND}
    assert last_json(capsys.readouterr().out) == dict(
        mode="retune", kernels=1, gpu="sm_90", tiles=tiles, cache=str(tmp_path / "cache.json"))
    assert json.loads((tmp_path / "cache.json").read_text()) == tiles
    Trainer.step = lambda self, batch: None
    with pytest.raises(UserError, match="no Triton kernel ran"):
        retune.retune(program, ultra(tmp_path / "another"))
