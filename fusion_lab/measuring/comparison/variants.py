"""The rows of --compare-fusion: which settings are measured, and in which order."""
from dataclasses import dataclass, field, fields, replace

from fusion_lab.measuring.probe import Findings
from fusion_lab.training.files import UserError

COMPILE = "enable_torch_compile"
BASELINE, ALL, AS_GIVEN = "baseline", "all", "as given"
EVERYTHING, ULTRA = "everything", "ultra"  # --enable-all-fusion, --enable-ultra
TOO_LATE = "no time was left; a longer --budget gives more"
UNMEASURED = "stopped before it was measured"  # the reason of a variant that a signal left out


@dataclass
class Variant:
    """Settings under a name, and what was measured of them."""
    name: str
    settings: object  # Settings
    reason: str | None = None  # why it was not measured
    found: Findings | None = None  # alone: with peak_memory_mb and first_step_time
    operations: dict | None = None  # of a forward pass, by sub-layer; None for compiled ones
    trainer: object = None
    timer: object = None  # PhaseTimer
    losses: list = field(default_factory=list)
    names: list = field(default_factory=list)  # all by which it may be picked, if there is more than one

    @property
    def compiled(self):
        return self.settings.fusion.enable_torch_compile


def refuse_idle(variant, device):
    """Whether the variant would measure nothing of its own here, which then is its reason; the user's own
    switches are measured as they are."""
    idle = variant.settings.idle(device.type == "cuda")
    if idle and variant.name != AS_GIVEN:
        variant.reason = "; ".join(idle)
    return variant.reason is not None


def short(name):
    """"enable_qkv_fusion_msa" -> "qkv_msa" """
    return name.removeprefix("enable_").replace("_fusion", "")


def pick_name(name):
    """The word for a row on the command line: "opm alone" -> "opm", "+ cuda_graphs" -> "+cuda_graphs"."""
    return name.removesuffix(" alone").removeprefix("all + ").replace("+ ", "+").replace(" ", "-")


def spoken(word):
    """A word without the differences between a flag, a field and a row: --enable-opm-fusion is opm."""
    return short(word.lstrip("-").replace("-", "_").replace(" ", "_"))


def with_fusion(settings, fusion):
    return replace(settings, fusion=fusion)


def comparison_variants(program, settings, on_gpu):
    """Baseline; every fusion that is on by default alone; all of these; the others alone; then a ladder that
    adds one switch a rung to all and leaves out what cannot run here; the presets; and the user's own
    switches if they are none of these."""
    kind = program.fusion_config
    off, rung, mode = kind.preset(False), kind(), settings.fusion.torch_compile_mode
    usual = [name for name in kind.names() if getattr(rung, name)]
    others = [f.name for f in fields(kind) if f.metadata["alone"] and f.name in kind.names()
              and f.name not in usual]

    def alone(names):
        return {f"{short(name)} alone": replace(off, **{name: True}) for name in names}

    found = {BASELINE: off} | alone(usual) | {ALL: rung} | alone(others)
    for name in kind.ladder():
        compiled = name == COMPILE or rung.enable_torch_compile
        try:
            higher = replace(rung, **{name: True, "torch_compile_mode": mode if compiled else "default"})
        except ValueError:  # CUDA graphs of our own, where torch.compile's mode makes some
            continue
        found["all + torch.compile" if name == COMPILE else f"+ {short(name)}"] = higher
        rung = rung if with_fusion(settings, higher).idle(on_gpu) else higher
    found |= {EVERYTHING: kind.preset(True), ULTRA: kind.ultra()}
    if settings.idle(on_gpu) or settings.fusion not in found.values():  # idle rungs are only named
        found = {**{name: f for name, f in found.items() if f != settings.fusion}, AS_GIVEN: settings.fusion}
    return distinct(settings, found)


def distinct(settings, fusions):
    """Variants of settings, one for each different fusion config, under the first of its names, or that of
    several switches together."""
    names = {}
    for name, fusion in fusions.items():
        names.setdefault(fusion, []).append(name)
    return [Variant(next((n for n in found if n in (ALL, EVERYTHING, ULTRA)), found[0]),
                    with_fusion(settings, fusion), names=found) for fusion, found in names.items()]


def usual_rows(variants, program, on_gpu):
    """The variants without most of those that compile, which --variants names. On a GPU torch.compile by
    itself, the presets and the highest rung below them that runs stay; on a CPU that rung; and everywhere the
    user's own. That rung is "everything" itself where nothing of it is idle."""
    every = program.fusion_config.preset(True)
    rungs = [v for v in variants if v.compiled and not v.settings.idle(on_gpu) and v.name != AS_GIVEN and all(
        getattr(every, name) >= getattr(v.settings.fusion, name) for name in every.names())]
    kept = [v.name for v in (rungs[:1] + rungs[-1:] if on_gpu else rungs[-1:])]
    kept += [EVERYTHING, ULTRA, AS_GIVEN] if on_gpu else [AS_GIVEN]
    return [v for v in variants if not v.compiled or v.name in kept]


def pick(variants, text):
    """The variants that text names, by blanks or commas, and the baseline, each under the name by which it is
    asked for. "opm" is the row of that switch alone, or, where there is none, the one that adds it to the
    others, "+opm". Raises UserError."""
    words = text.replace("+ ", "+").replace(",", " ").split()
    named = [(variant, name) for variant in variants for name in variant.names or [variant.name]]
    rows = {}  # word: rows
    for variant, name in named:
        for word in {spoken(pick_name(name)), spoken(name)}:
            rows.setdefault(word, []).append((variant, name))
    for variant, name in named:
        rows.setdefault(spoken(pick_name(name)).removeprefix("+"), [(variant, name)])
    unknown = [word for word in words if spoken(word) not in rows]
    if unknown or not words:
        raise UserError(f"--variants {text!r}: {unknown[0] if unknown else 'nothing'} is no row; there are "
                        f"{' '.join(dict.fromkeys(pick_name(name) for _, name in named))}")
    asked = {}  # by a variant's first name
    for word in words:
        for variant, name in rows[spoken(word)]:
            asked.setdefault(variant.name, name)
    return [replace(v, name=asked.get(v.name, v.name)) for v in variants if v.name in (BASELINE, *asked)]
