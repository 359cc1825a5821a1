"""What documents tell people to type runs, at toy size: the workshop's commands and the notebook's cells.

Each mode and tool is a process here, as users type it.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support import PATIENCE, ROOT, run_program

TEXT = (ROOT / "WORKSHOP.md").read_text(encoding="utf-8")
EXERCISE = re.compile(r"^## (\d+\.[^\n]*)\n.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {title: [line for line in block.splitlines() if line] for title, block in EXERCISE.findall(TEXT)}
STEPS = "--num-steps 2 --device cpu"
EVOFORMER = ("--num-blocks 1 --num-seqs 4 --msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 "
             f"--batch-size 2 --seq-len 16 {STEPS}")
TOY = {  # what makes a program's commands small; later flags win
    "tiny_openfold_v2.py": EVOFORMER, "./run_pytorch_profiler.sh": f"{EVOFORMER} --profile-steps 2",
    "companions/protein_mpnn.py": f"--hidden-dim 16 --num-layers 1 --neighbors 6 --seq-len 20 {STEPS}",
    "companions/tiny_llama.py": (
        "--hidden-size 32 --intermediate-size 32 --num-layers 1 --num-heads 2 --num-kv-heads 1 --seq-len 16 "
        f"--data {ROOT / 'README.md'} {STEPS}"),
    "companions/fusion_patterns.py": "--patterns topk --rounds 2 --no-compile --ladder --device cpu",
    "./launch_performance_study.sh": "--device cpu --no-plots --seq-lens 16 --num-runs 1"}
NO_GPU = 4  # exit code of what needs one


def words_of(command):
    words = shlex.split(command)
    return words[1:] if words[0] == "python" else words


def run(command, directory):
    program, *flags = words_of(command)
    as_text = dict(cwd=directory, capture_output=True, text=True, check=False)
    if program == "head":  # the shell's
        return subprocess.run(command, shell=True, **as_text)
    if program == "torchrun":
        place = flags.index("tiny_openfold_v2.py")
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags[:place],
                   ROOT / flags[place], *flags[place + 1:], *TOY["tiny_openfold_v2.py"].split()]
        return subprocess.run(started, timeout=PATIENCE, **as_text)
    toy = [] if {"--compare-ultra", "--contacts"} & {*flags} else shlex.split(TOY.get(program, ""))
    place = flags.index("--") if "--" in flags else len(flags)  # the study's own flags come before it
    return run_program(program, *flags[:place], *toy, *flags[place:], cwd=directory)


@pytest.mark.slow
@pytest.mark.parametrize("title", BLOCKS)
def test_every_command_runs_at_toy_size(title, tmp_path):
    query = "MKVLAEDGHITNRWCYPQSFLKAT"
    (tmp_path / "query.a3m").write_text("".join(f">{i}\n{query[i % 5:]}{'-' * (i % 5)}\n" for i in range(40)))
    for command in BLOCKS[title]:
        command = command.replace("--fold", "--contacts")  # tests/proteins/test_fold_prediction.py folds
        done, expected = run(command, tmp_path), 0
        if "--compare-ultra" in command and not shutil.which("nvidia-smi"):
            expected = NO_GPU
        assert done.returncode == expected, f"{command}: {done.stderr[-2000:]}"


# The notebook of the first hour, without Jupyter

BOOK = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text(encoding="utf-8"))
FEW = "--demo --num-steps 8 --eval-every 4"
CELLS = ["".join(cell["source"]).replace("--demo", FEW) for cell in BOOK["cells"]
         if cell["cell_type"] == "code"]
# What a kernel does: cells one after the other in one namespace. The first one is run twice, as people do.
KERNEL = """
import json, sys

names = {"__name__": "__main__"}
first, *others = json.load(sys.stdin)
for source in (first, first, *others):
    exec(compile(source, "cell", "exec"), names)
"""


def test_the_notebook_has_no_stored_outputs():
    assert BOOK["nbformat"] == 4 and len({cell["id"] for cell in BOOK["cells"]}) == len(BOOK["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in BOOK["cells"])


@pytest.mark.slow
def test_the_notebook_s_cells_run_in_order(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], input=json.dumps(CELLS), capture_output=True,
                          text=True, cwd=ROOT / "docs", env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("In words: after step 8", "torch.Size([1, 32, 32])", "Training speed: ", "PASS",
                  "Findings:"):
        assert words in done.stdout, words
    assert len(done.stdout.splitlines()) < 70
    results = sorted(path.name for path in tmp_path.glob("first_hour_*/*"))
    assert results == ["accuracy", "compare", "session", "train"]
