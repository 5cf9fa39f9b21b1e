{{/* The accepted API keys: where they lie in a pod, and the volume that brings them. Only with a Secret's name. */}}
{{- define "k3.keysFile" -}}
/etc/k3-keys/api-keys
{{- end -}}

{{- define "k3.keysMount" -}}
{name: api-keys, mountPath: /etc/k3-keys, readOnly: true}
{{- end -}}

{{- define "k3.keysVolume" -}}
name: api-keys
secret:
  secretName: {{ .Values.router.apiKeys.secretName }}
  items: [{key: {{ .Values.router.apiKeys.secretKey }}, path: api-keys}]
{{- end -}}

{{/* The router's own YAML. What the chart decides wins over `config`; values.schema.json refuses those keys there. */}}
{{- define "k3.routerConfig" -}}
{{- $values := .Values.router -}}
{{- $http := dict
  "host" "0.0.0.0" "port" (int $values.port) "admin_host" "127.0.0.1" "admin_port" (int $values.adminPort)
  "drain_delay_s" (int $values.drain.delaySeconds) "drain_timeout_s" (int $values.drain.timeoutSeconds)
-}}
{{- if $values.apiKeys.secretName }}
{{- $_ := set $http "api_key_file" (include "k3.keysFile" .) -}}
{{- end }}
{{- $fleet := dict
  "prefills" (include "k3.addresses" (dict "root" . "component" "prefill") | fromYamlArray)
  "decodes" (include "k3.addresses" (dict "root" . "component" "decode") | fromYamlArray)
-}}
{{- $model := include "k3.modelConfig" . | fromYaml -}}
{{- toYaml (mergeOverwrite (deepCopy $values.config) $model (dict "http" $http "fleet" $fleet)) -}}
{{- end -}}
