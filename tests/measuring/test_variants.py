"""The vocabulary of variants: what a name stands for, which are measured, and why others are not."""
from dataclasses import replace

import pytest

import tiny_openfold_v2 as tof
from fusion_lab.measuring.variants import default_names, fusion_named, make_variants, with_fusion
from fusion_lab.training.errors import UserError
from tests.second_program import PROGRAM as SECOND

KIND = tof.FusionConfig
PLAIN, USUAL = KIND.baseline(), KIND()
SETTINGS = tof.PROGRAM.settings()
BF16 = tof.PROGRAM.settings(use_amp=True, amp_dtype="bfloat16")
SINGLE = ["only-qkv-fusion-msa", "only-qkv-fusion-triangle", "only-flash-attention", "only-triangle-fusion",
          "only-opm-fusion"]


@pytest.mark.parametrize("name, fusion", [
    ("baseline", PLAIN), ("fused", USUAL), ("compiled", replace(USUAL, enable_torch_compile=True)),
    ("everything", KIND.preset()), ("ultra", KIND.ultra()),
    ("only-opm-fusion", replace(PLAIN, enable_opm_fusion=True)),
    ("opm-fusion", replace(PLAIN, enable_opm_fusion=True)),
    ("without-opm-fusion", replace(USUAL, enable_opm_fusion=False)),
    ("opm-fusion+flash-attention", replace(PLAIN, enable_opm_fusion=True, enable_flash_attention=True)),
    ("fused+projection-fusion", replace(USUAL, enable_projection_fusion=True)),
    ("compiled+cuda-graphs", replace(USUAL, enable_torch_compile=True, enable_cuda_graphs=True)),
    ("given+opm-fusion", replace(PLAIN, enable_transition_fusion=True, enable_opm_fusion=True))])
def test_what_a_name_stands_for(name, fusion):
    assert fusion_named(name, replace(PLAIN, enable_transition_fusion=True)) == fusion


def test_the_compilers_mode_is_that_of_the_command_line_where_something_compiles():
    given = replace(USUAL, enable_torch_compile=True, torch_compile_mode="reduce-overhead")
    modes = {name: fusion_named(name, given).torch_compile_mode
             for name in ("given", "compiled", "only-torch-compile", "fused", "baseline", "everything")}
    assert [name for name, mode in modes.items() if mode == "reduce-overhead"] == [
        "given", "compiled", "only-torch-compile"]


def test_names_that_stand_for_nothing_are_one_line():
    for names in ("al", "only-x", "only-fused", "fused+", "without-opm", "baseline,al", "", []):
        with pytest.raises(UserError, match=r"^--variants.*\S$"):
            make_variants(SETTINGS, names, False)


@pytest.mark.parametrize("name, meant", [
    ("fusd", "fused"), ("fusd+opm-fusion", "fused+opm-fusion"), ("only-opm-fuson", "only-opm-fusion"),
    ("only-fusd", None), ("without-flash_attention", "without-flash-attention")])
def test_a_mistyped_name_is_told_the_nearest_one_first(name, meant):
    with pytest.raises(UserError) as refused:
        make_variants(SETTINGS, name, False)
    said = str(refused.value)
    assert said.startswith(f"--variants {name!r}: {f'did you mean {meant}? ' if meant else 'must be '}")


def test_the_usual_rows():
    assert default_names(SETTINGS, False) == ["baseline", "fused", *SINGLE, "compiled"]
    assert default_names(BF16, True) == ["baseline", "fused", *SINGLE, "compiled", "everything", "ultra"]
    assert [v.name for v in make_variants(BF16, None, True) if v.reason] == ["only-opm-fusion"]
    assert not [v.name for v in make_variants(BF16.having(batch_size=1), None, True) if v.reason]
    own = with_fusion(SETTINGS, KIND.preset())
    assert default_names(own, False)[-1] == "given" and default_names(own, True)[-1] == "ultra"
    assert default_names(SECOND.settings(), False) == ["baseline", "fused", "compiled"]  # one fusion is both


def test_the_baseline_is_always_there_and_each_name_once():
    found = make_variants(SETTINGS, "fused,only-opm-fusion fused baseline", False)
    assert [v.name for v in found] == ["baseline", "fused", "only-opm-fusion"]
    assert [v.name for v in found if v.wants_own_process] == []
    others = make_variants(SETTINGS, ["compiled", "cuda-graphs"], True)
    assert [v.name for v in others if v.wants_own_process] == ["compiled", "cuda-graphs"]


def test_what_does_nothing_here_says_why_and_presets_leave_it_out():
    reasons = {v.name: v.reason for v in make_variants(
        SETTINGS, "fused only-opm-fusion fused+cuda-graphs without-opm-fusion everything ultra", False)}
    idle = "; opm-fusion changes nothing at these sizes"
    assert reasons.pop("ultra").startswith("here it is the same as everything; CUDA graphs need a GPU;")
    assert reasons == {"baseline": None, "fused": None, "everything": None,
                       "only-opm-fusion": f"here it is the same as baseline{idle}",
                       "fused+cuda-graphs": f"here it is the same as fused; CUDA graphs need a GPU{idle}",
                       "without-opm-fusion": "here it is the same as fused"}
    everything = make_variants(SETTINGS, "everything", False)[1]
    assert everything.not_used == ("CUDA graphs need a GPU", "master weights need --use-amp", idle[2:])
    used = everything.settings.in_use(False)
    assert "enable_torch_compile" in used and not {"enable_cuda_graphs", "enable_master_weights"} & {*used}


def test_a_field_that_is_no_switch_and_does_nothing_makes_no_variant():
    idle = SETTINGS.having(torch_compile_mode="reduce-overhead", enable_triton_adamw=True)
    given = make_variants(idle, "fused given", True)[-1]
    assert given.reason.startswith("here it is the same as fused; ")


def test_a_switch_that_needs_mixed_precision_is_in_use_beside_it():
    alone = replace(PLAIN, enable_master_weights=True)
    assert with_fusion(BF16, alone).in_use(False) == ["enable_master_weights"]
    assert with_fusion(SETTINGS, alone).in_use(False) == []
