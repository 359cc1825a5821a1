"""One rung of measure_ladder.py, in a process of its own: ladder_rung.py ROOT STEPS FLAGS...

ROOT is the checkout that this file belongs to. Compiles and warms up, prints "ready", waits for a line, then
measures. Its last line is the result as JSON. measure_ladder.py of any later checkout may start it.
"""
import json
import sys
import time
from dataclasses import replace

sys.path[0] = sys.argv[1]

import torch

from fusion_lab.measuring.accuracy import compare_numerics
from fusion_lab.measuring.bench import only_a_graph
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.counters import gpu_times
from fusion_lab.measuring.probe import begin_peak, peak_megabytes
from fusion_lab.training.feeding import to_device
from fusion_lab.training.flags import make_parser, parse
from fusion_lab.training.machine import choose_device, process_settings
from tiny_openfold_v2 import PROGRAM, TinyOpenFoldConfig

UNTIMED = 5  # steps that follow the wait and are not counted
TOP = 200  # kernels that a result names: of a compiled step, all


def failures_of(settings, device):
    """What breaks the accuracy rules, with one block of the default widths and at most 64 residues."""
    residues, rows = min(settings.model.seq_len, 64), min(settings.model.num_seqs, 16)
    small = replace(settings, model=TinyOpenFoldConfig(num_blocks=1, seq_len=residues, num_seqs=rows))
    failures = compare_numerics(PROGRAM, small, device)[1]
    if device.type == "cuda":  # 64 MB of the library's, which would count as a step's
        torch._C._cuda_clearCublasWorkspaces()
    return failures


def timed(trainer, batches, steps):
    """Times (ms) of a step, its loss and, on a GPU, peak memory (MB), launches and the heaviest kernels."""
    device = trainer.device
    timer = PhaseTimer(device)
    begin_peak(device)
    for i in range(steps + UNTIMED):
        timer.start()
        loss = trainer.step(batches[i % len(batches)])
        timer.mark()
    p20, median, p80 = quantiles(1e3 * timer.seconds()[UNTIMED:, 0])
    result = dict(median_ms=median, p20_ms=p20, p80_ms=p80, loss=loss.item())
    if device.type == "cuda":
        result.update(peak_mb=peak_megabytes(device, only_a_graph(trainer, batches[0])),
                      **kernels_of_a_step(trainer, batches[0]))
    return result


def kernels_of_a_step(trainer, batch):
    """How many kernels, how long they and copies run (ms), and which take most: (name, calls, ms)."""
    found = gpu_times(lambda: trainer.step(batch))
    return dict(launches=sum(calls for name, calls, _ in found if not name.startswith(("Memcpy", "Memset"))),
                gpu_busy_ms=sum(time for *_, time in found),
                top=[(name[:90], calls, round(time, 3)) for name, calls, time in found[:TOP]])


def main(steps, flags):
    _, settings, _ = parse(make_parser(PROGRAM), PROGRAM, flags)
    device = choose_device(settings.training.device)
    failures = failures_of(settings, device)
    process_settings(settings, device)
    trainer, source = PROGRAM.trainer(PROGRAM, settings, device), PROGRAM.data(settings)
    batches = [to_device(source.batch(i), device) for i in range(4)]
    started = time.perf_counter()
    trainer.step(batches[0]).item()
    first = time.perf_counter() - started
    for batch in batches:
        trainer.step(batch).item()
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("measure_ladder.py has gone")
    result = timed(trainer, batches, steps)
    result.update(first_step_s=first, kernel=trainer.model.attention_kernel(trainer.amp_dtype),
                  accurate=not failures, failures=failures[:3])
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3:])
