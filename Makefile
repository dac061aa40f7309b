# Needs Python 3.11 or newer with venv, make and git; everything else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv/peers/.installed
UPSTREAM := .venv/upstream/.installed
UPSTREAM_OLDEST := .venv/upstream-oldest/.installed

.DELETE_ON_ERROR:
.PHONY: help demo test test-integrations test-matrix faults mutants lint format docs bench clean test-tools

help:
	@echo 'make demo     train, lose a node and its disk, recover, compare bit for bit'
	@echo 'make test     run the tests, with one example of each framework'
	@echo 'make test-integrations  all tests with other frameworks, also in their long forms; OLDEST=1:'
	@echo '              with the oldest release of each that is supported;'
	@echo '              LOCALCKPT_UPSTREAM_SUITES=DIR: also upstream tests, with our classes'
	@echo 'make test-matrix  the tests on each Python and torch that is supported, and a table of how'
	@echo '              they did; MATRIX="3.12:2.8.0 3.13:newest" or TESTS=tests/storage: only these'
	@echo 'make faults   the long forms of all tests of faults, and the table of what was run;'
	@echo '              TESTS=tests/storage: only these;'
	@echo '              SEED= or STEPS=: the random campaign alone, for as long as it takes'
	@echo 'make mutants  break the product in one line after the other; the tests fail for each'
	@echo 'make lint     ruff, ruff format --check, mypy --strict'
	@echo 'make format   let ruff rewrite what it can'
	@echo 'make docs     build the documentation site into build/docs, strictly'
	@echo 'make bench    measure; results also in benchmarks/results/'
	@echo 'make clean    remove .venv, .venv-matrix, caches and benchmark results'

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP) $(UPSTREAM) test-tools
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# Every rank imports its tests, and every script the package: they compile it once, not each for itself.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait more than they work. One file is run by one worker, which makes what its tests share;
# the order is that of tests/conftest.py, which has the longest files first.
SIDE_BY_SIDE = --numprocesses 6 --dist loadfile --no-loadscope-reorder

INTEGRATIONS = tests/integrations tests/upstream

test-integrations: export LOCALCKPT_UPSTREAM = $(abspath $(dir $(if $(OLDEST),$(UPSTREAM_OLDEST),$(UPSTREAM))))

test-integrations: $(STAMP) $(if $(OLDEST),$(UPSTREAM_OLDEST),$(UPSTREAM)) test-tools
	$(BIN)/python -m pytest --integrations $(SIDE_BY_SIDE) $(INTEGRATIONS)
	$(BIN)/python -m pytest --faults $(INTEGRATIONS)

# An environment each under .venv-matrix, of several GB where torch comes with CUDA.
MATRIX ?= 3.11:2.13.0 3.12:2.8.0 3.13:newest

test-matrix: test-tools
	$(PYTHON) tests/matrix.py $(MATRIX) -- $(SIDE_BY_SIDE) $(TESTS)

faults: $(STAMP) $(UPSTREAM) test-tools
	$(BIN)/python -m pytest --faults $(if $(SEED)$(STEPS),$(CAMPAIGN),$(SPREAD)) $(PATIENCE)

# Every worker takes the next test, one at a time: most of a file may be one long form.
SPREAD = --numprocesses 6 --dist load --maxschedchunk 1 $(TESTS)

CAMPAIGN = $(if $(SEED),--seed=$(SEED)) $(if $(STEPS),--steps=$(STEPS)) tests/faults/test_campaign.py

# Long forms take minutes or hours, in which the stacks of all threads would tell of nothing.
PATIENCE = --timeout=1800 --override-ini=faulthandler_timeout=0

mutants: $(STAMP) test-tools
	$(BIN)/python -m tests.mutants

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The variable silences a notice of mkdocs-material on later versions of mkdocs.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP) $(PEERS)
	$(BIN)/python -m benchmarks

# The stamp is written last, so an installation that was interrupted is done again.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'make: no python3.11 or python3 on PATH' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  'make: $(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 1; }
	@echo 'Installing into .venv (torch is a large download the first time) ...'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,bench,docs]'
	@touch $@

# A peer that cannot be installed is told as such beside the figures of the others.
$(PEERS): benchmarks/peers.txt $(STAMP)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --no-deps --target $(@D) --requirement benchmarks/peers.txt && touch $@ || \
	  echo 'not all peers could be installed, those are not measured'

# DeepSpeed compiles its operations when they are first used, and here that is never.
$(UPSTREAM): constraints-integrations.txt $(STAMP)
	@mkdir -p $(@D)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --no-deps --target $(@D) --requirement constraints-integrations.txt && touch $@ || \
	  echo 'not all frameworks could be installed, tests with those are skipped'

# A copy by links, in which pip puts the older releases in the place of the others.
$(UPSTREAM_OLDEST): constraints-integrations-oldest.txt $(UPSTREAM)
	rm -rf $(@D)
	cp -al $(dir $(UPSTREAM)) $(@D)
	rm -f $@
	sed -n 's/==.*//p' $< | tr - _ | xargs -I NAME \
	  find $(@D) -maxdepth 1 -name 'NAME-*.dist-info' -exec rm -rf {} +
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --no-deps --target $(@D) --requirement $< && touch $@

# Some fault tests inject errors into system calls, cut networks or mount small file systems. The
# programs they use are installed where that is possible, and those tests are skipped elsewhere.
test-tools:
	@missing=; \
	for need in strace:strace ip:iproute2 mkfs.ext4:e2fsprogs; do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${need%%:*}" >/dev/null || missing="$$missing $${need#*:}"; \
	done; \
	test -n "$$missing" || exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { timeout 120 apt-get -qq update; \
	    timeout 300 apt-get -qq install -y --no-install-recommends $$missing; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "not installed, their tests are skipped:$$missing"

clean:
	rm -rf .venv .venv-matrix .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist benchmarks/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
