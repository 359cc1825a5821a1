"""Memory against length, and the roofline's predictions against measurement."""
from dataclasses import asdict, replace

import numpy as np

from fusion_lab.measuring.ceilings import measure_ceilings
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.comparison import Variant, measure_alone, release
from fusion_lab.measuring.roofline import predict
from fusion_lab.measuring.tables import aligned
from fusion_lab.profiler.report import ceiling_line, prediction_rows
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info
from tiny_openfold_v2 import Trainer, open_source


def memory_scaling(config, fusion, training, device, lengths):
    """Peak and saved MB for every S, with fused and with plain attention, and the fitted exponents."""
    points = []
    for length in lengths:
        for name, fused in (("plain", False), ("fused", True)):
            variant = Variant(f"{name} S={length}", replace(fusion, enable_flash_attention=fused))
            sized, quick = replace(config, seq_len=length), replace(training, warmup_steps=0)
            batch = to_device(open_source(sized, quick).batch(0), device)
            measure_alone(variant, sized, quick, device, batch)
            found = variant.found or {}
            points.append(dict(attention=name, seq_len=length, peak_memory_mb=found.get("peak_memory_mb"),
                               saved_activation_mb=sum(found["saved"].values()) / MEGABYTE if found else None,
                               reason=variant.reason))
            variant.trainer = None
            release()
    return dict(points=points, exponents={name: exponents([p for p in points if p["attention"] == name])
                                          for name in ("plain", "fused")})


def exponents(points):
    """Slope of log MB over log S: through all points, and between the two largest S ("last_")."""
    result = {}
    for key in ("peak_memory_mb", "saved_activation_mb"):
        known = sorted({p["seq_len"]: p[key] for p in points if p[key]}.items())
        x, y = np.log(np.array(known, dtype=float)).T if known else ([], [])
        result[key] = float(np.polyfit(x, y, 1)[0]) if len(known) > 1 else None
        result[f"last_{key}"] = float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(known) > 1 else None
    return result


def prediction_shapes(config, training):
    """Six shapes or more round the given one."""
    b, s, n = training.batch_size, config.seq_len, config.num_seqs
    half, short = max(1, b // 2), max(1, s // 2)
    return list(dict.fromkeys([(b, s, n), (half, s, n), (b, short, n), (b, s, 2 * n), (half, 2 * s, n),
                               (half, s, max(1, n // 2)), (b + 1, s, n), (b, short, 2 * n)]))


def check_predictions(config, fusion, training, device, ceilings, shapes):
    """predict() against measurement for every (B, S, N): rows with measured step time (s), peak (MB), the
    ratio measured / bound of time, and the error of the peak in percent."""
    rows = []
    for b, s, n in shapes:
        sized = replace(config, seq_len=s, num_seqs=n)
        quick = replace(training, batch_size=b, warmup_steps=2)
        variant = Variant("as given", fusion)
        batch = to_device(open_source(sized, quick).batch(0), device)
        measure_alone(variant, sized, quick, device, batch)
        entry = dict(batch_size=b, seq_len=s, num_seqs=n, reason=variant.reason)
        if variant.found:
            entry.update(predict(sized, fusion, quick, device, ceilings, variant.found["launches"]))
            seconds = time_steps(sized, fusion, quick, device, batch)
            peak = variant.found["peak_memory_mb"]
            error = 100 * (entry["peak_memory_mb"] / peak - 1) if peak else None
            entry.update(measured_s=seconds, time_ratio=seconds / entry["step_s"],
                         measured_peak_memory_mb=peak, peak_error_percent=error)
        variant.trainer = None
        release()
        rows.append(entry)
    return rows


def time_steps(config, fusion, training, device, batch, steps=10):
    """Median seconds of a step on one batch."""
    trainer, timer = Trainer(config, fusion, training, device), PhaseTimer(device)
    for _ in range(3):
        trainer.step(batch).item()
    for _ in range(steps):
        timer.start()
        trainer.step(batch)
        timer.mark()
    return quantiles(timer.seconds().sum(axis=1))[1]


def predict_mode(configs, options):
    """--predict and --check-prediction: print bounds, and their errors against measurement."""
    config, training, fusion, _ = configs
    device = choose_device(training.device)
    ceilings = measure_ceilings(device, training)
    print(ceiling_line(ceilings))
    result = dict(mode="predict", ceilings=ceilings, system_info=system_info(device), config=asdict(config),
                  fusion_config=asdict(fusion), training_params=asdict(training))
    if options.predict:
        b, s, n = options.predict
        sized, quick = replace(config, seq_len=s, num_seqs=n), replace(training, batch_size=b, warmup_steps=0)
        small = replace(config, seq_len=16, num_seqs=4)
        variant = Variant("as given", fusion)
        measure_alone(variant, small, replace(quick, batch_size=b), device,
                      to_device(open_source(small, quick).batch(0), device))
        bound = predict(sized, fusion, quick, device, ceilings, (variant.found or {}).get("launches"))
        result["prediction"] = bound
        print(f"B {b}, S {s}, N {n}: a step takes at least {1e3 * bound['step_s']:.3f} ms "
              f"({1e3 * bound['device_s']:.3f} ms at the device's ceilings, {1e3 * bound['launch_s']:.3f} ms "
              f"for the host to launch it); peak memory of an eager step {bound['peak_memory_mb']:.1f} MB, "
              f"of which {bound['saved_activation_mb']:.1f} MB saved for backward")
    if options.check_prediction:
        result["checks"] = check_predictions(config, fusion, training, device, ceilings,
                                             prediction_shapes(config, training))
        print("\n".join(aligned(prediction_rows(result["checks"]))))
        known = [e for e in result["checks"] if not e["reason"]]
        ratios = [e["time_ratio"] for e in known]
        errors = [abs(e["peak_error_percent"]) for e in known if e["peak_error_percent"] is not None]
        print(f"Over {len(known)} shapes: measured time is {min(ratios):.2f} to {max(ratios):.2f} times the "
              "bound" + (f"; peak memory is off by at most {max(errors):.1f}%" if errors else ""))
    return result
