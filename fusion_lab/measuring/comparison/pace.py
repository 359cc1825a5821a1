"""How long a comparison goes on: rounds, or a budget of seconds."""
import math
import time

from fusion_lab.measuring.comparison.rows import FEWEST, speedup_interval

ROUNDS = 0.25  # of the budget at least, however long counting took
NARROW = 0.04  # high / low - 1 of a speed-up's interval that needs no more rounds
WHOLE = dict(cpu=3.0, cuda=1.5)  # budgets of the first table until the last row


class Pace:
    """So many rounds; or, within a budget of seconds from now on, as many as it takes until all intervals
    are narrow. With both, rounds end with whichever comes first. There is always one. strict: what cannot be
    counted within the budget is left out. slowest: seconds that counting one of its variants took at most."""

    def __init__(self, steps, seconds=None, strict=False):
        self.steps, self.seconds, self.look, self.began = steps, seconds, FEWEST, None
        self.slowest = 0.0
        self.ends = None if seconds is None else time.monotonic() + seconds
        self.strict = strict and seconds is not None

    def __str__(self):
        rounds = [] if self.steps is None else [f"{self.steps} of each"]
        return " or ".join(rounds + ([] if self.seconds is None else [f"at most {self.seconds:g} s of them"]))

    def whole(self, device):
        """When the last row is to be there, on the clock of this."""
        return None if self.ends is None else self.ends + (WHOLE[device.type] - 1) * self.seconds

    def part(self, share, until=None):
        """That of other rows, which begin now: a share of the budget, or what is left of it until then."""
        if self.seconds is None:
            return Pace(self.steps)
        left = math.inf if until is None else max(until - time.monotonic(), 0.0)
        return Pace(self.steps, min(share * self.seconds, left), strict=True)

    def late(self):
        """Whether to stop counting, as only the time for rounds is left, or less than one variant took before
        (its kernels may compile); never if not strict."""
        return self.strict and time.monotonic() + self.slowest >= self.ends - ROUNDS * self.seconds

    def left(self):
        if self.ends is None:
            return math.inf
        return max(self.ends - time.monotonic(), self.seconds * ROUNDS if self.began is None else 0.0)

    def left_text(self, rounds=0):
        """How much longer it takes, after so many rounds, to be put behind something."""
        counted = (self.steps - rounds) * self.per_round(rounds) if self.steps and rounds else math.inf
        left = min(self.left(), counted)
        return "" if left == math.inf else f", at most {left:.0f} s left"

    def per_round(self, rounds):
        return (time.monotonic() - self.began) / rounds

    def over(self, variants, rounds):
        """Whether so many rounds are enough of these variants; asked before each."""
        if rounds == 0:
            self.ends = self.ends and time.monotonic() + self.left()
            self.began = time.monotonic()
            return False
        if rounds == self.steps or self.left() < self.per_round(rounds):
            return True
        if self.steps is not None or rounds < self.look:
            return False
        self.look = rounds + rounds // 8 + 1
        intervals = [speedup_interval(v, variants[0]) for v in variants[1:] if not v.reason]
        return all(high < (1 + NARROW) * low for low, high in intervals)
