# On a fresh machine `make demo` or `make test` is all that is needed: each first installs into .venv what it needs.
# `make demo` installs ONNX Runtime, PyTorch and the ONNX packages; `make test` installs the rest into the same .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# PyPI's torch for Linux brings NVIDIA's packages. Without a GPU its CPU build is taken, if PyTorch's own index answers.
TORCH_CPU = https://download.pytorch.org/whl/cpu
ANSWERS = $(PYTHON) -c "from urllib.request import urlopen; urlopen('$(TORCH_CPU)/torch/', timeout=5)" >/dev/null 2>&1
WITHOUT_GPU = test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null
INDEX = $(shell $(WITHOUT_GPU) && $(ANSWERS) && echo --extra-index-url $(TORCH_CPU))
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(INDEX)
DEMO_READY = $(VENV)/.ready-demo
READY = $(VENV)/.ready

.PHONY: demo test test-slow test-arm test-triton test-cuda test-bindings test-ray test-clients test-peers soak mutants lint docs setup clean

demo: $(DEMO_READY)
	$(BIN)/xl-export demo --train --out demo --force

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# all combinations and long runs of which `make test` has a part; `make test-slow TESTS=tests/cpp` runs the tests of a folder
TESTS ?= tests
test-slow: $(READY)
	$(BIN)/python -m pytest $(TESTS) -m slow -n auto --maxprocesses 4 --dist loadfile

# random schedules for an hour, or for `make soak SECONDS=60`; SEED=… repeats what a failed round printed
SECONDS ?= 3600
soak: $(READY)
	SOAK_SECONDS=$(SECONDS) SOAK_SEED=$(SEED) $(BIN)/python -m pytest tests/soak -m soak -n 0 -s

# random faults in a copy of the tree, and which of them the nearest tests catch; FIRST=… begins with another seed
SEEDS ?= 150
FIRST ?= 0
mutants: $(READY)
	$(BIN)/python tests/mutants.py --seeds $(SEEDS) --first $(FIRST)

# the edge part on an emulated ARM processor, on Debian and Ubuntu; what it downloads and builds stays in build/arm
test-arm: $(READY)
	$(BIN)/python -m pytest tests/arm -m arm -n 0

# the real Triton Inference Server with its Python backend, and Triton's client with our server; what it installs stays in build/triton and build/triton-client
test-triton: $(READY)
	test -d build/triton-client/geventhttpclient || $(INSTALL) --target build/triton-client geventhttpclient
	test -d build/triton-client/tritonclient || $(INSTALL) --no-deps --target build/triton-client tritonclient python-rapidjson 'protobuf<7'
	PYTHONPATH=build/triton-client $(BIN)/python -m pytest tests/xl_export/deployment/test_triton_program.py tests/serve/http/test_inference.py -m slow -n 0

# ONNX Runtime's CUDA provider over stub libraries, without a GPU; what it installs (284 MB) stays in build/cuda
test-cuda: $(READY)
	test -x build/cuda/bin/python || $(BIN)/python -m venv build/cuda
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > build/cuda/main.pth && cp build/cuda/main.pth build/cuda/lib/python3*/site-packages/
	build/cuda/bin/python -m pip install --quiet --disable-pip-version-check --no-deps onnxruntime-gpu==1.31.1
	build/cuda/bin/python -m pytest tests/cuda -m 'slow or not slow' -n 0

# the plugin and every name of TensorRT that is used, with the oldest bindings that pyproject.toml allows and with the newest; what it installs (5 MB and NumPy) stays in build/bindings
test-bindings: $(READY)
	test -x build/bindings/bin/python || $(BIN)/python -m venv build/bindings
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > build/bindings/main.pth && cp build/bindings/main.pth build/bindings/lib/python3*/site-packages/
	for packages in 'tensorrt-cu13-bindings==10.15.1.29 numpy<2.4' '--upgrade tensorrt-cu13-bindings numpy>=2.4'; do \
	  build/bindings/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$packages && \
	  build/bindings/bin/python -m pytest tests/xl_export/tensorrt/test_bindings.py tests/xl_export/tensorrt/test_plugin.py -m 'slow or not slow' -n 0 || exit 1; \
	done

# Ray Data and Ray Serve, in an environment of their own; what it installs (690 MB) stays in build/ray
test-ray: $(READY)
	test -x build/ray/bin/python || $(BIN)/python -m venv build/ray
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > build/ray/main.pth && cp build/ray/main.pth build/ray/lib/python3*/site-packages/
	build/ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[data,serve]>=2.60'
	build/ray/bin/python -m pytest tests/xl_export/offline/test_ray.py tests/xl_export/serve/test_ray_serve.py -m slow -n 0

# guidellm and aiperf, in an environment of their own; what it installs stays in build/clients
test-clients: $(READY)
	test -x build/clients/bin/python || $(BIN)/python -m venv build/clients
	grep '^torch' constraints.txt > build/clients/constraints.txt
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check -c build/clients/constraints.txt $(INDEX) guidellm==0.8.1 aiperf==0.13.0
	PATH="$(CURDIR)/build/clients/bin:$$PATH" $(BIN)/python -m pytest tests/serve/http/test_load_programs.py -m slow -n 0

# packages of other projects against their artefacts, in an environment of their own; it stays in build/peers
test-peers: $(READY)
	test -x build/peers/bin/python || $(BIN)/python -m venv build/peers
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > build/peers/main.pth && cp build/peers/main.pth build/peers/lib/python3*/site-packages/
	grep -v gymnasium constraints.txt > build/peers/constraints.txt  # RLlib wants an older one
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check -c build/peers/constraints.txt x-transformers==2.31.10 recurrent-memory-transformer-pytorch==0.7.0 'ray[rllib]>=2.60' rwkv==0.8.32 'torchrl-nightly>=2026.10.27'
	PYTORCH_JIT=0 build/peers/bin/python -m pytest tests/xl_export/test_peers.py -m slow -n 0 -s

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# the site, in build/site; ends with an error at a dead link or a page that is in no menu
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs/ has $$(find docs -name '*.md' -exec cat {} + | tr '|' ' ' | wc -w) words"

setup: $(READY)

$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(DEMO_READY) $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
