# make lists what there is to make.
PYTHON ?= python3
VENV = .venv/bin/python

help:
	@echo "make run      a chat with the first provider that can be used"
	@echo "make demo     the scripted model writes and runs a program, in ./workspace"
	@echo "make test     makes .venv, installs pytest, runs all tests"
	@echo "make bench    figures of this machine: start-up, turns, sessions, grep, memory"
	@echo "make outline  the sections of the file and what is in them"
	@echo "make events   the events of a run and their fields"

run:
	$(PYTHON) tiny_agent.py

demo:
	$(PYTHON) tiny_agent.py --mode auto --sandbox off "create fib.py that prints the first 10 Fibonacci numbers, then run it"

$(VENV):
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install --quiet --disable-pip-version-check pytest

test: $(VENV)
	$(VENV) -m pytest -q

bench: $(VENV)
	$(VENV) test_tiny_agent.py bench

outline:
	@grep -nE "^(# ─── |# ── |class |def |    def [a-z])" tiny_agent.py | sed -E "s/ ─+$$//; s/ -> .*//; s/:$$//"

events:
	@$(PYTHON) -c "import tiny_agent as t; [print(f'{name:16}', ', '.join(kind.__dataclass_fields__)) for name, kind in t.EVENTS.items()]"

.PHONY: help run demo test bench outline events
