"""Every printed figure against an independent count, for three settings on a CPU.

The counts here share no code with the project's: PyTorch's FlopCounterMode, a dispatch mode that sees by
storages what is a view, weak references to storages, saved_tensors_hooks of its own, bytes kernel by kernel.
Times cannot be counted twice; what is made of them can. Lists of (figure, printed, expected) must be equal.
"""
import json
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import run_pytorch_profiler
import tiny_openfold_v2 as tof
from tests.support import last_json

CPU, MB, PHASES = torch.device("cpu"), 2 ** 20, ("forward", "backward", "optimizer")
SMALL = "--device cpu --msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 4 --outer-product-dim 4".split()
SETTINGS = {
    "default, re-associated": "--batch-size 1 --num-seqs 3 --seq-len 13 --num-blocks 2".split(),
    "nothing fused, bfloat16": ("--batch-size 3 --num-seqs 6 --seq-len 8 --num-blocks 1 --disable-all-fusion "
                                "--use-amp --dropout 0.1").split(),
    "recomputing, averaged": ("--batch-size 2 --num-seqs 5 --seq-len 10 --num-blocks 2 --ema-decay 0.9 "
                              "--enable-selective-checkpointing --enable-projection-fusion").split()}
EACH = pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)


def storages(*values):
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(values)
            if isinstance(t, torch.Tensor)}


class Count(TorchDispatchMode):
    """Operations that run, all and by the name that stands in `place`; and the most bytes of storages that
    were made within and are alive at once."""

    def __init__(self, place=lambda: None):
        super().__init__()
        self.launches, self.by_place, self.place, self.alive, self.peak = 0, Counter(), place, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = storages(args, kwargs)
        result = func(*args, **(kwargs or {}))
        made = {key: storage for key, storage in storages(result).items() if key not in given}
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.alive |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in made.items()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        name = func._schema.name.removeprefix("aten::")
        looks = storages(result) and not made and not func._schema.is_mutable
        if not looks and not name.startswith(("empty", "new_empty")):
            self.launches += 1
            self.by_place[self.place()] += 1
        return result


def kernel_bytes(settings):
    """{sub-layer: bytes of one block, forward and backward}: what ideal kernels read and write, one by one;
    in backward the residual's gradient passes through. A batch's tensors: "z" pair, "m" MSA, "h" one side of
    the outer product, "b" a bias of scores."""
    model, b = settings.model, settings.training.batch_size
    n, s, element = model.num_seqs, model.seq_len, 2 if settings.training.use_amp else 4

    def attention(x, bias, source=""):
        return [x + 3 * x + source + bias, 3 * x + bias + x, x + x + x,  # q, k, v, bias; scores; gate, output
                3 * x + 2 * x, 4 * x + bias + 3 * x + bias, 5 * x + x + bias + 2 * source]
    transition, triangle = "{0}{0} {0}{0}{0}", ["zzz", "zzz", "zzz", "zzz zz", "zzz zz", "zzzz z"]
    kernels = dict(
        msa_row_attention=attention("m", "b", "z"), msa_column_attention=attention("m", ""),
        msa_transition=[transition.format("m")], pair_transition=[transition.format("z")],
        outer_product_mean=["m hh", "hh z", "z hh hh", "hh m m m"],
        triangle_mult_outgoing=triangle, triangle_mult_incoming=triangle,
        triangle_attn_starting=attention("z", "b"), triangle_attn_ending=attention("z", "b"))
    sizes = dict(z=s * s * model.pair_dim, m=n * s * model.msa_dim, h=n * s * model.outer_product_dim)
    heads = dict.fromkeys(kernels, model.pair_heads) | dict(msa_row_attention=model.msa_heads)
    return {name: element * b * sum((sizes | dict(b=s * s * heads[name])).get(letter, 0)
                                    for kernel in steps for letter in kernel)
            for name, steps in kernels.items()}


def count(settings):
    """What a step of these settings costs, counted here: the second one, as the first makes the optimizer's
    state."""
    trainer = tof.PROGRAM.trainer(tof.PROGRAM, settings, CPU)
    batch, model = tof.PROGRAM.data(settings).batch(0), trainer.model
    found = SimpleNamespace(first_loss=trainer.step(batch).item(), saved=Counter())
    own, seen, inside = storages(list(model.parameters()), list(model.buffers())), set(), ["rest"]

    def pack(tensor):
        (key, storage), = storages(tensor).items()
        if key not in own and key not in seen:
            seen.add(key)
            found.saved[inside[-1]] += storage.nbytes()
        return tensor.detach()
    hooks = [hook for block in model.blocks for name in tof.SUBLAYERS for hook in (
        getattr(block, name).register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
        getattr(block, name).register_forward_hook(lambda *_: inside.pop() and None, always_call=True))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with Count(lambda: inside[-1]) as forward:
            loss = trainer.forward(batch, only_loss=True)["loss"]
    for hook in hooks:
        hook.remove()
    del loss
    found.forward, found.saved_mb = forward.by_place, sum(found.saved.values()) / MB
    given = storages(list(model.parameters()), list(model.buffers()), list(batch.values()),
                     [list(state.values()) for state in trainer.optimizer.state.values()],
                     trainer.average.tensors if trainer.average else [])
    with Count() as whole:
        trainer.step(batch)
    found.launches = whole.launches
    found.peak_mb = (whole.peak + sum(storage.nbytes() for storage in given.values())) / MB
    product = {torch.ops.aten._addmm_activation: lambda bias, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=product) as flops, sdpa_kernel(SDPBackend.MATH):
        trainer.forward(batch, only_loss=True)["loss"].backward()
    found.flops, found.bytes = flops.get_total_flops(), kernel_bytes(settings)
    return found


def run(flags, directory, program=tof.main):
    """Seconds that a run in this process takes, which must succeed."""
    started = time.monotonic()
    assert program([*SMALL, *flags, "--warmup-steps", "1", "--profile-dir", str(directory)]) == 0
    return time.monotonic() - started


def settings_of(result):
    """The settings that a result was measured with."""
    parts = (result["config"], result["training_params"], result.get("fusion_config", {}))
    return tof.PROGRAM.settings(**{key: value for part in parts for key, value in part.items()
                                   if key != "ranks"})


def differing(rows):
    return [(figure, printed, expected) for figure, printed, expected in rows if printed != expected]


def cells(lines, first):
    """{row's name: {title: cell}} of the printed table whose header begins with this word, up to the first
    line that is no row of it."""
    start = next(i for i, line in enumerate(lines) if line.startswith(first) and "  " in line)
    titles, found = re.split(r"\s{2,}", lines[start]), {}
    for line in lines[start + 1:]:
        if not re.search(r"\S\s{2,}\S", line):
            return found
        parts = re.split(r"\s{2,}", line)
        found[parts[0]] = dict(zip(titles, parts, strict=True))
    return found


def markdown_cells(lines):
    """The same of the first Markdown table."""
    titles, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|")
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def of_a_run(figures, lines, own, settings, seconds):
    """(figure, printed, expected) of a training run's last line or file, and of its step lines."""
    b, steps, mean = settings.training.batch_size, settings.training.num_steps, figures["avg_batch_time"]
    median, phases = figures["median_batch_time"], sum(figures[f"avg_{p}_time"] for p in ("data", *PHASES))
    ceiling = figures["matmul_ceiling_tflops"] * 1e12
    yield "first loss", figures["first_loss"], own.first_loss
    yield "samples", figures["total_samples"], b * steps
    yield "samples/s", figures["avg_training_speed"], pytest.approx(b / mean)
    yield "phases", phases, pytest.approx(mean)
    yield "within the run", 0 < mean * steps < seconds, True
    yield "quantiles", figures["p20_batch_time"] <= median <= figures["p80_batch_time"], True
    yield "peak", figures["peak_memory_mb"], own.peak_mb
    yield "saved", figures["saved_activation_mb"], own.saved_mb
    yield "launches", figures["launches_per_step"], own.launches
    yield "FLOPs", figures["flops_per_step"], own.flops
    yield "TFLOP/s", figures["achieved_tflops"], pytest.approx(own.flops / median / 1e12)
    yield "MFU", figures["mfu"], pytest.approx(own.flops / median / ceiling)
    for line in lines:
        ms = float(re.search(r"Time: +(\S+)ms", line)[1])
        yield "memory of a step line", re.search(r"Memory: +(\S+) MB", line)[1], f"{own.peak_mb:.1f}"
        yield "speed of a step line", float(re.search(r"Speed: +(\S+) ", line)[1]), pytest.approx(
            1e3 * b / ms, abs=0.05 + 0.05 * 1e3 * b / ms ** 2)  # half of both last digits


def require_run(flags, tmp_path, capsys):
    seconds = run([*flags, "--num-steps", "4", "--log-every", "2"], tmp_path)
    out = capsys.readouterr().out
    summary, lines = last_json(out), [line for line in out.splitlines() if line.startswith("Step ")]
    settings, figures = settings_of(summary), summary["performance_summary"]
    losses = [line["loss"] for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "loss" in line]
    rows = [*of_a_run(figures, lines, count(settings), settings, seconds),
            ("losses", [figures[f"{which}_loss"] for which in ("first", "final", "avg")],
             [losses[0], losses[-1], pytest.approx(np.mean(losses))]),
            ("losses printed", [re.search(r"Loss: (\S+)", line)[1] for line in lines],
             [f"{losses[1]:.4f}", f"{losses[3]:.4f}"])]
    assert len(lines) == 2 and differing(rows) == []


def test_a_training_run_prints_what_was_counted(tmp_path, capsys):
    require_run(SETTINGS["default, re-associated"], tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [*SETTINGS.values()][1:], ids=[*SETTINGS][1:])
def test_other_training_runs_print_what_was_counted(flags, tmp_path, capsys):
    require_run(flags, tmp_path, capsys)


def saved_against(before, after):
    return pytest.approx(100 * (1 - after / before))


def of_a_variant(row, baseline, own, first):
    """(figure, in the file, expected) of one row of the comparison."""
    steps, before = np.array(row["step_times"]), np.array(row["baseline_step_times"])
    ratios, median = sorted(before / steps), float(np.median(steps))
    for key, there, here in (("peak_memory", own.peak_mb, first.peak_mb), ("flop", own.flops, first.flops),
                             ("launch", own.launches, first.launches),
                             ("saved_activation", own.saved_mb, first.saved_mb)):
        yield f"{key} saved", row[f"{key}_reduction_percent"], saved_against(here, there)
    yield "rounds", (row["rounds"], len(steps), len(before)), (7, 7, 7)
    yield "peak", row["peak_memory_mb"], own.peak_mb
    yield "saved", row["saved_activation_mb"], own.saved_mb
    yield "saved by sub-layer", row["saved_activation_mb_by_sublayer"], {
        name: size / MB for name, size in own.saved.items()}
    yield "launches", row["launches_per_step"], own.launches
    yield "FLOPs", row["flops_per_step"], own.flops
    yield "TFLOP/s", row["achieved_tflops"], pytest.approx(own.flops / median / 1e12)
    yield "first loss", row["first_loss"], pytest.approx(baseline["first_loss"], rel=1e-2)
    yield "median", row["median_batch_time"], pytest.approx(median)
    yield "speed-up", row["speedup"], pytest.approx(ratios[3])
    yield "interval", (row["speedup_low"], row["speedup_high"]), (None, None) if row is baseline else (
        pytest.approx(ratios[0]), pytest.approx(ratios[6]))  # of seven, all: 98%
    yield "time saved", row["batch_time_reduction_percent"], pytest.approx(100 - 100 / ratios[3])
    yield "phases", sum(row[f"median_{p}_time"] for p in PHASES), pytest.approx(median, rel=0.5)


def on_paper(row, baseline, own, first, batch_size):
    """The table's cells of one row, as they must be printed."""
    median, p20, p80 = (1e3 * row[f"{q}_batch_time"] for q in ("median", "p20", "p80"))

    def against(here, there):
        change = 100 * (here / there - 1)
        return f" ({change:+.0f}%)" if abs(change) >= 0.5 else ""
    return {"variant": row["name"], "step ms (p20, p80)": f"{median:.2f} ({p20:.2f}, {p80:.2f})",
            "samples/s": f"{1e3 * batch_size / median:.1f}", "speed-up (95%)": "1" if row is baseline else
            f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}, {row['speedup_high']:.2f})",
            "peak MB": f"{own.peak_mb:.1f}{against(own.peak_mb, first.peak_mb)}",
            "saved act. MB": f"{own.saved_mb:.1f}{against(own.saved_mb, first.saved_mb)}",
            "launches": f"{own.launches}{against(own.launches, first.launches)}"}


@pytest.mark.slow
@EACH
def test_a_comparison_prints_what_was_counted(flags, tmp_path, capsys):
    run([*flags, "--compare-fusion", "--num-steps", "7", "--variants",
         "fused only-selective-checkpointing given+transition-fusion"], tmp_path)
    out = capsys.readouterr().out
    result, lines = last_json(out), out.splitlines()
    rows, settings = result["variants"], settings_of(result)
    owns = [count(replace(settings, fusion=tof.FusionConfig(**row["fusion_config"]))) for row in rows]
    printed, found = markdown_cells(lines), []
    for row, own in zip(rows, owns, strict=True):
        found += [(row["name"], *more) for more in of_a_variant(row, rows[0], own, owns[0])]
        found.append((row["name"], "on paper", printed[row["name"]],
                      on_paper(row, rows[0], own, owns[0], settings.training.batch_size)))
    after, first, own, b = rows[1], owns[0], owns[1], settings.training.batch_size
    times = [1e3 * np.median(after[key]) for key in ("baseline_step_times", "step_times")]
    numbers = [[after["speedup"], b / times[0] * 1e3, b / times[1] * 1e3],
               [100 * (1 - own.peak_mb / first.peak_mb), first.peak_mb, own.peak_mb],
               [100 - 100 / after["speedup"], *times],
               [100 * (1 - own.launches / first.launches), first.launches, own.launches]]
    for line, expected in zip(lines[-5:-1], numbers, strict=True):
        figures = [float(text) for text in re.findall(r"-?\d+\.?\d*", line)][:3]
        found.append(("fused", line, figures, pytest.approx(expected, abs=0.051)))
    assert len(rows) == 4 and [line for line in found if line[2] != line[3]] == []


def of_a_session(analysis, own, settings):
    """(figure, in the file, expected) of a profiler session."""
    entries, blocks = analysis["sublayers"], settings.model.num_blocks
    step, phases = analysis["step"], analysis["step"]["phases_ms"]
    yield "FLOPs", analysis["flops_per_step"], own.flops
    yield "launches", analysis["launches_per_step"], own.launches
    yield "launches by sub-layer", sum(e["launches"] or 0 for e in entries), own.launches
    yield "launches forward", {e["name"]: e["launches"] for e in entries if e["direction"] == "forward"}, \
        dict(own.forward)
    yield "peak", analysis["memory_peak_mb"], own.peak_mb
    yield "saved", analysis["saved_activation_mb"], {name: size / MB for name, size in own.saved.items()}
    yield "saved by sub-layer", {e["name"]: e["saved_activation_mb"] for e in entries
                                 if e["direction"] == "forward"}, {
        name: own.saved[name] / MB for name in (*tof.SUBLAYERS, "rest")}
    yield "calls", {e["calls"] for e in entries if e["name"] != "rest"}, {blocks}
    yield "times", sum(e["total_us"] for e in entries), pytest.approx(analysis["total_us"])
    yield "shares", sum(e["share"] for e in entries), pytest.approx(1)
    yield "coverage", sum(analysis["coverage"].values()), pytest.approx(1)
    yield "coverage of sub-layers", analysis["coverage"]["sublayers"], pytest.approx(
        sum(e["share"] for e in entries if e["name"] != "rest"))
    for e in entries:
        yield "share", e["share"], pytest.approx(e["total_us"] / analysis["total_us"])
    yield "kernels' shares", sum(k["share"] for k in analysis["kernels"]), pytest.approx(1)
    yield "kinds' shares", sum(k["share"] for k in analysis["kinds"].values()), pytest.approx(1)
    yield "kinds' calls", sum(k["calls"] for k in analysis["kinds"].values()), pytest.approx(
        sum(k["calls"] for k in analysis["kernels"]))
    yield "phases", all(0 < ms < step["p80_ms"] for ms in phases.values()), True
    yield "quantiles", step["p20_ms"] <= step["untraced_ms"] <= step["p80_ms"], True


def of_a_roofline(analysis, own, settings):
    """(figure, in the file, expected) of the roofline, and its cells as they must be printed."""
    speeds, blocks, papers = analysis["ceilings"], settings.model.num_blocks, {}
    dtype = "bfloat16" if settings.training.use_amp else "float32"
    product, copy, found = speeds["matmul_flops_per_s"][dtype], speeds["copy_bytes_per_s"], []
    for row in analysis["roofline"]:
        name, flops, moved = row["name"], row["flops"], own.bytes[row["name"]] * blocks
        entries = [e for e in analysis["sublayers"] if e["name"] == name]
        launches, seconds = sum(e["launches"] for e in entries), sum(e["total_us"] for e in entries) / 1e6
        times = dict(compute=flops / product, memory=moved / copy, launch=launches * speeds["dispatch_s"])
        share = max(times["compute"], times["memory"]) / seconds
        found += [(f"bytes of {name}", row["minimal_bytes"], moved),
                  (f"FLOP/byte of {name}", row["flops_per_byte"], pytest.approx(flops / moved)),
                  *((f"{key} of {name}", row[f"{key}_s"], pytest.approx(times[key])) for key in times),
                  (f"measured of {name}", row["measured_s"], pytest.approx(seconds)),
                  (f"launches of {name}", row["launches"], launches),
                  (f"bound of {name}", row["bound"], max(times, key=times.get) if share <= 1 else None),
                  (f"share of {name}", row["share"], pytest.approx(share) if share <= 1 else None)]
        note = f" ({row['note']})" if share > 1 else ""
        papers[name] = {"sub-layer": name, "GFLOP": f"{flops / 1e9:.2f}",
                        "bound": (row["bound"] or "none") + note,
                        "minimal MB, no weights": f"{moved / MB:.1f}", "FLOP/byte": f"{flops / moved:.1f}",
                        **{f"{key} ms": f"{1e3 * times[key]:.3f}" for key in times},
                        "measured ms": f"{1e3 * seconds:.3f}",
                        "share of ceiling": "above 100%" if share > 1 else f"{100 * share:.1f}%"}
    heads = 3 * settings.training.batch_size * (  # of distances and of letters, forward and backward twice
        2 * settings.model.seq_len ** 2 * settings.model.pair_dim * 64
        + 2 * settings.model.num_seqs * settings.model.seq_len * settings.model.msa_dim * 23)
    inside = sum(row["flops"] for row in analysis["roofline"])
    return [*found, ("FLOPs of all sub-layers", inside, own.flops - heads)], papers


@pytest.mark.slow
@EACH
def test_a_session_prints_what_was_counted(flags, tmp_path, capsys):
    run([*flags, "--roofline", "--profile-steps", "3"], tmp_path, run_pytorch_profiler.run)
    out = capsys.readouterr().out
    analysis = last_json(out)
    settings = settings_of(analysis)
    own = count(settings)
    found, papers = of_a_roofline(analysis, own, settings)
    found += [*of_a_session(analysis, own, settings),
              ("roofline on paper", cells(out.splitlines(), "sub-layer"), papers)]
    assert differing(found) == []
