"""Times that a profiler recorded: impossible ones are cut to what can be true. Standard library only."""
import math
from collections import defaultdict
from typing import NamedTuple

IMPOSSIBLE = ("{} recorded times are impossible: they end before they begin, or behind what came later in "
              "their queue. They count as far as they can be true.")


class Span(NamedTuple):
    """A piece of work on a GPU; times of one clock."""
    name: str
    start: float
    end: float
    queue: object = None   # where the work of one launch comes after that of another; None where unknown
    launch: object = None  # the call that launched it: a graph's launches many, which may run side by side
    number: object = None  # the piece's own, to know one that was recorded twice; None where unknown

    @property
    def time(self):
        return self.end - self.start


def possible(spans, jitter):
    """([Span or None], how many were impossible), in the given order; None for one that was recorded before.
    One that has no times, or ends before it begins, takes none. One that outlives the work of the next launch
    in its queue by more than the clock's jitter ends where that begins."""
    kept, seen, impossible, queues = [], set(), 0, defaultdict(list)
    for place, span in enumerate(spans):
        kept.append(None if span.number is not None and span in seen else span)
        seen.add(span)
        if not 0 <= span.time < math.inf or span.start == span.end == 0:
            impossible += kept[place] is not None
            kept[place] = kept[place] and span._replace(start=0, end=0)
        elif kept[place] and span.queue is not None:
            queues[span.queue].append(place)
    for places in queues.values():
        following = later = None  # the next launch's work, and the next work at all
        for place in sorted(places, key=lambda place: kept[place][1:3], reverse=True):
            span = kept[place]
            if span.launch is None or later and later.launch != span.launch:
                following = later
            if following and following.start > span.start and span.end > following.end + jitter:
                impossible += 1
                kept[place] = span._replace(end=following.start)
            later = kept[place]
    return kept, impossible
