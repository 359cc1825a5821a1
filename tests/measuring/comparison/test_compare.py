"""--compare-fusion's plan: what is measured, with what and in which order; measurements are recorders."""
import contextlib
import json
import signal
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring.comparison import compare as comparison
from fusion_lab.measuring.comparison.variants import ALL, AS_GIVEN, BASELINE, Variant

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Settings:
    def __init__(self, name="", compiled=False, **training):
        self.name, self.fusion = name, SimpleNamespace(enable_torch_compile=compiled)
        self.training = SimpleNamespace(**{**dict(device="asked for", num_steps=20), **training})

    def __str__(self):
        return self.name

    def as_dict(self):
        return dict(config=dict(a=1), training_params=dict(b=2), other=3)


class Trainer:
    amp_dtype = torch.bfloat16

    def __init__(self, name, device=CPU):
        self.name, self.device, self.steps, self.loaded = name, device, [], []
        self.model = SimpleNamespace(load_state_dict=self.loaded.append,
                                     state_dict=lambda: f"weights of {name}")
        self.preserved = contextlib.nullcontext

    def step(self, batch):
        self.steps.append(batch)
        return torch.tensor(1.0)


def program(log, **values):
    def trainer(program, settings, device):
        log.append(("trainer", program is found, settings, device))
        return Trainer(settings.name, device)
    found = SimpleNamespace(
        trainer=trainer, fusion_config=lambda: "the default",
        data=lambda settings: SimpleNamespace(batch=lambda step: dict(x=step), settings=settings),
        **values)
    return found


def variant(name, compiled=False, found=None, device=CPU):
    return Variant(name, Settings(name, compiled), found=found, trainer=Trainer(name, device))


def findings(flops=None, operations=None):
    return SimpleNamespace(flops=flops, operations=operations, launches=5, peak_memory_mb=7.0)


class Rungs:
    """Processes of compiled rows."""

    def __init__(self, log, *given):
        self.log = log
        log.append(("rungs", *given))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("rungs end")

    def begin(self):
        self.log.append(("rungs begin",))

    @contextlib.contextmanager
    def paused(self):
        self.log.append(("rungs stop",))
        yield
        self.log.append(("rungs go on",))

    def measure(self, *given):
        self.log.append(("rungs measure", *given))
        return [dict(name="compiled")] if any("rungs" in entry and entry[2] for entry in self.log) else []


@pytest.fixture
def planned(monkeypatch):
    """compare() with recorders; returns a function: (log, result) of it for these variants on this device."""
    def run(variants, device, given=None, long=0.1, amp=torch.bfloat16, **how):
        log = []

        def note(name, result=None):
            return lambda *given: log.append((name, *given)) or (result(*given) if result else None)
        monkeypatch.setattr(comparison, "choose_device", lambda asked: {"asked for": device}[asked])
        monkeypatch.setattr(comparison, "Rungs", lambda *given: Rungs(log, *given))
        for name, result in dict(
                process_settings=None, comparison_variants=lambda *_: variants, release=None, add_worth=None,
                pick=lambda found, names: found[:2], nominal_counts=lambda *_: "nominal",
                matmul_ceiling=lambda *_: 4e12, baseline_shares=lambda *_: dict(a=0.5),
                rows_of=lambda found, ceiling: [dict(name=v.name, median_batch_time=long) for v in found],
                usual_rows=lambda variants, *_: variants, amp_dtype=lambda *_: amp,
                system_info=lambda device: f"system of {device}",
                launch_kind=lambda device: f"kind of {device}").items():
            monkeypatch.setattr(comparison, name, note(name, result))
        monkeypatch.setattr(comparison, "measure", lambda *given: log.append((
            "measure", *given[:4], given[4].seconds, given[5] is table, type(given[6]), *given[7:])))
        table = SimpleNamespace(note=print, begin=note("begin", lambda *_: None), add=note("add"), save=print)
        settings, lab, pace = Settings(), program(log), comparison.Pace(None, 8.0)
        result = comparison.compare(lab, settings, given, table=table, pace=pace, **how)
        return SimpleNamespace(log=[entry for entry in log if isinstance(entry, tuple)], result=result,
                               settings=settings, program=lab, pace=pace)
    return run


def names(entries, *wanted):
    return [entry for entry in entries if entry[0] in wanted]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_table_that_people_ask_for_comes_first_then_the_rest_then_compiled_ones(device, planned):
    base, one, usual, more, compiled = variants = [
        variant(BASELINE, found="found"), variant("a alone"), variant(ALL), variant("b alone"),
        variant("c", True)]
    base.operations = "operations"
    found = planned(variants, device)
    log, lab, settings = found.log, found.program, found.settings
    first, second = names(log, "measure")
    in_order = [entry[0] for entry in names(log, "measure", "rungs measure")]
    assert in_order == (["measure", "rungs measure", "measure"] if device is GPU else [
        "measure", "measure", "rungs measure"])
    source = first[4]
    assert source.settings is settings
    assert first == ("measure", lab, [base, one, usual], device, source, 8.0, True, Rungs, False)
    again = second[2][0]
    assert second == ("measure", lab, [again, more], device, source, 4.8, True, Rungs, False)
    assert (again.name, again.settings, again.found, again.operations, again.trainer) == (
        BASELINE, base.settings, "found", "operations", base.trainer) and again is not base
    rows = [dict(name=name, median_batch_time=0.1) for name in (BASELINE, "a alone", ALL, "b alone")]
    rows.insert(3 if device is GPU else 4, dict(name="compiled"))
    result = found.result
    assert result["variants"] == rows
    assert datetime.fromisoformat(result["timestamp"]).utcoffset().total_seconds() == 0
    assert {key: result[key] for key in result if key not in ("variants", "timestamp")} == dict(
        mode="compare_fusion", config=dict(a=1), training_params=dict(b=2, amp_dtype="bfloat16"),
        system_info=f"system of {device}", launch_kind=f"kind of {device}", nominal="nominal",
        matmul_ceiling_tflops=4)
    assert names(log, "begin", "add") == [("begin", result, variants, 4e12), *3 * [("add",)]]
    later = next(row for row in rows if row["name"] == "b alone")
    assert names(log, "add_worth") == [("add_worth", rows[:3], [base, one, usual], dict(a=0.5)),
                                       ("add_worth", [rows[0], later], [again, more], dict(a=0.5))]
    single = ("rungs", "rungs begin", "rungs stop", "rungs go on", "rungs measure", "baseline_shares",
              "matmul_ceiling", "comparison_variants")
    assert names(log, *single) == [
        ("comparison_variants", lab, settings, device is GPU),
        ("matmul_ceiling", device, torch.bfloat16), ("rungs", lab, [compiled], device, print, found.pace),
        ("rungs stop",), ("baseline_shares", base, source, 5), ("rungs go on",), ("rungs begin",),
        ("rungs measure", rows[0], 4e12)]
    slow = planned(variants, device, long=0.6)
    assert names(slow.log, "baseline_shares")[0][-1] == 2
    released = [("release", [one, usual])] if device is GPU else []
    assert names(log, "release") == released and log[0] == ("process_settings", settings, device)


def test_rows_that_were_asked_for_are_measured_even_if_they_are_the_baseline(planned):
    variants = [variant(BASELINE), variant(ALL), variant("a")]
    for how, kept in ((dict(picked="a"), variants[:2]), (dict(given=variants), variants)):
        found = planned(None if "given" in how else variants, GPU, amp=None, **how)
        measured, = names(found.log, "measure")
        assert measured[2] == kept and measured[-1] is ("given" not in how)  # nobody asked for each of those
        assert not names(found.log, "release")
        assert bool(names(found.log, "comparison_variants")) is ("picked" in how)
        assert names(found.log, "pick") == ([("pick", variants, "a")] if "picked" in how else [])
        assert names(found.log, "matmul_ceiling") == [("matmul_ceiling", GPU, torch.float32)]


def test_rows_that_were_asked_for_and_the_users_own_are_in_the_first_table():
    rows = [variant(BASELINE), variant(ALL), variant("a"), variant(AS_GIVEN), variant("c", True)]
    assert comparison.parts(rows, ALL) == ([*rows[:2], rows[3]], [rows[2]], [rows[4]])
    assert comparison.parts(rows) == (rows[:4], [], [rows[4]])


@pytest.fixture
def alone(monkeypatch):
    """measure() with recorders of its parts; returns their log."""
    log = []

    def measure_alone(program, variant, device, batch):
        log.append(("alone", variant.name, device, batch))
        variant.found = findings(100) if variant.name != "fails" else None
        variant.reason = None if variant.found else "it fails"

    def bring_to_life(program, variant, device, weights, batch):
        log.append(("to life", variant.name, device, weights, batch))
        variant.reason = "too large" if variant.name == "large" else None

    def alternate(variants, pace, supply, heard):
        log.append(("in turn", [v.name for v in variants], pace.steps, [batch["x"] for batch in supply]))
        for found in variants:
            found.losses.append(1.0)
    for function in (measure_alone, bring_to_life, alternate):
        monkeypatch.setattr(comparison, function.__name__, function)
    for name in ("process_settings", "refuse_equal", "release"):
        monkeypatch.setattr(comparison, name, lambda *given, name=name: log.append(
            (name, *(getattr(x, "name", x) for x in given))))
    monkeypatch.setattr(comparison, "to_device", lambda batch, device: batch)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: log.append(("reset",)))
    return log


@pytest.mark.parametrize("device, compiled, reset", [(CPU, True, 0), (GPU, True, 1), (GPU, False, 0)])
def test_variants_are_measured_alone_then_in_turn(device, compiled, reset, alone):
    known = variant("known", compiled, found=findings(100))
    variants = [variant(BASELINE), variant("fails"), variant(ALL), variant(AS_GIVEN), known, variant("large"),
                variant("other")]
    notes, within, lab = [], [], program(alone)

    @contextlib.contextmanager
    def paused():
        within.append(len(alone))
        yield
        within.append(len(alone))
    rungs = SimpleNamespace(begin=lambda peak: alone.append(("begin", peak)), paused=paused)
    comparison.measure(lab, variants, device, lab.data(None), rungs=rungs,
                       table=SimpleNamespace(note=notes.append), equal=False)
    assert names(alone, "alone") == [
        ("alone", name, device, dict(x=0))
        for name in (BASELINE, "fails", ALL, AS_GIVEN, "large", "other")]
    assert names(alone, "refuse_equal") == [
        ("refuse_equal", name, BASELINE) for name in ("fails", "large", "other")]
    living = [BASELINE, ALL, AS_GIVEN, "known", "large", "other"]
    assert names(alone, "to life") == [("to life", name, device, f"weights of {BASELINE}", dict(x=0))
                                       for name in living]
    assert names(alone, "process_settings") == [("process_settings", name, device) for name in living]
    assert len(names(alone, "release")) == 6 + 6 and len(names(alone, "reset")) == reset
    in_turn = [name for name in living if name != "large"]
    assert names(alone, "in turn") == [("in turn", in_turn, 20, [*range(16)])]
    assert within == [len(alone) - 1, len(alone)] and alone[-1][0] == "in turn"
    assert [entry[0] for entry in alone[:4]] == ["alone", "release", "begin", "alone"] and alone[2][1] == 7.0
    assert notes == [*(f"{name}: memory and launches, {number} of 7" for number, name in (
        (1, BASELINE), (2, "fails"), (3, ALL), (4, AS_GIVEN), (6, "large"), (7, "other"))),
        "5 variants in turn"]
    assert [v.reason for v in variants] == [None, "it fails", None, None, None, "too large", None]
    trainer, = names(alone, "trainer")
    assert trainer == ("trainer", True, variants[0].settings, device)


def test_what_there_is_no_time_to_count_is_left_out(alone):
    """Of rows beyond the first table, whose own are all counted."""
    for strict, counted in ((True, [BASELINE]), (False, [BASELINE, "a", "b"])):
        alone.clear()
        variants, lab = [variant(name) for name in (BASELINE, "a", "b")], program(alone)
        pace = comparison.Pace(None, 8.0)
        variants[0].found = findings(100)
        pace.ends, pace.strict = pace.ends - 7.0, strict
        comparison.measure(lab, variants, CPU, lab.data(SimpleNamespace()), pace)
        assert [BASELINE, *(name for _, name, *_ in names(alone, "alone"))] == counted
        assert [v.reason for v in variants] == [None, *[comparison.TOO_LATE if strict else None] * 2]


def test_by_default_equal_variants_are_measured(alone):
    variants, lab = [variant(BASELINE), variant("a")], program(alone)
    comparison.measure(lab, variants, CPU, lab.data(None))
    assert not names(alone, "refuse_equal") and [v.losses for v in variants] == [[1.0], [1.0]]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 0)])
def test_what_is_known_is_in_the_file_when_a_signal_ends_it(number, code, tmp_path, monkeypatch):
    def compare(program, settings, variants, picked, table, pace):
        table.save(dict(rows=1, speedup=float("nan")))  # of a loss that is none
        if number:
            signal.raise_signal(number)

    class Table:
        rows = [dict(name="a", speedup=2, more=3)]

        def __init__(self, save):
            self.save, self.finish = save, lambda signal: None
    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(comparison, "LiveTable", Table)
    monkeypatch.setattr(comparison, "print_result", lambda *given: None)
    monkeypatch.setattr(comparison, "choose_device", lambda asked: {"asked for": CPU}[asked])
    settings = Settings()
    settings.profiler = SimpleNamespace(profile_dir=str(tmp_path))
    lab = program([], result=lambda kind: f"{kind}.json", sample=lambda settings: "B 3")
    assert comparison.compare_fusion(lab, settings, "a", limits=(None, 7.5)) == code
    assert json.loads((tmp_path / "fusion_comparison.json").read_text()) == dict(rows=1, speedup=None)


def test_what_runs_the_baseline_s_operations_has_that_for_a_reason():
    base = variant(BASELINE, found=findings(operations=["mm", "add"]))
    found = [variant("a", found=findings(operations=kinds)) for kinds in (["mm", "add"], ["mm"], None, [])]
    found.append(variant("a"))
    for other in found:
        comparison.refuse_equal(other, base)
    assert [v.reason for v in found] == ["here it runs the same 5 operations as the baseline", *4 * [None]]
    assert [v.trainer is None for v in found] == [True, *4 * [False]]


@pytest.mark.parametrize("warmup, warm, steps", [(0, False, 2), (3, False, 3), (3, True, 0)])
def test_a_variant_comes_to_life_warm(warmup, warm, steps):
    log = []
    settings, there = Settings("a", warmup_steps=warmup), Trainer("there")
    made = Variant("a", settings, trainer=there if warm else None)
    comparison.bring_to_life(program(log), made, CPU, "weights", "batch")
    assert (made.trainer is there) is warm and made.trainer.loaded == ["weights"]
    assert made.trainer.steps == steps * ["batch"] and made.timer.steps == []
    assert log == ([] if warm else [("trainer", True, settings, CPU)])


def test_shares_of_the_baseline_s_step(monkeypatch):
    calls, base = [], variant(BASELINE)
    monkeypatch.setattr(comparison, "process_settings", lambda *given: calls.append(given))
    monkeypatch.setattr(comparison, "shares_of_a_step", lambda *given: given)
    monkeypatch.setattr(comparison, "to_device", lambda *given: given)
    source = SimpleNamespace(batch=lambda step: f"batch {step}")
    assert comparison.baseline_shares(base, source, 3) == (base.trainer, ("batch 0", CPU), 3)
    assert calls == [(base.settings, CPU)]


@pytest.mark.parametrize("compiled, counts, peak", [
    (False, False, 5.0), (True, True, 5.0), (False, True, None)])
def test_what_is_found_of_a_variant_alone_on_a_cpu(compiled, counts, peak, monkeypatch):
    log, ticks, made = [], iter([1.0, 3.5]), variant("a", compiled)
    lab = program(log)
    monkeypatch.setattr(comparison, "refuse_idle", lambda *given: log.append(("idle", *given)))
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(comparison, "counts_its_first_step", lambda trainer: counts)
    for name, result in dict(process_settings=None, probe=findings(7), operations_by_sublayer="operations",
                             peak_of_two_steps=peak).items():
        monkeypatch.setattr(comparison, name, lambda *given, name=name, found=result, **named: log.append(
            (name, *given, named)) or found)
    batch = dict(x=torch.zeros(4))
    comparison.measure_alone(lab, made, CPU, batch)
    trainer, found = made.trainer, made.found
    assert (found.first_step_time, found.peak_memory_mb) == (None if counts else 2.5, peak)
    assert made.operations == (None if compiled else "operations") and trainer.steps == [batch] * (not counts)
    expected = [("idle", made, CPU), ("process_settings", made.settings, CPU, {}),
                ("trainer", True, made.settings, CPU), ("probe", trainer, batch, {}),
                ("operations_by_sublayer", trainer, batch, {}),
                ("peak_of_two_steps", trainer, batch, found, {})]
    left_out = {"operations_by_sublayer"} if compiled else set()
    assert log == [entry for entry in expected if entry[0] not in left_out]
