# make train    a small model learns, in minutes      make train ARGS="--num-steps 200 --use-amp"
# make test     runs the tests                        make test ARGS="-m slow"  (the long ones)
# make mutants  do the tests notice changed code?  make mutants ARGS="proteins/batches.py"  (all: an hour)
# make lint     ruff and, where installed, shellcheck
# fusion_lab/environment.py chooses the Python: an activated environment with a torch, or a venv that it makes.
PYTHON ?= python3
IN := $(PYTHON) fusion_lab/environment.py

train:
	@$(IN) requirements.txt tiny_openfold_v2.py --demo $(ARGS)

test:  # with bytecode, which many containers forbid: every process would compile the project once more
	@PYTHONDONTWRITEBYTECODE= $(IN) requirements-dev.txt -m pytest -n 2 --dist worksteal $(ARGS)

mutants:
	@$(IN) requirements-mutants.txt benchmarks/mutants.py $(ARGS)

lint:
	@$(IN) requirements-dev.txt -m ruff check .
	if command -v shellcheck >/dev/null; then shellcheck *.sh fusion_lab/*.sh; fi

clean:
	rm -rf .venv .pytest_cache .ruff_cache

.PHONY: train test mutants lint clean
