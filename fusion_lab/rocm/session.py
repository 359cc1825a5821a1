"""The story of one session of a wrapper: dry run, checks, fresh directory, the run, records, verdict."""
import json
import os
import pathlib
import platform
import shlex
import sys
import time
from dataclasses import dataclass

from fusion_lab.rocm import machine, preflight, profiled
from fusion_lab.rocm.failures import MEANING, without_colours
from fusion_lab.rocm.process import failure, run, say
from fusion_lab.training import torchrun
from fusion_lab.training.files import NO_DATA, OK, UserError, exit_code, set_aside, write_text
from fusion_lab.training.program import ROOT


@dataclass
class Outcome:
    code: int
    reason: str
    directory: str = ""
    seconds: float = 0.0


def profile(wrapper):
    """Check, make room, run, judge, report. Raises UserError where nothing was run."""
    commands = wrapper.commands()
    if wrapper.options.dry_run:
        say(wrapper.script_text(commands).rstrip())
        return Outcome(OK, "dry run")
    if wrapper.options.preflight:
        return preflight_only(wrapper, commands)
    aside = wrapper.fresh_directory() and check_directory(wrapper.directory, wrapper.options)
    if not (wrapper.options.skip_preflight and wrapper.tool.path):
        preflight.refuse(list(wrapper.problems()))
        wrapper.notes += [f"warning: {text}" for text in wrapper.warnings(commands)]
    if aside:
        wrapper.notes.append(f"earlier results are now in {set_aside(wrapper.directory)}")
    for path in {os.path.join(wrapper.directory, command.log) for command in commands} | wrapper.replaced():
        if moved := set_aside(path):
            wrapper.notes.append(f"{path} is now {moved}")
    write_records(wrapper, commands)
    say(*wrapper.notes, *(shlex.join(command.argv) for command in commands))
    outcome = execute(wrapper, commands)
    write_manifest(wrapper, commands, outcome)
    if outcome.code == OK:
        say(f"{wrapper.script}: done in {outcome.seconds:.0f} s, {outcome.reason}; in {wrapper.directory}")
    else:
        print(f"{wrapper.script}: {MEANING.get(outcome.code, 'failed')}: {outcome.reason.rstrip('.')}. "
              f"Its output: {os.path.join(wrapper.directory, commands[0].log)}", file=sys.stderr)
    return outcome


def preflight_only(wrapper, commands):
    """Everything that was looked at, in order of what helps or hinders."""
    problems, warnings = list(wrapper.problems()), list(wrapper.warnings(commands))
    say(wrapper.executable, *(f"  ok       {text}" for text in wrapper.facts()),
        *(f"  note     {text}" for text in wrapper.notes), *(f"  warning  {text}" for text in warnings),
        *(f"  problem  {problem.what}. {problem.advice}" for problem in problems))
    code = preflight.worst_code(problems)
    say(f"  {'can profile here' if code == OK else f'cannot profile here: {MEANING[code]}'}")
    return Outcome(code, "; ".join(problem.what for problem in problems) or "fine")


def execute(wrapper, commands):
    """Run the commands up to the first that fails, then judge what is there: half a trace is a trace."""
    code, reason, start, wrapper.started = OK, "", time.monotonic(), time.time()
    write_manifest(wrapper, commands, Outcome(None, "running"))
    for command in commands:
        ended = run(command, wrapper.directory, wrapper.options.timeout)
        log = without_colours(pathlib.Path(wrapper.directory, command.log).read_text(errors="replace"))
        if ended.code or ended.interrupted or ended.timed_out:
            code, reason = wrapper.explain(*failure(ended, log), log)
            write_manifest(wrapper, commands, Outcome(code, reason))
            break
    try:
        verdict, words = wrapper.judge(log)
    except (UserError, OSError) as error:  # damaged results; or a full disk
        verdict, words = NO_DATA, str(error)
    if code == OK:
        code, reason = verdict, words
    elif verdict == OK:
        reason += f" (what is there: {words})"
    return Outcome(code, reason, wrapper.directory, time.monotonic() - start)


def check_directory(directory, options):
    """True: results of an earlier run, to be set aside. Refuses what the user named, without --force."""
    path = pathlib.Path(directory)
    if path.exists() and not path.is_dir():
        raise UserError(f"-o {directory}: is not a directory")
    if not path.exists() or not any(path.iterdir()):
        return False
    if options.output_dir and not options.force:
        raise UserError(f"-o {directory}: is not empty. Name a fresh one, or add --force: results of an "
                        "earlier run are then set aside, other files stay.")
    return not options.output_dir or (path / "manifest.json").exists()


def write_records(wrapper, commands):
    """What was run (command.txt) and in which environment (env.txt), and the files that the commands need."""
    os.makedirs(wrapper.records, exist_ok=True)
    for name, content in wrapper.files().items():
        write_text(os.path.join(wrapper.directory, name), content)
    code, commit = machine.output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    facts = {"host": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
             "interpreter": sys.executable, "tool": wrapper.tool.path, "tool version": wrapper.tool.version,
             "ROCm of the tool": wrapper.tool.rocm, "git commit": commit.strip() if code == 0 else None,
             **{f"torch {key}": value for key, value in wrapper.torch.items()}}
    wanted = ("ROC", "HIP", "HSA", "GPU_", "AMD_", "MIOPEN", "TORCH", "PYTORCH", "TRITON", "OMP_", "LD_",
              "PYTHON", "PATH", "VIRTUAL_ENV", "CUDA_VISIBLE", profiled.VARIABLE)
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(wanted)]
    write_text(os.path.join(wrapper.records, "env.txt"), "\n".join(lines) + "\n")
    write_text(os.path.join(wrapper.records, "command.txt"), wrapper.script_text(commands))


def write_manifest(wrapper, commands, outcome):
    """What was run, how it ended, what lies there. How many steps a failed run did, nobody knows."""
    directory = pathlib.Path(wrapper.directory)
    manifest = {
        "script": wrapper.script, "status": MEANING.get(outcome.code, "running"), "reason": outcome.reason,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(wrapper.started)),
        "exit_code": outcome.code, "seconds": round(outcome.seconds, 3), "tool": wrapper.tool.path,
        "tool_version": wrapper.tool.version, "rocm": wrapper.tool.rocm, "torch": wrapper.torch,
        "steps": wrapper.steps() if outcome.code in (None, OK) else None,
        "notes": wrapper.notes, "summary": wrapper.profiled.summary(),
        "commands": [{"argv": command.argv, "cwd": command.cwd, "environment": command.set_env,
                      "unset": list(command.unset_env)} for command in commands],
        "files": [{"path": str(path.relative_to(directory)), "bytes": path.stat().st_size}
                  for path in sorted(directory.rglob("*")) if path.is_file()],
    }
    write_text(os.path.join(wrapper.records, "manifest.json"), json.dumps(manifest, indent=1) + "\n")


def main(wrapper_class, arguments):
    """Exit code of one wrapper; wrong use is one line, problems of the machine are a list."""
    def run(argv):
        torchrun.require_alone(wrapper_class.script)
        return profile(wrapper_class.from_arguments(argv)).code

    return exit_code(run, arguments, wrapper_class.script)
