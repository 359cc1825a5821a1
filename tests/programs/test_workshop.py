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
    "companions/fusion_patterns.py": "--patterns topk --rounds 2 --no-compile --ladder --device cpu"}
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
    return run_program(program, *flags, *toy, cwd=directory)


@pytest.mark.slow
@pytest.mark.parametrize("title", BLOCKS)
def test_every_command_runs_at_toy_size(title, tmp_path):
    query = "MKVLAEDGHITNRWCYPQSFLKAT"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "1a3a.a3m").write_text("".join(
        f">{i}\n{query[i % 5:]}{'-' * (i % 5)}\n" for i in range(40)))
    for command in BLOCKS[title]:  # tests/proteins/test_fold_prediction.py folds
        command = command.replace("--fold", "--contacts").partition(" --structure")[0]
        done, expected = run(command, tmp_path), 0
        if "--compare-ultra" in command and not shutil.which("nvidia-smi"):
            expected = NO_GPU
        assert done.returncode == expected, f"{command}: {done.stderr[-2000:]}"


def raw(name):
    assert name in TEXT
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


def test_the_gpu_s_figures_are_those_of_the_raw_files():
    roofline = raw("roofline_h200_ultra_2026-11-24.json")
    for layer, name in {"outer_product_mean": "outer product mean", "msa_row_attention": "row attention",
                        "triangle_mult_outgoing": "triangle multiplication"}.items():
        [row] = [row for row in roofline["roofline"] if row["name"] == layer]
        assert f"| {name} | {row['flops_per_byte']:,.0f} | {row['bound']} |" in TEXT
    copy, product = (roofline["ceilings"][key] for key in ("copy_bytes_per_s", "matmul_flops_per_s"))
    product = product["bfloat16"]
    assert f"{copy / 1e9:,.0f} GB/s and computed {product / 1e12:.0f} TFLOP/s, so it changes at " \
        f"{product / copy:.0f}." in TEXT.replace("\n", " ")
    compared = raw("fusion_h200_2026-11-21_b4_s64_n16.json")["compare"]["B4 S64 N16 fp32"]
    rows = {row["name"]: row for row in compared["variants"]}
    for name, text in {"baseline": "baseline", "qkv_msa alone": "`only-qkv-fusion-msa`",
                       "all": "all default fusions"}.items():
        row = rows[name]
        assert f"| {text} | {row['launches_per_step']:,} | {1e3 * row['median_batch_time']:.2f} |" in TEXT
    compared = raw("fusion_h200_2026-11-21_b1_s256_n64.json")["compare"]["B1 S256 N64 bf16"]
    peaks = {row["name"]: row.get("peak_memory_mb") for row in compared["variants"]}
    assert f"from {peaks['baseline']:,.0f} to {peaks['flash_attention alone']:,.0f} MB in bfloat16" in TEXT


# The notebook of the first hour, without Jupyter. After a change, tests/notebook.py stores its outputs.

BOOK = ROOT / "docs" / "first_hour.ipynb"
FEW = "--demo --num-steps 20 --eval-every 10"


def cells_of(path):
    """[(source, what is printed below it)] of its code cells."""
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), "".join(line for output in cell["outputs"]
                                              for line in output.get("text", ()))) for cell in cells]


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"Step +(\d+)/\d+ \| Loss: ([\d.]+)", text)}


def without_times(text):
    """The rows of a comparison: operations and memory of each variant."""
    return [re.sub(r" +[\d.]+ ms", "", line) for line in text.splitlines() if " operations " in line]


def test_the_notebook_has_the_outputs_of_one_run_and_no_place_of_its_machine():
    cells = json.loads(BOOK.read_text("utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)] and len({cell["id"] for cell in cells}) == len(cells)
    assert BOOK.read_text("utf-8").count('"image/png": ') == 3 and BOOK.stat().st_size < 60_000
    assert not re.search(r"/(?:tmp|home|root|opt|work|usr)\b|Busy machine", str(cells_of(BOOK)))


@pytest.mark.slow
def test_the_notebook_s_cells_run_in_order_and_print_what_is_stored(tmp_path):
    book = tmp_path / "short.ipynb"
    book.write_text(BOOK.read_text("utf-8").replace("--demo", FEW), "utf-8")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, ROOT / "tests" / "notebook.py", book], env=environment, text=True,
                          capture_output=True, timeout=4 * PATIENCE, check=False)  # four programs
    assert done.returncode == 0, done.stderr[-3000:]
    for (source, stored), (_, here) in zip(cells_of(BOOK), cells_of(book), strict=True):
        if "--demo" in source:  # here only the first of its steps
            assert losses(here) == pytest.approx({n: losses(stored)[n] for n in (10, 20)}, abs=2e-4)
        elif "--compare-fusion" in source:
            assert without_times(here) == without_times(stored) != []
        elif "--verify-accuracy" in source:
            assert "PASS" in here and "PASS" in stored
        elif "run_pytorch_profiler" in source:
            assert "Findings:" in here and "Findings:" in stored
        else:
            assert here == stored
    results = sorted(path.name for path in tmp_path.glob("first_hour_*/*"))
    assert results == ["accuracy", "compare", "session", "train"]
