"""Settings under a name: the one vocabulary of comparison, ablation and study. Needs no torch.

    baseline      nothing is fused            only-X        the baseline and the switch X
    fused         the defaults                without-X     the defaults without X
    compiled      fused + torch.compile       X+Y           the baseline with X and Y
    everything    --enable-all-fusion         fused+X       the defaults and X
    ultra         --enable-ultra              given         the switches of the command line

X is a switch as its flag spells it: flash-attention for --enable-flash-attention.
"""
import difflib
from dataclasses import dataclass, replace

from fusion_lab.training.errors import UserError

BASELINE, FUSED, COMPILED, EVERYTHING, ULTRA, GIVEN = (
    "baseline", "fused", "compiled", "everything", "ultra", "given")
ONLY, WITHOUT = "only-", "without-"
COMPILE = "enable_torch_compile"


@dataclass
class Variant:
    """Settings and their name."""
    name: str
    settings: object  # Settings
    reason: str | None = None  # why it is not measured
    not_used: tuple = ()  # why switches that are on change nothing here, a sentence each

    @property
    def wants_own_process(self):
        """Whether it needs a process of its own, because other models in it would disturb compiled or
        captured code."""
        fusion = self.settings.fusion
        return fusion.enable_torch_compile or fusion.enable_cuda_graphs


def spelled(switch):
    """"enable_flash_attention" -> "flash-attention" """
    return switch.removeprefix("enable_").replace("_", "-")


def with_fusion(settings, fusion):
    return replace(settings, fusion=fusion)


def fusion_named(name, given):
    """The switches that a name stands for, as an instance of given's class; given are those of the command
    line. Raises UserError."""
    kind = type(given)
    switches = {spelled(switch): switch for switch in kind.names()}

    def turned(fusion, words, on):  # for an unknown word its error lists `whole`, which is below
        if unknown := [word for word in words if word not in switches]:
            names = ", ".join((*whole, f"{ONLY}X", f"{WITHOUT}X", "X+Y", f"{FUSED}+X"))
            possible = [*switches, *(whole if name.startswith(unknown[0]) else ())]
            near = difflib.get_close_matches(unknown[0], possible, 1)
            meant = "+".join(part.replace(unknown[0], near[0]) if near and part.endswith(unknown[0]) else part
                             for part in name.split("+"))
            meant = f"did you mean {meant}? It " if near else ""
            raise UserError(f"--variants {name!r}: {meant}must be {names}, where X is one of "
                            f"{', '.join(switches)}; {unknown[0]!r} is none")
        fusion = replace(fusion, **{switches[word]: on for word in words})
        # --torch-compile-mode is for every row that compiles, unless that makes its own CUDA graphs
        compiled = fusion.enable_torch_compile and not fusion.enable_cuda_graphs
        return replace(fusion, torch_compile_mode=given.torch_compile_mode) if compiled else fusion

    whole = {BASELINE: kind.baseline(), FUSED: kind(), COMPILED: turned(kind(), [spelled(COMPILE)], True),
             EVERYTHING: kind.preset(), ULTRA: kind.ultra(), GIVEN: given}
    if name in whole:
        return whole[name]
    if name.startswith(WITHOUT):
        return turned(kind(), [name.removeprefix(WITHOUT)], False)
    first, *others = name.split("+")
    if first in whole:
        return turned(whole[first], others, True)
    return turned(whole[BASELINE], name.removeprefix(ONLY).split("+"), True)


def at_work(settings, on_gpu):
    """The fusion config without the switches that are idle here. Settings for which it is equal run alike."""
    idle, off = settings.fusion.idle(settings, on_gpu), settings.fusion.baseline()
    return replace(settings.fusion, **{name: getattr(off, name) for name in idle})


def name_of(settings, on_gpu):
    """The name of the variant that runs as these settings do; None if switches alone do not make it."""
    acting = [spelled(switch) for switch in settings.in_use(on_gpu)]
    name = "+".join(acting) if acting[1:] else "".join([ONLY, *acting]) if acting else BASELINE
    named = with_fusion(settings, fusion_named(name, settings.fusion))
    return name if at_work(named, on_gpu) == at_work(settings, on_gpu) else None


def default_names(settings, on_gpu):
    """The usual rows: what is on by default together and one by one, compiled, and on a GPU the presets; the
    command line's own switches if they are none of these."""
    usual = type(settings.fusion)()
    single = [f"{ONLY}{spelled(switch)}" for switch in usual.names() if getattr(usual, switch)]
    names = [BASELINE, FUSED, *single, COMPILED, *([EVERYTHING, ULTRA] if on_gpu else []), GIVEN]
    by_fusion = {}
    for name in names:
        by_fusion.setdefault(fusion_named(name, settings.fusion), name)
    return list(by_fusion.values())


def make_variants(settings, names, on_gpu):
    """The baseline, then a Variant for each of the names (text with blanks or commas, or a list; None: the
    usual ones). A variant that would run like an earlier one here has a reason not to be measured. Raises
    UserError."""
    words = names.replace(",", " ").split() if isinstance(names, str) else names
    if words is not None and not words:
        raise UserError("--variants: names nothing")
    asked = [BASELINE, *(default_names(settings, on_gpu) if words is None else words)]
    variants, known = [], {}
    for name in dict.fromkeys(asked):
        variant = Variant(name, with_fusion(settings, fusion_named(name, settings.fusion)))
        variant.not_used = tuple(variant.settings.idle_reasons(on_gpu))
        if (same := known.setdefault(at_work(variant.settings, on_gpu), name)) != name:
            variant.reason = "; ".join((f"here it is the same as {same}", *variant.not_used))
        variants.append(variant)
    return variants
