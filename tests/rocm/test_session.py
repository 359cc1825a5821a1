"""How a session's command is run, ended in time and explained, and what is set aside."""
import shlex
import signal
import subprocess
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import session
from fusion_lab.rocm.session import Command, Outcome
from fusion_lab.training.errors import NO_GPU, PROGRAM_FAILED, TIMEOUT
from tests.rocm.fake_rocm.machine import FAKES, manifest, start, summary_of
from tests.support import PATIENCE, ROOT, gone, wait_for


def test_what_goes_on_too_long_is_asked_then_told_then_killed(tmp_path, monkeypatch):
    log, said = tmp_path / "run.log", {signal.SIGINT: "asked", signal.SIGTERM: "told"}

    def patiently(process, number, send=session.signal_group):
        wait_for(lambda: "began" in log.read_text())
        send(process, number)
        wait_for(lambda: said.get(number, "") in log.read_text())
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(session, "signal_group", patiently)
    deaf = "trap 'echo asked' INT; trap 'echo told' TERM; echo began; while :; do sleep 0.1; done"
    assert session.run(Command(["bash", "-c", deaf]), str(tmp_path), 0.1).code == TIMEOUT
    assert log.read_text().replace("Terminated\n", "") == "began\nasked\ntold\n"


def test_what_a_command_leaves_behind_does_not_keep_it(tmp_path):
    assert session.run(Command(["sh", "-c", "sleep 600 & echo $!"]), str(tmp_path), 0).code == 0
    wait_for(lambda: gone(int((tmp_path / "run.log").read_text())), 5)


@pytest.mark.parametrize("ended, log, code, words", [
    (Outcome(-15), "", 143, "the profiled program ended by SIGTERM"),
    (Outcome(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (Outcome(160), "", PROGRAM_FAILED, "it ended with exit code 160"),  # a signal without a name
    (Outcome(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = session.failure(ended, log)
    assert found == code and reason.startswith(words)


@pytest.mark.parametrize("script, number", [
    ("run_rocprofv3.sh", signal.SIGINT), ("run_rocprof_sys.sh", signal.SIGINT),
    ("run_rocprof_compute.sh", signal.SIGTERM)])
def test_an_interrupted_profile_is_flushed_and_summarised(script, number, machine):
    out = machine("7.0", FAKE_TRAINER="hang") / "out"
    command = [ROOT / script, "-o", "out", "--program", FAKES / "trainer.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert any(line.startswith("step 1") for line in process.stdout)
        assert "another run is writing into it" in start("rocprof-sys", "-o", "out", "--force").stderr
        process.send_signal(number)
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == manifest(out)["exit_code"] == 128 + number
    if script == "run_rocprofv3.sh":
        assert "1488 kernel launches" in output and summary_of(out)["steps"] is None  # nobody knows how many


@pytest.mark.parametrize("asked, steps", [(None, 13), ("--validate-setup", None)])
def test_a_mode_has_no_steps_that_kernels_are_counted_for(asked, steps, tmp_path):
    wrapper = SimpleNamespace(answer=dict(asked=asked, training_params=dict(num_steps=10, warmup_steps=3)),
                              selected=False, counted="", records=str(tmp_path), script="x", notes=[],
                              about=lambda: {})
    session.write_manifest(wrapper, [], Outcome(0, "done"))
    assert manifest(tmp_path)["steps"] == steps


def test_the_reader_of_the_output_goes_away(machine):
    workplace = machine("7.0")
    command = ["./run_rocprofv3.sh", "-o", f"{workplace}/out", "--program", f"{FAKES}/trainer.py"]
    command = f"{shlex.join(command)} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and manifest(workplace / "out")["exit_code"] == 0
