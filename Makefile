# `make demo` and `make test` set up everything they need in $(VENV), from nothing but python3, pip and make.
# `make help` lists the rest.

PYTHON      ?= python3
VENV        ?= .venv
# An index to take torch from, and nothing else. Empty: pip's own, where torch may be a CUDA build of several gigabytes.
TORCH_INDEX ?=
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile
DEMO_ARGS   ?=
# Without "judges" the comparisons with other people's packages are skipped.
TEST_EXTRAS ?= test,judges

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-input --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint clean
.NOTPARALLEL:

help:
	@echo 'make demo    quantize, compile and explain a small real model (examples/demo.py)'
	@echo 'make test    all tests; for a choice: make test PYTEST_ARGS="-k swizzle"'
	@echo 'make lint    ruff, mypy and the import contracts'
	@echo 'make clean   remove $(VENV), caches and built packages'
	@echo
	@echo 'variables, as in make test PYTHON=python3.12:'
	@echo '  PYTHON=$(PYTHON)   the Python to build $(VENV) with, 3.10 or newer'
	@echo '  VENV=$(VENV)   where everything is installed'
	@echo '  TORCH_INDEX=$(TORCH_INDEX)   a package index to take torch from, for instance one of CPU builds'
	@echo '  PYTEST_ARGS=$(PYTEST_ARGS)'
	@echo '  DEMO_ARGS=$(DEMO_ARGS)   arguments of examples/demo.py'
	@echo '  TEST_EXTRAS=$(TEST_EXTRAS)   what make test installs beside the library'

demo: $(VENV)/.ready-base
	$(BIN)/python -u examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.ready-test
	@echo '$(BIN)/python -m pytest $(PYTEST_ARGS)'; \
	status=0; $(BIN)/python -m pytest $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/python -c 'import platform, torch; print(f"lanes: base ran (Python {platform.python_version()}, torch {torch.__version__})")'; \
	exit $$status

lint: $(VENV)/.ready-lint
	@status=0; \
	for check in 'ruff check --output-format concise .' mypy 'lint-imports --no-logo'; do \
	    echo "== $$check"; $(BIN)/$$check || status=1; \
	done; \
	exit $$status

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find fusion_moe translators tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps are written last, so that an interrupted set-up is taken up again, and a changed requirement is installed.
$(VENV)/.ready-base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo 'This needs Python 3.10 or newer; $(PYTHON) is' "$$($(PYTHON) -V 2>&1 | head -n 1)."; \
	    echo 'Name another: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo '$(PYTHON) comes without its venv module. On Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@version='import sys; print(sys.version)'; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1 || [ "$$($(BIN)/python -c "$$version")" != "$$($(PYTHON) -c "$$version")" ]; then \
	    echo "creating $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV); fi
	$(PIP) 'pip>=22.3'
ifneq ($(TORCH_INDEX),)
	$(PIP) --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(PIP) -e '.[models]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-base pyproject.toml constraints.txt
	$(PIP) -e '.[models,$(TEST_EXTRAS)]'
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready-base pyproject.toml constraints.txt
	$(PIP) -e '.[models,lint]'
	@touch $@
