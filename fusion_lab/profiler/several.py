"""Several sessions: of every fusion alone and left out, or of the baseline (V1) and the given switches."""
import contextlib
import os
from dataclasses import replace

from fusion_lab.measuring.comparison.compare import compare, release
from fusion_lab.measuring.comparison.table import (
    WITHIN_NOISE,
    LiveTable,
    print_details,
    table,
    within_noise,
)
from fusion_lab.measuring.comparison.variants import (
    ALL,
    AS_GIVEN,
    BASELINE,
    COMPILE,
    Variant,
    short,
    with_fusion,
)
from fusion_lab.measuring.tables import code, markdown
from fusion_lab.profiler.plots import plot_ablation
from fusion_lab.profiler.report import comparison_lines, interleaved_line, sizes_text, write_lines
from fusion_lab.profiler.session import run_session
from fusion_lab.training.files import counted, finite, write_json

SUMMARY, COMPARISON, V1_COMPARISON = "ablation_summary", "v1_comparison.md", "v1_comparison.json"


def ablation_variants(program, settings):
    """Baseline, each fusion alone, all, and all without each one of those that are on by default."""
    off, usual = program.fusion_config.preset(False), program.fusion_config()
    names = [name for name in usual.names() if getattr(usual, name)]
    fusions = {BASELINE: off, **{f"{short(name)} alone": replace(off, **{name: True}) for name in names},
               ALL: usual, **{f"all but {short(name)}": replace(usual, **{name: False}) for name in names},
               "all + torch.compile": replace(usual, **{COMPILE: True})}
    return [Variant(name, with_fusion(settings, fusion)) for name, fusion in fusions.items()]


def ablation(program, settings, directory, **options):
    """Interleaved timing of all variants, then a session of each, run_session's options with it, in a folder
    of its own. Returns the content of ablation_summary.json, which is written anew with each of them."""
    variants, path = ablation_variants(program, settings), os.path.join(directory, SUMMARY)

    def save(result, folders=()):
        result = dict(result, mode="ablation", folders=dict(folders))
        write_json(f"{path}.json", result)
        return result

    result = save(compare(program, settings, variants=variants, table=LiveTable(save)))
    release(variants)
    print_details(result)
    write_lines(f"{path}.md", summary_lines(program, settings, result))
    plot_ablation(f"{path}.png", result["variants"])
    measured = {row["name"] for row in result["variants"] if row["measured"]}
    for variant in variants:
        if variant.name in measured:
            folder = variant.name.replace(" + ", "_").replace(" ", "_").replace(".", "_")
            quiet_session(program, variant, os.path.join(directory, folder), options)
            result = save(result, {**result["folders"], variant.name: folder})
    return result


def summary_lines(program, settings, result):
    """The ablation as markdown: the table, and which rows are within noise."""
    system, rows = result["system_info"], result["variants"]
    noise = [row["name"] for row in rows[1:] if row["measured"] and within_noise(row)]
    return ["# Ablation", "",
            f"{code(system['gpu_name'] or system['host_cpu'])}, torch {system['torch_version']}, "
            f"{result['timestamp']}: {counted(settings.training.num_steps, 'step')} of every variant, in "
            f"turn with a baseline, {sizes_text(program, settings)}. "
            "\"of X ms\": a compiled variant's own baseline.", "",
            *markdown(table(rows)), "",
            f"{WITHIN_NOISE}: {', '.join(noise) or 'none'}."]


def quiet_session(program, variant, path, options):
    """A session of a variant into a directory, what it prints into a log beside that."""
    print(f"Session of {variant.name} in {path}", flush=True)
    with open(f"{path}.log", "w", encoding="utf-8") as log, \
            contextlib.redirect_stdout(log):
        run_session(program, variant.settings, path, **options)
    release()


def compare_v1(program, settings, directory, **options):
    """The baseline (V1) and the given switches: interleaved steps, and one session each, side by side."""
    baseline = with_fusion(settings, program.fusion_config.preset(False))
    variants = [Variant(BASELINE, baseline), Variant(AS_GIVEN, settings)]
    timed = compare(program, settings, variants=variants, table=LiveTable(lambda _: None))["variants"]
    release(variants)
    paths = [os.path.join(directory, name) for name in ("v1_baseline", "v2")]
    before = run_session(program, baseline, paths[0], **options)
    release()
    after = run_session(program, settings, paths[1], **options, earlier=(paths[0], before))
    comparison = dict(after["compared_with"], interleaved=timed)
    alone, fused = timed
    seconds = (fused["baseline_batch_time"], fused["median_batch_time"]) if fused["measured"] else (
        alone["median_batch_time"], None)
    times = [None if time is None else 1e3 * time for time in seconds]
    result = dict(comparison, mode="compare_v1", session_step_ms=comparison["step_ms"], step_ms=times)
    write_lines(os.path.join(directory, COMPARISON), comparison_lines(comparison))
    write_json(os.path.join(directory, V1_COMPARISON), finite(result))
    print(f"{interleaved_line(*timed)} All of it: {os.path.join(directory, COMPARISON)}")
    return result
