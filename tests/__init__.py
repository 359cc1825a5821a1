"""Where the test of a thing is.

tests/kernels/attention/test_function.py tests evoformer_kernels/attention/function.py, and so on: folders
are as in fusion_lab, tiny_openfold and companions.

    kernels/     problems.py: functions of kernels beside PyTorch's; test_families.py: what all of them keep
    model/       tiny_openfold_v2.py: layers, Evoformer, trainer, training loop
    programs/    whole programs as a user starts them: runs, stops, wrong use, damaged files, verbs on a GPU
    test_house   imports run one way, and every program keeps to the seam

`make test` runs the quick ones. ARGS="-m slow" runs the long ones, "-m gpu" what needs a GPU, "-m full" every
case of every kernel. Where there are tests of kernels in Triton's interpreter, on the CPU, a second session
with the same arguments follows (conftest.py). support.py starts programs and reads what they print.
Stand-ins lie beside their users.
"""
