"""What `import fusion_lab.kernels` gives without Triton."""
import subprocess
import sys

import pytest

from fusion_lab.kernels import DROP_IN
from tests.support import ROOT

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import fusion_lab.kernels
try:
    {use}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("use", ["fusion_lab.kernels.{}(None)", "from fusion_lab.kernels import {}"])
@pytest.mark.parametrize("name", DROP_IN)
def test_functions_say_that_triton_is_missing(name, use):
    code = WITHOUT_TRITON.format(use=use.format(name))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (
        f"fusion_lab.kernels.{name} needs Triton: pip install triton\n", "")


def test_another_module_that_is_missing_is_named(monkeypatch):
    import fusion_lab.kernels
    monkeypatch.setitem(DROP_IN, "other", "not_there")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        _ = fusion_lab.kernels.other
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fusion_lab.kernels.nothing
