# Each target first creates the venv .venv if it is missing, with the versions pinned in constraints.txt.
# If pip's index has no CPU build of PyTorch: make demo PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_OPTIONS ?=
EXTRAS ?= dev
# Two test processes, each with one file at a time: the networks of the tests are too small to use a second thread.
PYTEST_OPTIONS ?= -n 2 --dist loadfile
BIN := .venv/bin
comma := ,
INSTALLED := .venv/installed-$(subst $(comma),-,$(EXTRAS))
ALL_INSTALLED := .venv/installed-dev-onnx-ray-tensorboard-mlflow-wandb-pretrained

.PHONY: demo demo-photos docs results quick test slow-test release-check crash-test crash-points restarts soak fuzz lint types format clean

# Train on 40 labeled digits and write report.html: about a minute.
demo: $(INSTALLED)
	$(BIN)/crmatch train digits@4 --baseline
	$(BIN)/crmatch report runs/digits@4/crmatch/split1-seed0 --out report.html

# Your own pictures, on photos that come with installed packages: a pretrained backbone, a folder, 9 labels.
demo-photos: .venv/installed-dev-onnx-pretrained
	$(BIN)/python examples/demo_photos.py demo-photos
	$(BIN)/crmatch train demo-photos
	$(BIN)/crmatch suggest runs/demo-photos/crmatch-head/split1-seed0 -n 5
	@echo "Next: $(BIN)/crmatch label runs/demo-photos/crmatch-head"

# The documentation as a site in build/site. Its theme announces its own end (May 2027) on every build unless told not to.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Rewrite the tables and the page about claims in docs/ from the committed records, without training.
results: $(INSTALLED)
	$(BIN)/python benchmarks/results.py

# All tests that start no other process. Tests that try thousands of cases try fewer of them here.
quick: $(INSTALLED)
	CRMATCH_QUICK=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS) -m "not slow and not process"

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) --durations=15

# Tests that take minutes each.
slow-test: $(ALL_INSTALLED)
	$(BIN)/python -m pytest -m slow

# Build wheel and source archive, check them, and use and test them in a new environment.
release-check: $(INSTALLED)
	$(BIN)/python -m pytest -p no:xdist -m "" tests/test_package.py

# The next targets write their sections of docs/results/survival.md. Kill and resume runs of every method:
crash-test: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python tests/crash/full.py

# Crash, or fail, at every file operation of the commands that write: 20 minutes.
crash-points: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/crash/points.py

# Kill ranks of torchrun, start eight commands at once: 16 minutes.
restarts: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python tests/crash/processes.py

# 20,000 steps of four runs: memory, open files and time per step stay the same: 20 minutes.
soak: .venv/installed-dev-tensorboard
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/crash/soak.py

# 10,000 mutations of every file that may come from a stranger: an hour.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/crash $(BIN)/python tests/hostile/fuzz.py --page

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The name of the stamp file contains the extras, so that another set of extras is installed too.
.venv/installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt -e '.[$(subst -,$(comma),$*)]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
