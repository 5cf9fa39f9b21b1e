#!/usr/bin/env bash
# The Helm chart: lint and render every example with a real helm, validate strictly, then tests/chart.
source "$(dirname "$0")/env.sh"
.ci/setup.sh
helm="$("$PY" .ci/helm.py)"
chart=charts/k3-serving
rendered=.chart/rendered
rm -rf "$rendered" && mkdir -p "$rendered"

for values in "$chart/values.yaml" "$chart"/examples/*.yaml; do
  name="$(basename "$values" .yaml)"
  say "$name"
  "$helm" lint --strict --quiet "$chart" --values "$values"
  "$helm" template k3 "$chart" --namespace serving --values "$values" > "$rendered/$name.yaml"
  for version in 1.28 1.33 1.37; do
    kubernetes-validate --strict --quiet --no-warn -k "$version" "$rendered/$name.yaml"
  done
done
say "tests/chart"
"$PY" -m pytest -q tests/chart
