# Each target is one line; the work is in .ci/, so that CI and a laptop cannot drift.
# `demo`, `run` and `test` make the virtual environment themselves when it is missing.
.DEFAULT_GOAL := help
.PHONY: help setup demo run check fast test e2e chaos chart bench proto clean

help:   ## this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' Makefile
setup:  ## virtual environment, editable install, git hooks
	@.ci/setup.sh && .ci/hooks.sh
demo:   ## start the cluster, ask two questions, stream the answers, compare drafts, stop
	@.ci/local.sh --demo --prefill-pp 2 --prefill-cache-prefix on --cp 2
run:    ## router, prefill and decode in the foreground, API on port 8000
	@.ci/local.sh
check:  ## format, lint, types, import contracts, wire
	@.ci/setup.sh && .ci/check.sh
fast:   ## check and the tests without processes
	@.ci/test.sh fast
test:   ## everything CI runs
	@.ci/test.sh all
e2e:    ## real processes
	@.ci/e2e.sh e2e
chaos:  ## kills, stops and starves real processes
	@.ci/e2e.sh chaos
chart:  ## lint, render and validate the Helm chart
	@.ci/chart.sh
bench:  ## load and step benchmarks into benchmarks/results/
	@.ci/bench.sh
proto:  ## regenerate k3/v1 from proto/
	@.ci/setup.sh && $${K3_VENV:-.venv}/bin/python hatch_build.py
clean:  ## caches and generated files; the virtual environment stays
	@.ci/clean.sh
