"""What a field of the configs refuses, and what switches say of themselves."""
import math

import pytest

import tests.second_program as second
from fusion_lab.training.options import Switches, TrainingConfig

GRAPHS = dict(enable_cuda_graphs=True, enable_torch_compile=True)


@pytest.mark.parametrize("kind, values, words", [
    (TrainingConfig, dict(use_amp=1), "use_amp = 1"),
    (TrainingConfig, dict(num_steps=True), "num_steps = True"),
    (TrainingConfig, dict(num_steps=2.0), "num_steps = 2.0"),
    (TrainingConfig, dict(learning_rate=math.inf), "learning_rate = inf"),
    (TrainingConfig, dict(save_every=1), "save_every = 1: .*--save-checkpoint"),
    (TrainingConfig, dict(lr_warmup_steps=2, num_steps=2), "lr_warmup_steps = 2: .*--num-steps 2"),
    (TrainingConfig, dict(save_best="a", save_checkpoint="a"), "save_best = 'a': .*--save-checkpoint"),
    (TrainingConfig, dict(resume="a", init_from="b"), "init_from = 'b': .*--resume"),
    (TrainingConfig, dict(amp_dtype="float16"), "amp_dtype = 'float16': .*--use-amp"),
    (Switches, dict(GRAPHS, torch_compile_mode="reduce-overhead"), "torch_compile_mode = 'reduce-overhead'")])
def test_what_a_field_refuses(kind, values, words):
    """By its name and value, and the flag that it does not go together with. Limits of a single field:
    test_flags.py."""
    with pytest.raises(ValueError, match=f"^{words}"):
        kind(**values)


def test_autotuning_leaves_the_graph_to_whoever_makes_one_of_the_step():
    assert Switches(torch_compile_mode="max-autotune").compile_mode == "max-autotune"
    assert Switches(**GRAPHS, torch_compile_mode="max-autotune").compile_mode == "max-autotune-no-cudagraphs"
    assert Switches(**GRAPHS).compile_mode == "default"


@pytest.mark.parametrize("values, words", [
    ({}, []), (dict(torch_compile_mode="reduce-overhead"), ["--torch-compile-mode is for torch.compile"]),
    (dict(enable_torch_compile=True, torch_compile_mode="reduce-overhead"), ["CUDA graphs need a GPU"]),
    (dict(enable_torch_compile=True), []), (dict(enable_cuda_graphs=True), ["CUDA graphs need a GPU"]),
    (dict(enable_master_weights=True), ["master weights need --use-amp"]),
    (dict(enable_triton_adamw=True), ["triton-adamw needs a GPU, Triton, --use-amp and master weights"])])
def test_idle_switches_on_a_cpu(values, words):
    assert second.PROGRAM.settings(**values).idle_reasons(on_gpu=False) == words
