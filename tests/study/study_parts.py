"""What the tests of the performance study share: studies and rows made by hand."""
import json
import pathlib

from fusion_lab.study.design import Shape, Study, Vocabulary
from fusion_lab.study.page import page
from fusion_lab.study.results import FIGURES, Results, read_config
from fusion_lab.study.summary import summarise
from fusion_lab.training.program import load_program

WORDS = Vocabulary(load_program())
SHAPE = Shape((2, 32, 8), WORDS.axes)
SETTINGS = ("baseline", "fused", "only-flash-attention")


def study_of(*sizes, words=WORDS, **values):
    """A Study of these sizes: a tuple for each axis."""
    plain = dict(switches=(), num_runs=2, num_steps=5, warmup_steps=1, device="cpu", amp_dtype=None,
                 trainer_flags=(), seed=1)
    return Study(vocabulary=words, sizes=sizes, **(plain | values))


def row(setting, run, seconds, shape=SHAPE, **figures):
    return dict(
        shape.as_dict(), setting=setting, run=run, status="ok", reason=None, seconds=1.0,
        system=dict(gpu_name=None, host_cpu="<CPU>", torch_version="2", cuda_version=None, hip_version=None,
                    git_commit=None),
        **{**dict(median_batch_time=seconds, p20_batch_time=0.95 * seconds, p80_batch_time=1.1 * seconds,
                  avg_training_speed=1.0, peak_memory_mb=1e3 * seconds + 20, saved_activation_mb=5,
                  launches_per_step=9, flops_per_step=1, mfu=0.5, first_step_time=1), **figures})


def row_of(point, seconds):
    return row(point.setting, point.run, seconds, point.shape)


def failed(setting, run, status, reason):
    return dict(SHAPE.as_dict(), setting=setting, run=run, status=status, reason=reason, seconds=1.0,
                **dict.fromkeys((*FIGURES, "system")))


def small_study(**values):
    return study_of((2,), (32,), (8,), **{**dict(settings=SETTINGS, num_runs=3), **values})


def summary_of(directory="s"):
    return json.loads(pathlib.Path(directory, "results_summary.json").read_text())


def write_study(place):
    """The files of a study of two shapes and three settings into a directory; returns the Study."""
    study = study_of((2,), (32, 64), (8,), settings=SETTINGS)
    results = Results(str(place), study.axes)
    for point in study.points():
        results.append(row_of(point, 0.01 * point.run))
    (place / "config.json").write_text(json.dumps(dict(
        study=study.as_dict(), command="x", created="2026-01-01")))
    return study


def read_back(path):
    """Read a study's files as the study does, and use all that was read."""
    study, how = read_config(str(path), WORDS)
    results = Results(str(path), WORDS.axes)
    results.load()
    return page(study, summarise(study, results.rows.values()), how, [])
