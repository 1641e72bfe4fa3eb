# Everything runs in a virtual environment of its own, made from nothing on first use. ENV=ngc: one
# with the versions of NVIDIA's containers, on their Python; ENV=newest: Python 3.13 or 3.12, NumPy 2
# and pandas 2. (Not ENV ?=: shells have an ENV as well.)
ENV :=
ifeq ($(ENV),ngc)
PYTHONS := python3.10
else ifeq ($(ENV),newest)
PYTHONS := python3.13 python3.12
else ifeq ($(ENV),)
PYTHONS := python3.11
else
$(error ENV must be ngc, newest or left out. Received: ENV=$(ENV))
endif
CONSTRAINTS := constraints$(ENV:%=-%).txt
VENV   ?= .venv$(ENV:%=-%)
# pyenv's own are there even where its shims are switched off.
PYENV  := $(foreach p,$(PYTHONS),$(wildcard $(HOME)/.pyenv/versions/$(p:python%=%).*/bin/$(p)))
PYTHON ?= $(firstword $(foreach p,$(PYTHONS) $(PYENV),$(shell $(p) -c 'import sys; print(sys.executable)' 2>/dev/null)))
# Not the environment made here: CUDA, cudf and dask-cuda are the container's.
GPU_PYTHON ?= python3
# A worker process needs 1 to 4 GiB of memory.
PYTEST := -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Beside it, not in it: where Horovod is installed, importing Merlin starts it.
RANKS  := $(VENV)-ranks
# Triton's server with its Python backend, from PyPI; it runs our models in $(VENV).
TRITON := $(VENV)-triton
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-extended test-versions test-ranks triton test-triton test-gpu kills mutants containers-test has-python lint bench docs wheel release-check clean

help:  ## what can be made here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "merlin-cowclip needs one of: $(PYTHONS). Found none: install it or run 'make PYTHON=/path/to/$(firstword $(PYTHONS)) …'." >&2; exit 2; }
	@echo "Installing into $(VENV) with $(PYTHON) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --no-deps --requirement $(CONSTRAINTS)
ifeq ($(ENV),newest)  # the tools, which that file leaves out for users, are those of constraints.txt
	@awk -F== 'NR == FNR {has[tolower($$1)]; next} !/^(#|pandas-stubs|dask-cuda)/ && !(tolower($$1) in has)' $(CONSTRAINTS) constraints.txt > $(VENV)/tools.txt
	@$(BIN)/pip install --quiet --no-deps --requirement $(VENV)/tools.txt
endif
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)  ## synthetic data: prepare, train at batch sizes 64 and 8,192, compare
	@$(BIN)/merlin-cowclip demo

test: $(STAMP) lint  ## ruff, mypy and the quick tests
	@$(BIN)/python $(PYTEST) -m quick

test-all: $(STAMP) $(RANKS)/.installed $(TRITON)/.installed lint  ## every test that needs no GPU
	@COWCLIP_TRITON=$(abspath $(TRITON)) $(BIN)/python $(PYTEST) -m "quick or extended" --ignore tests/ranks
	@$(RANKS)/bin/python -m pytest tests/ranks

test-extended: $(STAMP) $(RANKS)/.installed $(TRITON)/.installed  ## the tests that only test-all runs; QUARTER=0 to 3: a quarter of them
	@COWCLIP_TRITON=$(abspath $(TRITON)) $(BIN)/python $(PYTEST) -m extended --ignore tests/ranks $(QUARTER:%=--quarter %)
	@$(RANKS)/bin/python -m pytest tests/ranks -m extended $(QUARTER:%=--quarter %)

kills: $(STAMP)  ## kill a run KILLS times (40) at random, resume it, compare it with one that was not killed
	@COWCLIP_KILLS=$(or $(KILLS),40) $(BIN)/python -m pytest tests/workflows/training/test_resume.py -k at_random

mutants: $(STAMP) $(RANKS)/.installed  ## change the source, one line at a time, and see that tests fail (an hour)
	@$(BIN)/python -m tests.mutants

test-versions: $(STAMP)  ## the quick tests, without ruff and mypy; for ENV=ngc or ENV=newest
	@$(BIN)/python $(PYTEST) -m quick

# With Gloo only: neither MPI nor NCCL is needed.
$(RANKS)/.installed: $(STAMP) containers/horovod.sh
	@echo "Building Horovod into $(RANKS) (some minutes, once)"
	@$(BIN)/python -m venv $(RANKS)
	@$(BIN)/python -c 'import site, sys; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	  > "$$($(RANKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	@containers/horovod.sh $(RANKS)/bin/python
	@touch $@

test-ranks: $(RANKS)/.installed  ## the important tests on two ranks; builds Horovod for them
	@$(RANKS)/bin/python -m pytest tests/ranks -m ranks

# Without a download there is no server, and its tests skip; the next make tries again.
$(TRITON)/.installed: $(STAMP)
	@echo "Installing Triton's server into $(TRITON) (55 MB)"
	@rm -rf $(TRITON) && mkdir $(TRITON)
	@$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest $(TRITON) nvidia-pytriton==0.7.0 || \
	  { rm -rf $(TRITON); echo "Cannot download nvidia-pytriton from PyPI: tests on a Triton server will be skipped." >&2; exit 0; }; \
	set -e; \
	$(BIN)/python -m zipfile -e $(TRITON)/*.whl $(TRITON); rm $(TRITON)/*.whl; \
	stub=python_backend_stubs/$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	cd $(TRITON)/pytriton/tritonserver; cp $$stub/* backends/python/; \
	chmod +x bin/tritonserver backends/python/triton_python_backend_stub; touch ../../.installed

triton: $(TRITON)/.installed  ## Triton's server, unpacked into $(TRITON)

test-triton: $(STAMP) $(TRITON)/.installed  ## exported runs on a real Triton server, by gRPC; installs it
	@COWCLIP_TRITON=$(abspath $(TRITON)) $(BIN)/python -m pytest tests/triton

test-gpu:  ## every check that needs a GPU, in the environment you are in (an NGC container)
	@COWCLIP_TEST_GPU=1 $(GPU_PYTHON) -m pytest tests/gpu

containers-test:  ## both images, built without a container engine, and the demo in the CPU's (minutes, 7 GB)
	@containers/test.sh

has-python:
	@test -n "$(PYTHON)"

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(STAMP)  ## speed, memory and quality, each compared within one run
	@for b in benchmarks/bench_*.py; do $(BIN)/python $$b || exit 1; done

# -W: a warning is an error, a link that leads nowhere among them.
docs: $(STAMP)  ## the documentation site, into docs/_build
	@$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

words:  ## words of each page, and sentences that readers stumble over
	@python3 docs/words.py

wheel: $(STAMP)  ## the wheel, in dist/
	@$(BIN)/python -m build --wheel --outdir dist

release-check: has-python  ## wheel and source archive, each installed on its own, and the demo run from it (minutes)
	@.ci/release-check $(PYTHON)

clean:  ## remove the environments and everything built
	@rm -rf $(VENV) $(RANKS) $(TRITON) .venv-ngc .venv-ngc-ranks .venv-ngc-triton .venv-newest .venv-newest-ranks .venv-newest-triton dist build docs/_build docs/api .mypy_cache .ruff_cache .pytest_cache
