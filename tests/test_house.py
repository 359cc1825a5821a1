"""The house: imports run one way; the lab serves any program, and the programs there are keep to the seam."""
import ast
import dataclasses
import graphlib
import subprocess
import sys

import pytest
import torch

from fusion_lab.measuring import accuracy, compare
from fusion_lab.measuring.variants import with_fusion
from fusion_lab.profiler import command
from fusion_lab.training.checkpoints import restore, snapshot
from fusion_lab.training.program import PARTS, load_program
from tests.support import ROOT, last_json, run_program

CPU = torch.device("cpu")
SECOND = ROOT / "tests" / "second_program.py"
PROGRAMS = {"tiny_openfold_v2.py": dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, num_blocks=1,
                                        outer_product_dim=4, num_seqs=6, seq_len=16),
            "tests/second_program.py": dict(width=64),
            "companions/protein_mpnn.py": dict(hidden_dim=16, num_layers=1, neighbors=6, seq_len=20,
                                               dropout=0.0),
            "companions/tiny_llama.py": dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
                                             num_kv_heads=1, seq_len=16, data=str(ROOT / "README.md"))}
LARGER = {"tests/second_program.py": dict(width=512, batch_size=512),  # for a session
          "companions/protein_mpnn.py": dict(hidden_dim=128, num_layers=2, neighbors=32, seq_len=32),
          "companions/tiny_llama.py": dict(hidden_size=512, intermediate_size=1024, num_layers=2, seq_len=64)}

# Floors of the house, from the ground up; a module may import from its own floor and from those below.
FLOORS = ("evoformer_kernels", "fusion_lab.commands", "fusion_lab.training.words",
          "fusion_lab.training.errors", "fusion_lab.training.files",
          "fusion_lab.training.options", "fusion_lab.training.program",
          "fusion_lab.measuring.variants", "fusion_lab.training",
          "fusion_lab.measuring", "fusion_lab.rocm", "tiny_openfold", "tiny_openfold_v2", "companions",
          "fusion_lab.study", "fusion_lab.profiler", "benchmarks", "puzzles")
PACKAGES = ("evoformer_kernels", "fusion_lab", "tiny_openfold", "companions", "benchmarks", "puzzles")
STANDARD_LIBRARY_ONLY = ("fusion_lab.rocm",)  # beside what needs no torch of the floors below


def sources(*packages):
    """(path, syntax tree) of each Python file in the root and in these folders."""
    for file in [*ROOT.glob("*.py"), *(f for d in packages for f in sorted((ROOT / d).rglob("*.py")))]:
        yield file, ast.parse(file.read_text(encoding="utf-8"))


def modules():
    """{dotted name: imported dotted names, those within functions too} of the whole project."""
    found = {}
    for file, tree in sources(*PACKAGES):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name: {i for i in imported if i in found} - {name} for name, imported in found.items()}


def within(name, package):
    return name == package or name.startswith(package + ".")


def floor(name):
    """The highest floor that names the module most exactly."""
    fitting = [(len(package), number) for number, package in enumerate(FLOORS) if within(name, package)]
    return max(fitting)[1] if fitting else None


def test_no_import_runs_up_and_none_in_a_circle():
    graph = modules()
    assert {"tiny_openfold_v2", "tiny_openfold.proteins.files", "fusion_lab.rocm.all_profilers"} <= set(graph)
    for name, imported in graph.items():
        for other in imported:
            if floor(name) is not None and floor(other) is not None:
                assert floor(other) <= floor(name), f"{name} imports {other}, which stands above it"
            if within(name, "fusion_lab"):
                assert within(other, "fusion_lab") or within(other, "evoformer_kernels"), (
                    f"{name} imports {other}: the lab knows no model")
            if not within(name, "benchmarks") and not within(name, "companions"):
                assert not within(other, "companions"), f"{name} imports {other}: nothing needs a companion"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_amd_wrappers_need_neither_torch_nor_numpy():
    names = [name for name in modules() if any(within(name, package) for package in STANDARD_LIBRARY_ONLY)]
    code = (f"import sys; sys.modules.update(torch=None, numpy=None, tqdm=None); import importlib; "
            f"[importlib.import_module(name) for name in {[*names, 'profile_summary']!r}]")
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(names) > 4, done.stderr


def test_kernels_need_torch_and_triton_alone():
    needed = set()
    for file, tree in sources("evoformer_kernels"):
        if ROOT / "evoformer_kernels" in file.parents:
            needed |= {(node.module if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
                       for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
                       for alias in node.names}
    assert needed - sys.stdlib_module_names == {"torch", "triton", "evoformer_kernels"}
    inner = {name: imported for name, imported in modules().items() if within(name, "evoformer_kernels")}
    assert all(within(other, "evoformer_kernels") for imported in inner.values() for other in imported)


def test_functions_files_and_signatures_stay_small():
    """What travels together is one named thing; kernels and operators, which return tensors, take their
    operands one by one, and one function is called as cuEquivariance's."""
    large, free = [], {"triangle_multiplicative_update"}
    for file, tree in sources(*PACKAGES, "tests"):
        length = file.read_text(encoding="utf-8").count("\n")
        limit = 700 if ROOT / "tests" in file.parents else 820 if file.name == "tiny_openfold_v2.py" else 500
        large += [f"{file.relative_to(ROOT)}: {length} lines"] * (length > limit)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines, given = node.end_lineno - node.lineno, len(node.args.posonlyargs + node.args.args)
                kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
                operator = node.returns is not None and "Tensor" in ast.unparse(node.returns)
                free_to = kernel or operator or node.name in free or "kernels" in file.parts
                if lines >= 60 or given > 10 and not free_to:
                    large.append(f"{file.relative_to(ROOT)}: {node.name}, {lines} lines, {given} arguments")
    assert large == []


# Conformance: every program keeps to the seam


@pytest.fixture(params=PROGRAMS)
def program(request):
    return load_program(ROOT / request.param)


def small(program, **values):
    sizes = next(sizes for file, sizes in PROGRAMS.items() if file.endswith(program.name))
    return program.settings(**{**sizes, "batch_size": 3, "device": "cpu", "num_steps": 2, **values})


def each_switch(program, settings):
    """Settings with every switch that works here turned over, one at a time, and with all of the preset."""
    fusion, off = settings.fusion, program.fusion_config.baseline()
    everything = dataclasses.replace(program.fusion_config.preset(), enable_torch_compile=False)
    turned = [dataclasses.replace(fusion, **{name: not getattr(fusion, name)})
              for name in program.fusion_config.names() if name != "enable_torch_compile"]
    return [with_fusion(settings, f) for f in (off, everything, *turned)]


def test_the_record_is_complete(program):
    settings, kind = small(program), program.fusion_config
    names = [f.name for part in PARTS for f in dataclasses.fields(getattr(settings, part))]
    assert len(names) == len(set(names)) and set(program.axes) <= set(names)
    assert next(iter(program.axes)) == "batch_size" and program.demo.keys() <= set(names)
    assert set(kind.titles().values()) <= set(kind.names())
    assert all(program.result(kind).endswith(f"_{program.suffix}.json") for kind in ("accuracy", "x"))
    trainer = program.trainer(program, settings, CPU)
    assert set(program.model.SUBLAYERS) == {name for name, _ in trainer.model.sublayers()}
    source = program.data(settings)
    first, again = source.batch(3), source.batch(3)
    assert all(torch.equal(first[key], again[key]) for key in first) and source.describe()
    costs = trainer.model.costs(settings.training)
    assert costs == {} or costs.keys() >= set(program.model.SUBLAYERS)


def test_every_parameter_gets_a_gradient(program):
    trainer = program.trainer(program, small(program), CPU)
    accuracy.shake(trainer.model)
    trainer.forward(program.data(trainer.settings).check_batch())["loss"].backward()
    sums = {name: p.grad is not None and bool(p.grad.any()) for name, p in trainer.model.named_parameters()}
    assert all(sums.values()), sums


def test_a_step_asks_for_the_same_loss(program):
    """And for no more than a training step needs."""
    trainer = program.trainer(program, small(program), CPU)
    accuracy.shake(trainer.model)
    batch, asked = program.data(trainer.settings).check_batch(), []
    whole, part = trainer.forward(batch), trainer.forward(batch, only_loss=True)
    torch.testing.assert_close(part, {key: whole[key] for key in part}, rtol=0, atol=0)
    trainer.model.register_forward_hook(lambda *given: asked.append(given[-1]))
    assert torch.equal(trainer.step(batch), whole["loss"]) and asked[0].keys() == part.keys()


def test_one_seed_gives_one_model_under_all_switches(program):
    states = [program.trainer(program, settings, CPU).model.state_dict()
              for settings in each_switch(program, small(program))]
    assert all(state.keys() == states[0].keys() for state in states)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def test_a_checkpoint_crosses_settings(program, tmp_path):
    settings = small(program)
    trainer = program.trainer(program, settings, CPU)
    batches = [program.data(settings).batch(step) for step in range(2)]
    accuracy.shake(trainer.model)
    trainer.step(batches[0])
    torch.save(snapshot(trainer), tmp_path / "saved.pt")
    expected = trainer.step(batches[1]).item()
    for other in each_switch(program, settings):
        if other.idle_reasons(False) == settings.idle_reasons(False):
            second = program.trainer(program, other, CPU)
            restore(second, tmp_path / "saved.pt")
            assert second.step(batches[1]).item() == pytest.approx(expected, rel=1e-4)


def spoil(module, inputs, output):
    return torch.utils._pytree.tree_map(lambda y: y * (1 - 1e-4), output)


def test_accuracy_passes_and_catches_a_generic_mutant(program):
    """The mutant's fused path loses one part in ten thousand of one sub-layer's output."""
    settings = small(program)
    assert accuracy.compare_numerics(program, settings, CPU)[1] == []
    for sublayer in program.model.SUBLAYERS:
        def mutant(config, fusion, sublayer=sublayer):
            model = program.model(config, fusion)
            if fusion != program.fusion_config.baseline():
                dict(model.sublayers())[sublayer].register_forward_hook(spoil)
            return model
        broken = dataclasses.replace(program, model=mutant)
        assert accuracy.compare_numerics(broken, settings, CPU)[1] != [], sublayer


def test_comparison_runs(program):
    settings = small(program)
    found = compare.compare(program, settings, "fused", 2)
    assert all(row.measured and row.launches_per_step > 5 for row in found.rows)
    assert found.as_dict()["config"] == dataclasses.asdict(settings.model)


@pytest.mark.slow
@pytest.mark.parametrize("file", LARGER)
def test_a_profiler_session_attributes_most_of_forward_to_sublayers(file, tmp_path, capsys):
    """The Evoformer's sessions: tests/profiler/test_session.py."""
    program, sizes = load_program(ROOT / file), dict(batch_size=4) | PROGRAMS[file] | LARGER[file]
    flags = [word for name, value in sizes.items() for word in ("--" + name.replace("_", "-"), str(value))]
    session = "--num-steps 6 --warmup-steps 1 --profile-steps 3 --profile-dir".split()
    assert command.run(["--program", program.file, *flags, "--device", "cpu", *session,
                        str(tmp_path / "p")]) == 0
    entries = last_json(capsys.readouterr().out)["sublayers"]
    assert {entry["name"] for entry in entries} == {*program.model.SUBLAYERS, "rest"}
    forward = [(entry["total_us"], entry["name"]) for entry in entries if entry["direction"] == "forward"]
    assert sum(us for us, name in forward if name != "rest") > 0.9 * sum(us for us, _ in forward)


@pytest.mark.slow
def test_amd_wrappers_profile_the_second_program(tmp_path):
    """Which judges its flags, and has no size that it does not know."""
    wrong = run_program("run_rocprofv3.sh", "--dry-run", "--program", SECOND, "--batch-size", 0, cwd=tmp_path)
    assert wrong.returncode == 2 and "--batch-size" in wrong.stderr and wrong.stderr.count("\n") == 1
    done = run_program("run_all_profilers.sh", "--quick", "--only", "pytorch", "--dry-run", "--program",
                       SECOND, "--width", 64, cwd=tmp_path)
    assert done.returncode == 0 and "--width 64" in done.stdout, done.stderr
    assert "--num-steps" in done.stdout and "--seq-len" not in done.stdout


def test_flags_are_judged_and_shown():
    result = run_program("tiny_openfold_v2.py", "--check-flags", "--seq-len", 32, "--disable-all-fusion")
    found = last_json(result)
    assert result.returncode == 0 and result.stdout.count("\n") == 1 and result.stderr == ""
    assert found["config"]["seq_len"] == 32 and not any(v is True for v in found["fusion_config"].values())
    assert found["torch"] == torch.__version__ and found["summary"] == "performance_summary_v2.json"
