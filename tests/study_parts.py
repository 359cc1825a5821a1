"""What the tests of the performance study share: studies and rows made by hand."""
import json
import pathlib

from fusion_lab.study.design import Study, Vocabulary
from fusion_lab.study.results import Figures, Machine, Row
from fusion_lab.training.program import load_program

WORDS = Vocabulary(load_program())


def study_of(*sizes, words=WORDS, **values):
    """A Study of these sizes: a tuple for each axis."""
    plain = dict(switches=(), num_runs=2, num_steps=5, warmup_steps=1, device="cpu", amp_dtype=None,
                 trainer_flags=(), seed=1, mode="study")
    return Study(vocabulary=words, sizes=sizes, **(plain | values))


def row_of(point, seconds):
    figures = Figures(
        median_batch_time=seconds, p20_batch_time=0.95 * seconds, p80_batch_time=1.1 * seconds,
        avg_training_speed=1.0, peak_memory_mb=1e3 * seconds + 20, saved_activation_mb=5, launches_per_step=9,
        flops_per_step=1, mfu=0.5, first_step_time=1)
    return Row(point.shape, point.setting, point.run, "ok", None, figures,
               Machine(None, "<CPU>", "2", None, None, None), seconds=1)


def summary_of(directory="s"):
    return json.loads(pathlib.Path(directory, "results_summary.json").read_text())
