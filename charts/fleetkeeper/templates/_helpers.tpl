{{- define "fleetkeeper.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "fleetkeeper.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "fleetkeeper.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "fleetkeeper.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fleetkeeper.selector" -}}
app.kubernetes.io/name: {{ include "fleetkeeper.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "fleetkeeper.labels" -}}
{{ include "fleetkeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "fleetkeeper.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "fleetkeeper.fullname" .) -}}
{{- else -}}
{{- required "serviceAccount.name is required if serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "fleetkeeper.controlSecretName" -}}
{{- if not .Values.controlKeys.create -}}
{{- required "controlKeys.secretName is required if controlKeys.create is false" .Values.controlKeys.secretName -}}
{{- else -}}
{{- .Values.controlKeys.secretName | default (printf "%s-control-keys" (include "fleetkeeper.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{- /* Keeps the router role after an uninstall: routers of earlier releases still watch pods with it. */}}
{{- define "fleetkeeper.keptWithServices" -}}
{{- if .Values.crds.keep -}}
annotations: {helm.sh/resource-policy: keep}
{{- end }}
{{- end }}

{{- /* The name that marks this release, so that no two releases serve the same namespace. */}}
{{- define "fleetkeeper.release" -}}
{{ .Release.Namespace }}/{{ include "fleetkeeper.fullname" . }}
{{- end }}

{{- define "fleetkeeper.routerRoleName" -}}
{{ include "fleetkeeper.fullname" . }}-router
{{- end -}}

{{- define "fleetkeeper.wakeMarksName" -}}
{{ include "fleetkeeper.fullname" . }}-wake-marks
{{- end -}}

{{- define "fleetkeeper.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* Engine profiles in the format of the operator: a list, sorted by name. Simulated ones only with simulatedEngines. */ -}}
{{- define "fleetkeeper.profiles" -}}
{{- $profiles := list -}}
{{- $names := list -}}
{{- $off := list -}}
{{- range $name, $profile := .Values.engineProfiles -}}
{{- if and $profile $profile.simulated (not $.Values.simulatedEngines) -}}
{{- $off = append $off $name -}}
{{- else if $profile -}}
{{- $profiles = append $profiles (merge (dict "name" $name) $profile) -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- $aliases := dict -}}
{{- range $alias, $name := .Values.engineAliases -}}
{{- if has $name $names -}}
{{- $_ := set $aliases $alias $name -}}
{{- else if and $name (not (has $name $off)) -}}
{{- fail (printf "engineAliases.%s is %s, which is not in engineProfiles" $alias $name) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "profiles" $profiles "aliases" $aliases) -}}
{{- end -}}

{{- /* The settings file of the operator. */ -}}
{{- define "fleetkeeper.settings" -}}
namespaces: {{ toJson .Values.namespaces }}
operatorNamespace: {{ .Release.Namespace }}
listenPort: 8080
logLevel: {{ .Values.log.level }}
logFormat: {{ .Values.log.format }}
workers: {{ .Values.workers }}
requestsInFlight: {{ .Values.requestsInFlight }}
resyncS: {{ .Values.resyncSeconds }}
leader:
  leaseName: {{ include "fleetkeeper.fullname" . }}
  durationS: {{ .Values.leader.durationSeconds }}
  renewDeadlineS: {{ .Values.leader.renewDeadlineSeconds }}
  retryS: {{ .Values.leader.retrySeconds }}
prometheusUrl: {{ .Values.prometheus.url | quote }}
prometheusSelector: {{ .Values.prometheus.selector | quote }}
{{- if and (.Values.gateway).enabled ((.Values.gateway).batch).enabled }}
{{- /* Only pods of this chart run in its namespace. Prometheus sets the label, not the pod. */}}
prometheusBatchSelector: {{ printf "namespace=%q" .Release.Namespace | squote }}
{{- end }}
{{- with .Values.prometheus.caSecret.name }}
prometheusCaFile: /etc/fleetkeeper/prometheus-ca/{{ $.Values.prometheus.caSecret.key }}
{{- end }}
{{- with .Values.prometheus.tokenSecret.name }}
prometheusTokenFile: /etc/fleetkeeper/prometheus-token/{{ $.Values.prometheus.tokenSecret.key }}
{{- end }}
controlEnabled: {{ .Values.control.enabled }}
directReads: {{ .Values.control.directReads }}
controlKeyFile: /etc/fleetkeeper/control-keys/key.pem
controlJwksFile: /etc/fleetkeeper/control-keys/jwks.json
{{- if (.Values.gateway).enabled }}
grantJwksFile: /etc/fleetkeeper/grant-keys/jwks.json
wakeMarks: {{ include "fleetkeeper.wakeMarksName" . }}
helmRelease: {{ .Release.Name | quote }}
{{- with .Values.gateway.hold }}
holdS: {{ .seconds }}
{{- end }}
{{- end }}
profilesFile: /etc/fleetkeeper/settings/profiles.yaml
router:
  image: {{ .Values.router.image }}
  cpu: {{ .Values.router.cpu | quote }}
  memory: {{ .Values.router.memory | quote }}
  roleKind: {{ ternary "Role" "ClusterRole" (gt (len .Values.namespaces) 0) }}
  roleName: {{ include "fleetkeeper.routerRoleName" . }}
  requestTimeoutS: {{ .Values.router.requestTimeoutSeconds }}
security:
  user: {{ toJson .Values.pods.user }}
  group: {{ toJson .Values.pods.group }}
imagePullSecrets: {{ toJson .Values.pods.imagePullSecrets }}
operatorPeers:
  - namespaceLabels:
      kubernetes.io/metadata.name: {{ .Release.Namespace }}
    podLabels:
      {{- include "fleetkeeper.selector" . | nindent 6 }}
prometheusPeers: {{ toJson .Values.prometheus.peers }}
{{- with .Values.network.dns }}
dnsRule: {{ toJson . }}
{{- end }}
{{- with .Values.network.apiServer }}
apiServerRule: {{ toJson . }}
{{- end }}
{{- with .Values.network.modelHub }}
modelHubRule: {{ toJson . }}
{{- end }}
{{- with .Values.network.objectStorage }}
objectStorageRule: {{ toJson . }}
{{- end }}
maxAccelerators: {{ toJson .Values.accelerators.max }}
maxAcceleratorsByNamespace: {{ toJson .Values.accelerators.maxByNamespace }}
floatingRevisions: {{ .Values.floatingRevisions }}
systemPriorityClasses: {{ .Values.systemPriorityClasses }}
engineServiceAccounts: {{ toJson .Values.engineServiceAccounts }}
{{- if hasKey .Values "podMetadataNames" }}
podMetadataNames: {{ toJson .Values.podMetadataNames }}
{{- end }}
exposedServiceTypes: {{ toJson .Values.exposedServiceTypes }}
refuseSecondRelease: {{ .Values.refuseSecondRelease }}
{{- end -}}

{{- /* Security contexts of the chart's pods and containers: Pod Security "restricted". */ -}}
{{- define "fleetkeeper.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- with .Values.securityContext.runAsUser }}
runAsUser: {{ . }}
{{- end }}
{{- with .Values.securityContext.runAsGroup }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
{{- end -}}

{{- define "fleetkeeper.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Permissions of the operator in served namespaces. It uses every verb. */ -}}
{{- define "fleetkeeper.rules" -}}
- apiGroups: [fleetkeeper.io]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [fleetkeeper.io]
  resources: [inferenceservices/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [{{ ternary "roles" "clusterroles" (gt (len .Values.namespaces) 0) }}]
  resourceNames: [{{ include "fleetkeeper.routerRoleName" . }}]
  verbs: [bind]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end -}}

{{- /* Permissions of a router of an earlier release (vllm-router) in its namespace. */ -}}
{{- define "fleetkeeper.routerRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- end -}}

{{- /* Converts peers of the values to peers of a NetworkPolicy. */ -}}
{{- define "fleetkeeper.peers" -}}
{{- range . }}
{{- if .cidr }}
- ipBlock:
    cidr: {{ .cidr }}
    {{- with .cidrExcept }}
    except: {{ toJson . }}
    {{- end }}
{{- else if .namespaceLabels }}
- namespaceSelector:
    matchLabels: {{ toJson .namespaceLabels }}
  {{- with .podLabels }}
  podSelector:
    matchLabels: {{ toJson . }}
  {{- end }}
{{- else }}
- podSelector:
    matchLabels: {{ toJson .podLabels }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "fleetkeeper.egressRule" -}}
{{- with .peers }}
to: {{- include "fleetkeeper.peers" . | nindent 2 }}
{{- end }}
ports:
  {{- range .tcpPorts }}
  - {port: {{ . }}, protocol: TCP}
  {{- end }}
  {{- range .udpPorts }}
  - {port: {{ . }}, protocol: UDP}
  {{- end }}
{{- end -}}

{{- /* Placement of the chart's jobs: the same as for the operator. */ -}}
{{- define "fleetkeeper.jobPlacement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
