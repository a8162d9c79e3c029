# Every target installs what it needs into $(VENV) first; a second run starts at once.
#   make up ARGS="--port 9000"     VENV=/elsewhere make test     PYTHON=python3.12 make up

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
BIN := $(VENV)/bin

# With it each of hundreds of processes would compile all that it imports once more.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml constraints-cpu.txt

# Without an NVIDIA GPU, torch is held to a release that has CPU wheels. Which wheel pip takes is its own configuration's
# matter (index, find-links): see CONTRIBUTING.md.
GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c GPU)
CONSTRAINTS := $(if $(filter-out 0,$(GPU)),,-c constraints-cpu.txt)

# Damaged payloads, every bit pattern, odd sizes; all of it would take hours under compute-sanitizer.
MEMCHECKED := tests/gpu/test_splitzip.py tests/gpu/test_entropy.py tests/codec/test_progressive_ans_gpu.py \
	tests/codec/test_lynx_kernels.py \
	-k "corrupt or one_tensor or every_bit_pattern or (kernels_equal and 0.02)"

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(firstword $(MAKEFILE_LIST)))
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvrail needs Python 3.11 or later; name one: make PYTHON=python3.12" >&2; exit 1; }
	@scripts/saying.sh "making $(VENV)" $(PYTHON) -m venv $(VENV)

$(VENV)/.worker: $(SOURCES) | $(BIN)/python
	@scripts/saying.sh "installing kvrail and PyTorch into $(VENV), a few minutes, once" \
		$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[worker]'
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	@scripts/saying.sh "installing kvrail and what its tests need into $(VENV), a few minutes, once" \
		$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[dev]'
	@touch $(VENV)/.worker $@

$(VENV)/.page: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev,page]'
	@touch $(VENV)/.worker $(VENV)/.dev $@

$(VENV)/audit/.made: | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet 'pip-audit>=2.9'
	@touch $@

$(VENV)/.bench: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev,bench]'
	@touch $(VENV)/.worker $(VENV)/.dev $@

up: $(VENV)/.worker  ## a cluster with the demo model on this machine, on http://127.0.0.1:8000
	@exec $(BIN)/kvrail up $(ARGS)

# Half of a test's time is waiting for others, on average: three processes on two cores, each with one thread.
# Where a test has two, they wait passively: to spin takes a core from others.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() * 3 // 2))')

test: lint  ## everything that CI checks, but for the compose cluster
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-heavy: $(VENV)/.dev  ## kernels on large pages in Triton's interpreter; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "heavy and not clients" -n auto --maxprocesses 8 $(ARGS)

test-pack-large: $(VENV)/.dev  ## a model of 1 GB packed and unpacked, killed ten times each; 8 GB of disk, minutes
	$(BIN)/python -m pytest -m heavy -o tmp_path_retention_policy=failed tests/pack $(ARGS)

chaos: $(VENV)/.dev  ## storms of kills, stops and partitions over clusters of real processes; needs root; an hour
	KVRAIL_CHAOS_REQUESTS=500 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "not gpu" tests/chaos \
		tests/gpu/test_lost_prefill_process.py $(ARGS)

fuzz: $(VENV)/.dev  ## more damaged frames and bodies than `make test` sends; prints the delay of streams beside them
	KVRAIL_FUZZ_BODIES=10000 KVRAIL_FUZZED_TRANSFERS=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout=3600 \
		tests/router/test_fuzz.py tests/transfer/test_hostile_frames.py $(ARGS)

test-mixes: $(VENV)/.dev  ## 1,000 random mixes of requests over the engine (`make test` has 40)
	KVRAIL_MIXES=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PROCESSES) tests/engine/mixes $(ARGS)

test-openapi: $(VENV)/.dev  ## schemathesis on the OpenAPI document: 5,000 requests and more
	KVRAIL_OPENAPI_EXAMPLES=300 $(BIN)/python -m pytest -s --timeout=1800 tests/router/test_openapi.py $(ARGS)

test-progressive: $(VENV)/.dev  ## with every exact codec prompts get raw's output, bit for bit; takes hours
	KVRAIL_EQUALITY_PROMPTS=200 $(BIN)/python -m pytest tests/progressive --timeout=7200 -o log_cli=true \
		--log-cli-level=INFO $(ARGS)
	KVRAIL_EQUALITY_DTYPE=bfloat16 KVRAIL_EQUALITY_PROMPTS=40 $(BIN)/python -m pytest \
		tests/progressive/test_same_output.py --timeout=7200 -o log_cli=true --log-cli-level=INFO $(ARGS)

test-clients: $(VENV)/.dev  ## clients, agent frameworks and compliance suites in Python and Node against a cluster; installs them
	$(BIN)/python -m tests.clients.environments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients --timeout=900 --durations=0 tests/clients $(ARGS)

test-chart: $(VENV)/.dev  ## the Helm chart rendered, checked, and installed, upgraded, rolled back and removed at an API
	$(BIN)/python -m pytest tests/deploy/test_chart.py tests/deploy/test_helm_release.py $(ARGS)

test-schemas: $(VENV)/.dev  ## 1,000 outputs under 100 schemas (`make test` has a few); half an hour
	KVRAIL_SCHEMA_OUTPUTS=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=3600 tests/e2e/test_openai_client.py -k valid_or_cut $(ARGS)

lint: $(VENV)/.dev  ## style, types, import laws, generated stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
		PYTHON=$(abspath $(BIN))/python scripts/protos.sh "$$scratch" && \
		diff -r -x __init__.py -x __pycache__ "$$scratch/kvrail/wire/v1" kvrail/wire/v1 || \
		{ echo "kvrail/wire/v1 is not what proto/ says; run make protos" >&2; exit 1; }

format: $(VENV)/.dev  ## put the code into the form that lint demands
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

words: $(VENV)/.dev  ## words of scripts/words.py that stand somewhere: make words ARGS=kvrail/engine
	@$(BIN)/python scripts/words.py $(ARGS)

lines: | $(BIN)/python  ## lines of shipped code in each room and its budget; REV=main adds the difference to that commit
	@$(BIN)/python scripts/lines.py $(REV)

boards: $(VENV)/.dev  ## regenerate Grafana's boards in deploy/grafana/boards
	$(BIN)/python -m deploy.grafana.source

boards-picture: $(VENV)/.page  ## draw the boards of a demo cluster under traffic with Grafana's components, into build/boards; needs npm, Chromium, Prometheus
	$(BIN)/python -m tests.boards build/boards $(ARGS)

docs-metrics: $(VENV)/.dev  ## writes the tables of docs/metrics.md from the code
	$(BIN)/python scripts/metrics_page.py

docs-models: $(VENV)/.dev  ## writes what the newest smoke run on a GPU says into docs/models.md and docs/performance.md
	$(BIN)/python scripts/models_page.py

protos: $(VENV)/.dev  ## regenerate the stubs in kvrail/wire/v1
	PYTHON=$(abspath $(BIN))/python scripts/protos.sh

gpu-test: $(VENV)/.dev  ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

gpu-smoke: $(VENV)/.dev  ## the whole server on an NVIDIA GPU, or on each: architectures and settings, each under many different requests at once; minutes
	$(BIN)/python -m tests.smoke $(ARGS)

soak: $(VENV)/.dev  ## random traffic for ten minutes over each form of KV pages on one GPU; ARGS="--device cpu" without
	$(BIN)/python -m tests.smoke.soak $(ARGS)

gpu-smoke-state: $(VENV)/.dev  ## whether the result of `make gpu-smoke` is green and of this code
	@$(BIN)/python -m tests.smoke --state

gpu-memcheck: $(VENV)/.dev  ## codecs' kernels on an NVIDIA GPU under compute-sanitizer; every tensor its own allocation
	@command -v compute-sanitizer > /dev/null || \
		{ echo "gpu-memcheck needs compute-sanitizer; put the CUDA toolkit's bin folder on PATH" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(BIN)/python -m pytest -m gpu --timeout=1800 $(MEMCHECKED) $(ARGS)

bench-engine: $(VENV)/.dev  ## throughput and latency of the engine
	$(BIN)/python -m benchmarks.engine $(ARGS)

bench-attention-chunks: $(VENV)/.dev  ## attention of a few new tokens behind many, on a GPU
	$(BIN)/python -m benchmarks.attention_chunks $(ARGS)

bench-draws: $(VENV)/.dev  ## draws of tokens with every filter, on a GPU
	$(BIN)/python -m benchmarks.draws $(ARGS)

bench-kv-formats: $(VENV)/.dev  ## decode attention over closed pages beside bfloat16 pages, on a GPU
	$(BIN)/python -m benchmarks.kv_formats $(ARGS)

bench-start: $(VENV)/.dev  ## how long `kvrail up` takes, by part, and its processes' CPU time
	$(BIN)/python -m benchmarks.start $(ARGS)

bench-kv-pages: $(VENV)/.dev  ## what each form of KV pages gives an engine: tokens that fit, prefills, steps
	$(BIN)/python -m benchmarks.kv_pages $(ARGS)

bench-kvcomp-figures: $(VENV)/.bench  ## KVComp's Figures 7 and 8 on the demo model
	$(BIN)/python -m benchmarks.kvcomp_figures $(ARGS)

bench-kvcomp-kernels: $(VENV)/.dev  ## KVComp's Figures 9 to 11: products with pages that stay compressed, on a GPU
	$(BIN)/python -m benchmarks.kvcomp_kernels $(ARGS)

bench-transport: $(VENV)/.dev  ## throughput of the transports of KV beside bare transports
	$(BIN)/python -m benchmarks.transport $(ARGS)

bench-serving: $(VENV)/.dev  ## latency, throughput and goodput of a whole cluster, as a client sees it
	$(BIN)/python -m benchmarks.serving $(ARGS)

bench-codec: $(VENV)/.bench  ## ratio and speed of the KV codecs, beside their peers
	$(BIN)/python -m benchmarks.codec $(ARGS)

bench-codec-kernels: $(VENV)/.bench  ## the codecs' GPU kernels beside the memory's limit
	$(BIN)/python -m benchmarks.codec_kernels $(ARGS)

bench-weights-gpu: $(VENV)/.dev  ## products with compact and TCA-TBE weights beside cuBLAS, and a model's steps, on a GPU
	$(BIN)/python -m benchmarks.weights_gpu $(ARGS)

bench-weights: $(VENV)/.bench  ## ratio and speed of packed models and checkpoints, beside ZipNN where it is installed, and zstd
	$(BIN)/python -m benchmarks.weights $(ARGS)

bench-link: $(VENV)/.bench  ## the KV codecs over a slow link between two network namespaces; needs root
	$(BIN)/python -m benchmarks.link $(ARGS)

bench-attention-error: $(VENV)/.dev  ## error of attention's outputs after each stage of a codec
	$(BIN)/python -m benchmarks.attention_error $(ARGS)

bench-kvcomp-points: $(VENV)/.dev  ## what KVComp costs the demo model at other scales and granularities
	$(BIN)/python -m benchmarks.kvcomp_points $(ARGS)

bench-progressive: $(VENV)/.dev  ## when a client has the k-th token behind a slow link, drafted and verified; needs root
	$(BIN)/python -m benchmarks.progressive $(ARGS)

bench-token-path: $(VENV)/.dev  ## what Python does for one token in router and decode worker, without a model
	$(BIN)/python -m benchmarks.token_path $(ARGS)

bench-overload: $(VENV)/.dev  ## requests that fail or wait when one client floods a cluster; five minutes
	$(BIN)/python -m benchmarks.overload $(ARGS)

bench-local-prefill: $(VENV)/.dev  ## short prompts at the decode worker: a fixed number of tokens, or as measured
	$(BIN)/python -m benchmarks.local_prefill $(ARGS)

bench-structured: $(VENV)/.dev  ## tokens/s with a JSON schema and without, in turns
	$(BIN)/python -m benchmarks.structured $(ARGS)

simulate: $(VENV)/.dev  ## the router's policies on traces of requests, on a simulated clock
	$(BIN)/python -m benchmarks.simulator $(ARGS)

replay: $(VENV)/.dev  ## the simulator's traces, scaled down, through a real cluster of 2 + 2 workers; five minutes
	$(BIN)/python -m benchmarks.replay $(ARGS)

newcomer: $(VENV)/.dev  ## README's first commands in a clean clone: output never pauses for long, and KV crosses; minutes
	$(BIN)/python -m pytest -m newcomer tests/newcomer $(ARGS)

docs: $(VENV)/.dev  ## the pages that are made from code: docs/configuration.md
	$(BIN)/python scripts/configuration.py

dist: $(VENV)/.dev  ## wheel, source distribution and the demo model's archive, in dist/
	rm -rf dist
	$(BIN)/python -m build
	tar -C models -czf dist/kvrail-demo.tar.gz kvrail-demo

wheel-test: $(VENV)/.dev  ## the built wheel in an empty environment: its files, pip check, a cluster with the demo model; minutes
	$(BIN)/python -m pytest -m "wheel or not wheel" tests/package $(ARGS)

images: $(VENV)/.dev  ## the images of compose.yaml, which report git's version; ARGS="-f compose.yaml -f deploy/docker/compose.gpu.yaml"
	KVRAIL_VERSION=$$($(BIN)/python -m setuptools_scm) docker compose $(ARGS) build

lock: | $(BIN)/python  ## pin what the image for GPUs installs, with hashes, in deploy/docker/requirements-cuda.txt
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra worker --extra ucx --extra otel -c constraints-cpu.txt --upgrade --quiet \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-emit-index-url \
		--custom-compile-command "make lock" -o deploy/docker/requirements-cuda.txt

compose-test: $(VENV)/.dev  ## the compose cluster on whatever Docker engine answers
	$(BIN)/python -m pytest -m compose -o log_cli=true --log-cli-level=INFO tests/deploy $(ARGS)

chart-podman: $(VENV)/.dev  ## the Helm chart's pods under podman, with the images of compose.yaml; needs root and a Docker engine
	unshare --net --mount --pid --fork --kill-child --mount-proc \
		$(BIN)/python -m pytest -m podman -rs tests/deploy $(ARGS)

page-test: $(VENV)/.page  ## the status page in Chromium, before a cluster under traffic; three minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/page $(ARGS)

audit: $(VENV)/.dev $(VENV)/audit/.made  ## known vulnerabilities of what is installed; asks PyPI's service, so it needs the network
	@scripts/audit.sh $(VENV)/audit/bin/pip-audit $(BIN)/python

clean:  ## remove what the other targets made
	rm -rf $(filter .venv,$(VENV)) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
