{{/* The objects of an engine, prefill or decode: one text for both. Each takes dict root, component. */}}

{{/* The process's own YAML. What the chart decides wins over `config`; values.schema.json refuses those keys there. */}}
{{- define "k3.engineConfig" -}}
{{- $values := index .root.Values .component -}}
{{- $transfer := .root.Values.transfer -}}
{{- $serve := dict
  "host" "0.0.0.0" "port" (int $values.port) "ops_host" "0.0.0.0" "ops_port" (int $values.opsPort)
  "drain_delay_s" (int $values.drain.delaySeconds) "drain_timeout_s" (int $values.drain.timeoutSeconds)
-}}
{{- $ours := dict "serve" $serve -}}
{{- if not (and (eq .component "decode") (eq $values.role "both")) -}}
{{- $ports := printf "%d-%d" (int $transfer.firstPort) (int $transfer.lastPort) -}}
{{- $_ := set $ours "transfer" (dict "port_range" $ports) -}}
{{- if eq .component "decode" -}}
{{- $prefills := include "k3.addresses" (dict "root" .root "component" "prefill") | fromYamlArray -}}
{{- $_ := set $serve "prefills" $prefills -}}
{{- end -}}
{{- end -}}
{{- if eq .component "decode" -}}
{{- if and (eq $values.role "decode") (lt (int .root.Values.prefill.replicas) 1) -}}
{{- fail "prefill.replicas=0 with decode.role=decode: nobody would compute prompts; set decode.role=both or raise prefill.replicas" -}}
{{- end -}}
{{- $_ := set $ours "role" $values.role -}}
{{- end -}}
{{- $model := include "k3.modelConfig" .root | fromYaml -}}
{{- $_ := set $model.model "device" (include "k3.device" .) -}}
{{- toYaml (mergeOverwrite (deepCopy $values.config) $model $ours) -}}
{{- end -}}

{{/* cuda or cpu, as `gpu.count` says; ranks and GPUs must be as many. */}}
{{- define "k3.device" -}}
{{- $values := index .root.Values .component -}}
{{- $tls := .root.Values.transfer.ucxTls -}}
{{- $gpus := int $values.gpu.count -}}
{{- $ranks := 1 -}}
{{- range $size := list "pp" "tp" "cp" }}{{ $ranks = mul $ranks (dig "parallel" $size 1 $values.config) | int }}{{ end -}}
{{- if eq $gpus 0 -}}
cpu
{{- else if ne $gpus $ranks -}}
{{- fail (printf "%s.gpu.count=%d: every rank needs a GPU of its own, and pp * tp * cp of %s.config.parallel is %d; set %s.gpu.count=%d or change parallel" .component $gpus .component $ranks .component $ranks) -}}
{{- else if not (regexMatch "^$|^\\^|\\b(cuda|cuda_copy|all)\\b" $tls) -}}
{{- fail (printf "transfer.ucxTls=%s: nothing in it reaches GPU memory, and %s.gpu.count=%d; add cuda_copy and cuda_ipc, or leave it empty" $tls .component $gpus) -}}
{{- else -}}
cuda
{{- end -}}
{{- end -}}

{{- define "k3.engineConfigMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "k3.name" . }}
  labels: {{ include "k3.labels" . | nindent 4 }}
data:
  config.yaml: |
    {{- include "k3.engineConfig" . | nindent 4 }}
{{- end -}}

{{/* Headless: each instance has a name of its own; the router probes also those that are not ready. */}}
{{- define "k3.engineService" -}}
{{- $values := index .root.Values .component -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "k3.name" . }}
  labels: {{ include "k3.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{ include "k3.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $values.port }}, targetPort: grpc, appProtocol: grpc}
    - {name: ops, port: {{ $values.opsPort }}, targetPort: ops}
{{- end -}}

{{- define "k3.engineStatefulSet" -}}
{{- $values := index .root.Values .component -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "k3.name" . }}
  labels: {{ include "k3.labels" . | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  serviceName: {{ include "k3.name" . }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{ include "k3.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{ include "k3.labels" . | nindent 8 }}
      annotations:
        checksum/config: {{ include "k3.engineConfig" . | sha256sum }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "k3.podCommon" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          {{- include "k3.containerCommon" . | nindent 10 }}
          ports:
            - {name: grpc, containerPort: {{ $values.port }}}
            - {name: ops, containerPort: {{ $values.opsPort }}}
          {{- include "k3.probes" "ops" | nindent 10 }}
          volumeMounts:
            {{- include "k3.volumeMounts" .root | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        {{- include "k3.volumes" . | nindent 8 }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
{{- end -}}

{{/* Who may call an engine: gRPC from `callers`, ops from monitoring, the data plane from the other engine. */}}
{{- define "k3.engineNetworkPolicy" -}}
{{- $values := index .root.Values .component -}}
{{- $transfer := .root.Values.transfer -}}
{{- $callers := eq .component "prefill" | ternary (list "router" "decode") (list "router") -}}
{{- $peer := eq .component "prefill" | ternary "decode" "prefill" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "k3.name" . }}
  labels: {{ include "k3.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{ include "k3.selector" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    - ports:
        - {port: {{ $values.port }}, protocol: TCP}
      from:
        {{- range $callers }}
        - podSelector:
            matchLabels: {{ include "k3.selector" (dict "root" $.root "component" .) | nindent 14 }}
        {{- end }}
    - ports:
        - {port: {{ $transfer.firstPort }}, endPort: {{ $transfer.lastPort }}, protocol: TCP}
      from:
        - podSelector:
            matchLabels: {{ include "k3.selector" (dict "root" .root "component" $peer) | nindent 14 }}
    - ports:
        - {port: {{ $values.opsPort }}, protocol: TCP}
      from: {{ .root.Values.networkPolicy.monitoring | default (list (dict "namespaceSelector" (dict))) | toYaml | nindent 8 }}
{{- end -}}
