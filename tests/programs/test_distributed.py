"""Several processes train one model: what they reckon, how they end. ranks.py has what the ranks do."""
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import tiny_openfold_v2
from fusion_lab.measuring.metrics import read_metrics
from fusion_lab.training.feeding import batch_of, own
from fusion_lab.training.program import load_program
from tests.programs import ranks
from tests.support import PATIENCE, ROOT, last_json, wait_for

QUICK = ("equal", "differ", "agree", "one", "two", "killed", "terminated", "nan", "memory", "warming",
         "evaluating", "no_data", "no_rank")
SLOW = ("equal_of_four", "asleep", "mistake", "flags", "mode")


def outcomes(directory, names):
    """What ranks.py found: {scenario: {codes, out, err, seconds}}."""
    done = subprocess.run([sys.executable, RANKS, directory, *names], timeout=PATIENCE,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    return outcomes(directory, QUICK), directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal", "differ", "agree"])
def test_several_do_what_one_does(name, ran):
    assert ran[0][name]["codes"] == [0, 0], ran[0][name]["err"]


def losses(path):
    return [step["loss"] for step in read_metrics(path)[0]]


@pytest.mark.slow
def test_a_whole_run_of_two_prints_and_writes_once_and_is_that_of_one(ran):
    found, directory = ran
    one, two = found["one"], found["two"]
    assert two["codes"] == [0, 0] and two["err"] == ["", ""] and two["out"][1] == ""
    assert "Ranks: 2 (2 with samples of their own), gloo" in two["out"][0]
    after = [losses(directory / name / "results" / "metrics.jsonl") for name in ("one", "two")]
    assert after[0] == pytest.approx(after[1], rel=1e-5) and len(after[0]) == 6
    results = [last_json(run["out"][0]) for run in (one, two)]
    assert [r["contact_precision"].keys() for r in results] == [{"3", "final"}] * 2
    alone, both = (torch.load(directory / name / f"{name}.pt") for name in ("one", "two"))
    assert both["updates"] == alone["updates"] == 6
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        a, b = ((saved["moments"].get(kind) or saved["model"]) for saved in (alone, both))
        assert all(torch.allclose(a[key], b[key], rtol=1e-3, atol=1e-5) for key in a)
    assert sorted(path.name for path in (directory / "two").iterdir()) == [
        "rank0.err", "rank0.out", "rank1.err", "rank1.out", "results", "two.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("name, codes, words", [
    ("killed", [1, -9], "rank 1 has ended without a word"), ("nan", [1, 1], "loss is nan at step 4"),
    ("memory", [1, 1], "out of memory: lower"), ("warming", [1, 1], "out of memory: lower"),
    ("evaluating", [1, 1], "out of memory: lower"), ("no_data", [2, 2], "absent: no such file"),
    ("no_rank", [2, 2], "--profile-rank 2: there are 2 ranks")])
def test_what_ends_one_ends_all_with_one_line(name, codes, words, ran):
    found = ran[0][name]
    assert found["codes"] == codes and found["seconds"] < 60
    said = "".join(found["err"])
    assert words in said and said.count("\n") == 1, said


@pytest.mark.slow
def test_a_signal_to_one_ends_all_in_order(ran):
    found, directory = ran
    ended = found["terminated"]
    assert ended["codes"] == [143, 143] and ended["err"] == ["", ""]
    step = int(re.search(r"Interrupted at step (\d+) of 100000", ended["out"][0])[1])
    assert torch.load(directory / "terminated" / "run.pt")["step"] == step
    assert torch.load(directory / "killed" / "run.pt")["step"] % 3 == 0


@pytest.mark.slow
def test_a_profile_of_every_rank_tells_what_collectives_take(tmp_path):
    found, directory = outcomes(tmp_path, ["profiled"]), tmp_path
    assert found["profiled"]["codes"] == [0, 0], found["profiled"]["err"]
    results = directory / "profiled" / "results"
    analyses = [json.loads((results / name).read_text()) for name in ("fusion_analysis.json",
                                                                     "fusion_analysis_rank1.json")]
    assert analyses[0]["collectives"] == analyses[1]["collectives"]
    exchanged = analyses[0]["collectives"]
    assert {*exchanged["by_rank"]} == {"0", "1"} and min(exchanged["wait_us"].values()) == 0
    reduced = exchanged["by_rank"]["0"]["all-reduce"]
    assert reduced["calls"] == pytest.approx(2)  # gradients with the loss; counts
    said = found["profiled"]["out"][0]
    assert "Collectives in a step of rank 1: all-reduce" in said and len([*results.glob("rank?.*.json")]) == 2


@pytest.mark.slow
def test_four_ranks_and_rarer_ends(tmp_path):
    found = outcomes(tmp_path, SLOW)
    assert found["equal_of_four"]["codes"] == [0] * 4, found["equal_of_four"]["err"]
    for name, codes, words in (("asleep", [124, 124], "rank 0 has waited 2 s for the others"),
                               ("flags", [2, 2], "--batch-size: 0"),
                               ("mode", [2, 2], "--compare-fusion is for one process")):
        said = "".join(found[name]["err"])
        assert found[name]["codes"] == codes and words in said and said.count("\n") == 1, said
    assert found["mistake"]["codes"] == [1, 1]
    assert "".join(found["mistake"]["err"]).count("Traceback") == 1


class Rank:
    def __init__(self, rank, size):
        self.data_rank, self.data_size = rank, size


def there(*files):
    """Those of these programs that there are: companions may go."""
    return [file for file in files if (ROOT / file).exists()]


@pytest.mark.parametrize("file", there("tiny_openfold_v2.py", "tests/second_program.py",
                                       "companions/protein_mpnn.py", "companions/tiny_llama.py"))
def test_the_samples_of_all_ranks_are_those_of_one_process(file):
    program = load_program(ROOT / file)
    source = program.open_source(program.settings(batch_size=6, device="cpu"))
    for size in (2, 3):
        whole, parts = source.batch(2), [batch_of(source, 2, Rank(rank, size)) for rank in range(size)]
        assert all(torch.equal(whole[key], torch.cat([part[key] for part in parts])) for key in whole)


@pytest.mark.parametrize("file", there("tiny_openfold_v2.py", "companions/protein_mpnn.py"))
def test_a_loss_is_that_of_its_parts_by_their_counts(file):
    program = load_program(ROOT / file)
    settings = program.settings(batch_size=3, device="cpu")
    torch.manual_seed(0)
    model = program.model(settings.model, settings.fusion).eval().requires_grad_(False)
    for weight in model.parameters():
        weight += 0.1 * torch.randn_like(weight)  # heads begin at zero, where all losses are alike
    batch = program.open_source(settings).batch(0)
    next(batch[key] for key in ("coord_mask", "mask") if key in batch)[0, ::2] = 0
    parts = [own(batch, rank, 3) for rank in range(3)]
    counts = [model.loss_counts(**part) for part in parts]
    whole, parts = model(**batch)["loss"].item(), [model(**part) for part in parts]
    found = sum((part.get("loss_terms", part["loss"]) * count / sum(counts)).sum().item()
                for part, count in zip(parts, counts, strict=True))
    assert found == pytest.approx(whole, rel=1e-6)
    assert sum(part["loss"].item() for part in parts) / 3 != pytest.approx(whole, rel=1e-4)


def test_ranks_of_the_natural_world_repeat_no_sample():
    program = load_program()
    natural = program.open_source(ranks.settings(batch_size=4, synthetic_world="natural", device="cpu"))
    found = [natural.part(step, rank, 2)["coords"] for step in range(2) for rank in range(2)]
    assert len({x.numpy().tobytes() for part in found for x in part}) == 8
    one = program.open_source(ranks.settings(batch_size=2, synthetic_world="natural", device="cpu"))
    assert all(torch.equal(one.batch(i)["coords"], x) for i, x in enumerate(found))


RANKS = ROOT / "tests/programs/ranks.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_torchrun_starts_it_and_hands_on_a_signal_and_one_process_continues(tmp_path, capsys):
    flags = [*ranks.FLAGS, "--device", "cpu", "--profile-dir", tmp_path / "p", "--save-checkpoint",
             tmp_path / "c.pt"]
    command = [*TORCHRUN, ROOT / "tiny_openfold_v2.py", *flags, "--num-steps", "9999", "--batch-size", "2",
               "--save-every", "3"]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for(lambda: (tmp_path / "c.pt").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert "Interrupted at step" in out and "tiny_openfold_v2.py: error" not in err
    step = torch.load(tmp_path / "c.pt")["step"]
    assert f"Interrupted at step {step} of" in out and last_json(out)["performance_summary"]["final_loss"] < 5
    steps = ["--num-steps", step + 2, "--batch-size", 4, "--resume", tmp_path / "c.pt"]
    assert tiny_openfold_v2.main(list(map(str, [*flags, *steps]))) == 0
    said = capsys.readouterr().out
    assert f"at step {step}; different now: batch_size 2 -> 4, ranks 2 -> 1" in said
    done, _ = read_metrics(tmp_path / "p" / "metrics.jsonl")
    assert [line["step"] for line in done] == [*range(1, step + 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("cases", ["float32 graphs masters shards", "compiled both", "everything",
                                   "shards_of_masters", "float16"])  # each compiles twice, or not at all
def test_two_gpus_do_what_one_does(cases):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run([*TORCHRUN, "--standalone", RANKS, "same", *cases.split()], capture_output=True,
                          text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout + done.stderr
