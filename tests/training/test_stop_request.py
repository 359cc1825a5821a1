"""files.StopRequest where several processes may pass on one signal twice."""
import os
import signal

from fusion_lab.training import files


def test_a_patient_one_takes_every_signal_as_one_wish():
    before = signal.getsignal(signal.SIGINT)
    with files.StopRequest(patient=True) as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            assert signal.getsignal(number) == stop.ask  # or the next line would end this process
            os.kill(os.getpid(), number)
            assert stop.signal == number
    assert signal.getsignal(signal.SIGINT) == before
