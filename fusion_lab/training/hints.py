"""Flags of related examples, and what does the same here; the refusal of such a flag says it."""

SESSION, STUDY = "./run_pytorch_profiler.sh", "./launch_performance_study.sh"
V3, SYS, COMPUTE = "./run_rocprofv3.sh", "./run_rocprof_sys.sh", "./run_rocprof_compute.sh"
BATCH_SIZE = "python optimize_batch_size.py prints the largest and the fastest"
EARLIER = "--compare-with-v1 FILE, with --min-speedup X"
ROOFLINE = f"{SESSION} --roofline"

HERE = {  # the word that was typed: what does it here
    "-n": f"{COMPUTE} --output-name NAME",
    "--all-combinations": f"{STUDY} --all-combinations",
    "--baseline": "--compare-fusion, whose first row it is; ./run_pytorch_profiler.sh --baseline",
    "--baseline-results": EARLIER,
    "--check-against": EARLIER,
    "--computational-intensity": ROOFLINE,
    "--current-results": EARLIER,
    "--design": "the authors' ProteinMPNN designs sequences; this one measures recovery",
    "--detailed-analysis": f"{COMPUTE} --mode analyze",
    "--duration": "--num-steps N",
    "--enable-rocm-tools": "./run_all_profilers.sh runs all of AMD's tools that are installed",
    "--find-batch-size": BATCH_SIZE,
    "--generate-report": f"every session of {SESSION} writes comprehensive_profiling_report.md",
    "--generate-roofline": ROOFLINE,
    "--generate-roofline-plot": ROOFLINE,
    "--kernel-names": f"{COMPUTE} --roof-only --tool-option=--kernel-names",
    "--kernel-trace": f"{V3} always passes it",
    "--metrics": f"{STUDY} measures speed and memory, --verify-accuracy accuracy",
    "--models": f"{STUDY} --program FILE",
    "--optimization-hints": f"the findings at the end of {SESSION}",
    "--optimization-target": BATCH_SIZE,
    "--optimized": "--compare-fusion --variants given",
    "--output-dir": "--profile-dir DIR",
    "--predict": "--check-flags says how much memory a step needs at least; optimize_batch_size.py measures",
    "--profile-kernels": f"{V3} does so by itself",
    "--recommend": "--compare-fusion ends with the command of the fastest setting",
    "--seq-lengths": f"{STUDY} --seq-lens",
    "--stats": f"{V3} always passes it",
    "--target-memory-usage": "python optimize_batch_size.py --target-memory-usage X",
    "--tolerance": "--verify-accuracy allows rtol 1e-3, atol 1e-4, and three times the baseline's own error",
    "--trace": f"{SYS} always traces; --tool-option=--trace goes to the tool, whose --help decides",
    "--truncate-kernels": f"{V3} --tool-option=--truncate-kernels",
    "--weights": "--init-from FILE",
}


def of(words):
    """What to add to the refusal of these words: for each of them in HERE, what does the same here."""
    names = dict.fromkeys(name for name in (word.partition("=")[0] for word in words) if name in HERE)
    return "".join(f"; {name} here: {HERE[name]}" for name in names)
