"""Words in what programs print. Standard library only."""


def printable(text):
    """Text on one line: control characters, such as a name may hold, are spelled out."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in str(text))


def time_left(seconds):
    """In words."""
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"


def counted(number, noun):
    """As in "1 step" and "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
