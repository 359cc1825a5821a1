#!/usr/bin/env python3
"""Which settings let ProteinMPNN recover residues of families it never saw? Validation chooses, folds report.

    python benchmarks/mpnn_recovery.py --data DIR --out OUT                 # minutes on a GPU
    python benchmarks/mpnn_recovery.py --data DIR --out OUT --more DIR      # and further families to train on

Four folds, every fourth family by name held out. In each fold every fourth family of the rest validates: all
settings are trained without both, and validation alone chooses. The chosen one is trained again with the
validation families, and only then is recovery on the fold's families computed, beside that of the settings
of docs/companions.md. Writes OUT/mpnn_recovery.json after each fold. No setting is begun in a
fold after its quarter of --budget (seconds); those without time are left out in all later folds alike.
"""
import pathlib
import sys
import time
from statistics import median

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.measuring.tables import aligned
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, exit_code, require_directory, write_json
from fusion_lab.training.flags import Parser, whole_number, whole_numbers
from fusion_lab.training.machine import choose_device, process_settings, system_info
from fusion_lab.training.program import load_program
from proteins.designs import evaluate, pooled

FOLDS = 4
DOCUMENTED = "as documented"
WARMUP = 30
AVERAGE = dict(lr_schedule="cosine", lr_warmup_steps=WARMUP, ema_decay=0.99)
SETTINGS = {  # name: fields beside D 64, 2+2 layers, k 16, B 8, learning rate 2e-3, noise 0.1
    DOCUMENTED: {},
    "cosine, average, noise 0.02": {**AVERAGE, "backbone_noise": 0.02},
    "cosine, average": AVERAGE,
    "cosine, average, dropout 0.3": {**AVERAGE, "dropout": 0.3},
    "cosine, average, noise 0.02, dropout 0.3": {**AVERAGE, "backbone_noise": 0.02, "dropout": 0.3},
    "cosine, average, noise 0.3": {**AVERAGE, "backbone_noise": 0.3},
    "cosine, average, weight decay 0.3": {**AVERAGE, "weight_decay": 0.3},
}
SIZES = dict(hidden_dim=64, num_layers=2, neighbors=16, batch_size=8, learning_rate=2e-3, backbone_noise=0.1)


def trained(program, settings, device, source):
    """(trainer, source under these settings) after all steps."""
    process_settings(settings, device)
    source = source.under(settings)
    trainer = program.trainer(program, settings, device)
    for step in range(settings.training.num_steps):
        trainer.step(to_device(source.batch(step), device))
        trainer.step_number = step + 1
    return trainer, source


def recovery(trainer, source, names):
    """Share of the residues of these held-out families that it names, and the perplexity."""
    with trainer.averaged():
        found = evaluate(trainer, source)["held_out"]
    share, perplexity, _ = pooled({name: found[name] for name in names})
    return share, perplexity


def chosen(program, base, held_out, validation, candidates, device, deadline):
    """{(setting, steps): recovery on the validation families}"""
    found = {}
    base = base.having(holdout=",".join([*held_out, *validation]))
    source = program.open_source(base)
    for name, steps in candidates:
        if time.monotonic() > deadline and found:
            break
        settings = base.having(**{**SETTINGS[name], "num_steps": steps})
        found[name, steps] = recovery(*trained(program, settings, device, source), validation)[0]
        print(f"validation, {name}, {steps} steps: {found[name, steps]:.3f}", flush=True)
    return found


def fold_of(program, base, names, number, candidates, device, seconds, beside):
    """One fold as JSON. names: families that take part in folds; beside: others, which only train."""
    held_out = names[number::FOLDS]
    rest = [name for name in names if name not in held_out]
    validation = rest[number::FOLDS]
    tried = chosen(program, base, held_out, validation, candidates, device, time.monotonic() + seconds)
    name, steps = max(tried, key=tried.get)
    longest = max(count for _, count in candidates)
    result = dict(
        held_out=held_out, validation=validation, only_trained=len(beside), chosen=name, steps=steps,
        tried=[dict(setting=key[0], steps=key[1], validation=value) for key, value in tried.items()])
    base = base.having(holdout=",".join(held_out))
    source = program.open_source(base)
    for label, fields, count in (("chosen", SETTINGS[name], steps), ("documented", {}, longest)):
        made = trained(program, base.having(**{**fields, "num_steps": count}), device, source)
        share, perplexity = recovery(*made, held_out)
        result[f"{label}_recovery"], result[f"{label}_perplexity"] = share, perplexity
        result["constant"] = source.yardsticks()["recovery"]
    return result


def together(data, more, out):
    """A directory with links to the files of both."""
    place = pathlib.Path(out) / "families"
    require_directory(str(place))
    for file in (f for folder in (data, more) for f in sorted(pathlib.Path(folder).iterdir()) if f.is_file()):
        link = place / file.name
        if not link.exists():
            link.symlink_to(file.resolve())
    return place


def run(argv=None):
    parser = Parser(prog="mpnn_recovery.py", description=__doc__)
    parser.add_argument("--data", required=True, help="families, for the folds")
    parser.add_argument("--more", help="families that only train")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=whole_numbers, default=[300, 600])
    parser.add_argument("--budget", type=whole_number(), default=240, help="seconds for choosing, in all")
    parser.add_argument("--seed", type=whole_number(0), default=42)
    parser.add_argument("--device", default="auto")
    a = parser.parse_args(argv)
    if min(a.steps) <= WARMUP:
        parser.error(f"--steps: more than the {WARMUP} of the warm-up")
    program, device = load_program(ROOT / "companions" / "protein_mpnn.py"), choose_device(a.device)
    require_directory(a.out)
    data = together(a.data, a.more, a.out) if a.more else a.data
    base = program.settings(**SIZES, data=str(data), seed=a.seed)
    if device.type == "cuda":
        base = base.having(enable_cuda_graphs=True)
    own = {path.stem for path in pathlib.Path(a.data).iterdir()}
    everything = sorted(program.open_source(base).names)
    names = [name for name in everything if name in own]
    if len(names) < 2 * FOLDS:
        raise UserError(f"--data {a.data}: {len(names)} families are too few for {FOLDS} folds")
    beside = [name for name in everything if name not in own]
    candidates = [(name, steps) for name in SETTINGS for steps in a.steps]
    result = dict(mode="mpnn_recovery", system_info=system_info(device), seed=a.seed, folds=[])
    for number in range(FOLDS):
        fold = fold_of(program, base, names, number, candidates, device, a.budget / FOLDS, beside)
        result["folds"].append(fold)
        candidates = candidates[:len(fold["tried"])]  # alike in all folds
        print(f"fold {number}: {len(fold['tried'])} settings tried; chosen {fold['chosen']}, {fold['steps']} "
              f"steps: held-out recovery {fold['chosen_recovery']:.3f}, as documented "
              f"{fold['documented_recovery']:.3f}, always one residue {fold['constant']:.3f}", flush=True)
        write_json(pathlib.Path(a.out) / "mpnn_recovery.json", result)
    rows = [["setting", "steps", "validation, mean of folds"]]
    for tried in zip(*(fold["tried"][:len(candidates)] for fold in result["folds"]), strict=True):
        rows.append([tried[0]["setting"], str(tried[0]["steps"]),
                     f"{sum(t['validation'] for t in tried) / len(tried):.3f}"])
    for label in ("chosen", "documented"):
        result[f"median_{label}"] = median(fold[f"{label}_recovery"] for fold in result["folds"])
    write_json(pathlib.Path(a.out) / "mpnn_recovery.json", result)
    print("\n".join(aligned(rows)))
    print(f"Median held-out recovery over folds: {result['median_chosen']:.3f}, as documented "
          f"{result['median_documented']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "mpnn_recovery.py"))
