"""The workshop: every block of commands runs, at toy size.

Each mode and tool is a process here, as users type it.
"""
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
