# Needs make, Python 3.11 or newer, and pip's usual way to packages. Everything lands in .venv.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
# What README names as tested; the first is the floor in pyproject.toml.
TORCHES ?= 2.10.0 2.15.0

# pip names each package, and draws bars in a terminal; elsewhere a line now and then says that it is still at it.
INSTALL = if [ ! -t 2 ]; then \
		( while sleep 10 >/dev/null 2>&1; do echo '… still installing' >&2; done ) & \
		beat=$$!; trap 'kill $$beat 2>/dev/null' EXIT; \
	fi; \
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
	-c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help demo test quick oldest-cpu soak soak-long soak-devices soak-laws soak-frozen soak-mutations engines cpus versions on-this-torch gpu lint format gallery docs clean

help:
	@echo 'make demo     plan, train and draw a small pipeline (installs into $(VENV) on first use)'
	@echo 'make test     all checks: lint, types, import rules, tests'
	@echo 'make quick    unit tests, doctests and golden files, without the rooms that start processes, search'
	@echo '              or measure (cli, partition, planner, profiler, rehearsal, transport, trial)'
	@echo '              and without training to the bit, laws, oracles, documents and jobs'
	@echo 'make soak     what takes an hour: random trainings, laws and faults by the hundred, long runs'
	@echo 'make engines  a part of it alone: plans in torchtitan, Megatron-Core, AutoModel and DeepSpeed, which'
	@echo '              are installed under build/engines (gigabytes)'
	@echo 'make cpus     the last part of it alone: the arithmetic of two older CPUs'
	@echo 'make versions tests on other releases of torch: TORCHES="$(TORCHES)", each in an environment'
	@echo '              of its own under build/ (on Linux, gigabytes each)'
	@echo 'make gpu      what only accelerators can show: the same trainings there, waits, memory, processes'
	@echo 'make lint     the same without the tests'
	@echo 'make format   rewrite the sources in the house style'
	@echo 'make gallery  write docs/schedules and docs/versions anew from the schedule families'
	@echo 'make docs     write the documentation as a site into build/site'
	@echo 'make clean    remove $(VENV), caches and build leftovers'
	@echo
	@echo 'PYTHON=python3.12    another interpreter to build $(VENV) with (3.11 or newer)'
	@echo 'PYTEST_ARGS="-k gpt" passed to pytest; DEMO_ARGS passed to penstock demo'
	@echo 'TORCH_INDEX=https://download.pytorch.org/whl/cpu'
	@echo '                     take torch from there too: on Linux, PyPI has the CUDA build (gigabytes),'
	@echo '                     this index has the CPU build (200 MB)'

demo: $(VENV)/.installed
	$(VENV)/bin/penstock demo $(DEMO_ARGS)

# Without groups, loadgroup hands out test by test, so that long ones do not queue up. Jobs of several processes
# are no group: they mostly wait, and a worker that ran all of them would be the last by far. Dozens of processes load
# the package: what is compiled is kept, also where the environment says otherwise.
# While one core checks types, the other one plays another CPU.
test oldest-cpu: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev
	+@$(if $(PYTEST_ARGS),$(MAKE) lint,$(MAKE) -j2 $(if $(filter output-sync,$(.FEATURES)),-O) lint oldest-cpu)
	$(VENV)/bin/pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

# A clean checkout has no tests that are compiled; otherwise each worker would compile them all.
oldest-cpu: $(VENV)/.installed-dev
	$(OLDEST_CPU) $(VENV)/bin/pytest -q $(SHORT_ELSEWHERE)
	$(if $(CI),$(VENV)/bin/pytest -qq --collect-only >/dev/null)

# Other kernels round otherwise: what is compared to the bit must be one computation, on any CPU.
OLDEST_CPU = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
OLDER_CPU = ATEN_CPU_CAPABILITY=avx2

SHORT_ELSEWHERE = tests/unit/stage tests/unit/test_rotated_adam.py \
	tests/unit/pipeline/test_pipeline.py tests/unit/pipeline/test_compile.py \
	tests/unit/interop/test_lightning.py tests/numerics/test_strides.py \
	tests/numerics/test_orders_of_sums.py \
	tests/numerics/test_same_as_one_device.py::test_dropout_depends_on_neither_partition_nor_schedule_but_on_the_seed

QUICK_WITHOUT = cli partition planner profiler rehearsal transport trial

quick: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -n 2 --dist loadgroup src/penstock tests/golden tests/unit \
		--ignore tests/golden/test_zero_bubble_table.py $(QUICK_WITHOUT:%=--ignore=tests/unit/%) $(PYTEST_ARGS)

# Written for the CPU; here every pipeline is on emulated devices.
ON_DEVICES = $(addprefix tests/numerics/test_,all_families.py asynchronous.py captured_models.py \
	split_attention.py split_captured.py split_layers.py)

# Each part stands alone, so that an evening has room for one.
soak: soak-long soak-devices soak-laws soak-frozen soak-mutations engines cpus

soak-long: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -m soak -n 2 --dist loadgroup $(PYTEST_ARGS)

soak-devices: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -p tests.kit.accelerator.everywhere -n 2 $(ON_DEVICES) $(PYTEST_ARGS)

soak-laws: $(VENV)/.installed-dev
	PENSTOCK_EXAMPLES=10 $(VENV)/bin/pytest -n 2 --dist loadgroup --timeout 3600 tests/laws $(PYTEST_ARGS)

soak-frozen: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.soak.frozen

soak-mutations: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.soak.mutations

# The engines that plans are handed over to, in the versions that were read; several processes each, so one at a time.
engines: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.engines.install
	$(VENV)/bin/pytest -m engines tests/engines $(PYTEST_ARGS)

# Left out is what computes with no tensor: schedules, plans and drawings.
WITHOUT_TENSORS = unit/drawing unit/partition unit/plans unit/schedule unit/timing unit/turns \
	docs/test_gallery.py docs/test_site.py golden/test_zero_bubble_table.py
LAWS_OF_TENSORS = $(addprefix tests/laws/test_,checkpoint_laws.py fault_laws.py fleet_laws.py \
	searched_plans.py stream_laws.py tensor_laws.py)
WITH_TENSORS = tests $(WITHOUT_TENSORS:%=--ignore=tests/%) \
	$(patsubst %,--ignore=%,$(filter-out $(LAWS_OF_TENSORS),$(wildcard tests/laws/test_*.py)))

cpus: $(VENV)/.installed-dev
	$(OLDEST_CPU) $(VENV)/bin/pytest -n 2 --dist loadgroup --timeout 1200 $(WITH_TENSORS) $(PYTEST_ARGS)
	$(OLDER_CPU) $(VENV)/bin/pytest -n 2 --dist loadgroup --timeout 1200 $(WITH_TENSORS) $(PYTEST_ARGS)

versions:
	@mkdir -p build
	@for torch in $(TORCHES); do \
		sed "s/^torch==.*/torch==$$torch/" constraints.txt >build/torch-$$torch.txt && \
		$(MAKE) VENV=build/torch-$$torch CONSTRAINTS=build/torch-$$torch.txt on-this-torch || exit 1; \
	done

on-this-torch: $(VENV)/.installed-dev
	@$(VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(VENV)/bin/pytest -n 2 --dist loadgroup --timeout 1200 $(PYTEST_ARGS)

# One at a time: they count the memory of devices.
gpu: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -m gpu tests/gpu $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tools.measure --strict

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

gallery: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/gallery/make.py

docs: $(VENV)/.installed-dev
	$(VENV)/bin/mkdocs build --strict
	@echo 'open build/site/index.html'

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make an install happen once, and again when a file that decides it has changed.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing Penstock into $(VENV) (minutes the first time, torch is large) …'
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing Penstock and its development tools into $(VENV) …'
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Penstock needs Python 3.11 or newer; '$(PYTHON)' is older or missing." \
			"Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment. On Debian or Ubuntu:" \
			"apt install python3-venv. Or name another one: make PYTHON=python3.12" >&2; exit 1; }
	@touch $@
