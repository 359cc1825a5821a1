"""A program's sizes: the axes that it names, and other sizes made of the given ones. No torch."""


def other_axes(program):
    """The axes but the number of samples, in the program's order."""
    return [axis for axis in program.axes if axis != "batch_size"]


def sizes_text(program, settings, axes=None):
    """"B 4, S 64, N 16", of all axes or of these."""
    return ", ".join(f"{program.axes[axis]} {settings.get(axis)}" for axis in axes or program.axes)


def shrunk(program, settings, largest):
    """The settings with next to no work in a step: the axes keep their proportion, since models choose ways
    of computing by it, and the largest is `largest`, or twice that, four times, where the program refuses
    it. The number of samples stays, because a step may loop over them."""
    sizes = {axis: settings.get(axis) for axis in other_axes(program)}
    top = max(sizes.values(), default=0)
    while largest < top:
        try:
            return settings.having(**{axis: max(1, size * largest // top) for axis, size in sizes.items()})
        except ValueError:
            largest *= 2
    return settings


def shapes_around(program, settings):
    """[{axis: size}, ...]: the given sizes and some on every side of them that the program accepts."""
    given = {axis: settings.get(axis) for axis in program.axes}
    batch, others = given["batch_size"], other_axes(program)
    half = {axis: max(1, size // 2) for axis, size in given.items()}
    changes = [{}, *({axis: half[axis]} for axis in given),
               *(dict(batch_size=half["batch_size"], **{axis: 2 * given[axis]}) for axis in others),
               dict(batch_size=batch + 1)]
    if len(others) > 1:
        changes.append({others[0]: half[others[0]], others[1]: 2 * given[others[1]]})
    shapes = []
    for change in changes:
        shape = {**given, **change}
        if shape not in shapes and accepts(settings, shape):
            shapes.append(shape)
    return shapes


def accepts(settings, shape):
    """Whether the configs allow these sizes."""
    try:
        settings.having(**shape)
    except ValueError:
        return False
    return True
