"""Memory against length, and the roofline's predictions against measurement."""
import sys
from functools import partial

import numpy as np

from fusion_lab.measuring.bounds.ceilings import ceiling_line, measure_ceilings
from fusion_lab.measuring.bounds.roofline import AT_FAULT, predict, unfused_on_meta
from fusion_lab.measuring.bounds.scaling import gpu_rows, step_on
from fusion_lab.measuring.bounds.sizes import shapes_around, shrunk, sizes_text
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.comparison.compare import measure_alone, release
from fusion_lab.measuring.comparison.variants import AS_GIVEN, Variant
from fusion_lab.measuring.tables import aligned, cell
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import counted
from fusion_lab.training.machine import choose_device, process_settings, system_info

ATTENTION = "enable_flash_attention"  # the switch of fused attention, in every program that has one
SMALL = 16  # largest axis of a trial that only counts launches


def measured_alone(program, settings, device, name=AS_GIVEN):
    """(Variant, measured while nothing else is on the device and its trainer let go, the batch used)."""
    variant = Variant(name, settings)
    batch = to_device(program.open_source(settings).batch(0), device)
    measure_alone(program, variant, device, batch)
    release([variant])
    return variant, batch


def memory_scaling(program, settings, device, axis, sizes):
    """Peak and saved MB at every size of an axis, and the fitted exponents: with plain and with fused
    attention where the program has that switch, else with the settings as given."""
    kinds = {AS_GIVEN: {}}
    if ATTENTION in settings.fusion.names():
        kinds = {"plain": {ATTENTION: False}, "fused": {ATTENTION: True}}
    points = []
    for size in sizes:
        for kind, switch in kinds.items():
            sized = settings.having(**{axis: size, "warmup_steps": 0}, **switch)
            variant, _ = measured_alone(program, sized, device, f"{kind} {program.axes[axis]}={size}")
            found = variant.found
            points.append({"attention": kind, axis: size,
                           "peak_memory_mb": found.peak_memory_mb if found else None,
                           "saved_activation_mb": found.saved_mb if found else None,
                           "reason": variant.reason})
    return dict(points=points, exponents={kind: exponents([p for p in points if p["attention"] == kind], axis)
                                          for kind in kinds})


def exponents(points, axis):
    """Slope of log MB over log size: through all points, and between the two largest sizes ("last_")."""
    result = {}
    for key in ("peak_memory_mb", "saved_activation_mb"):
        known = sorted({p[axis]: p[key] for p in points if p[key]}.items())
        x, y = np.log(np.array(known, dtype=float)).T if known else ([], [])
        result[key] = float(np.polyfit(x, y, 1)[0]) if len(known) > 1 else None
        result[f"last_{key}"] = float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(known) > 1 else None
    return result


def scaling_rows(scaling, axis, letter):
    """memory_scaling() as cells, the header first."""
    what = "attention" if "fused" in scaling["exponents"] else "switches"
    rows = [[what, letter, "peak MB", "saved MB", ""]]
    for e in scaling["points"]:
        rows.append([e["attention"], str(e[axis]), cell(e["peak_memory_mb"], ".1f"),
                     cell(e["saved_activation_mb"], ".1f"), e["reason"] or ""])
    for name, e in scaling["exponents"].items():
        if e["peak_memory_mb"] is None and e["saved_activation_mb"] is None:
            continue  # of one size
        rows.append([name, "exponent", cell(e["peak_memory_mb"]), cell(e["saved_activation_mb"]),
                     f"of {letter}, fitted; between the two largest: peak "
                     f"{cell(e['last_peak_memory_mb'])}, saved {cell(e['last_saved_activation_mb'])}"])
    return rows + ([["fused", "runs", scaling["fused_runs"]]] if "fused_runs" in scaling else [])


def check_predictions(program, settings, device, ceilings, shapes, note=lambda text: None):
    """predict() against measurement for every shape, {axis: size}: rows with measured step time (s), peak
    (MB), the ratio measured / bound of time, and the error of the peak in percent. note(text) hears what
    goes on."""
    rows = []
    for number, shape in enumerate(shapes, 1):
        note(f"measuring {', '.join(f'{program.axes[a]} {n}' for a, n in shape.items())}, {number} of "
             f"{len(shapes)}")
        sized = settings.having(**shape, warmup_steps=2)
        variant, batch = measured_alone(program, sized, device)
        entry = dict(shape, reason=variant.reason)
        if variant.found:
            entry.update(predict(program, sized, device, ceilings, variant.found.launches))
            seconds = time_steps(program, sized, device, batch)
            peak = variant.found.peak_memory_mb
            error = 100 * (entry["peak_memory_mb"] / peak - 1) if peak else None
            entry.update(measured_s=seconds, time_ratio=seconds / entry["step_s"],
                         measured_peak_memory_mb=peak, peak_error_percent=error)
            release()
        rows.append(entry)
    return rows


def prediction_rows(table, axes):
    """check_predictions() as cells, the header first; axes: {axis: letter}."""
    rows = [[*axes.values(), "bound ms", "measured ms", "measured/bound", "predicted peak MB", "measured MB",
             "error"]]
    for e in table:
        sizes = [str(e[axis]) for axis in axes]
        if e["reason"]:
            rows.append([*sizes, e["reason"]])
            continue
        rows.append([*sizes, cell(e["step_s"], ".3f", 1e3), cell(e["measured_s"], ".3f", 1e3),
                     cell(e["time_ratio"]), cell(e["peak_memory_mb"], ".1f"),
                     cell(e["measured_peak_memory_mb"], ".1f"),
                     cell(e["peak_error_percent"], "+.1f", unit="%")])
    return rows


def time_steps(program, settings, device, batch, steps=10):
    """Median seconds of a step on one batch."""
    trainer, timer = program.trainer(program, settings, device), PhaseTimer(device)
    for _ in range(3):
        trainer.step(batch).item()
    for _ in range(steps):
        timer.start()
        trainer.step(batch)
        timer.mark()
    return quantiles(timer.seconds().sum(axis=1))[1]


def predict_mode(program, settings, sizes=None, check=False, gpus=None, link=None):
    """--predict, for sizes in the order of the program's axes, and --check-prediction: print bounds, and
    their errors against measurement. gpus, link: a step of so many, with this Link between them."""
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    ceilings = measure_ceilings(device, settings.training)
    print(ceiling_line(ceilings), flush=True)
    configs, note = settings.as_dict(), partial(print, file=sys.stderr, flush=True)
    result = dict(mode="predict", ceilings=ceilings, system_info=system_info(device),
                  **{key: configs[key] for key in ("config", "fusion_config", "training_params")})
    if sizes:
        sized = settings.having(**dict(zip(program.axes, sizes, strict=True)), warmup_steps=0)
        trial, _ = measured_alone(program, shrunk(program, sized, SMALL), device)
        bound = predict(program, sized, device, ceilings, trial.found.launches if trial.found else None)
        result["prediction"] = bound
        print("\n".join(aligned(bound_rows(sizes_text(program, sized), bound))))
        if gpus:
            bound["gpus"] = on_several(program, sized, bound["step_s"], gpus, link)
    if check:
        result["checks"] = check_predictions(program, settings, device, ceilings,
                                             shapes_around(program, settings), note)
        print("\n".join(aligned(prediction_rows(result["checks"], program.axes))))
        print(errors_line(result["checks"]))
    return result


def on_several(program, settings, step_s, gpus, link):
    """The bound of a step on so many GPUs, each with such a batch; printed and returned as a dict."""
    size = 4 * sum(p.numel() for p in unfused_on_meta(program, settings).parameters())  # gradients, float32
    seconds, share = step_on(gpus, step_s, size, link)
    print(f"Predicted for {gpus} GPUs, not measured; {size / 1e6:.1f} MB of gradients that nothing hides:")
    print("\n".join(aligned(gpu_rows(step_s, settings.training.batch_size, size, link, (1, gpus)))))
    return dict(count=gpus, step_s=seconds, share_of_perfect=share, gradient_bytes=size, link=vars(link))


def bound_rows(sizes, bound):
    """predict() as cells, the header first."""
    at_ceilings, host = (f"{1e3 * bound[key]:.3f} ms" for key in ("device_s", "launch_s"))
    return [[sizes, "at least", ""],
            ["a step", f"{1e3 * bound['step_s']:.3f} ms",
             f"the longer of: device at its ceilings {at_ceilings}, host to launch it {host}"],
            ["peak memory", f"{bound['peak_memory_mb']:.1f} MB",
             f"{bound['saved_activation_mb']:.1f} MB saved for backward; of an eager step"]]


def errors_line(checks):
    """check_predictions() in one line."""
    known = [e for e in checks if not e["reason"]]
    if not known:
        return "No shape could be measured"
    ratios = [e["time_ratio"] for e in known]
    errors = [abs(e["peak_error_percent"]) for e in known if e["peak_error_percent"] is not None]
    return (f"Over {counted(len(known), 'shape')}: measured time is {min(ratios):.2f} to {max(ratios):.2f} "
            "times the bound" + (f" (below 1: {AT_FAULT})" if min(ratios) < 1 else "")
            + (f"; peak memory is off by at most {max(errors):.1f}%" if errors else ""))
