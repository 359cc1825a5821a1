"""--verify-accuracy and --validate-setup: every limit of the rule by hand, and what the rule is asked of."""
import json
from dataclasses import replace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring import accuracy
from tests.second_program import PROGRAM as SECOND
from tests.second_program import Mlp
from tests.support import last_json

CPU = torch.device("cpu")
FLOAT32 = 2.0 ** -23
SMALL = dict(width=8, batch_size=3, device="cpu")


def doubles(tensors):
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in tensors.items()}


def check_tensors(fused, baseline, exact, epsilon=FLOAT32, tolerances=None):
    return accuracy.check_tensors(*map(doubles, (fused, baseline, exact)), epsilon, tolerances)


def failed(*args, **options):
    """Names of the tensors that break the rule."""
    return [line.partition(": ")[0] for line in check_tensors(*args, **options)[1]]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("epsilon, roundings", [(FLOAT32, 16), (2.0 ** -7, 2), (1e-6, 2)])
def test_three_times_the_baselines_error_and_a_few_roundings_are_allowed(epsilon, roundings, sign):
    """Of the largest element, 8; in float32 sixteen roundings, in lower precision two."""
    exact, baseline = dict(x=[1.0, -8.0]), dict(x=[1.0 - 0.25, -8.0])
    limit = 3 * 0.25 + roundings * epsilon * 8
    for error, broken in ((limit * (1 - 1e-9), []), (limit * (1 + 1e-9), ["x"])):
        assert failed(dict(x=[1.0, -8.0 + sign * error]), baseline, exact, epsilon) == broken
    assert failed(dict(x=[1.0, -8.0 + sign * 0.75]), baseline, exact, 0.0) == []  # three times, and no more


def test_the_floor_of_a_small_tensor_is_a_thousandth_of_the_largest_of_its_kind():
    """Outputs and gradients are two kinds; the sign of the largest element does not matter."""
    exact = {"out": [1e6], "zero": [0.0], "gradient of a": [0.0], "gradient of b": [1.0, -1000.0]}
    for name, limit in (("zero", 16 * FLOAT32 * 1e3), ("gradient of a", 16 * FLOAT32)):
        for error, broken in ((limit * (1 - 1e-9), []), (limit * (1 + 1e-9), [name])):
            assert failed(dict(exact, **{name: [error]}), exact, exact) == broken
    exact = {"x": [1e-6], "gradient of b": [1.0]}
    assert failed(dict(exact, x=[1e-6 + 1e-11]), exact, exact) == ["x"]  # of little, little


def test_tolerances_hold_for_every_element():
    """rtol of the baseline's element and atol together; the error rule alone would let all of these pass."""
    exact = dict(x=[-1.0, -10.0])
    baseline = dict(x=[0.0, -20.0])  # its own error is 10
    limit = 1e-4 + 1e-3 * 20
    for sign in (1, -1):
        for error, broken in ((limit * (1 - 1e-9), []), (limit * (1 + 1e-9), ["x"])):
            fused = dict(x=[0.0, -20.0 + sign * error])
            assert failed(fused, baseline, exact, tolerances=(1e-3, 1e-4)) == broken
            assert failed(fused, baseline, exact) == []
    for error, broken in ((0.99e-4, []), (1.01e-4, ["x"])):
        assert failed(dict(x=[error, -20.0]), baseline, exact, tolerances=(1e-3, 1e-4)) == broken
    assert failed(dict(x=[0.5, -20.0]), baseline, exact, tolerances=(0.0, 0.5)) == []


@pytest.mark.parametrize("tolerances", [None, (1e-3, 1e-4)])
def test_a_nan_is_never_within_limits(tolerances):
    """As in mixed precision, which has no tolerances; also where another tensor's ratio is larger."""
    nan, exact = float("nan"), dict(a=[1.0, 1.0], b=[1.0])
    summary, lines = check_tensors(dict(a=[nan, 1.0], b=[5.0]), exact, exact, tolerances=tolerances)
    assert [line[0] for line in lines] == ["a", "b"]
    assert all(summary[key] != summary[key] for key in ("max_absolute", "worst_error_ratio"))


def test_the_summary_of_differences_by_hand():
    """Relative ones of elements above 1e-4 only; the ratio is of errors against float64, with the floor."""
    exact = dict(a=[2.0, 0.0], b=[4.0, 1.0])
    baseline, fused = dict(a=[2.5, 1e-4], b=[4.0, 1.25]), dict(a=[3.0, 0.0002], b=[4.5, 1.0])
    summary, _ = check_tensors(fused, baseline, exact, epsilon=2.0 ** -6)
    assert check_tensors(dict(x=[5.0]), dict(x=[8.0]), dict(x=[4.0]), 0.0)[0]["worst_error_ratio"] == 0.25
    assert summary == dict(
        max_absolute=0.5, mean_absolute=pytest.approx((0.5 + 1e-4 + 0.5 + 0.25) / 4),
        max_relative=0.2, mean_relative=pytest.approx((0.2 + 0.125 + 0.2) / 3),
        worst_error_ratio=pytest.approx(1.0 / (0.5 + 2 * 2.0 ** -6 * 2)), tensors=2)


# What is compared


def what_is_checked(monkeypatch, **values):
    """(fused, baseline, exact, epsilon, tolerances) of a check of the second program."""
    monkeypatch.setattr(accuracy, "check_tensors", lambda *asked: asked)
    return accuracy.compare_numerics(SECOND, SECOND.settings(**{**SMALL, **values}), CPU)


@pytest.mark.parametrize("values, tf32, epsilon, tolerances", [
    ({}, False, 2.0 ** -23, (1e-3, 1e-4)), ({}, True, 2.0 ** -10, None),
    (dict(use_amp=True), False, 2.0 ** -7, None),
    (dict(use_amp=True, amp_dtype="float16"), True, 2.0 ** -10, None),
    (dict(use_amp=True, amp_dtype="bfloat16"), True, 2.0 ** -7, None)])
def test_limits_follow_the_precision(values, tf32, epsilon, tolerances, monkeypatch):
    monkeypatch.setattr(accuracy, "runs_in_tf32", lambda *_: tf32)
    assert what_is_checked(monkeypatch, **values)[3:] == (epsilon, tolerances)


def test_three_runs_have_the_same_weights_and_their_own_precision(monkeypatch):
    fused, baseline, exact, *_ = what_is_checked(monkeypatch, use_amp=True)
    assert fused.keys() == baseline.keys() == exact.keys() > {"output", "loss", "gradient of shift"}
    low = exact["output"].bfloat16().double()
    assert 0 < (exact["output"] - baseline["output"]).abs().max() < 0.1 * low.abs().max()
    fused, baseline, exact, *_ = what_is_checked(monkeypatch)
    singles = [torch.equal(run["output"], run["output"].float().double()) for run in (fused, baseline, exact)]
    assert singles == [True, True, False]  # the exact one is float64 throughout
    assert (exact["output"] - baseline["output"]).abs().max() < 1e-5
    trainer = SECOND.trainer(SECOND, SECOND.settings(**SMALL), CPU)
    batch = SECOND.data(trainer.settings).check_batch()
    once, again = (accuracy.results_and_gradients(trainer, batch) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)  # gradients do not pile up


def test_shaken_weights_differ_from_those_of_an_initialised_model():
    """By half a standard deviation of an initialised matrix, and by 0.1 in vectors, which begin at 0."""
    noted, model = [], Mlp(SECOND.model_config(width=400), SECOND.fusion_config())
    model.shake = lambda: noted.append(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    accuracy.shake(model)
    spread = {name: (p - before[name]).std().item() for name, p in model.named_parameters()}
    assert noted == [model] and spread["shift"] == pytest.approx(0.1, rel=0.1)
    assert spread["up.0.weight"] == pytest.approx(0.5 / 20, rel=0.01)
    assert spread["down.1.weight"] == pytest.approx(0.5 / 40, rel=0.01)
    again = Mlp(SECOND.model_config(width=400), SECOND.fusion_config())
    again.load_state_dict(before)
    accuracy.shake(again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


# What is printed and written


VERDICT = dict(max_absolute=0.25, mean_absolute=0.125, max_relative=float("inf"), mean_relative=0.5,
               worst_error_ratio=1.5, tensors=7)


@pytest.mark.parametrize("broken", [0, 11])
def test_a_check_prints_some_failures_and_writes_all(broken, tmp_path, monkeypatch, capsys):
    lines = [f"tensor {i}: bad" for i in range(broken)]
    monkeypatch.setattr(accuracy, "compare_numerics", lambda *_: (VERDICT, lines))
    settings = SECOND.settings(**SMALL, profile_dir=str(tmp_path))
    assert accuracy.verify_accuracy(SECOND, settings) == (1 if broken else 0)
    out = capsys.readouterr().out
    assert out.count(": bad\n") == min(broken, 10) and ("FAIL" if broken else "PASS") in out.splitlines()
    assert ("not applied" in out) is False and "2.500e-01" in out and "1.50x" in out
    assert last_json(out) == dict(
        mode="verify_accuracy", passed=not broken, device="cpu", **dict(VERDICT, max_relative=None),
        failures=lines, rtol=1e-3, atol=1e-4, error_factor=3.0, checked=["fused-relu"], not_used=[])
    accuracy.verify_accuracy(SECOND, settings.having(use_amp=True))
    assert "not applied" in capsys.readouterr().out  # tolerances, which are for float32


def test_a_check_of_nothing_is_no_pass_and_says_what_did_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "compare_numerics", lambda *_: (VERDICT, []))
    settings = SECOND.settings(**SMALL, profile_dir=str(tmp_path), enable_fused_relu=False,
                               enable_cuda_graphs=True, enable_master_weights=True, use_amp=True)
    assert accuracy.verify_accuracy(SECOND, settings) == 1
    result = last_json(capsys.readouterr().out)
    assert (result["passed"], result["checked"]) == (False, []) and "nothing" in result["failures"][0]
    assert result["not_used"][0] == "CUDA graphs need a GPU" and "master-weights" in result["not_used"][1]
    assert accuracy.verify_accuracy(SECOND, settings.having(enable_fused_residual=True)) == 0
    assert last_json(capsys.readouterr().out)["checked"] == ["fused-residual"]
    plain = settings.having(width=16, enable_master_weights=False, use_amp=False)
    assert accuracy.validate_setup(SECOND, plain) == 1
    assert "nothing that is switched on" in capsys.readouterr().out.splitlines()[-1]


class Deaf(Mlp):
    """Some parameters are cut off from the loss, in the fused and in the plain path alike."""
    deaf = ("down.0.bias",)

    def forward(self, x, target):
        for name in self.deaf:
            self.get_parameter(name).requires_grad_(False)
        return super().forward(x, target)


def telling(losses):
    """A trainer whose steps take a batch of two of the tiny model and return these losses."""
    def step(trainer, batch):
        assert batch["x"].shape == (2, 16) and trainer.settings.training.learning_rate == 1e-3
        tof.Trainer.step(trainer, batch)
        return torch.tensor(left.pop(0))
    left = list(losses)
    return type("Telling", (tof.Trainer,), dict(step=step))


def validation(program, capsys):
    """(exit code, result, all lines) of --validate-setup."""
    code = accuracy.validate_setup(program, program.settings(**dict(SMALL, width=16)))
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-2]), lines


def test_validation_by_its_reasons(monkeypatch, capsys):
    code, result, lines = validation(SECOND, capsys)
    assert (code, result["passed"], result["reasons"]) == (0, True, [])
    assert lines[-1] == "MLP validation successful! Fusion setup working properly."
    assert len(result["losses"]) == 5 and result["losses"][-1] < result["losses"][0]
    code, result, lines = validation(replace(SECOND, model=Deaf), capsys)
    assert (code, result["reasons"]) == (1, ["parameters without a gradient: down.0.bias"])
    assert "parameters without a gradient: down.0.bias" in lines[-1]
    monkeypatch.setattr(accuracy, "compare_numerics", lambda *_: ({}, list("abcd")))
    code, result, lines = validation(replace(SECOND, trainer=telling([3.0, 2.0, 2.0, 4.0, 3.0])), capsys)
    assert code == 1 and not result["passed"] and result["losses"] == [3.0, 2.0, 2.0, 4.0, 3.0]
    assert result["reasons"] == [
        "a", "b", "c", "loss did not fall in five steps on one batch: 3.0000 -> 3.0000"]
    assert [line for line in lines if line.endswith("FAIL")] == lines[1:4:2]  # numerics and training
    monkeypatch.setattr(accuracy, "compare_numerics", lambda *_: ({}, []))
    code, _, lines = validation(replace(SECOND, trainer=telling([3.0, 1.0, 1.0, 4.0, 2.0])), capsys)
    assert code == 0 and not [line for line in lines if "FAIL" in line]


@pytest.mark.parametrize("named", [False, True])
def test_checks_write_where_they_are_told_and_nowhere_else(named, tmp_path, monkeypatch, capsys):
    """Beside what is there, of which nothing is moved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "compare_numerics", lambda *_: (VERDICT, []))
    place = tmp_path / ("named" if named else "pytorch_profiles_v2")
    place.mkdir()
    (place / "earlier").touch()
    given = ["--width", "16", "--device", "cpu", *["--profile-dir", str(place)] * named]
    for mode in ("--validate-setup", "--verify-accuracy"):
        assert tof.main([mode, *given], SECOND) == 0
    files = {file.name for file in place.iterdir()}
    assert files == {"earlier", "accuracy_mlp.json"} if named else files == {"earlier"}
    assert [each.name for each in tmp_path.iterdir()] == [place.name]
    assert last_json(capsys.readouterr().out)["passed"]
