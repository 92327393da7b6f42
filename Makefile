# What people and CI run. Needs make and Python 3.11 or newer; everything else comes pinned, into .venv.
#   make demo                    the whole story on this machine
#   make test PYTHON=python3.12  with another interpreter

PYTHON ?= python3
VENV   ?= .venv
UV     ?= uv
ARGS   ?=

BIN := $(VENV)/bin
# With every file pinned by its hash, a machine's own constraints can only be wrong.
PIP := PIP_CONSTRAINT=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help install demo guard test test-real lint format bench side-by-side lock clean

help:
	@echo "make demo       a simulated engine hangs and is replaced, and the sidecar and a router's guard see it"
	@echo "make guard      the router's guard as one file, dist/enginewatch-guard.pyz; any Python from 3.9 on builds it"
	@echo "make test       the tests (minutes; no root, no real engine)"
	@echo "make test-real  the tests against the real vLLM, llama.cpp and routers on this CPU (the first time, installs"
	@echo "                2.7 GB under ~/.cache and compiles some minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make format     what of that ruff can fix by itself"
	@echo "make bench      measurements"
	@echo "make side-by-side ARGS=\"--other 'NAME=COMMAND'\"  another watcher program and ours on one real vLLM"
	@echo "make lock       renews requirements/*.txt (needs uv); ARGS=--upgrade takes newer releases"
	@echo "make clean      removes .venv and what tools left behind"
	@echo "ARGS=... is handed on: make test ARGS='-k kv_growing -x'"

# Two stamps: a changed lock makes the environment anew, a changed pyproject.toml only installs the package again.
$(VENV)/.locked: requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "enginewatch needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing what requirements/dev.txt pins into $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/.installed

demo: install
	@$(BIN)/enginewatch demo $(ARGS)

# Standard library only, so nothing has to be installed. -I: what lies beside the script is not in its way.
guard:
	@$(PYTHON) -I src/enginewatch/guard/pack.py dist/enginewatch-guard.pyz

test: install
	$(BIN)/python -m pytest -m "not real" -n 2 --dist loadfile $(ARGS)

# Exit code 75 of an installer: what it installs cannot be had here, and its tests skip themselves, saying so.
test-real: install
	@venv=$$($(BIN)/python tests/real/install_vllm.py); code=$$?; \
	if [ $$code -eq 75 ]; then venv=unobtainable; elif [ $$code -ne 0 ]; then exit $$code; fi; \
	server=$$($(BIN)/python -m tests.real.install_llamacpp); code=$$?; \
	if [ $$code -eq 75 ]; then server=unobtainable; elif [ $$code -ne 0 ]; then exit $$code; fi; \
	routers=$$($(BIN)/python -m tests.real.install_routers); code=$$?; \
	if [ $$code -eq 75 ]; then routers=unobtainable; elif [ $$code -ne 0 ]; then exit $$code; fi; \
	ENGINEWATCH_REAL_VLLM="$$venv" ENGINEWATCH_REAL_LLAMACPP="$$server" ENGINEWATCH_REAL_ROUTERS="$$routers" \
	  $(BIN)/python -m pytest -m real tests/real -v --durations=0 $(ARGS)

# What runs in a router's container is checked once more against an old library; mypy knows none before 3.10.
GUARD := src/enginewatch/core/drift.py src/enginewatch/guard

# All of them, whatever the first says.
lint: install
	@failed=0; \
	for tool in "ruff check ." "ruff format --check ." "mypy" "mypy --python-version 3.10 $(GUARD)"; do \
	  echo "$$tool"; $(BIN)/$$tool || failed=1; \
	done; \
	exit $$failed

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python bench/run.py $(ARGS)

# On the engine of `make test-real`; with ARGS='--engine sim' on a simulated one.
side-by-side: install
	$(BIN)/python bench/side_by_side.py $(ARGS)

# The locks name no index and no file of this machine: what is installed is decided by the hashes alone.
# uv keeps the pins that a lock already has, so running this twice changes nothing.
COMPILE = $(UV) pip compile --quiet --no-config --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
          --python-version 3.11 $(ARGS)
# A local directory of wheels that pip is told about is where the CPU build of torch may be; uv must be told as well.
WHEELS = $(addprefix --find-links ,$(PIP_FIND_LINKS))

lock:
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: pip install uv, or name it: make lock UV=/path/to/uv" >&2; exit 1; }
	$(COMPILE) --universal pyproject.toml --output-file requirements/runtime.txt
	$(COMPILE) --universal pyproject.toml --extra dev --output-file requirements/dev.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_31 --only-binary :all: $(WHEELS) \
	  --override requirements/real-vllm.overrides requirements/real-vllm.in --output-file requirements/real-vllm.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_31 --no-binary llama-cpp-python \
	  requirements/real-llamacpp.in --output-file requirements/real-llamacpp.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_31 --only-binary :all: \
	  requirements/real-routers.in --output-file requirements/real-routers.txt

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
