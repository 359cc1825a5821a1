"""Ranks of distributed runs for tests/programs/test_distributed.py.

    python tests/programs/ranks.py DIRECTORY NAME...            # scenarios by Gloo on the CPU
    torchrun --nproc-per-node 2 tests/programs/ranks.py same    # equality on GPUs, by NCCL

The first form imports everything once and forks the ranks of every scenario; DIRECTORY/NAME.json then has
their exit codes and what they printed.
"""
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import time
import traceback
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training import checkpoints, distributed, feeding, master_weights
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.machine import choose_device, process_settings
from proteins import contacts
from proteins.batches import RealProteins, SyntheticProteins

TINY = dict(num_blocks=1, seq_len=16, num_seqs=6, msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2,
            outer_product_dim=4, warmup_steps=1)
FLAGS = [word for name, value in TINY.items() for word in ("--" + name.replace("_", "-"), str(value))]
STEPS = 3


def settings(**values):
    return tof.COMMAND_LINE.settings(**{**TINY, "num_steps": 9, "grad_clip": 0.1, **values})


# --- Sources ---------------------------------------------------------------------------------------------

def real_source(whole):
    """Families of all lengths and depths, some residues without coordinates: no file is read."""
    source = object.__new__(RealProteins)
    source.config, source.training, source.extra, source.world = whole.model, whole.training, 0, None
    source.families = []
    for length in range(7, 30, 3):
        rng, place = np.random.default_rng(length), np.arange(length)
        coords = np.stack([3 * place, 2 * (place % 4), place % 7], 1).astype(np.float32)
        coords[place % 5 == length % 5] = np.nan
        msa = rng.integers(0, 22, (length // 3, length)).astype(np.uint8)
        source.families.append(SimpleNamespace(name=f"f{length}", msa=msa, coords=coords, length=length))
    return source


class Lopsided:
    """No coordinates in the first half of the samples, no letters asked for in the other."""

    def __init__(self, whole):
        self.source = SyntheticProteins(whole)

    def batch(self, step):
        batch = self.source.batch(step)
        half = len(batch["coords"]) // 2
        batch["coord_mask"][:half], batch["msa_targets"][half:] = 0, -100
        return batch


SOURCES = dict(synthetic=SyntheticProteins, real=real_source, lopsided=Lopsided)


# --- In the ranks: several do what one does ----------------------------------------------------------------

def converted(batch, dtype, device):
    return feeding.to_device({key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()},
                             device)


def in_dtype(dtype):
    """The program with a model in this dtype."""
    return dataclasses.replace(tof.PROGRAM, model=lambda *how: tof.TinyOpenFoldV2(*how).to(dtype))


def trainer_in(world, program, device, values, samples):
    distributed.current = world
    own = settings(batch_size=samples // world.data_size, **values)
    process_settings(own, device)
    return program.trainer(program, own, device)


def steps_of(trainer, source, steps, dtype=torch.float64):
    """Losses of these steps."""
    losses = []
    for step in steps:
        batch = converted(feeding.batch_of(source, step, trainer.world), dtype, trainer.device)
        losses.append(trainer.step(batch).item())
        trainer.step_number += 1
    return losses


def weights_of(trainer):
    named = checkpoints.unpacked(trainer.model, {name: w.detach() for name, w in trainer.weights.items()})
    return torch.cat([named[name].flatten() for name in sorted(named)])


def far(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def require(what, *numbers, limit=1e-10):
    if not all(number <= limit for number in numbers):
        raise AssertionError(f"{what}: {numbers} should be at most {limit}")


def met(device="cpu", **values):
    device = choose_device(device)
    return device, distributed.begin(settings(**values), device)


def masters_in_float64(model, *_):
    return master_weights.MasterWeights(model, torch.float64)


def equal(rank):
    """Losses and weights of several ranks are those of one process that has all their samples; a checkpoint
    of n ranks continues on one and on n. Two ranks try every other case, four the rest."""
    device, world = met()
    program, path = in_dtype(torch.float64), f"{DIRECTORY[0]}/equal.pt"
    pairs = itertools.product(SOURCES, ("plain", "masters", "parts"))
    for name, kind in [*pairs][world.size // 4::2]:
        values = dict(shard_optimizer=kind == "parts", ema_decay=0.5 * (kind == "parts"))
        tof.master_weights = masters_in_float64 if kind == "masters" else master_weights.master_weights
        source = SOURCES[name](settings(batch_size=4))
        several, one = (trainer_in(w, program, device, values, 4) for w in (world, ALONE))
        expected, found = (steps_of(trainer, source, range(STEPS)) for trainer in (one, several))
        what = f"{name}, {kind}"
        require(what, far(found, expected), (weights_of(several) - weights_of(one)).abs().max().item())
        require("losses fall into place", -max(expected), limit=-1)
        checkpoints.save(several, path)
        world.from_first(lambda: None)
        resumed = trainer_in(ALONE, program, device, values, 4)
        checkpoints.restore(resumed, path)
        expected = steps_of(one, source, range(STEPS, STEPS + 1))
        require(f"{what}, resumed by one", far(steps_of(resumed, source, range(STEPS, STEPS + 1)), expected))
        back = trainer_in(world, program, device, values, 4)
        checkpoints.restore(back, path)
        require(f"{what}, resumed by all", far(steps_of(back, source, range(STEPS, STEPS + 1)), expected),
                (weights_of(back) - weights_of(one)).abs().max().item())


def plain_means_differ(rank):
    """What `equal` would notice: with the mean of the ranks' means, unequal samples make another loss."""
    device, world = met()
    source = Lopsided(settings(batch_size=4))
    one, several = (trainer_in(w, in_dtype(torch.float64), device, {}, 4) for w in (ALONE, world))
    several.world.weight = lambda model, batch: 1 / world.data_size
    require("difference", -far(steps_of(several, source, [0]), steps_of(one, source, [0])), limit=-1e-3)


def agree(rank):
    """A gradient that is infinite on one rank has all skip the step; a signal to one ends all after the same
    step; a loss that is not finite on one is so on all."""
    device, world = met()
    for shard in (False, True):
        values = dict(use_amp=True, amp_dtype="float16", enable_master_weights=True, shard_optimizer=shard)
        trainer = trainer_in(world, tof.PROGRAM, device, values, 4)
        source = SyntheticProteins(settings(batch_size=4))
        steps_of(trainer, source, [0], torch.float32)
        before, scale = weights_of(trainer), trainer.scaler.get_scale()
        if rank == 1:
            trainer.model.distogram_head.bias.register_hook(lambda g: g * float("inf"))
        steps_of(trainer, source, [1], torch.float32)
        assert torch.equal(before, weights_of(trainer)) and trainer.scaler.get_scale() == scale / 2
    trainer = trainer_in(world, tof.PROGRAM, device, {}, 4)
    heard = []
    for step in range(4):
        steps_of(trainer, source, [step], torch.float32)
        heard.append(world.heard(signal.SIGTERM if rank == 1 and step == 1 else None))
    assert heard == [None, None, signal.SIGTERM, signal.SIGTERM], heard
    assert world.settled(signal.SIGINT if rank == 0 else None) == signal.SIGINT
    assert world.gather(rank) == [*range(world.size)] and world.from_first(lambda: rank) == 0
    random = torch.rand(())
    assert len({x.item() for x in world.gather(random)}) == world.size, "dropout must differ"


def same(rank, *only):
    """On GPUs, by the 3x rule against float64: CUDA graphs, torch.compile, master weights, parts of them; or
    only some of these cases."""
    device, world = met("auto")
    large = dict(msa_dim=32, pair_dim=64, outer_product_dim=16, num_blocks=2, seq_len=32, num_seqs=16)
    samples, source = 2 * world.size, SOURCES["real"](settings(batch_size=2 * world.size, **large))
    plain = {name: False for name in tof.FusionConfig.names()}
    exact = trainer_in(ALONE, in_dtype(torch.float64), device, plain | large, samples)
    losses = steps_of(exact, source, range(STEPS))
    masters = dict(use_amp=True, amp_dtype="bfloat16", enable_master_weights=True)
    fast = dict(enable_cuda_graphs=True, enable_torch_compile=True)
    parts = dict(shard_optimizer=True)
    cases = dict(float32={}, graphs=dict(enable_cuda_graphs=True), compiled=dict(enable_torch_compile=True),
                 both=fast, masters=masters, everything={**masters, **fast}, shards=parts,
                 shards_of_masters={**masters, **fast, **parts},
                 float16={**masters, **fast, **parts, "amp_dtype": "float16"})
    failed = []
    for name, values in cases.items():
        if only and name not in only:
            continue
        errors = []
        for where in (world, ALONE):
            trainer = trainer_in(where, tof.PROGRAM, device, values | large, samples)
            own = steps_of(trainer, source, range(STEPS), torch.float32)
            off = weights_of(trainer) - weights_of(exact)
            errors.append((far(own, losses), off.square().mean().sqrt().item()))
            torch._dynamo.reset()
        (loss, weight), (loss_alone, weight_alone) = errors
        floor = 1e-3 if "use_amp" in values else 1e-5  # of rounding, by which either may be exact by luck
        good = loss <= 3 * loss_alone + floor and weight <= 3 * weight_alone + 0.01 * floor
        failed += [name] * (not good)
        if world.first:
            print(f"{name:18s} {'ok' if good else 'FAILED':6s} loss {loss:.2e} (one GPU {loss_alone:.2e}), "
                  f"weights {weight:.2e} ({weight_alone:.2e})", flush=True)
    distributed.current = world
    if world.first:
        print(f"{world.describe()}: {'FAILED: ' + ', '.join(failed) if failed else 'all equal'}", flush=True)
    return int(bool(failed))


# --- Whole programs --------------------------------------------------------------------------------------

def program(*flags, trouble=None):
    """A scenario that runs the trainer with flags, after trouble(rank), which may spoil something."""
    def run(rank):
        if trouble:
            trouble(rank)
        return tof.main([*FLAGS, "--device", "cpu", "--profile-dir", f"{DIRECTORY[0]}/results", *flags])
    return run


def spoilt_forward(make):
    """Trouble: from step 3 on, forward of rank 1 is make(output)."""
    def spoil(rank):
        plain = tof.Trainer.forward
        def forward(self, batch):
            output = plain(self, batch)
            return make(output) if rank == 1 and self.step_number >= 3 else output
        tof.Trainer.forward = forward
    return spoil


def not_a_number(output):
    return {key: x * float("nan") if x.is_floating_point() else x for key, x in output.items()}


def no_memory(output):
    raise MemoryError


def no_memory_at_once(rank):
    """Trouble: rank 1 has no memory for its first step, which is within what is restored afterwards."""
    def forward(self, batch):
        return no_memory(None) if rank == 1 else plain(self, batch)
    plain, tof.Trainer.forward = tof.Trainer.forward, forward


def no_memory_to_evaluate(rank):
    """Trouble: the first rank, which alone evaluates, has no memory for whole chains."""
    contacts.contact_precision = lambda *inputs: no_memory(None)


def asleep(output):
    time.sleep(60)


def mistaken(rank):
    def forward(self, batch):
        raise KeyError("a mistake of this test")
    tof.Trainer.forward = forward


def send(number):
    """What the parent does: send a signal to the last rank as soon as there is a checkpoint."""
    def act(pids):
        path = f"{DIRECTORY[0]}/run.pt"
        deadline = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pids[-1], number)
    return act


SAVING = ("--num-steps", "100000", "--save-every", "3", "--batch-size", "2", "--save-checkpoint")
SHORT = ("--num-steps", "6", "--log-every", "2", "--eval-every", "3", "--batch-size")
# name: (ranks, what each does, what is done to them)
SCENARIOS = dict(
    equal=(2, equal, None), equal_of_four=(4, equal, None), differ=(2, plain_means_differ, None),
    agree=(2, agree, None), one=(1, program(*SHORT, "4", "--save-checkpoint", "one.pt"), None),
    two=(2, program(*SHORT, "2", "--save-checkpoint", "two.pt", "--shard-optimizer"), None),
    killed=(2, program(*SAVING, "run.pt"), send(signal.SIGKILL)),
    terminated=(2, program(*SAVING, "run.pt"), send(signal.SIGTERM)),
    nan=(2, program(*SHORT, "2", trouble=spoilt_forward(not_a_number)), None),
    memory=(2, program(*SHORT, "2", trouble=spoilt_forward(no_memory)), None),
    warming=(2, program(*SHORT, "2", "--shard-optimizer", trouble=no_memory_at_once), None),
    evaluating=(2, program(*SHORT, "2", "--shard-optimizer", "--ema-decay", "0.5",
                           trouble=no_memory_to_evaluate), None),
    asleep=(2, program(*SHORT, "2", "--collective-timeout", "2", trouble=spoilt_forward(asleep)), None),
    mistake=(2, program(*SHORT, "2", trouble=mistaken), None),
    no_data=(2, program("--data", "absent"), None), flags=(2, program("--batch-size", "0"), None),
    mode=(2, program("--compare-fusion"), None),
    profiled=(2, program(*SHORT, "2", "--enable-pytorch-profiler", "--profile-rank", "all"), None),
    no_rank=(2, program("--profile-rank", "2"), None))

DIRECTORY = ["."]


def rank_of(scenario, rank, size, port):
    """A rank in a process of its own; returns its id."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"rank{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if size > 1:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            os.environ.update(zip(names, map(str, (rank, rank, size, size)), strict=True))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        code = scenario(rank) or 0
        if distributed.current is not ALONE:
            distributed.current.close(code)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_scenario(name):
    size, scenario, act = SCENARIOS[name]
    DIRECTORY[0] = os.path.abspath(name)
    os.makedirs(name)
    os.chdir(name)
    port, started = free_port(), time.monotonic()
    pids = [rank_of(scenario, rank, size, port) for rank in range(size)]
    if act:
        act(pids)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    found = dict(codes=codes, seconds=time.monotonic() - started)
    for kind in ("out", "err"):
        found[kind] = [pathlib.Path(f"rank{rank}.{kind}").read_text() for rank in range(size)]
    os.chdir("..")
    pathlib.Path(f"{name}.json").write_text(json.dumps(found))


def main(argv):
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        return distributed.exit_code(lambda names: globals()[names[0]](rank, *names[1:]), argv, "ranks.py")
    os.chdir(argv[0])
    for name in argv[1:]:
        run_scenario(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
