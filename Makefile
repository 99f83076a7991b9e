# Everything runs in .venv with the versions of constraints.txt; only Python 3.11+ and pip are needed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# what tests, lint and types need
EXTRAS := asr,vlm,train,eval,vad,media,serve,bench,dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-oldest lint types docs notebooks gpu gpu-bench bench clean

help:
	@echo "make demo      shipped models on shipped speech and images"
	@echo "make test      default tests, notebooks included"
	@echo "make test-all  the slow tests too, and test-oldest"
	@echo "make test-oldest  comparisons with transformers on the oldest version that is supported"
	@echo "make lint      ruff"
	@echo "make types     mypy"
	@echo "make docs      the site, in build/site"
	@echo "make bench     speed on this machine's CPU"
	@echo "make gpu       tests on CUDA, with the packages of $(PYTHON), installs nothing; call again to go on"
	@echo "make gpu-bench speed on CUDA, in parts: PART=passes, steps, widened, speech, images or vlm"
	@echo "make clean     remove caches and build outputs, keep $(VENV)"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), mmdecode needs Python 3.11 or newer;" \
	       "install one and run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# the build backend goes in first, so that its version is pinned as well
$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	$(PIP) hatchling
	$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(PY)
	$(PIP) hatchling
	$(PIP) --no-build-isolation -e '.[asr,vlm]'
	@touch $@

# a published recogniser, 56 MB, for Linux on x86_64: whoever cannot have it goes on without, and it
# is tried again the next time
$(VENV)/.moonshine: constraints.txt | $(PY)
	@$(PIP) --retries 0 --timeout 10 --no-deps moonshine-voice 2>/dev/null && touch $@ || echo \
	  "going on without moonshine:tiny-en, which could not be installed; to see why:" \
	  "$(PY) -m pip install --no-deps -c constraints.txt moonshine-voice" >&2

# Ray, 100 MB with Arrow, for the tests of --engine ray: whoever cannot have it goes on without
$(VENV)/.scale: pyproject.toml constraints.txt | $(VENV)/.installed
	@$(PIP) --retries 0 --timeout 10 'ray[data]>=2.60' pyarrow && touch $@ || echo \
	  "going on without Ray, whose tests are skipped" >&2

demo:
	@test -e $(VENV)/.installed || $(MAKE) --no-print-directory $(VENV)/.demo
	@$(MAKE) --no-print-directory $(VENV)/.moonshine
	$(VENV)/bin/mmdecode demo

# one torch thread per test process: two processes on two cores must not fight
test: $(VENV)/.installed $(VENV)/.moonshine
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.installed $(VENV)/.moonshine $(VENV)/.scale
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m "not gpu"
	$(MAKE) --no-print-directory test-oldest

# laid over the same torch, with a hub client of its time
OLDEST := .transformers-5.17
$(OLDEST)/.installed: | $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check --target $(OLDEST) 'huggingface_hub<2'
	$(PY) -m pip install --quiet --disable-pip-version-check --target $(OLDEST) --no-deps transformers==5.17.0
	@touch $@

test-oldest: $(OLDEST)/.installed $(VENV)/.moonshine
	OMP_NUM_THREADS=1 PYTHONPATH=$(OLDEST) $(PY) -m pytest -n 2 --dist loadfile \
	  tests/conformance tests/guide tests/asr tests/vlm tests/test_api.py

lint: $(VENV)/.installed
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(VENV)/.installed
	$(PY) -m mypy

# pages say what is wrong with them; a warning fails
docs: $(VENV)/.installed
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs
	$(PY) -m tests.support.notebooks --pages build/docs/notebooks
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# executes the notebooks and writes their outputs, where these say something else than before
notebooks: $(VENV)/.installed $(VENV)/.moonshine
	OMP_NUM_THREADS=1 $(PY) -m tests.support.notebooks

bench: $(VENV)/.installed
	$(PY) benchmarks/asr_speed.py --device cpu

# tests on CUDA and the benchmarks at toy size; then what is measured, in parts. Steps that are done are
# not repeated, and a call ends within eight minutes: call again to go on. QUICK=1 DEVICE=cpu tries all
DEVICE ?= cuda
GPU_OUT ?= build/gpu
GPU_STEPS = PYTHONPATH=. $(PYTHON) benchmarks/on_gpu.py $@ --device $(DEVICE) --out $(GPU_OUT) \
  $(if $(QUICK),--quick) $(if $(KEEP),--keep) $(if $(ANYWAY),--anyway)

gpu:
	$(GPU_STEPS)

gpu-bench:
	$(GPU_STEPS) $(if $(PART),--part $(PART))

clean:
	rm -rf build dist $(OLDEST) .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
