# hf_compressopt: every target makes what it needs; a second run is quick.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed

.PHONY: help install kernels demo test test-gpu style clean

help:
	@echo "make demo      train a small language model twice (adamw_torch, onebit_adam) on 2 processes and compare"
	@echo "make test      the tests (real process groups, a real Trainer), under 12 minutes on 2 cores"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make kernels   the native libraries, into hf_compressopt/kernels/lib (needs cmake and a C++ compiler; nvcc for CUDA)"
	@echo "make style     ruff and mypy --strict"

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing the development environment into $(VENV) (once; about a minute) =="
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

install: $(STAMP)

kernels:
	@echo "== native libraries, into hf_compressopt/kernels/lib =="
	@cmake -S . -B build/kernels
	@cmake --build build/kernels --parallel

demo: $(STAMP)
	@echo "== demo: adamw_torch and onebit_adam, 2 processes each, on Python's language reference =="
	@$(VENV)/bin/python scripts/demo.py

test: $(STAMP)
	@echo "== tests =="
	@$(VENV)/bin/python -m pytest tests

test-gpu: $(STAMP)
	@echo "== tests that need a CUDA device =="
	@$(VENV)/bin/python -m pytest -o addopts="-ra --strict-markers" tests/gpu

style: $(STAMP)
	@echo "== style: ruff, mypy --strict =="
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache
