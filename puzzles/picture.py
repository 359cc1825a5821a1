"""The picture of check.py --picture: for each launch its tensors as they lie in memory, and in a program's
colour the elements that this program loads or stores."""
import itertools
from dataclasses import dataclass, field

WIDE, HIGH, GAP = 5, 10, 18  # pixels: an element, and the space between panels
MOST_ROWS, LONGEST_ROW = 64, 64  # rows of a panel; elements in a row where a tensor has one dimension
MOST_STRIPES = 8  # programs that are told apart in one block
UNTOUCHED, MANY = "#eeeeee", "#999999"
LEGEND = ("Colour and number: the program. Stripes: several programs. Light grey: nobody. Point at a block "
          "to read its place.")


@dataclass
class Launch:
    """One launch of a kernel, or one matrix product of PyTorch: its tensors, and who touches what of them."""
    name: str
    tensors: dict  # {parameter: tensor}
    touched: list = field(default_factory=list)  # ("loaded" or "stored", program, addresses), in their order

    def owners(self, tensor, what):
        """For each element of the tensor's memory the programs that load or store it, in their order."""
        storage, size = tensor.untyped_storage(), tensor.element_size()
        owners = [()] * (storage.nbytes() // size)
        for program, addresses in ((p, a) for w, p, a in self.touched if w == what):
            for element in {(int(address) - storage.data_ptr()) // size for address in addresses}:
                if 0 <= element < len(owners) and program not in owners[element]:
                    owners[element] += (program,)
        return owners


def row_length(tensor):
    """Elements in a row of the picture: those of the dimension along which they are neighbours in memory."""
    if tensor.dim() < 2:
        return min(tensor.numel(), LONGEST_ROW)
    return tensor.shape[min(range(tensor.dim()), key=tensor.stride)]


def blocks(owners, length):
    """(first row, rows, first column, columns, programs) of each rectangle that the same programs touch."""
    runs, done = {}, []
    for row in range(-(-len(owners) // length) + 1):  # the last one is empty
        column, here = 0, {}
        for programs, run in itertools.groupby(owners[row * length:(row + 1) * length]):
            columns = len(list(run))
            here[column, columns, programs] = runs.pop((column, columns, programs), row)
            column += columns
        done += [(first, row - first, *run) for run, first in runs.items()]  # which end above this row
        runs = here
    return done


def rectangle(x, y, width, height, fill, title=""):
    return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}">'
            f"<title>{title}</title></rect>")


def color(program):
    """Neighbours differ in hue and in lightness."""
    number = int(program.replace(",", ""))
    return f"hsl({number * 137.5 % 360:.0f}, 65%, {(50, 65, 80)[number % 3]}%)"


def filling(programs):
    """(fill, the SVG that defines it): of several programs each has a stripe in each row of elements."""
    if not 1 < len(programs) <= MOST_STRIPES:
        return color(programs[0]) if len(programs) == 1 else MANY if programs else UNTOUCHED, ""
    name, height = "s" + "-".join(programs).replace(",", "."), HIGH / len(programs)
    stripes = [rectangle(0, n * height, WIDE, height, color(program)) for n, program in enumerate(programs)]
    return f"url(#{name})", (f'<pattern id="{name}" width="{WIDE}" height="{HIGH}" '
                             f'patternUnits="userSpaceOnUse">{"".join(stripes)}</pattern>')


def drawn(block):
    """The SVG of a block, with its programs' numbers where there is room."""
    first, rows, column, columns, programs = block
    x, y, width, height = column * WIDE, first * HIGH, columns * WIDE, rows * HIGH
    label = " ".join(programs) if len(programs) <= MOST_STRIPES else f"{len(programs)} programs"
    place = f"rows {first} to {first + rows - 1}, columns {column} to {column + columns - 1}"
    fill, definition = filling(programs)
    shapes = definition + rectangle(x, y, width, height, fill, f"{label or 'nobody'}: {place}")
    room = width >= 6 * len(label)
    return shapes + f'<text class="n" x="{x + width / 2:g}" y="{y + height / 2 + 3:g}">{label}</text>' * room


def panel(tensor, owners, title):
    """(width, height, SVG) of one tensor."""
    length = row_length(tensor)
    rows = -(-len(owners) // length)
    note = f"rows of {length}" + f", the first {MOST_ROWS} of {rows}" * (rows > MOST_ROWS)
    shapes = [f'<text y="-18">{title}</text><text y="-5">{note}</text>',
              *map(drawn, blocks(owners[:MOST_ROWS * length], length))]
    return max(length * WIDE, 7 * len(title), 7 * len(note)), min(rows, MOST_ROWS) * HIGH, "\n".join(shapes)


def draw(launches, verdict):
    """The picture, as SVG: a line of panels for each launch."""
    parts, y, widest = [f'<text x="{GAP}" y="24">{verdict}. {LEGEND}</text>'], 40, 900
    for number, launch in enumerate(launches, 1):
        programs = len({program for _, program, _ in launch.touched})
        parts.append(f'<text x="{GAP}" y="{y + 8}" font-weight="bold">launch {number}: {launch.name}, '
                     f'{programs} program{"s" * (programs != 1)}</text>')
        x, tallest = GAP, 0
        for (name, tensor), what in itertools.product(launch.tensors.items(), ("loaded", "stored")):
            if any(owners := launch.owners(tensor, what)):
                width, height, shapes = panel(tensor, owners, f"{name} {tuple(tensor.shape)}: {what}")
                parts.append(f'<g id="{number} {name} {what}" transform="translate({x} {y + 48})">'
                             f"{shapes}</g>")
                x, tallest = x + width + GAP, max(tallest, height)
        y, widest = y + 48 + tallest + GAP, max(widest, x)
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {widest} {y}" width="{widest}" '
                      f'height="{y}" font-family="sans-serif" font-size="12">',
                      "<style>.n { font-size: 9px; text-anchor: middle; paint-order: stroke; stroke: white; "
                      "stroke-width: 2px }</style>",
                      rectangle(0, 0, widest, y, "white"), *parts, "</svg>"]) + "\n"
