# Coterie: `make serve` and `make test` make their own environment below .venv.
PYTHON ?= python3.11
VENV ?= .venv
# Further arguments of pip, such as --index-url for another build of torch.
PIP_ARGS ?=
MODEL ?= demo_model
PORT ?= 8000
# Further arguments of `coterie serve`.
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install kernels serve chat test soak lint format docs clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo 'make serve    serve $(MODEL) at http://127.0.0.1:$(PORT) (MODEL=, PORT=, ARGS=)'
	@echo 'make chat     talk to $(MODEL) in this terminal, without Ray'
	@echo 'make test     all tests but the long ones'
	@echo 'make soak     the long ones'
	@echo 'make lint     ruff and mypy'
	@echo 'make format   lay out the code with ruff'
	@echo 'make docs     write docs/settings.md again'
	@echo 'make install  the environment alone (PYTHON=, PIP_ARGS=)'
	@echo 'make kernels  compile the native kernels of CPUs again (CXX=)'
	@echo 'make clean    remove it and all caches'

$(INSTALLED): pyproject.toml $(wildcard expert_pool/kernels/native/*)
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'error: $(PYTHON) not found; install Python 3.11 or set PYTHON=' >&2; exit 1; }
	@echo 'installing into $(VENV); the first time this takes minutes and gigabytes'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[dev]'
	@$(BIN)/python -m expert_pool.kernels.build --optional
	@touch $@

install: $(INSTALLED)

kernels: install
	@$(BIN)/python -m expert_pool.kernels.build

serve: install
	@$(BIN)/coterie serve $(MODEL) --port $(PORT) $(ARGS)

chat: install
	@$(BIN)/coterie chat $(MODEL) $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

soak: install
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install
	$(BIN)/python -m app.settings_page > docs/settings.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
