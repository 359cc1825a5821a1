"""Several sessions: of every fusion alone and left out, or of the baseline (V1) and the given switches."""
import contextlib
import os

from fusion_lab.measuring.compare import compare, release
from fusion_lab.measuring.comparison_table import Notes, below, table
from fusion_lab.measuring.tables import code
from fusion_lab.measuring.variants import (
    BASELINE,
    COMPILED,
    FUSED,
    GIVEN,
    ONLY,
    WITHOUT,
    fusion_named,
    spelled,
    with_fusion,
)
from fusion_lab.profiler.plots import plot_ablation
from fusion_lab.profiler.report import comparison_lines, interleaved_line, sizes_text, write_lines
from fusion_lab.profiler.session import run_session
from fusion_lab.training.files import StopRequest, UserError, finite, write_json

SUMMARY, COMPARISON, V1_COMPARISON = "ablation_summary", "v1_comparison.md", "v1_comparison.json"


def ablation_names(program):
    """Baseline, each fusion alone, all, and all without each one of those that are on by default."""
    usual = program.fusion_config()
    switches = [spelled(name) for name in usual.names() if getattr(usual, name)]
    return [BASELINE, *(f"{ONLY}{name}" for name in switches), FUSED,
            *(f"{WITHOUT}{name}" for name in switches), COMPILED]


def compared(program, settings, names, rounds, show=lambda found: None):
    """compare(), which says on stderr what goes on and that a signal ends, with what show() has kept."""
    stop = StopRequest()  # which compare() enters
    found = compare(program, settings, names, rounds, show, Notes(), stop)
    release()
    if stop.signal:
        raise UserError("interrupted: what is known so far was kept", 128 + stop.signal)
    return found


def ablation(program, settings, directory, rounds, **options):
    """compare() of all variants, then a session of each, run_session's options with it, in a folder of its
    own. Returns the content of ablation_summary.json, which is written anew with each of them."""
    path = os.path.join(directory, SUMMARY)

    def save(found, folders=()):
        result = dict(found.as_dict(), mode="ablation", folders=dict(folders))
        write_json(f"{path}.json", result)
        return result

    found = compared(program, settings, ablation_names(program), rounds, save)
    lines = [*table(found.rows), "", *below(found)]
    print("\n".join(lines))
    result, folders = save(found), {}
    write_lines(f"{path}.md", summary_lines(program, settings, result, lines))
    plot_ablation(f"{path}.png", result["variants"])
    for row in found.rows:
        if row.measured:
            chosen = with_fusion(settings, fusion_named(row.name, settings.fusion))
            quiet_session(program, row.name, chosen, os.path.join(directory, row.name), options)
            result = save(found, folders := {**folders, row.name: row.name})
    return result


def summary_lines(program, settings, result, lines):
    """The ablation as markdown; lines: the comparison's."""
    system = result["system_info"]
    return ["# Ablation", "", f"{code(system['gpu_name'] or system['host_cpu'])}, torch "
            f"{system['torch_version']}, {result['timestamp']}, {sizes_text(program, settings)}.", "", *lines]


def quiet_session(program, name, settings, path, options):
    """A session of a variant into a directory, what it prints into a log beside that."""
    print(f"Session of {name} in {path}", flush=True)
    with open(f"{path}.log", "w", encoding="utf-8") as log, \
            contextlib.redirect_stdout(log):
        run_session(program, settings, path, **options)
    release()


def compare_v1(program, settings, directory, rounds, **options):
    """The baseline (V1) and the given switches: interleaved steps, and one session each, side by side."""
    baseline = with_fusion(settings, program.fusion_config.preset(False))
    timed = compared(program, settings, [GIVEN], rounds).as_dict()["variants"]
    paths = [os.path.join(directory, name) for name in ("v1_baseline", "v2")]
    before = run_session(program, baseline, paths[0], **options)
    release()
    after = run_session(program, settings, paths[1], **options, earlier=(paths[0], before))
    comparison = dict(after["compared_with"], interleaved=timed)
    alone, fused = timed
    seconds = (fused["baseline_batch_time"], fused["median_batch_time"]) if fused["measured"] else (
        alone["median_batch_time"], None)
    times = [None if time is None else 1e3 * time for time in seconds]
    result = dict(comparison, mode="compare_v1", session_step_ms=comparison["step_ms"], step_ms=times,
                  **{key: fused.get(key) for key in ("speedup", "speedup_low", "speedup_high")})
    write_lines(os.path.join(directory, COMPARISON), comparison_lines(comparison))
    write_json(os.path.join(directory, V1_COMPARISON), finite(result))
    print(f"{interleaved_line(*timed)} All of it: {os.path.join(directory, COMPARISON)}")
    return result
