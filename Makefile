# make demo: install what models run on, without torch, and watch it work.  make test: install everything and run everything that
# proves it.  make quick: the exact proofs and the loop alone.  make light: what needs no torch, where torch is not installed.
PYTHON ?= python3
BIN = .venv/bin
LIGHT ?= tests lab/tests
FILES = pyproject.toml data/pyproject.toml certify/pyproject.toml lab/pyproject.toml ray/pyproject.toml setup.py constraints.txt
BUILT = $(FILES) $(wildcard outrider/kernels/cpu/src/* outrider/kernels/cpu/src/simd/*)
# compat: otherwise a program in the folder above would import the clone's folder, if that is called outrider.
PIP = PYTHONWARNINGS=ignore $(@D)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -C editable_mode=compat
VENV = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outrider needs Python 3.11 or newer, this is " + sys.version.split()[0])' && $(PYTHON) -m venv $(@D)

.PHONY: install demo test light quick check bench dist clean sanitize

install: .venv/.installed

.venv/.installed: $(BUILT)
	@echo "Installing everything into .venv: several minutes, and pip says nothing. Without a GPU, see docs/guides/operate.md#install first."
	@$(VENV)
	$(PIP) --quiet --upgrade pip
	$(PIP) --quiet -e '.[dev]' -e ./data -e ./certify -e ./lab -e ./ray
	@touch $(@D)/.demo $@

.venv/.demo: $(BUILT)
	@echo "Installing into .venv: first the kernels are compiled, for a minute or two."
	@$(VENV)
	$(PIP) -e ./data -e ./certify -e ./lab -e .
	@touch $@

demo: .venv/.demo
	@$(BIN)/outrider demo

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

.venv-light/.installed: $(BUILT)
	@$(VENV)
	$(PIP) --quiet -e '.[light]' -e ./data -e ./certify -e ./lab
	@touch $@

light: .venv-light/.installed
	.venv-light/bin/python -m pytest -n 2 --dist loadfile $(LIGHT)

quick: install
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/exact tests/unit/core tests/unit/verify tests/unit/control tests/unit/engine

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	cd certify && ../$(BIN)/lint-imports
	$(BIN)/pyright

bench: install
	$(BIN)/python -m benchmarks.real --target builtin:smollm2-135m --minutes 15

# The wheels of every platform, in dist/, and what can be tested of them on this machine.
dist: .venv-dist/.installed
	.venv-dist/bin/python packaging/dist.py

.venv-dist/.installed: packaging/requirements.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check -r packaging/requirements.txt
	@touch $@

# The native code under the address, undefined-behaviour and thread sanitizers.
sanitize:
	tests/native/sanitize

clean:
	rm -rf .venv .venv-light .venv-dist build dist *.egg-info outrider/kernels/cpu/*.so
