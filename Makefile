# Everything a checkout needs, from a fresh machine with Python >= 3.11 and a C compiler.
PYTHON ?= python3
ARGS   ?=
VENV   := .venv
WHEEL  := $(VENV)/wheel/*.whl
BIN    := $(VENV)/bin
CORE   := $(wildcard csrc/*.[ch] csrc/*.def csrc/*.map csrc/cpu/*.[ch] csrc/cuda/*.[ch] csrc/cuda/*.cu csrc/cuda/*.cuh)
SOURCE := $(CORE) setup.py pyproject.toml MANIFEST.in README.md LICENSE $(wildcard linattn/*.py linattn/*/*.py linattn/*/*/*.py linattn/*.pyi)
C      := $(MAKE) --no-print-directory -C tests/c

# Keeps the checkout off sys.path, for children too: what runs is the installed package.
RUN    := PYTHONSAFEPATH=1 $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo test mutants bench lint fmt asan asan-python tsan fuzz docs docs-test clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 13

demo: $(VENV)/installed  ## run the demo; ARGS="..." goes to it
	$(RUN) -m linattn demo $(ARGS)
test: $(VENV)/installed-test  ## run the tests; ARGS="-k gla" goes to pytest
	$(RUN) -m pytest $(ARGS)
mutants: $(VENV)/installed-test  ## plant mistakes in the C core, which the tests must catch; ARGS names some
	$(BIN)/pip install -q "setuptools>=77" && $(RUN) tests/mutants/run.py $(ARGS)
bench: $(VENV)/installed-bench $(VENV)/path/benchmarks  ## measure; ARGS="cuda --quick" goes to python -m benchmarks
	PYTHONPATH=$(abspath $(VENV)/path) $(RUN) -m benchmarks $(or $(ARGS),cpu)
lint: $(VENV)/installed-lint  ## ruff, clang-format, mypy, stubtest, pyright: nothing is changed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy && cd $(BIN) && ./python -P -m mypy.stubtest linattn._linattn
	cd tests/typing && $(abspath $(BIN))/python -P $(SCRIPT) && \
		$(abspath $(BIN))/mypy $(STRICT) $(SCRIPT) && $(abspath $(BIN))/pyright && \
		$(abspath $(BIN))/python -P notebooks.py $(STRICT)
fmt: $(VENV)/installed-lint  ## let ruff fix what it can and format the Python, and clang-format the C
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format . ; $(BIN)/clang-format -i $(FORMATTED)
asan:  ## the C core under AddressSanitizer and UBSan, on random problems
	+$(C) asan
asan-python: $(VENV)/installed-test  ## the whole extension under both, called from Python (gcc)
	+$(C) asan-python PYTHON=$(abspath $(BIN)/python)
tsan:  ## the thread pool under ThreadSanitizer
	+$(C) tsan
fuzz:  ## libFuzzer on the C core (needs clang)
	+$(C) fuzz
docs: $(VENV)/installed-docs  ## the site, into build/docs: every warning and every broken link is an error
	$(RUN) -m sphinx -W --keep-going docs build/docs && $(RUN) docs/check_links.py build/docs
docs-test: docs  ## the site in a browser (needs chromium and its driver)
	$(RUN) -m pytest docs/test_site.py $(ARGS)
clean:  ## remove everything that was built
	rm -rf build dist docs/generated $(VENV) *.egg-info linattn/*.so .*_cache .hypothesis

# A user's script and the cells of the notebooks, for type checkers that read the installed package: they
# run where the checkout's is not seen.
SCRIPT := user_script.py
STRICT  = --config-file= --cache-dir=$(abspath $(VENV))/mypy --strict
FORMATTED = $(filter %.c %.h,$(CORE)) $(wildcard tests/c/*.[ch])

# One environment. The package is built once into a wheel; the stamps say which of its extras are in.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("linattn needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) && $@ -m pip install -q --upgrade pip
# Without a GPU the CUDA part could not run, and nvcc takes minutes for it: LINATTN_CUDA=1 builds it.
$(VENV)/installed: $(SOURCE) | $(BIN)/python
	rm -rf $(VENV)/wheel
	[ "$$LINATTN_CUDA" ] || nvidia-smi -L 2>/dev/null | grep -q ^GPU || export LINATTN_CUDA=0; \
	$(BIN)/pip wheel -q --no-deps -w $(VENV)/wheel .
	$(BIN)/pip install -q --force-reinstall --no-deps $(WHEEL) && $(BIN)/pip install -q $(WHEEL) && touch $@
# benchmarks/ alone, without the linattn beside it that has no extension
$(VENV)/path/benchmarks: | $(BIN)/python
	mkdir -p $(@D) && ln -sfn ../../benchmarks $@
$(VENV)/installed-%: $(VENV)/installed
	$(BIN)/pip install -q "$$(echo $(WHEEL))[$*]" && touch $@
