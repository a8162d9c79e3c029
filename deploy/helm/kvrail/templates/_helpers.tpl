{{- define "kvrail.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "kvrail" $name) }}{{ $name = printf "%s-kvrail" $name }}{{ end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- /* Labels by which a role's pods are selected; they never change. Takes (dict "root" $ "role" ROLE). */ -}}
{{- define "kvrail.selector" -}}
app.kubernetes.io/name: kvrail
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kvrail.labels" -}}
{{ include "kvrail.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- /* The roles whose workers there are, with spaces; `worker` is a worker of both. */ -}}
{{- define "kvrail.workerRoles" -}}
prefill decode{{ if gt (int .Values.workers.replicas) 0 }} worker{{ end }}
{{- end }}

{{- /* A worker role's values: the role's own win over those of `worker`. */ -}}
{{- define "kvrail.worker" -}}
{{- $own := index .root.Values (ternary "workers" .role (eq .role "worker")) -}}
{{- mergeOverwrite (deepCopy .root.Values.worker) (deepCopy $own) | toYaml -}}
{{- end }}

{{- /* Hosts of the workers that prefill. */ -}}
{{- define "kvrail.prefillHosts" -}}
{{ include "kvrail.host" (dict "root" . "role" "prefill") }}
{{- if gt (int .Values.workers.replicas) 0 }},{{ include "kvrail.host" (dict "root" . "role" "worker") }}{{ end }}
{{- end }}

{{- /* The DNS name that has all addresses of a role's pods that are ready. */ -}}
{{- define "kvrail.host" -}}
{{ include "kvrail.name" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end }}

{{- /* A setting as an environment variable has it: lists with commas, whole numbers as such. */ -}}
{{- define "kvrail.value" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if kindIs "float64" . }}{{ if eq . (floor .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . }}{{ end -}}
{{- end }}

{{- /* Takes (dict "role" ROLE "settings" SETTINGS). */ -}}
{{- define "kvrail.settings" -}}
{{- $role := .role }}
{{- range $name, $value := .settings }}
- name: KVRAIL_{{ upper $role }}_{{ upper $name }}
  value: {{ include "kvrail.value" $value | quote }}
{{- end }}
{{- end }}

{{- define "kvrail.tlsSettings" -}}
{{- if .root.Values.tls.enabled }}
tls_ca: /tls/ca.crt
tls_cert: /tls/tls.crt
tls_key: /tls/tls.key
tls_verify: role
{{- if ne .role "router" }}
metrics_tls: true
{{- end }}
{{- end }}
{{- end }}

{{- define "kvrail.tlsSecret" -}}
{{- index .root.Values.tls.existingSecrets .role | default (printf "%s-%s-tls" (include "kvrail.name" .root) .role) -}}
{{- end }}

{{- define "kvrail.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "kvrail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What a pod of any role has: who it is, where it may run. Takes root, role, values. */ -}}
{{- define "kvrail.pod" -}}
serviceAccountName: {{ include "kvrail.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false # kvrail takes no environment variable that it does not know
securityContext: {{ toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
dnsConfig: # names are written in full; without this each is looked for in every search domain first
  options: [{name: ndots, value: "1"}]
{{- end }}

{{- define "kvrail.volumes" -}}
- name: tmp
  emptyDir: {}
- name: hub {{ include "kvrail.hubVolume" .root | nindent 2 }}
{{- with .root.Values.model.volume }}
- name: models {{ toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "kvrail.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Where downloads from the Hub are kept: the claim that this chart makes, a volume of yours, or the pod itself. */ -}}
{{- define "kvrail.hubVolume" -}}
{{- if .Values.model.hubClaim.enabled -}}
persistentVolumeClaim: {claimName: {{ include "kvrail.name" . }}-hub}
{{- else -}}
{{ toYaml (.Values.model.hubVolume | default (dict "emptyDir" dict)) }}
{{- end -}}
{{- end }}

{{- define "kvrail.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: hub, mountPath: /hub}
{{- if .root.Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvrail.hubToken" -}}
{{- with .Values.model.hubToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}

{{- /* One pod at a time goes, after a while of quiet. */ -}}
{{- define "kvrail.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.cooldownPeriod }}
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{- define "kvrail.threshold" -}}
{{ .values.autoscaling.threshold | default (ternary "8" "32" (eq .role "prefill")) }}
{{- end }}

{{- /* The query by which a role's pods are scaled: prompts that wait, or sequences that run. Takes root, role. */ -}}
{{- define "kvrail.scaleQuery" -}}
{{- $of := ternary "router" .role (eq .role "prefill") -}}
{{- $pods := printf "namespace=%q, pod=~%q" .root.Release.Namespace (printf "%s-%s-.*" (include "kvrail.name" .root) $of) -}}
{{ if eq .role "prefill" }}{{ printf "sum(kvrail_queue_prompts{%s})" $pods }}{{ else }}{{ printf "sum(kvrail_engine_sequences{%s, state=\"running\"})" $pods }}{{ end }}
{{- end }}
