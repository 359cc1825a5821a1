"""Samples split over ranks against one process, in float64: `python split_samples.py NAME ...` prints one
line of JSON, {case: {ranks: the largest error and where it is}}; "trained": of some steps of two pairs of
ranks; "peaks": bytes. test_splitting.py starts it.

Four processes, forked after the imports, of which all or two at a time share a sample.
"""
import json
import multiprocessing
import os
import pathlib
import sys
from dataclasses import replace
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import tiny_openfold_v2 as tof
from fusion_lab.kernels import dispatch
from fusion_lab.kernels.library import exchanges
from fusion_lab.measuring.counters import OpCounter
from fusion_lab.training import distributed
from fusion_lab.training.checkpoints import unpacked
from fusion_lab.training.feeding import batch_of
from proteins import splitting
from proteins.batches import SyntheticProteins
from proteins.orientations import BINS

SMALL = dict(msa_dim=16, pair_dim=16, msa_heads=2, pair_heads=2, outer_product_dim=4, num_blocks=2,
             batch_size=2, seq_len=13, num_seqs=7)
EVEN = dict(seq_len=12, num_seqs=8)
PLAIN = tof.FusionConfig.preset(False)
PACKED = tof.FusionConfig(enable_projection_fusion=True, enable_transition_fusion=True,
                          enable_activation_checkpointing=True, attention_backend="sdpa")
KERNELS = tof.FusionConfig(**{name: True for name in tof.FusionConfig.names() if "triton" in name})
SELECTIVE = tof.FusionConfig(enable_selective_checkpointing=True)
COMPILED = tof.FusionConfig(enable_torch_compile=True, enable_activation_checkpointing=True)


def case(fusion=None, masks=True, targets=True, dtype=torch.float64, **sizes):
    return dict(fusion=fusion or tof.FusionConfig(), masks=masks, targets=targets, dtype=dtype,
                sizes={**SMALL, **sizes})


CASES = {
    "uneven, masks": case(),
    "even, no masks, made again": case(SELECTIVE, masks=False, **EVEN),
    "uneven, no masks, more ranks than rows": case(masks=False, num_seqs=3, seq_len=5, num_blocks=1),
    "baseline": case(PLAIN, num_blocks=1),
    "packed, checkpointing, dropout": case(PACKED, dropout=0.3, num_blocks=1, **EVEN),
    "outer product re-associated": case(PACKED, batch_size=1, seq_len=14, num_seqs=3,
                                         num_blocks=1),
    "couplings": case(coevolution="couplings", num_blocks=1, **EVEN),
    "couplings, uneven": case(coevolution="couplings", num_blocks=1),  # whose inverse is made in float32
    "orientations, uneven": case(orientations=True, num_blocks=1),
    "predictions": case(targets=False, num_blocks=1),
    "predictions, orientations": case(targets=False, orientations=True, num_blocks=1),
    "bfloat16": case(dtype=torch.bfloat16),
    "compiled": case(COMPILED, num_blocks=1),
    "kernels": case(KERNELS, dtype=torch.float32, num_blocks=1, seq_len=6, num_seqs=3),
}


def a_batch(settings, masks, targets):
    batch = tof.PROGRAM.check_batch(settings, torch.device("cpu"))
    if settings.model.coevolution != "none":
        batch["extra_msa"] = SyntheticProteins(settings.having(num_seqs=24)).batch(0)["msa_tokens"]
    dropped = ("seq_mask", "row_mask") * (not masks)
    dropped += ("coords", "coord_mask", "msa_targets", "orientations") * (not targets)
    return {key: value for key, value in batch.items() if key not in dropped}


def a_model(settings, fusion, dtype=torch.float64):
    """The same weights under every fusion, none of them 0; in float32 for autocast."""
    torch.manual_seed(1)
    reference = tof.TinyOpenFoldV2(settings.model, PLAIN).double()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model = tof.TinyOpenFoldV2(settings.model, fusion).double()
    model.load_state_dict(reference.state_dict())
    return model.to(torch.promote_types(dtype, torch.float32))


def results(model, batch, dtype=torch.float64, ranks=exchanges.ALONE):
    """Loss and all gradients, or predictions where nothing is asked for."""
    torch.manual_seed(2)  # of dropout, alike on all ranks
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        output = model(**batch)
    if "loss" not in output:
        return {key: output[key] for key in ("distances", "contact_probability", *BINS) if key in output}
    output["loss"].backward()
    ranks.sum_gradients(model.parameters())
    gradients = unpacked(model, {name: p.grad for name, p in model.named_parameters()})
    return dict(gradients, **{key: value for key, value in output.items() if key.endswith("loss")})


def deviation(expected, found):
    """The largest error of any tensor relative to its largest element, or to a thousandth of the largest of
    all where it vanishes by cancellation, and that tensor's name."""
    assert set(expected) == set(found)
    floor = max(x.abs().max() for x in expected.values()) / 1000
    errors = {name: ((found[name] - x).abs().max() / x.abs().max().clamp(min=floor)).item()
              for name, x in expected.items()}
    worst = max(errors, key=errors.get)
    return dict(error=errors[worst], where=worst)


def error_of(group, fusion, masks, targets, dtype, sizes):
    settings = replace(tof.PROGRAM.settings(**sizes), fusion=fusion)
    batch = a_batch(settings, masks, targets)
    exact = results(a_model(settings, replace(fusion, enable_torch_compile=False)), batch)
    model = a_model(settings, fusion, dtype)
    found = deviation(exact, results(model, batch, dtype, splitting.split_over(model, group)))
    if dtype != torch.float64:
        found["alone"] = deviation(exact, results(a_model(settings, fusion, dtype), batch, dtype))["error"]
    return found


# Mutants: what an error of this code would be like. Names of attributes of exchanges, and what replaces them.


def no_exchange(x, name, size):
    """Every rank takes its own part for that of all."""
    return torch.stack([x] * size)


MUTANTS = {
    "all_gather": no_exchange,
    "all_to_all": lambda x, name, size: x,
    "reduce_scatter": lambda x, name, size: x[dist.get_rank() % size].clone(),
    "Ranks.sum_gradients": lambda ranks, tensors: None,
    "Ranks.sum": lambda ranks, x: x,
    "Ranks.own": lambda ranks, x, dim: x.chunk(ranks.size, dim)[0].clone(),
    "Gather.backward": lambda ctx, g: (exchanges.ranks_first(g, ctx.how[0], ctx.how[2])[0], *[None] * 3),
}


def mutated(name):
    owner, _, attribute = name.rpartition(".")
    return mock.patch.object(getattr(exchanges, owner) if owner else exchanges, attribute, MUTANTS[name])


def trained(world, steps=3):
    """The largest error of weights and losses of a few steps of two pairs of ranks, each pair with a sample
    of its own, against one process with both; with parts of the optimizer's state, too."""
    torch.set_default_dtype(torch.float64)
    found = []
    for ranks, shard in ((distributed.ALONE, False), (world, False), (world, True)):
        settings = tof.PROGRAM.settings(**SMALL, sequence_parallel=2, learning_rate=1e-3, ema_decay=0.5,
                                        shard_optimizer=shard)
        with mock.patch.object(distributed, "current", ranks):
            trainer = tof.Trainer(tof.PROGRAM, settings, torch.device("cpu"))
        source = tof.PROGRAM.open_source(settings)
        batches = [batch_of(source, step, ranks) for step in range(steps)]
        losses = [trainer.step({key: x.double() if x.is_floating_point() else x for key, x in batch.items()})
                  for batch in batches]
        found.append({name: x.detach() for name, x in trainer.weights.items()} | dict(
            losses=torch.stack(losses)))
    torch.set_default_dtype(torch.float32)
    return max((deviation(found[0], several) for several in found[1:]), key=lambda worst: worst["error"])


def peaks(group):
    """Bytes of the largest step of a model alone, and of one that shares its sample with this group."""
    settings = tof.PROGRAM.settings(**{**SMALL, "batch_size": 1, "num_seqs": 16, "seq_len": 48})
    batch, found = a_batch(settings, True, True), {}
    for name in ("alone", "split"):
        model = tof.TinyOpenFoldV2(settings.model, PACKED)
        if name == "split":
            splitting.split_over(model, group)
        with OpCounter() as counter:
            model(**batch)["loss"].backward()
        found[name] = counter.peak
    return found


def work(rank, port, names, out):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    world = distributed.begin(tof.PROGRAM.settings(sequence_parallel=2), torch.device("cpu"))
    groups = {"2": world.mesh["sequence"].get_group(), "4": dist.group.WORLD}
    found = {}
    for name in names:
        title, _, sizes = name.partition(" / ")
        if title == "trained":
            found[title] = trained(world)
            continue
        for size in sizes or "2":
            if rank >= int(size):  # the second pair would only do the same
                continue
            if title == "peaks":
                found.setdefault(title, {})[size] = peaks(groups[size])
            elif title in MUTANTS:
                with mutated(title):
                    found[title] = error_of(groups[size], **CASES["uneven, masks"])
            else:
                found.setdefault(title, {})[size] = error_of(groups[size], **CASES[title])
    if rank == 0:
        out.send(found)
    world.close(0)


def interpret_kernels():
    """Where Triton interprets: as if the model lay on a GPU."""
    from tests.kernels import triton_targets
    triton_targets.mend_interpreter()
    dispatch.runs = lambda x: x.dtype == torch.float32
    dispatch.takes_attention = lambda x, heads: dispatch.runs(x)


def main(names):
    if os.environ.get("TRITON_INTERPRET"):
        interpret_kernels()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    processes = [context.Process(target=work, args=(rank, store.port, names, sender)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)
    print(json.dumps(receiver.recv()))


if __name__ == "__main__":
    main(sys.argv[1:])
