#!/usr/bin/env python3
"""Smaller ProteinMPNNs: how much faster, and what they still recover. One table, on any device.

    python benchmarks/mpnn_sizes.py --out OUT
    python benchmarks/mpnn_sizes.py --out OUT --data DIR    # your structures

The sizes are those of the ProteinMPNN_apx study: "EXTREME-v2" has 2+2 layers of 64 channels and 12 neighbours
instead of 3+3, 128 and 48. Each is trained for the same steps, in batches of 8, and evaluated on what is held
out; the study's own figures are of models without training. Then forward passes of 1 and of 8 proteins of 106
residues take turns, on a GPU also in a CUDA graph. Writes OUT/mpnn_sizes.json.
"""
import sys
from functools import partial

from script import ROOT, begin, parser_of, write_result

begin(__name__, "torch")

import torch

from fusion_lab.measuring.bench import NEVER, by_turns
from fusion_lab.measuring.tables import markdown
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import exit_code
from fusion_lab.training.feeding import to_device
from fusion_lab.training.flags import whole_number
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.program import load_program

SIZES = {"baseline": dict(num_layers=3, hidden_dim=128, neighbors=48),
         "minimal": dict(num_layers=2, hidden_dim=64, neighbors=48),
         "EXTREME-v2": dict(num_layers=2, hidden_dim=64, neighbors=12)}
BATCHES = (1, 8)
TRAINING = dict(batch_size=8, learning_rate=2e-3, seed=42)


def forward(trainer, batch):
    with torch.no_grad():
        return trainer.forward(batch)["log_probs"]


def calls_of(program, settings, trainer, device):
    """{(batch size, how): a forward pass}"""
    found = {}
    trainer.model.eval()
    for count in BATCHES:
        batch = to_device(program.data(settings.having(batch_size=count)).batch(0), device)
        found[count, "eager"] = partial(forward, trainer, batch)
        if device.type == "cuda":
            graph = GraphedStep(partial(forward, trainer), batch, device)
            found[count, "graph"] = partial(graph, batch)
    return found


def run(argv):
    parser = parser_of(__file__, __doc__, required=True)
    parser.add_argument("--data", metavar="DIR", help="structures (default: built-in backbones)")
    parser.add_argument("--device", default="auto", help="as for the trainer (default: auto)")
    parser.add_argument("--num-steps", type=whole_number(), default=400, metavar="N",
                        help="of training each (default: 400)")
    parser.add_argument("--seq-len", type=whole_number(2), default=106, metavar="N",
                        help="residues of a sample (default: 106)")
    parser.add_argument("--rounds", type=whole_number(2), default=30, metavar="N", help="(default: 30)")
    options = parser.parse_args(argv)
    program, device = load_program(ROOT / "companions" / "protein_mpnn.py"), choose_device(options.device)
    Directory(str(options.out), named=True, flag="--out").claim()
    calls, found = {}, {}
    for name, sizes in SIZES.items():
        settings = program.settings(**sizes, **TRAINING, seq_len=options.seq_len, data=options.data)
        process_settings(settings, device)
        source, trainer = program.data(settings), program.trainer(program, settings, device)
        for step in range(options.num_steps):
            trainer.step(to_device(source.batch(step), device))
        found[name] = source.evaluate(trainer, NEVER).details
        calls |= {(name, *how): call for how, call in calls_of(program, settings, trainer, device).items()}
    times = by_turns(calls, device, options.rounds)
    rows = [dict(name=name, batch_size=count, how=how, p20=p20, median=median, p80=p80,
                 speedup=count * times["baseline", 1, "eager"][1] / median,
                 residues_per_second=count * options.seq_len / median, **found[name])
            for (name, count, how), (p20, median, p80) in times.items()]
    cells = [["model", "proteins", "how", "ms (p20, p80)", "speed-up a protein", "recovery"]]
    for row in rows:
        times = "{:.2f} ({:.2f}, {:.2f})".format(*(1e3 * row[key] for key in ("median", "p20", "p80")))
        cells.append([row["name"], str(row["batch_size"]), row["how"], times, f"{row['speedup']:.2f}x",
                      f"{row['recovery']:.3f}"])
    print("\n".join(markdown(cells)))
    path = options.out / "mpnn_sizes.json"
    write_result(path, device, rows=rows, sizes=SIZES, num_steps=options.num_steps, seq_len=options.seq_len,
                 data=options.data)
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, sys.argv[1:], "mpnn_sizes.py"))
