"""What collectives take in a trace, by small numbers."""
from types import SimpleNamespace

import pytest

from fusion_lab.measuring.trace import collectives


def event(name, start, duration, thread=1):
    return dict(name=name, ts=start, dur=duration, tid=thread)


@pytest.mark.parametrize("name, kind", [
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all-reduce"), ("gloo:all_reduce", "all-reduce"),
    ("rcclReduceScatter", "reduce-scatter"), ("gloo:reduce_scatter", "reduce-scatter"),
    ("nccl AllGather", "all-gather"), ("gloo:all-to-all", "all-to-all"),
    ("ncclDevKernel_SendRecv", "all-to-all"), ("gloo:broadcast", "broadcast"), ("gloo:barrier", "other")])
def test_kinds_of_exchanges(name, kind):
    assert collectives.kind_of(name) == kind


def test_times_that_meet_are_one():
    assert collectives.merged([(7, 8), (1, 2), (0, 1), (4, 6), (4, 5)]) == [(0, 2), (4, 6), (7, 8)]
    assert collectives.merged([(0, 5), (1, 2), (3, 6)]) == [(0, 6)] and collectives.merged([]) == []
    assert collectives.overlap(1, 6, [(0, 2), (3, 4), (5, 9), (10, 11)]) == 1 + 1 + 1
    assert collectives.overlap(1, 6, [(7, 8)]) == 0


def test_what_other_work_hides_on_a_gpu_and_on_a_cpu():
    work = [event("NCCL_AllReduce", 0, 10), event("gemm", 4, 20), event("copy", 2, 1),
            event("rcclAllReduce", 20, 8)]
    found = collectives.collectives(SimpleNamespace(on_gpu=True, work=work, steps=4))
    assert found == {"all-reduce": dict(calls=0.5, us=4.5, hidden_us=(7 + 4) / 4)}
    marks = [event("gloo:all_gather", 0, 10, thread=9), event("a gloo: of mine", 0, 9, thread=8)]
    operations = [event("aten::mm", 5, 10, thread=2), event("aten::copy_", 0, 10, thread=9)]
    trace = SimpleNamespace(on_gpu=False, marks=marks, operations=operations, steps=2)
    assert collectives.collectives(trace) == {"all-gather": dict(calls=0.5, us=5, hidden_us=2.5)}


def test_waits_are_what_goes_beyond_the_shortest():
    def of(**us):
        return {kind.replace("_", "-"): dict(calls=3.0, us=time, hidden_us=0.75 * time)
                for kind, time in us.items()}
    ranks = {0: of(all_reduce=2000.0, all_gather=500.0), 1: of(all_reduce=1500.0)}
    assert collectives.of_ranks(ranks) == dict(by_rank=ranks, wait_us={0: 1000, 1: 0})
    ranks[2] = of(broadcast=0.0)
    found = collectives.of_ranks(ranks)
    assert found == dict(by_rank=ranks, wait_us={0: 2500, 1: 1500, 2: 0})
    assert collectives.sentences(found) == [
        "Collectives in a step of rank 0: all-reduce 2.000 ms (3 calls, 75% hidden), all-gather 0.500 ms "
        "(3 calls, 75% hidden); 2.500 ms of it waits for other ranks",
        "Collectives in a step of rank 1: all-reduce 1.500 ms (3 calls, 75% hidden); 1.500 ms of it waits "
        "for other ranks",
        "Collectives in a step of rank 2: broadcast 0.000 ms (3 calls, 0% hidden); 0.000 ms of it waits for "
        "other ranks"]
    alone = collectives.of_ranks({3: of(all_reduce=0.5)})  # less than a microsecond
    assert alone["wait_us"] is None and collectives.of_ranks({}) == dict(by_rank={}, wait_us=None)
    assert collectives.sentences(alone) == [
        "Collectives in a step of rank 3: all-reduce 0.001 ms (3 calls, 75% hidden)"]
