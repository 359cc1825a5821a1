"""One compiled variant of a comparison, measured in a process of its own: rung.py PROGRAM NAME SETTINGS PACE.

It compiles and counts when it likes; in its turn its steps alternate with the baseline's. Its last line is
its row as JSON.
"""
import json

from fusion_lab.measuring import turns
from fusion_lab.measuring.comparison.compare import (
    alternate,
    bring_to_life,
    measure_alone,
    release,
    supply_of,
)
from fusion_lab.measuring.comparison.pace import Pace
from fusion_lab.measuring.comparison.rows import add_speed, own_figures
from fusion_lab.measuring.comparison.variants import BASELINE, Variant, with_fusion
from fusion_lab.training.files import finite
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.program import load_program


def main(file, name, text, pace):
    turns.die_with_parent()
    program = load_program(file)
    settings = program.settings(**{k: v for part in json.loads(text).values() for k, v in part.items()})
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    supply = supply_of(program.data(settings), settings, device)
    variant = Variant(name, settings)
    baseline = Variant(BASELINE, with_fusion(settings, program.fusion_config.preset(False)))
    weights = program.trainer(program, baseline.settings, device).model.state_dict()
    measure_alone(program, variant, device, supply[0])
    if not variant.reason:
        bring_to_life(program, variant, device, weights, supply[0])
    release()
    with turns.turn():
        if not variant.reason:
            bring_to_life(program, baseline, device, weights, supply[0])
            alternate([baseline, variant], Pace(*json.loads(pace)), supply)
        row = own_figures(variant)
        if row["measured"]:
            add_speed(row, variant, baseline)
    print(json.dumps(finite(row), allow_nan=False))
