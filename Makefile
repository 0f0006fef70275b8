# `make demo` and `make test` are all that a new machine needs; docs/guide/building.md has the rest.
# Options are remembered in the build folder: make build SPARK_CUDA=ON, make build CMAKE_FLAGS=-DSPARK_UI=OFF

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
CMAKE  := $(VENV)/bin/cmake
CTEST  := $(VENV)/bin/ctest
JOBS   ?=
SERVE  ?= --spark-slots 16
PYTEST ?= tests
FUZZ_SECONDS ?= 60

FLAGS := $(CMAKE_FLAGS)
ifdef SPARK_CUDA
FLAGS += -DSPARK_CUDA=$(SPARK_CUDA)
endif
ifdef SPARK_CUDA_ARCHITECTURES
FLAGS += "-DSPARK_CUDA_ARCHITECTURES=$(SPARK_CUDA_ARCHITECTURES)"
endif

CONFIGURE = $(CMAKE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DPython3_EXECUTABLE=$(CURDIR)/$(PY) -S .
# CMake's long report goes to a file; what concerns the user is shown, and all of it when it fails.
LOGGED    = $(1) >build/configure.log 2>&1 && sed -n '/^-- \(upstream\|CUDA backend\|Web UI\|OpenSSL\)/p' build/configure.log || { cat build/configure.log; exit 1; }
COMPILE   = $(CMAKE) --build $(1) $(if $(JOBS),-j $(JOBS))

.PHONY: help build sources native demo serve test test.native test.python test.fuzz lint bench patches.check stock build.asan build.tsan test.sanitizers build.cuda toolchain clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo           build, start the server with half of the demo model's experts in memory, ask it, stop"
	@echo "make serve          the same server, kept running (SERVE='--spark-slots 16 --port 8080')"
	@echo "make test           everything CI runs (PYTEST=tests/unit for a part)"
	@echo "make build          libraries and Python package into .venv (SPARK_CUDA=ON, JOBS=4, CMAKE_FLAGS=-D..., SDIST=FILE)"
	@echo "make test.fuzz      the readers of transcripts and profiles against inputs nobody wrote, FUZZ_SECONDS each (60)"
	@echo "make lint | patches.check | test.sanitizers | build.cuda | stock | bench | clean | distclean"

# What must be on the machine; everything else comes from PyPI into .venv.
toolchain:
	@missing=""; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo "make: $(PYTHON) is missing or older than 3.10; give another one: make PYTHON=python3.11" >&2; missing="$$missing python3"; }; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) has no venv module" >&2; missing="$$missing python3-venv"; }; \
	command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "make: there is no C++ compiler" >&2; missing="$$missing g++"; }; \
	if [ -n "$$missing" ]; then echo "make: on Debian or Ubuntu: apt install$$missing" >&2; exit 1; fi

$(VENV)/.tools: scripts/install_python.py | toolchain
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) # an interrupted one has no pip
	@$(PY) scripts/install_python.py tools
	@touch $@

$(VENV)/.runtime: pyproject.toml scripts/install_python.py patches/UPSTREAM $(VENV)/.tools | sources
	@$(PY) scripts/install_python.py runtime
	@touch $@

$(VENV)/.test: pyproject.toml scripts/install_python.py patches/UPSTREAM $(VENV)/.runtime
	@$(PY) scripts/install_python.py test
	@touch $@

# The sdist: from PyPI, or SDIST=FILE. Both llama.cpp and the Python part of llama-cpp-python come from it.
sources: $(VENV)/.tools
	@mkdir -p build
	@$(PY) scripts/upstream.py $(if $(SDIST),--sdist "$(SDIST)") fetch >/dev/null

native: sources
	@if [ ! -f build/native/build.ninja ] || [ -n "$(strip $(FLAGS))" ]; then $(call LOGGED,$(CONFIGURE) -B build/native $(FLAGS)); fi
	@$(call COMPILE,build/native) --target spark_libraries

# The package itself: pip once (it finds the native build done), afterwards only the libraries that changed are copied.
$(VENV)/.package: pyproject.toml CMakeLists.txt native/CMakeLists.txt $(wildcard cmake/*) $(VENV)/.runtime | native
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

build: native $(VENV)/.package
	@$(CMAKE) --install build/native --prefix "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >build/install.log || { cat build/install.log; exit 1; }

demo: build
	@$(PY) -m pyspark_moe.demo

serve: build
	@exec $(VENV)/bin/dflash_server --demo --spark $(SERVE)

lint: $(VENV)/.tools
	@$(PY) scripts/lint_tree.py

patches.check: $(VENV)/.tools
	@$(PY) scripts/upstream.py check
	@$(PY) scripts/upstream.py stats

test.native: sources
	@$(call LOGGED,$(CONFIGURE) -B build/native -DSPARK_BUILD_TESTS=ON $(FLAGS)) >build/tests.log || { cat build/tests.log; exit 1; }
	@$(call COMPILE,build/native)
	@$(CTEST) --test-dir build/native --output-on-failure --no-tests=error

test.python: build $(VENV)/.test
	@$(PY) -m pytest $(PYTEST)

test:
	@$(MAKE) --no-print-directory lint patches.check
	@$(MAKE) --no-print-directory build
	@$(MAKE) --no-print-directory test.native
	@$(MAKE) --no-print-directory test.python

# The parsers of files that others write, guided by coverage; a crash is the exit code, and its input stays in build/fuzz.
test.fuzz: build $(VENV)/.test
	@status=0; $(PY) scripts/install_python.py fuzz || status=$$?; \
	if [ $$status = 3 ]; then exit 0; elif [ $$status != 0 ]; then exit $$status; fi; \
	$(PY) tests/fuzz/fuzz_transcripts.py --seconds $(FUZZ_SECONDS) && $(PY) tests/fuzz/fuzz_profile.py --seconds $(FUZZ_SECONDS)

# The native tests with sanitizers; everything they link is instrumented.
build.asan: sources
	@$(call LOGGED,$(CONFIGURE) -B build/asan -DSPARK_SANITIZE=address)
	@$(call COMPILE,build/asan)
	@$(CTEST) --test-dir build/asan --output-on-failure --no-tests=error

build.tsan: sources
	@$(call LOGGED,$(CONFIGURE) -B build/tsan -DSPARK_SANITIZE=thread)
	@$(call COMPILE,build/tsan)
	@$(CTEST) --test-dir build/tsan --output-on-failure --no-tests=error

test.sanitizers: build.asan build.tsan

build.cuda:
	@$(MAKE) --no-print-directory build SPARK_CUDA=ON

# llama-server, llama-bench, llama-quantize, llama-gguf-split from the same sources without our series, for comparisons.
stock: sources
	@test -f build/stock/build.ninja || { $(call LOGGED,$(CONFIGURE) -B build/stock -DSPARK_STOCK=ON); }
	@$(call COMPILE,build/stock)

bench: build stock $(VENV)/.test
	@$(PY) benchmarks/bench_server.py

clean:
	rm -rf build

distclean: clean
	rm -rf $(VENV)
