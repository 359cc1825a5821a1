"""What a field of the configs refuses, and what switches say of themselves."""
import math

import pytest

import tests.second_program as second
from fusion_lab.training.options import Switches, TrainingConfig

GRAPHS = dict(enable_cuda_graphs=True, enable_torch_compile=True)


@pytest.mark.parametrize("kind, values, words", [
    (TrainingConfig, dict(device=""), "device = '': must not be empty"),
    (TrainingConfig, dict(use_amp=1), "use_amp = 1: must be True or False"),
    (TrainingConfig, dict(num_steps=True), "num_steps = True: must be of type int"),
    (TrainingConfig, dict(num_steps=2.0), "num_steps = 2.0: must be of type int"),
    (TrainingConfig, dict(num_steps=0), "num_steps = 0: must be at least 1"),
    (TrainingConfig, dict(learning_rate=math.inf), "learning_rate = inf: must be finite"),
    (TrainingConfig, dict(ema_decay=1), "ema_decay = 1: must be less than 1.0"),
    (TrainingConfig, dict(lr_schedule="x"), "lr_schedule = 'x': must be one of constant, linear, cosine"),
    (TrainingConfig, dict(save_every=1), "save_every = 1: needs --save-checkpoint"),
    (TrainingConfig, dict(lr_warmup_steps=2, num_steps=2), "lr_warmup_steps = 2: must be less than --num-st"),
    (TrainingConfig, dict(save_best="a", save_checkpoint="a"), "save_best = 'a': must be another file than"),
    (TrainingConfig, dict(resume="a", init_from="b"), "init_from = 'b': allowed without --resume only"),
    (TrainingConfig, dict(amp_dtype="float16"), "amp_dtype = 'float16': needs --use-amp"),
    (Switches, dict(GRAPHS, torch_compile_mode="reduce-overhead"), "torch_compile_mode = 'reduce-overhe")])
def test_what_a_field_refuses(kind, values, words):
    with pytest.raises(ValueError) as caught:
        kind(**values)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("kind, values", [
    (TrainingConfig, dict(learning_rate=1, ema_decay=0.999, lr_warmup_steps=1, num_steps=2, init_from="a")),
    (TrainingConfig, dict(num_steps=1, save_every=1, save_checkpoint="a", save_best="b", resume="a")),
    (TrainingConfig, dict(num_steps=10 ** 5, seed=2 ** 63 - 1, use_amp=True, amp_dtype="float16")),
    (Switches, dict(enable_torch_compile=True, torch_compile_mode="reduce-overhead"))])
def test_what_it_takes(kind, values):
    assert {name: getattr(kind(**values), name) for name in values} == values


def test_presets_and_what_is_beside_them():
    kind = second.MlpSwitches
    assert kind.names() == ["enable_torch_compile", "enable_cuda_graphs", "enable_master_weights",
                            "enable_triton_adamw", "enable_fused_relu", "enable_fused_residual"]
    on = kind.preset(True)
    assert [name for name in kind.names() if not getattr(on, name)] == ["enable_triton_adamw"]
    assert all(getattr(kind.ultra(), name) for name in kind.names())
    assert not any(getattr(kind.preset(False), name) for name in kind.names())
    given = kind(enable_fused_relu=False, enable_torch_compile=True, enable_master_weights=True)
    assert given.beside() == ["--enable-master-weights"]  # the others have titles


@pytest.mark.parametrize("values, words", [
    ({}, []), (dict(torch_compile_mode="reduce-overhead"), ["--torch-compile-mode is for torch.compile"]),
    (dict(enable_torch_compile=True, torch_compile_mode="reduce-overhead"), ["CUDA graphs need a GPU"]),
    (dict(enable_torch_compile=True), []), (dict(enable_cuda_graphs=True), ["CUDA graphs need a GPU"]),
    (dict(enable_master_weights=True), ["master weights need --use-amp"]),
    (dict(enable_triton_adamw=True), ["triton-adamw needs a GPU, Triton, --use-amp and master weights"])])
def test_idle_switches_on_a_cpu(values, words):
    assert second.PROGRAM.settings(**values).idle(on_gpu=False) == words
