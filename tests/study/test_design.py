"""Names and flags of settings, and the order of a study's points."""
import dataclasses

from fusion_lab.study import design
from fusion_lab.training.flags import make_parser, read_settings
from tests.study.study_parts import WORDS, study_of


def test_settings_have_one_name():
    every = design.combinations([name for name in WORDS.switches if name in WORDS.everything][:5])
    names = [WORDS.name(on) for on in every]
    assert len(set(names)) == len(every) == 32
    assert [WORDS.parse(name) for name in names] == every
    assert WORDS.name(WORDS.parse("without-flash-attention")) in ("without-flash-attention", *WORDS.named)
    in_old_studies = "qkv-fusion-msa+torch-compile+master-weights+activation-checkpointing"
    assert WORDS.name(WORDS.parse(in_old_studies)) == in_old_studies


def test_setting_flags_mean_their_switches():
    parser = make_parser(WORDS.program)
    for name in (*WORDS.named, "only-flash-attention", "without-flash-attention"):
        flags = WORDS.flags(WORDS.parse(name))
        fusion = read_settings(WORDS.program, parser.parse_args(flags)).fusion
        assert WORDS.switches_of(fusion) == WORDS.parse(name), name


def test_random_order_is_stored():
    study = study_of((1, 2, 4), (8, 16), (4,), settings=("baseline", "fused"))
    order = study.points()
    assert order == study.points() != dataclasses.replace(study, seed=2).points()
    assert dataclasses.replace(study, num_runs=3).points()[:24] == order
    assert len(set(order)) == 24 and {point.run for point in order[:12]} == {1}
