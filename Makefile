# make train    trains on the built-in proteins      make train ARGS="--num-steps 200 --use-amp"
# make test     runs the tests                       make test ARGS="-k masks"
# make lint     ruff and, where installed, shellcheck
# The venv sees the system's packages, so a torch that is already there (a ROCm or CUDA module's) is kept.
PYTHON ?= python3
VENV := .venv

train: $(VENV)/core
	$(VENV)/bin/python tiny_openfold_v2.py $(ARGS)

test: $(VENV)/dev
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/dev
	$(VENV)/bin/python -m ruff check .
	if command -v shellcheck >/dev/null; then shellcheck *.sh fusion_lab/*.sh; fi

$(VENV)/python:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	touch $@

$(VENV)/core: requirements.txt | $(VENV)/python
	$(VENV)/bin/python -m pip install -r requirements.txt
	touch $@

$(VENV)/dev: requirements-dev.txt requirements.txt | $(VENV)/python
	$(VENV)/bin/python -m pip install -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

.PHONY: train test lint clean
