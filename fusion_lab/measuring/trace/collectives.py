"""Exchanges between ranks in a trace: how long each kind takes, and how much of it other work hides.

On a GPU they are kernels of NCCL or RCCL, on a CPU ranges of Gloo. They begin when this rank comes to them
and end when all have: what one rank's take longer than the shortest of all ranks' is its wait for others.
"""
import re

KINDS = {"all-reduce": r"allreduce", "reduce-scatter": r"reducescatter", "all-gather": r"allgather",
         "all-to-all": r"alltoall|sendrecv", "broadcast": r"broadcast"}
OF_GPUS = re.compile("nccl|rccl", re.IGNORECASE)


def kind_of(name):
    """One of KINDS, or "other"."""
    plain = re.sub("[_ -]", "", name).lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, plain)), "other")


def merged(spans):
    """(start, end) pairs -> the same times as disjoint pairs, in order."""
    result = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(start, end, spans):
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in spans)


def span(event):
    return event["ts"], event["ts"] + event["dur"]


def collectives(trace):
    """{kind: {calls, us, hidden_us}}, a step's, of a TraceAnalysis; empty where nothing is exchanged."""
    if trace.on_gpu:
        found = [e for e in trace.work if OF_GPUS.search(e["name"])]
        other = [e for e in trace.work if not OF_GPUS.search(e["name"])]
    else:
        found = [e for e in trace.marks if e["name"].startswith("gloo:")]
        threads = {e["tid"] for e in found}  # Gloo's own
        other = [e for e in trace.operations if e["tid"] not in threads]
    busy, result = merged(map(span, other)), {}
    for event in found:
        entry = result.setdefault(kind_of(event["name"]), dict(calls=0.0, us=0.0, hidden_us=0.0))
        entry["calls"] += 1 / trace.steps
        entry["us"] += event["dur"] / trace.steps
        entry["hidden_us"] += overlap(*span(event), busy) / trace.steps
    return result


def of_ranks(by_rank):
    """What collectives() found in ranks, {rank: its result}, with each rank's wait for the others."""
    totals = {rank: sum(entry["us"] for entry in kinds.values()) for rank, kinds in by_rank.items()}
    least = min(totals.values(), default=0.0)
    return dict(by_rank=by_rank, wait_us={rank: total - least for rank, total in totals.items()}
                if len(totals) > 1 else None)


def sentences(found):
    """of_ranks() in words, a line for each rank."""
    lines = []
    for rank, kinds in found["by_rank"].items():
        parts = [f"{kind} {e['us'] / 1e3:.3f} ms ({e['calls']:.0f} calls, "
                 f"{100 * e['hidden_us'] / (e['us'] or 1.0):.0f}% hidden)" for kind, e in kinds.items()]
        wait = found["wait_us"] and f"; {found['wait_us'][rank] / 1e3:.3f} ms of it waits for other ranks"
        lines.append(f"Collectives in a step of rank {rank}: {', '.join(parts)}{wait or ''}")
    return lines
