"""Does fusion change the numbers, and is the set-up right: --validate-setup, --verify-accuracy."""
import json
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fusion_lab.measuring.variants import spelled
from fusion_lab.training.checkpoints import optimizer_state, unpacked
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import finite
from fusion_lab.training.machine import choose_device, process_settings, require_memory, runs_in_tf32
from fusion_lab.training.program import Model
from fusion_lab.training.reporting import for_people, print_result

RTOL, ATOL = 1e-3, 1e-4  # fused against baseline in float32, as users know it from this example family
TF32_EPSILON = 2.0 ** -10  # ten bits of mantissa
GRADIENT = "gradient of "
ERROR_FACTOR = 3.0  # fused error against float64, at most this many times the baseline's own


def shake(model):
    """Add noise to every weight: at initialisation the last layer of every residual branch is often zero,
    which would hide any mistake behind it. Model.shake() comes last."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
    if isinstance(model, Model):  # a test may pass a part of one
        model.shake()


def results_and_gradients(trainer, batch):
    """The model's outputs where they are defined, and the gradients of its loss by unpacked parameter name,
    as float64 on the CPU."""
    trainer.model.zero_grad(set_to_none=True)
    output = trainer.forward(batch)
    output["loss"].backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad
                 for name, p in trainer.model.named_parameters()}
    tensors = trainer.model.defined(output, batch)
    tensors |= {f"{GRADIENT}{name}": g for name, g in unpacked(trainer.model, gradients).items()}
    return {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}


def check_tensors(fused, baseline, exact, epsilon, tolerances):
    """Compare two dicts of tensors, each with the float64 one. Returns (summary, failures): largest and mean
    differences fused - baseline; and a line for every tensor that breaks the tolerances or the 3x rule."""
    failures, absolute, relative, worst_ratio = [], [], [], 0.0
    largest = {}  # {is_gradient: largest element of all of them, else of all outputs}
    for name, truth in exact.items():
        is_gradient = name.startswith(GRADIENT)
        largest[is_gradient] = max(largest.get(is_gradient, 0.0), truth.abs().max().item())
    for name, truth in exact.items():
        difference = (fused[name] - baseline[name]).abs()
        size = baseline[name].abs()
        absolute.append(difference.flatten())
        relative.append((difference / size)[size > ATOL])
        error, own = ((x - truth).abs().max().item() for x in (fused[name], baseline[name]))
        # The floor: a few roundings of the largest element, since a small tensor's baseline can be exact by
        # luck, and compiled code sums in a plainer order (8 roundings seen in bias gradients on CPU). Some
        # gradients are zero in exact arithmetic: a constant added to all biases of a softmax changes nothing.
        scale = max(truth.abs().max().item(), 1e-3 * largest[name.startswith(GRADIENT)])
        floor = (16 if epsilon < 1e-6 else 2) * epsilon * scale
        allowed = ERROR_FACTOR * own + floor
        worst_ratio = float(np.maximum(worst_ratio, error / (own + floor)))  # unlike max, keeps NaN
        if not error <= allowed:  # so that NaN fails
            failures.append(f"{name}: error {error:.2e} against float64, allowed {allowed:.2e} "
                            f"(baseline's own {own:.2e})")
        elif tolerances and not bool((difference <= tolerances[1] + tolerances[0] * size).all()):
            failures.append(f"{name}: differs from the baseline by {difference.max().item():.2e}, outside "
                            f"rtol={tolerances[0]}, atol={tolerances[1]}")
    absolute, relative = torch.cat(absolute), torch.cat(relative)
    summary = dict(max_absolute=absolute.max().item(), mean_absolute=absolute.mean().item(),
                   max_relative=relative.max().item(), mean_relative=relative.mean().item(),
                   worst_error_ratio=worst_ratio, tensors=len(exact))
    return summary, failures


def compare_numerics(program, settings, device, note=lambda text: None):
    """Run fused, baseline and float64 baseline on the same weights and batch; returns what check_tensors()
    says. note(text) is told what goes on."""
    training = settings.training
    if hasattr(settings.model, "dropout"):
        settings = settings.having(dropout=0.0)  # three runs cannot draw the same masks
    masters = settings.fusion.enable_master_weights
    off = program.fusion_config.baseline()
    plain = replace(settings, fusion=replace(off, enable_master_weights=masters))
    batch = to_device(program.data(settings).check_batch(), device)
    process_settings(settings, device)
    baseline = program.trainer(program, plain, device)
    shake(baseline.model)
    exact = program.trainer(program, plain.having(use_amp=False, amp_dtype=None), device)
    fused = program.trainer(program, settings, device)
    for trainer in (exact, fused):
        trainer.model.load_state_dict(baseline.model.state_dict())
    exact.model.double()
    double = {key: value.to(device, torch.float64 if value.is_floating_point() else None)
              for key, value in batch.items()}
    runs = []
    for name, trainer, inputs in (("as given", fused, batch), ("the baseline", baseline, batch),
                                  ("the baseline in float64", exact, double)):
        note(f"Running {name}")
        runs.append(results_and_gradients(trainer, inputs))
    dtype = baseline.amp_dtype or torch.float32
    tf32 = dtype == torch.float32 and runs_in_tf32(training, device)
    tolerances = (RTOL, ATOL) if dtype == torch.float32 and not tf32 else None
    return check_tensors(*runs, TF32_EPSILON if tf32 else torch.finfo(dtype).eps, tolerances)


OF_THE_STEP = {"enable_cuda_graphs", "enable_master_weights", "enable_triton_adamw"}  # not of its gradients


def covered(settings, device):
    """What a check of these settings covers, for its result. checked: the switches that outputs and gradients
    depend on. not_used: why the others have no effect, or none on outputs and gradients."""
    on_gpu = device.type == "cuda"
    used = settings.in_use(on_gpu)
    beyond = [spelled(name) for name in used if name in OF_THE_STEP]
    return dict(checked=[spelled(name) for name in used if name not in OF_THE_STEP],
                not_used=[*settings.idle_reasons(on_gpu), *(
                    f"{name} changes the optimizer's step, and outputs and gradients are checked"
                    for name in beyond)])


def print_covered(coverage):
    """Print it. Returns a list: why nothing was checked, or nothing if something was."""
    print(f"Checked: {', '.join(coverage['checked']) or 'nothing'}")
    if coverage["not_used"]:
        print(f"Not used here: {'; '.join(coverage['not_used'])}")
    return [] if coverage["checked"] else ["nothing that is switched on differs from the baseline here"]


def verify_accuracy(program, settings):
    """--verify-accuracy: print the differences and PASS or FAIL, and write them where --profile-dir says;
    exit code 0 or 1."""
    training = settings.training
    device = choose_device(training.device)
    require_memory(program, device, settings)
    directory = RunDirectory(program, settings).claim_for_check()
    verdict, failures = compare_numerics(program, settings, device, partial(print, flush=True))
    print(f"Fused against baseline on {device}: {verdict['tensors']} tensors (outputs, loss, all gradients), "
          f"same weights and inputs")
    print(f"   Absolute difference: max {verdict['max_absolute']:.3e}, mean {verdict['mean_absolute']:.3e}")
    print(f"   Relative difference: max {verdict['max_relative']:.3e}, mean {verdict['mean_relative']:.3e} "
          f"(of elements above {ATOL:g})")
    applied = " (float32 only, not applied)" if training.use_amp or runs_in_tf32(training, device) else ""
    print(f"   Tolerance: rtol={RTOL:g}, atol={ATOL:g}{applied}")
    print(f"   Error against float64: at most {verdict['worst_error_ratio']:.2f}x the baseline's own, "
          f"allowed {ERROR_FACTOR:g}x")
    coverage = covered(settings, device)
    failures = [*failures, *print_covered(coverage)]
    for line in failures[:10]:
        print(f"   {line}")
    if len(failures) > 10:
        print(f"   ... and {len(failures) - 10} more")
    result = dict(mode="verify_accuracy", passed=not failures, device=str(device), **finite(verdict),
                  failures=failures, rtol=RTOL, atol=ATOL, error_factor=ERROR_FACTOR, **coverage)
    path = directory.write("accuracy", result) if directory.named else None
    print("FAIL" if failures else "PASS")
    print_result(result, path, settings)
    return 1 if failures else 0


def validate_setup(program, settings):
    """--validate-setup: numerics of the fusions and five steps of training on a small model. The last line
    is the verdict, the line before it, for programs, the result as JSON; exit code 0 or 1."""
    device = choose_device(settings.training.device)
    sizes = {name: value for name, value in program.demo.items() if hasattr(settings.model, name)}
    small = settings.having(**sizes, batch_size=2)
    print(f"Device: {device} | torch {torch.__version__}", flush=True)
    _, failures = compare_numerics(program, small, device)
    print(f"   Fused against baseline numerics: {'FAIL' if failures else 'ok'}", flush=True)
    coverage = covered(small, device)
    reasons = [*failures[:3], *print_covered(coverage)]
    trainer = program.trainer(program, small.having(learning_rate=1e-3), device)
    batch = to_device(program.data(small).check_batch(), device)
    losses = [trainer.step(batch).item() for _ in range(5)]
    falls = losses[-1] < losses[0]
    print(f"   Five training steps: loss {losses[0]:.4f} -> {losses[-1]:.4f} {'ok' if falls else 'FAIL'}")
    if not falls:
        reasons.append(f"loss did not fall in five steps on one batch: {losses[0]:.4f} -> {losses[-1]:.4f}")
    squares = trainer.weights.named(optimizer_state(trainer, "exp_avg_sq"))
    missing = [name for name, square in squares.items() if not square.any()]
    if missing:
        reasons.append(f"parameters without a gradient: {', '.join(missing[:3])}")
    if not for_people(settings):
        print(json.dumps(dict(mode="validate_setup", passed=not reasons, reasons=reasons,
                              losses=finite(losses), device=str(device), **coverage), allow_nan=False))
    title = program.suffix.upper()
    print(f"{title} validation failed: {'; '.join(reasons)}" if reasons else
          f"{title} validation successful! Fusion setup working properly.")
    return 1 if reasons else 0
