"""While a program starts or ends, when nothing is under way that would have to be saved: Ctrl-C and want of
memory are one line, no traceback; streams that are closed take nothing and harm nobody. Imports next to
nothing, since whatever comes before quiet() is not covered by it."""
import os
import signal
import sys

# What the system says that gives no more; of a library that cannot be loaded, or of a thread.
TOO_SMALL = ("start new thread", "failed to map segment", "Cannot allocate memory")


def leave(number, _frame):
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def quiet(name):
    """The first call of a program, with its __name__; where that is imported, nothing happens. An ignored
    Ctrl-C stays ignored, as shells have it for what runs in the background."""
    if name == "__main__":
        open_streams()
        sys.excepthook = say_what_is_missing
    if name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def open_streams():
    """Standard streams that whoever started the program has closed (`2>&-`) go nowhere: else the next file
    would get their number, and what libraries print would be written into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, handle == number)  # programs that this one starts have it, too
            setattr(sys, name, open(handle, mode, closefd=False))  # noqa: SIM115  as long as the program


def gives_no_more(error):
    """Whether the system has no memory or thread left, by an error's words."""
    return any(words in str(error) for words in TOO_SMALL)


def say_what_is_missing(kind, error, trace):
    """sys.excepthook: a line where there is no memory to begin with."""
    if issubclass(kind, MemoryError) or gives_no_more(error):
        name = os.path.basename(sys.argv[0])
        print(f"{name}: error: {str(error) or 'out of memory'}: the system gives no more memory or threads; "
              "see ulimit -v and ulimit -u", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class Raised:
    """Within, Ctrl-C raises KeyboardInterrupt where quiet() has been called, so that work ends in order;
    before and after, while modules are imported and Python ends, it is leave()."""
    within = False

    def __enter__(self):
        self.was_quiet = signal.getsignal(signal.SIGINT) is leave
        if self.was_quiet:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Raised.within = True

    def __exit__(self, *_):
        if self.was_quiet:
            Raised.within = False
            signal.signal(signal.SIGINT, leave)
