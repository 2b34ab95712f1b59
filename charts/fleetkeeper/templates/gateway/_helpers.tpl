{{- define "fleetkeeper.gateway.name" -}}
{{ include "fleetkeeper.fullname" . }}-gateway
{{- end -}}

{{- /*
Labels of the gateway's pods. The operator allows pods with this name and component to reach services, so they do not
depend on nameOverride. Takes a list: the context, and the component.
*/ -}}
{{- define "fleetkeeper.gateway.selector" -}}
app.kubernetes.io/name: fleetkeeper
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "fleetkeeper.gateway.labels" -}}
{{- $root := index . 0 -}}
{{ include "fleetkeeper.gateway.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "fleetkeeper.gateway.grantSecretName" -}}
{{ .Values.gateway.grantKeys.secretName | default (printf "%s-grant-keys" (include "fleetkeeper.fullname" .)) }}
{{- end -}}

{{- /* Address of Redis; empty without one. */ -}}
{{- define "fleetkeeper.gateway.redisUrl" -}}
{{- $redis := .Values.gateway.redis -}}
{{- if $redis.enabled -}}
redis://{{ include "fleetkeeper.gateway.name" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else -}}
{{ $redis.url }}
{{- end -}}
{{- end -}}

{{- /*
Refuses values that would give the gateway other Secrets than those of keys, or with which its processes would not
start.
*/ -}}
{{- define "fleetkeeper.gateway.check" -}}
{{- $gateway := .Values.gateway -}}
{{- if has $gateway.keys.namespace (append .Values.namespaces .Release.Namespace) -}}
{{- fail (printf "gateway.keys.namespace is %s, which has other Secrets that the gateway could read: set a namespace that holds keys of clients alone" $gateway.keys.namespace) -}}
{{- end -}}
{{- if lt (int64 $gateway.bodyBudgetBytes) (mul 2 $gateway.requestBytes) -}}
{{- fail "gateway.bodyBudgetBytes is less than twice gateway.requestBytes, and a key may hold half of it, so the largest requests would never be accepted: raise it, and the memory limit with it" -}}
{{- end -}}
{{- $redis := $gateway.redis -}}
{{- if and $redis.enabled $redis.url -}}
{{- fail "gateway.redis.enabled and gateway.redis.url are both set: set url for your own Redis, or enabled for one of the chart" -}}
{{- end -}}
{{- if and $redis.enabled $redis.username -}}
{{- fail "gateway.redis.username is set, but the chart's Redis has no users: remove it, or set url for your own Redis" -}}
{{- end -}}
{{- if and $redis.username (not $redis.passwordSecret.name) -}}
{{- fail "gateway.redis.username needs gateway.redis.passwordSecret" -}}
{{- end -}}
{{- if and $redis.caSecret.name (not (hasPrefix "rediss://" $redis.url)) -}}
{{- fail "gateway.redis.caSecret needs a gateway.redis.url that begins with rediss://" -}}
{{- end -}}
{{- end -}}

{{- /* Refuses values with which the batch process would not start, or would lose or mix up results. */ -}}
{{- define "fleetkeeper.gateway.batch.check" -}}
{{- $gateway := .Values.gateway -}}
{{- $batch := $gateway.batch -}}
{{- if not (or $gateway.enabled $batch.upstream) -}}
{{- fail "gateway.batch.enabled is true, but gateway.enabled is not: set gateway.batch.upstream to the URL of the OpenAI-compatible API that answers the lines" -}}
{{- end -}}
{{- if hasSuffix "/v1" $batch.upstream -}}
{{- fail "gateway.batch.upstream ends with /v1, which lines bring along: remove it" -}}
{{- end -}}
{{- if not (include "fleetkeeper.gateway.redisUrl" .) -}}
{{- fail "gateway.batch.enabled needs Redis for its queue: set gateway.redis.url, or gateway.redis.enabled for one of the chart" -}}
{{- end -}}
{{- $store := $batch.store -}}
{{- if and (gt (int $batch.replicas) 1) (not $store.url) -}}
{{- if not $store.persistence.enabled -}}
{{- fail "gateway.batch.replicas is more than 1, but each replica would have a volume of its own: set gateway.batch.store.url to an object store, or use a ReadWriteMany volume, or one replica" -}}
{{- end -}}
{{- if not (has "ReadWriteMany" $store.persistence.accessModes) -}}
{{- fail "gateway.batch.replicas is more than 1, but gateway.batch.store.persistence.accessModes has no ReadWriteMany: replicas must see the same files, so set gateway.batch.store.url to an object store, or use a ReadWriteMany volume, or one replica" -}}
{{- end -}}
{{- end -}}
{{- if and $batch.upstreamKeySecret.name (not $batch.upstream) -}}
{{- fail "gateway.batch.upstreamKeySecret is set, but lines go to this gateway, which takes no key for them: remove it, or set gateway.batch.upstream" -}}
{{- end -}}
{{- if and (not $gateway.enabled) (not $batch.upstreamKeySecret.name) (not $gateway.grantKeys.secretName) -}}
{{- fail "gateway.batch.upstream needs a key: set gateway.batch.upstreamKeySecret, or, if it is a gateway of another release, gateway.grantKeys.secretName to a Secret with the key that signs its grants" -}}
{{- end -}}
{{- $memory := include "fleetkeeper.gateway.bytes" (($batch.resources).limits).memory -}}
{{- $needed := add (mul ($batch.processes | default 4 | int64) ($batch.processBytes | default 536870912 | int64)) 1073741824 -}}
{{- if and $memory (gt (mul $needed 5) (mul (int64 $memory) 4)) -}}
{{- fail (printf "gateway.batch.processes x processBytes and 1 GiB for the rest are %d MiB, more than 80%% of the memory limit: lower one of them, or raise gateway.batch.resources.limits.memory to at least %dMi" (div $needed 1048576) (div (add (mul $needed 5) 4194303) 4194304)) -}}
{{- end -}}
{{- end -}}

{{- /* The bytes of a quantity of Kubernetes; empty without one, or with a unit that is not known. */ -}}
{{- define "fleetkeeper.gateway.bytes" -}}
{{- $text := toString (. | default "") -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?(e[+]?[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- if and $number (hasKey $units $unit) -}}
{{- mulf ($number | float64) (get $units $unit | float64) | int64 -}}
{{- end -}}
{{- end -}}

{{- /* Bytes that one key may store. Without an object store they are at most those of the volume. */ -}}
{{- define "fleetkeeper.gateway.batch.keyBytes" -}}
{{- $batch := .Values.gateway.batch -}}
{{- $bytes := $batch.quotas.bytes | int64 -}}
{{- if $batch.store.url -}}
{{- $bytes | default 107374182400 -}}
{{- else -}}
{{- $size := $batch.store.persistence.size -}}
{{- $volume := include "fleetkeeper.gateway.bytes" $size | int64 -}}
{{- if not $volume -}}
{{- fail (printf "gateway.batch.store.persistence.size is %q: write a number and Mi, Gi or Ti, such as 50Gi" $size) -}}
{{- end -}}
{{- if gt $bytes $volume -}}
{{- fail (printf "gateway.batch.quotas.bytes is %d, more than gateway.batch.store.persistence.size: one key could fill the volume of all. Set it to null for a tenth of the volume, or make the volume larger" $bytes) -}}
{{- end -}}
{{- $bytes | default (div $volume 10) -}}
{{- end -}}
{{- end -}}

{{- define "fleetkeeper.gateway.batch.upstream" -}}
{{- $gateway := .Values.gateway -}}
{{ $gateway.batch.upstream | default (printf "http://%s.%s.svc:%d" (include "fleetkeeper.gateway.name" .) .Release.Namespace (int $gateway.service.port)) }}
{{- end -}}

{{- /* Environment that all processes of the gateway share. */ -}}
{{- define "fleetkeeper.gateway.commonEnv" -}}
- {name: FLEETKEEPER_GATEWAY_LOG_LEVEL, value: {{ .Values.log.level | quote }}}
- {name: FLEETKEEPER_GATEWAY_LOG_FORMAT, value: {{ .Values.log.format | quote }}}
- {name: FLEETKEEPER_GATEWAY_NAMESPACES, value: {{ join "," .Values.namespaces | quote }}}
- {name: FLEETKEEPER_GATEWAY_GRANT_KEYS_DIRECTORY, value: /etc/fleetkeeper/grant-keys}
{{- include "fleetkeeper.gateway.redisEnv" . }}
{{- end -}}

{{- /* Without Redis these three are empty. Each entry begins with the end of the line before it. */ -}}
{{- define "fleetkeeper.gateway.redisEnv" -}}
{{- $gateway := .Values.gateway -}}
{{- with include "fleetkeeper.gateway.redisUrl" . }}
- {name: FLEETKEEPER_GATEWAY_REDIS_URL, value: {{ . | quote }}}
{{- with $gateway.redis.username }}
- {name: FLEETKEEPER_GATEWAY_REDIS_USERNAME, value: {{ . | quote }}}
{{- end }}
{{- with $gateway.redis.passwordSecret.name }}
- {name: FLEETKEEPER_GATEWAY_REDIS_PASSWORD_FILE, value: /etc/fleetkeeper/redis-password/{{ $gateway.redis.passwordSecret.key }}}
{{- end }}
{{- with $gateway.redis.caSecret.name }}
- {name: FLEETKEEPER_GATEWAY_REDIS_CA_FILE, value: /etc/fleetkeeper/redis-ca/{{ $gateway.redis.caSecret.key }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "fleetkeeper.gateway.commonMounts" -}}
- {name: grant-keys, mountPath: /etc/fleetkeeper/grant-keys, readOnly: true}
{{- include "fleetkeeper.gateway.redisMounts" . }}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "fleetkeeper.gateway.redisMounts" -}}
{{- with .Values.gateway.redis.passwordSecret.name }}
- {name: redis-password, mountPath: /etc/fleetkeeper/redis-password, readOnly: true}
{{- end }}
{{- with .Values.gateway.redis.caSecret.name }}
- {name: redis-ca, mountPath: /etc/fleetkeeper/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "fleetkeeper.gateway.commonVolumes" -}}
- name: grant-keys
  secret: {secretName: {{ include "fleetkeeper.gateway.grantSecretName" . }}, defaultMode: 0440}
{{- include "fleetkeeper.gateway.redisVolumes" . }}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- end -}}

{{- define "fleetkeeper.gateway.redisVolumes" -}}
{{- with .Values.gateway.redis.passwordSecret.name }}
- name: redis-password
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.gateway.redis.caSecret.name }}
- name: redis-ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- /* Environment of a process that accepts keys of clients. */ -}}
{{- define "fleetkeeper.gateway.keysEnv" -}}
{{- $gateway := .Values.gateway -}}
- {name: FLEETKEEPER_GATEWAY_KEYS_NAMESPACE, value: {{ $gateway.keys.namespace }}}
- {name: FLEETKEEPER_GATEWAY_KEYS_STALE_SECONDS, value: {{ $gateway.keys.staleSeconds | quote }}}
- {name: FLEETKEEPER_GATEWAY_ANONYMOUS, value: {{ $gateway.anonymous.enabled | quote }}}
{{- if $gateway.anonymous.enabled }}
- {name: FLEETKEEPER_GATEWAY_ANONYMOUS_HIGHEST_TIER, value: {{ $gateway.anonymous.highestTier }}}
{{- range $setting, $limit := dict "REQUESTS_PER_MINUTE" $gateway.anonymous.requestsPerMinute "TOKENS_PER_MINUTE" $gateway.anonymous.tokensPerMinute "CONCURRENCY" $gateway.anonymous.concurrency }}
{{- if not (kindIs "invalid" $limit) }}
- {name: FLEETKEEPER_GATEWAY_ANONYMOUS_{{ $setting }}, value: {{ ternary $limit (int64 $limit) (kindIs "string" $limit) | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Metadata of a pod: labels and annotations. Takes a list: the context, the component, and its admin port. */ -}}
{{- define "fleetkeeper.gateway.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- with $root.Values.gateway.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "fleetkeeper.gateway.selector" . | nindent 2 }}
{{- $annotations := $root.Values.gateway.podAnnotations | default dict }}
{{- if $root.Values.prometheus.annotations }}
{{- $annotations = merge (dict "prometheus.io/path" "/metrics" "prometheus.io/port" (index . 2) "prometheus.io/scrape" "true") $annotations }}
{{- end }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Placement and security of a pod. Takes the context. */ -}}
{{- define "fleetkeeper.gateway.podSettings" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext: {{- include "fleetkeeper.podSecurity" . | nindent 2 }}
{{- with .Values.gateway.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Egress to DNS and to the API server, as for the operator. */ -}}
{{- define "fleetkeeper.gateway.egress" -}}
{{- with .Values.network.dns }}
- {{- include "fleetkeeper.egressRule" . | nindent 2 }}
{{- else }}
- to:
    - namespaceSelector:
        matchLabels: {kubernetes.io/metadata.name: kube-system}
      podSelector:
        matchLabels: {k8s-app: kube-dns}
    - ipBlock: {cidr: 169.254.20.10/32}  # NodeLocal DNSCache
  ports: [{port: 53, protocol: TCP}, {port: 53, protocol: UDP}]
{{- end }}
{{- with .Values.network.apiServer }}
- {{- include "fleetkeeper.egressRule" . | nindent 2 }}
{{- else }}
- ports: [{port: 443, protocol: TCP}, {port: 6443, protocol: TCP}]
{{- end }}
{{- $redis := .Values.gateway.redis }}
{{- if $redis.enabled }}
- to:
    - podSelector:
        matchLabels: {{- include "fleetkeeper.gateway.selector" (list . "gateway-redis") | nindent 10 }}
  ports: [{port: 6379, protocol: TCP}]
{{- else if $redis.url }}
- {{- with $redis.peers }}
  to: {{- include "fleetkeeper.peers" . | nindent 4 }}
  {{- end }}
  ports: [{port: {{ regexFind ":[0-9]+$" (urlParse $redis.url).host | trimPrefix ":" | default "6379" }}, protocol: TCP}]
{{- end }}
{{- end -}}
