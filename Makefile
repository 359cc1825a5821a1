# make train    a small model learns, in minutes      make train ARGS="--num-steps 200 --use-amp"
# make fold     folds the alignment in examples/      make fold ARGS=query.a3m
# make test     runs the tests                        make test ARGS="-m slow"  (the long ones)
# make lint     ruff and, where installed, shellcheck
# An activated environment that has torch is used as it is, and nothing is installed there. Otherwise pip
# completes .venv. One that is made here sees the packages of $(PYTHON), so that a torch in range is kept; one
# that is there already stays as isolated as its owner made it.
PYTHON ?= python3
ACTIVE := $(filter-out $(CURDIR)/.venv,$(or $(VIRTUAL_ENV),$(CONDA_PREFIX)))
ifneq ($(ACTIVE),)
  HAS_TORCH := $(shell $(PYTHON) -c "import importlib.util as u; print('yes' * bool(u.find_spec('torch')))")
endif
ifeq ($(HAS_TORCH),yes)
  IN := $(PYTHON)
else
  IN := .venv/bin/python
  RUN := .venv/complete-requirements
  GEMMI := .venv/complete-gemmi
  RUFF := .venv/complete-ruff
  TRITON := .venv/complete-triton
endif

train: $(RUN)
	@$(IN) tiny_openfold_v2.py --demo $(ARGS)

fold: $(RUN) $(GEMMI)
	@$(IN) tiny_openfold_v2.py --fold $(or $(ARGS),examples/1a3a.a3m --structure examples/1a3a.pdb)

test: $(TRITON)  # with bytecode, which many containers forbid: every process would compile the project once more
	@$(IN) -c "import pytest, xdist" || { echo "needed: $(IN) -m pip install -r requirements-dev.txt" >&2; exit 3; }
	@PYTHONDONTWRITEBYTECODE= $(IN) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(RUFF)
	@$(IN) -m ruff check .
	@if command -v shellcheck >/dev/null; then shellcheck *.sh; fi

define VENV
@test -w . || { echo "$(CURDIR) cannot be written into: activate an environment with torch first" >&2; exit 2; }
@grep -qs "system-site-packages = false" .venv/pyvenv.cfg || $(PYTHON) -m venv --system-site-packages .venv
endef

.venv/complete-%: %.txt requirements.txt
	$(VENV)
	.venv/bin/python -m pip install -r $<
	@touch $@

.venv/complete-gemmi .venv/complete-ruff: .venv/complete-%: requirements-dev.txt
	$(VENV)
	.venv/bin/python -m pip install "$$(grep -o '^$*[^ ]*' $<)"
	@touch $@

.venv/complete-triton: .venv/complete-requirements-dev  # a torch for GPUs brings one, under whatever name
	.venv/bin/python -c "import triton" || .venv/bin/python -m pip install "triton>=3.6,<3.10" || \
		echo "without Triton the tests of the kernels are skipped"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache

.PHONY: train fold test lint clean
