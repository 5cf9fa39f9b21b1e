{{/* The router's own YAML. What the chart decides wins over `config`; values.schema.json refuses those keys there. */}}
{{- define "k3.routerConfig" -}}
{{- $values := .Values.router -}}
{{- $http := dict
  "host" "0.0.0.0" "port" (int $values.port) "admin_host" "127.0.0.1" "admin_port" (int $values.adminPort)
  "drain_delay_s" (int $values.drain.delaySeconds) "drain_timeout_s" (int $values.drain.timeoutSeconds)
-}}
{{- if $values.apiKeys.secretName }}
{{- $_ := set $http "api_key_file" "/etc/k3-keys/api-keys" -}}
{{- end }}
{{- $fleet := dict
  "prefills" (include "k3.addresses" (dict "root" . "component" "prefill") | fromYamlArray)
  "decodes" (include "k3.addresses" (dict "root" . "component" "decode") | fromYamlArray)
-}}
{{- $model := include "k3.modelConfig" . | fromYaml -}}
{{- toYaml (mergeOverwrite (deepCopy $values.config) $model (dict "http" $http "fleet" $fleet)) -}}
{{- end -}}
