# make demo   install into .venv and run the three systems    make test   install and run the tests
# make lint   style and types                                 make format rewrite sources in style
# make bench  the benchmark                                   make docs   pages into build/docs/
# make wheel  build a wheel into dist/, for this machine
# make wheels wheels of every Python that is served into wheelhouse/, by cibuildwheel with Docker
# make nvcc   install nvcc from Python packages, where the machine has no CUDA toolkit
#
# PYTHON, TORCH and VENV choose the interpreter, the torch requirement and the environment's folder.
# The environment variables FUSEDCONV_CUDA (AUTO, ON, OFF), FUSEDCONV_CUDA_ARCHITECTURES,
# FUSEDCONV_IGNORE_SYSTEM_NVCC, FUSEDCONV_CUTLASS_DIR, FUSEDCONV_WERROR and CMAKE_ARGS reach CMake.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP := $(shell find cpp -name '*.hpp' -o -name '*.cpp' -o -name '*.cu')
BUILD_OPTIONS := $(FUSEDCONV_CUDA) $(FUSEDCONV_CUDA_ARCHITECTURES) $(FUSEDCONV_IGNORE_SYSTEM_NVCC) \
	$(FUSEDCONV_CUTLASS_DIR) $(FUSEDCONV_WERROR) $(CMAKE_ARGS)

.PHONY: demo test install lint format bench docs wheel wheels nvcc clean force
.DELETE_ON_ERROR:

demo: install
	$(BIN)/fusedconv demo

test: install
	$(BIN)/python -m pytest -q

install: $(VENV)/.installed

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q "pip>=25.1"
	touch $@

# Rewritten when TORCH changes, so that a change installs it.
$(VENV)/.torch-asked: force | $(VENV)/.created
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.torch: $(VENV)/.created $(VENV)/.torch-asked
	$(PIP) install -q "$(TORCH)" numpy
	touch $@

$(VENV)/.tools: $(VENV)/.created
	$(PIP) install -q --group build
	$(PIP) install -q --no-deps nvidia-cutlass==4.2.0.0
	touch $@

# Rewritten when the options change, so that a change builds again.
$(VENV)/.options: force | $(VENV)/.created
	@echo '$(BUILD_OPTIONS)' | cmp -s - $@ || echo '$(BUILD_OPTIONS)' > $@

$(VENV)/.installed: $(VENV)/.torch $(VENV)/.tools $(VENV)/.options \
		pyproject.toml CMakeLists.txt $(wildcard cmake/*.cmake) $(CPP)
	$(PIP) install -v --no-build-isolation -e ".[dev]" "$(TORCH)"
	touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

bench: install
	$(BIN)/fusedconv bench $(BENCH_ARGS)

docs: install
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

wheel: install
	$(PIP) wheel -v --no-build-isolation --no-deps -w dist .
	$(BIN)/python tools/check_wheel.py dist/*.whl

wheels: $(VENV)/.created
	$(PIP) install -q "cibuildwheel>=3.2"
	$(BIN)/cibuildwheel --platform linux --output-dir wheelhouse

nvcc: $(VENV)/.tools
	$(PIP) install -q --group cuda-build
	rm -f $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist wheelhouse
