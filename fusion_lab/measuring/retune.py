"""--retune: the tile sizes of this project's Triton kernels, measured for a program's sizes on this GPU."""
from dataclasses import replace

from evoformer_kernels.limits import HAS_TRITON
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.errors import MISSING, NO_GPU, UserError
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import choose_device, process_settings, require_memory
from fusion_lab.training.reporting import print_result

SWITCH = "enable_triton_"  # how fields of kernels begin
UNTUNED = f"{SWITCH}adamw"  # has no tile sizes to choose from


def retune(program, settings):
    """Run one step in which every launch measures its candidates, uncompiled unless the compiler makes one of
    the calls; keep the winners in the user's cache. Returns the exit code; raises UserError without a GPU,
    Triton or a switch for its kernels."""
    fusion = settings.fusion
    names = [name for name in fusion.names() if name.startswith(SWITCH) and name != UNTUNED]
    if not names:
        raise UserError("--retune: this program's kernels have no tile sizes to choose from")
    if not any(getattr(fusion, name) for name in names):
        raise UserError("--retune: no Triton kernel is on; add --enable-ultra")
    device = choose_device(settings.training.device)
    if device.type != "cuda":
        raise UserError("--retune needs a GPU", code=NO_GPU)
    if not HAS_TRITON:
        raise UserError("--retune needs Triton: pip install triton", code=MISSING)
    require_memory(program, device, settings)
    directory = RunDirectory(program, settings).claim()  # now: what is refused moves no earlier results
    from evoformer_kernels import tuner
    cache = tuner.cache_file()
    try:
        tuner.write(cache, tuner.read(cache))  # what cannot be kept is told now, not after minutes
    except OSError as error:
        raise UserError(f"--retune: cannot write {cache}: {error.strerror}") from None
    compiled = fusion.enable_torch_compile and getattr(fusion, f"{SWITCH}weight_gradients", False)
    settings = replace(settings, fusion=replace(fusion, enable_torch_compile=compiled,
                                                enable_cuda_graphs=False))
    process_settings(settings, device)
    trainer, source = program.trainer(program, settings, device), program.data(settings)
    with tuner.retuning() as tiles:
        trainer.step(to_device(source.batch(0), device))
    if not tiles:
        raise UserError("--retune: no Triton kernel ran; they need --use-amp, and sizes that they take "
                        "(docs/kernels.md)")
    for kernel, chosen in sorted(tiles.items()):
        print(f"{kernel:44s} {', '.join(f'{key} {value}' for key, value in chosen.items())}")
    headline = dict(mode="retune", kernels=len(tiles))
    path = directory.write("tiles", dict(headline, gpu=tuner.gpu(), tiles=tiles, cache=str(cache)))
    print(f"Kept in {cache}")
    print_result(headline, path, settings)
    return 0
