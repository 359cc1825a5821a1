"""Several settings: compared as by --compare-fusion, then a session of each beside the baseline's."""
import contextlib
import os

from fusion_lab.measuring.compare import compare, release
from fusion_lab.measuring.comparison_table import Notes, below, table
from fusion_lab.measuring.tables import code
from fusion_lab.measuring.variants import (
    BASELINE,
    COMPILED,
    FUSED,
    ONLY,
    WITHOUT,
    fusion_named,
    spelled,
    with_fusion,
)
from fusion_lab.profiler.plots import write_ablation_plot
from fusion_lab.profiler.report import sizes_text, write_lines
from fusion_lab.profiler.session import run_session
from fusion_lab.training.files import StopRequest, UserError, write_json

SUMMARY = "ablation_summary"


def ablation_names(program):
    """Baseline, each fusion alone, all, and all without each one of those that are on by default."""
    usual = program.fusion_config()
    switches = [spelled(name) for name in usual.names() if getattr(usual, name)]
    return [BASELINE, *(f"{ONLY}{name}" for name in switches), FUSED,
            *(f"{WITHOUT}{name}" for name in switches), COMPILED]


def ablation(program, settings, directory, names, rounds, **options):
    """compare() of variants by name, then a session of each that was measured, run_session's options with it,
    in a folder of its own; what it prints goes into a log beside that. Returns the content of
    ablation_summary.json, which is written anew with each of them. Raises UserError after a signal."""
    path, folders, baseline = os.path.join(directory, SUMMARY), {}, None

    def save(found):
        result = dict(found.as_dict(), mode="ablation", folders=folders)
        write_json(f"{path}.json", result)
        return result

    found = compare(program, settings, names, rounds, save, Notes(), stop := StopRequest())
    release()
    if stop.signal:
        raise UserError("interrupted: what is known so far was kept", 128 + stop.signal)
    lines, result = [*table(found.rows), "", *below(found)], save(found)
    print("\n".join(lines))
    write_lines(f"{path}.md", summary_lines(program, settings, result, lines))
    write_ablation_plot(f"{path}.png", result["variants"])
    for name in [row.name for row in found.rows if row.measured]:
        chosen = with_fusion(settings, fusion_named(name, settings.fusion))
        place = os.path.join(directory, name)
        print(f"Session of {name} in {place}", flush=True)
        with open(f"{place}.log", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            analysis = run_session(program, chosen, place, **options, earlier=baseline)
        baseline = baseline or (place, analysis)
        release()
        folders[name] = name
        result = save(found)
    return result


def summary_lines(program, settings, result, lines):
    """The ablation as markdown; lines: the comparison's."""
    system = result["system_info"]
    return ["# Ablation", "", f"{code(system['gpu_name'] or system['host_cpu'])}, torch "
            f"{system['torch_version']}, {result['timestamp']}, {sizes_text(program, settings)}.", "", *lines]
