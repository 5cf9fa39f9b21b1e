{{/* Names, labels, addresses and the parts that every pod has in common. */}}

{{- define "k3.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s-%s" .Release.Name .Chart.Name) | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of a component's objects. dict root, component. */}}
{{- define "k3.name" -}}
{{- printf "%s-%s" (include "k3.fullname" .root) .component -}}
{{- end -}}

{{- define "k3.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "k3.labels" -}}
{{ include "k3.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: {{ .root.Chart.Name }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "k3.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end -}}

{{- define "k3.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "k3.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "k3.fullname" .) }}
{{- else -}}
{{ required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* host:port of every instance of an engine, as a YAML list. dict root, component. */}}
{{- define "k3.addresses" -}}
{{- $values := index .root.Values .component -}}
{{- $name := include "k3.name" . -}}
{{- range $i := until (int $values.replicas) }}
- {{ printf "%s-%d.%s.%s.svc:%d" $name $i $name $.root.Release.Namespace (int $values.port) }}
{{- end -}}
{{- end -}}

{{/* Section `model` of every configuration. */}}
{{- define "k3.modelConfig" -}}
model:
  name: {{ .Values.model.name | quote }}
  path: {{ eq .Values.model.source "embedded" | ternary "" "/model" | quote }}
{{- end -}}

{{/* Pod settings that do not depend on the component. dict root, component. */}}
{{- define "k3.podCommon" -}}
{{- $values := index .root.Values .component -}}
serviceAccountName: {{ include "k3.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "k3.gracePeriod" $values }}
{{- with include "k3.pullSecrets" .root }}
{{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with index $values $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "k3.selector" $ | fromYaml)) }}
topologySpreadConstraints:
  {{- range . }}
  - {{ hasKey . "labelSelector" | ternary . (merge (deepCopy .) $own) | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Container settings that do not depend on the component. dict root, component. */}}
{{- define "k3.containerCommon" -}}
{{- $values := index .root.Values .component -}}
image: {{ include "k3.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: ["k3-{{ .component }}"]
args: ["--config", "/etc/k3/config.yaml"]
{{- with include "k3.env" . | fromYamlArray }}
env: {{ toYaml . | nindent 2 }}
{{- end }}
resources: {{ include "k3.resources" $values | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if dig "rdma" "enabled" false $values }}
    add: [IPC_LOCK]
    {{- end }}
{{- end -}}

{{/* What the values of both engines say about UCX, then the component's own variables. dict root, component. */}}
{{- define "k3.env" -}}
{{- $own := (index .root.Values .component).extraEnv -}}
{{- $named := list -}}
{{- range $own }}{{ $named = append $named .name }}{{ end -}}
{{- $env := list -}}
{{- if ne .component "router" -}}
{{- $transfer := .root.Values.transfer -}}
{{- range $name, $value := dict "UCX_TLS" $transfer.ucxTls "UCX_NET_DEVICES" $transfer.ucxNetDevices -}}
{{- if and $value (not (has $name $named)) }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- concat $env $own | toYaml -}}
{{- end -}}

{{/* `resources` with the component's GPUs and RDMA devices. The argument is the component's values. */}}
{{- define "k3.resources" -}}
{{- $devices := dict -}}
{{- with .gpu }}{{ if .count }}{{ $_ := set $devices .resourceName .count }}{{ end }}{{ end -}}
{{- with .rdma }}{{ if .enabled }}{{ $_ := set $devices .resourceName .count }}{{ end }}{{ end -}}
{{- mergeOverwrite (deepCopy .resources) (dict "limits" $devices) | toYaml -}}
{{- end -}}

{{/* Drain, then 30 s; more for an engine whose transfers may take longer to end. The argument is its values. */}}
{{- define "k3.gracePeriod" -}}
{{- $lease := include "k3.seconds" (dig "transfer" "lease_s" 30 .config) | int -}}
{{- $quiet := include "k3.seconds" (dig "transfer" "drain_s" 10 .config) | int -}}
{{- add .drain.delaySeconds .drain.timeoutSeconds (max 30 $lease (add $quiet 20)) -}}
{{- end -}}

{{/* Whole seconds, rounded up, of a duration as configurations write it: 45, 500ms, 30s, 5m, 1h. */}}
{{- define "k3.seconds" -}}
{{- $unit := toString . | regexFind "[a-z]*$" -}}
{{- $scale := get (dict "ms" 0.001 "" 1.0 "s" 1.0 "m" 60.0 "h" 3600.0) $unit -}}
{{- mulf (toString . | trimSuffix $unit) $scale | ceil -}}
{{- end -}}

{{/* Probes on a port's real endpoints; the argument is the port's name. */}}
{{- define "k3.probes" -}}
startupProbe:
  httpGet: {path: /startup, port: {{ . }}}
  periodSeconds: 10
  failureThreshold: 180
livenessProbe:
  httpGet: {path: /health, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{- define "k3.volumeMounts" -}}
- {name: config, mountPath: /etc/k3, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.model.source "embedded" }}
- name: model
  mountPath: /model
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* dict root, component. */}}
{{- define "k3.volumes" -}}
- name: config
  configMap:
    name: {{ include "k3.name" . }}
- name: tmp
  emptyDir: {}
{{- if eq .root.Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ required "model.claimName is needed with model.source=pvc" .root.Values.model.claimName }}
    readOnly: true
{{- else if eq .root.Values.model.source "hostPath" }}
- name: model
  hostPath:
    path: {{ required "model.hostPath is needed with model.source=hostPath" .root.Values.model.hostPath }}
    type: Directory
{{- end }}
{{- end -}}
