"""The notebook of the first hour: plain, and it runs as in a kernel, without Jupyter and with few steps."""
import json
import os
import subprocess
import sys

import pytest

from tests.support import PATIENCE, ROOT

PAGE = ROOT / "docs" / "first_hour.ipynb"
BOOK = json.loads(PAGE.read_text(encoding="utf-8"))
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


def test_it_has_no_stored_outputs():
    assert BOOK["nbformat"] == 4 and len({cell["id"] for cell in BOOK["cells"]}) == len(BOOK["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in BOOK["cells"])


@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], input=json.dumps(CELLS), capture_output=True,
                          text=True, cwd=PAGE.parent, env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("In words: after step 8", "torch.Size([1, 32, 32])", "Training speed: ", "PASS",
                  "Findings:"):
        assert words in done.stdout, words
    assert len(done.stdout.splitlines()) < 70
    results = sorted(path.name for path in tmp_path.glob("first_hour_*/*"))
    assert results == ["accuracy", "compare", "session", "train"]
