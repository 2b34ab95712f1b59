"""Every constant of the control loop, with its unit and its reason. No other module defines numbers.

Units: seconds (`_S`), ratios from 0 to 1 (`_RATIO`), ticks and windows as named.
"""

from __future__ import annotations

from typing import Final

# Time
TICK_S: Final = 5.0
"""Time between two ticks; equal to the scrape interval, so that each tick has one new sample."""
RATE_S: Final = 30.0
"""Span of rates: six scrapes, long enough to smooth, short enough to act within 15 s."""
WINDOW_S: Final = 10.0
"""Length of a judged window; windows are disjoint, so two windows are two independent observations."""
WINDOWS_KEPT: Final = 6
"""Windows kept in memory: a minute. A queue in all of them no longer counts as one that drains by itself."""
FRESH_S: Final = 15.0
"""A sample up to three scrapes old may raise and lower."""
AGEING_S: Final = 60.0
"""A sample up to this age may only raise; an older one counts as unknown."""
OVERDUE_SCRAPES: Final = 1.4
"""A pod whose newest sample is older than this many of its own scrape intervals is overdue ..."""
OVERDUE_S: Final = 2.5
"""... plus half a tick of jitter. While a pod is overdue, no replica is removed."""
FUTURE_S: Final = 5.0
"""A sample may be this far ahead of the operator's clock (skew between nodes), else it is rejected."""
WARM_UP_S: Final = 60.0
"""Warm-up of a pod: its first minute (graph capture, cold caches) says nothing about its speed, nor does
the minute after its engine restarted."""
MIN_SPAN_S: Final = 4.0
"""Rates need samples at least this far apart: less than one scrape interval measures only jitter."""

# Judgment
MIN_REQUESTS: Final = 20
"""A window with fewer requests is not judged: one late request of 19 already costs 5 points."""
MIN_STEPS: Final = 100
"""A window with fewer steps is not judged."""
COVERAGE_RATIO: Final = 0.5
"""If fewer than half of the warmed-up pods report, the service's signals are unknown."""
REJECTIONS_STALE: Final = 3
"""Impossible samples in a row after which the pod counts as not reporting."""
MAX_COUNTER: Final = 2.0**53
"""A double cannot hold larger integers exactly, so a larger counter is garbage."""
MAX_SUM: Final = 1e24
"""A window's sum of products above this is garbage (a million KV tokens squared over a day is 1e19)."""
MAX_KV_RATIO: Final = 1.05
"""More KV tokens than the capacity, beyond rounding, are impossible."""
BATCH_TIME_OUTLIER: Final = 10.0
"""A mean step more than ten times the slowest seen is rejected (paused clock, garbage)."""
BATCH_TIME_BELIEVED_S: Final = 2.0
"""Means up to this are always accepted: at start-up limits a step of 8192 prefill tokens takes 0.5 s."""
REFERENCE_DECAY: Final = 0.98
"""Per window: the slowest step seen decays by half in six minutes, so that a changed model is accepted."""
TOKENS_EWMA_S: Final = 300.0
"""Tokens per request change with the users, within minutes."""
HANG_S: Final = 60.0
"""A pod that reports a hung engine for this long was not helped by its supervisor (which acts at once) or
by its liveness probe (three failures in 30 s, then 30 s of grace)."""
OPEN_ENGINE_S: Final = 180.0
"""The kubelet brings a changed ConfigMap into a pod within a minute or two. An engine that demands no grant
after this long will not."""

# Step-time model and targets
OBJECTIVE_RATIO: Final = 0.9
"""Targets aim at nine tenths of an objective: the mean must be below what 95% attain."""
PREFILL_WAIT: Final = 1.25
"""Mean wait for other prompts at a replica's capacity, in queue wait objectives, times the quantile of the
attainment (1.64 at 95%: 0.76 objectives): half of the requests wait for nothing."""
PREFILL_WAIT_MAX: Final = 2.0
"""Upper bound of that wait, in objectives: the quantile is 0 at the lowest attainment, 50%."""
TOKEN_NOTCHES: Final = (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
"""Allowed tokens per step: kernels are tuned for multiples of 128, and small moves have no effect."""
KV_CAPACITY_RATIO: Final = 0.9
"""The capacity of a replica leaves a tenth of the KV cache free: above it vLLM preempts."""
KV_SEQUENCES_RATIO: Final = 0.85
"""The upper bound M* of sequences aims lower, because it must hold in the worst minute, not on average."""
KV_SPREAD: Final = 1.3
"""Standard deviations of a sequence's tokens that M* keeps in reserve."""
KV_CV: Final = 0.5
"""Coefficient of variation of a sequence's tokens, which engines do not export (traces: 0.4 to 0.7)."""
INNOVATION_GATE: Final = 7.4
"""Squared normalized innovation above which an update is rejected (2.72 standard deviations)."""
GATE_REFUSALS: Final = 6
"""Rejections in a row after which the model and not the data is doubted: its covariance is reset."""
FORGETTING: Final = 0.97
"""Forgetting factor per update and excited direction: half is forgotten after 23 windows (4 minutes)."""
COVARIANCE_MAX: Final = 1e6
"""Upper bound of a coefficient's variance (milliseconds, scaled features): an uninformed prior."""
COVARIANCE_MIN: Final = 1e-4
"""Lower bound: a well-known coefficient can still follow a change."""
EXCITED_RATIO: Final = 1e-3
"""A direction with a smaller share of the scatter was not excited and is not updated."""
MODEL_STEPS: Final = 200
"""Steps of a class that are needed before its fit is used."""
MODEL_ERROR_RATIO: Final = 0.2
"""Upper bound for the standard error of a predicted batch time, as a ratio of the prediction."""
MODEL_OFF_RATIO: Final = 0.5
"""The model is wrong if it is off by more than half of the measured mean."""
MODEL_WINDOWS: Final = 5
"""Right for this many windows (ten ticks), the model is proven. If it is then wrong for as many, something
broke, and the control breaker opens."""

# Batch limits
LOW_POINTS: Final = 0.02
"""Attainment below objective + 2 points (97% for 95%): one notch down, before the objective is missed."""
LOW_WINDOWS: Final = (2, 3)
"""Low in two of three windows: one bad window is noise."""
HIGH_POINTS: Final = 0.045
"""Attainment from objective + 4.5 points (99.5% for 95%): room for one notch up."""
HIGH_LIMIT: Final = 0.999
"""Upper bound of both marks: more than 99.9% could not be reached."""
HIGH_WINDOWS: Final = 4
"""Windows that must show room."""
NEAR_WAIT_RATIO: Final = 0.25
"""Queue wait is near its objective above a quarter of it: below that it is the ordinary queue."""
LASTING_RATIO: Final = 0.75
"""Queue wait attainment below which a window is part of a lasting queue."""
LONG_QUEUE: Final = 20.0
"""A queue that takes more objectives than this to serve (10 s by default) needs no minute to count."""
UP_EVERY_S: Final = 30.0
"""At most one raise in this time: its effect must show first (two windows and a scrape)."""
DOWN_EVERY_S: Final = 10.0
"""At most one cut in this time."""
UP_FACTOR: Final = 1.1
"""A notch of sequences up."""
DOWN_FACTOR: Final = 0.9
"""A notch of sequences down if the model places the limits near the target."""
CUT_FACTOR: Final = 0.8
"""Sequences down without a model (multiplicative decrease), and for the KV cache or the memory cap."""
NEAR_NOTCHES: Final = 2
"""Moves of at most so many notches follow the load: the control breaker counts larger ones only."""
QUEUE_UP_FACTOR: Final = 1.25
"""Sequences up if requests wait, steps are short and KV cache is free: the batch is too small."""
USED_RATIO: Final = 0.5
"""Limits that are used by less than half are not raised."""
FULL_RATIO: Final = 0.9
"""From this share of the limit on, the limit makes requests wait."""
PREEMPTIONS_PER_S: Final = 0.1
"""Preemptions per second and pod above which sequences are cut at once: each repeats a whole prefill."""
KV_HIGH_RATIO: Final = 0.92
"""Above this KV cache usage, preemptions are imminent."""
KV_LOW_RATIO: Final = 0.85
"""Below this KV cache usage, a larger batch may help a queue."""
FEED_FORWARD_RATIO: Final = 0.1
"""The target of sequences must move by more than a tenth before it is followed."""
MODEL_CUT_FACTOR: Final = 0.5
"""A model-driven cut keeps at least this fraction of the sequence limit."""
SHORT_STEP_RATIO: Final = 0.7
"""Steps are short, and a larger batch helps a queue, below this share of the objective."""
CANARY_PODS: Final = 3
"""With three pods or more, a raise goes to one pod first."""
CANARY_POINTS: Final = 0.05
"""The raise is reverted if that pod's attainment is 5 points below the others'."""
CANARY_WINDOWS: Final = 2
"""Windows of the canary that are judged."""
CANARY_S: Final = 60.0
"""A canary that could not be judged in this time is reverted: a raise needs evidence."""
CANARY_REST_S: Final = 300.0
"""Nothing is raised for this long after a canary failed."""
LEASE_S: Final = 120.0
"""A pod keeps its limits for this long after the last limits request."""
ADMISSION_LEASE_RATIO: Final = 0.5
"""Leases are renewed at half-life."""
PUT_RETRY_S: Final = 10.0
"""A failed PUT is retried after this."""

# Replicas
ROUNDING: Final = 0.1
"""Subtracted before the replicas for a backlog are rounded up: its tokens are estimates, and a replica for less
than a tenth of one would be taken back within the hour."""
MAX_REPLICAS_NEEDED: Final = 1e6
"""Upper bound of the needed replicas before rounding: a forged rate could make them infinite."""
UP_STEP: Final = 4
"""Within UP_SPAN_S, at most four more replicas or twice as many, as an HPA by default."""
UP_SPAN_S: Final = 15.0
"""Span of that bound."""
DOWN_SHARE: Final = 0.1
"""One pod or a tenth of the fleet is removed at a time."""
DOWN_EVERY_REPLICA_S: Final = 60.0
"""At most one scale-down step per minute: its effect must show before the next."""
ASKED_KEPT_S: Final = 120.0
"""Pods that were read directly before a reduction are read for this much longer. It is longer than
DIRECT_WHOLE_S, so that a reason that comes and goes does not restart that time."""
DIRECT_WHOLE_S: Final = 60.0
"""A scale-down needs direct reads of every pod for this long without a gap; without Prometheus for the
stabilization window if that is longer."""
CARRY_RATIO: Final = 0.85
"""Maximum share of the remaining replicas' capacity that all sequences may use after a scale-down."""
CARRY_KV_RATIO: Final = 0.8
"""Maximum KV-cache use of the remaining replicas after a scale-down."""
IDLE_READ_S: Final = 15.0
"""Pods are read directly from this long before their service could sleep: three ticks, after which no sample of
Prometheus counts."""
EARLY_IDLE_S: Final = 30.0
"""Time without a request after which a service may sleep early, for one that wakes."""
WAKE_LACKS_S: Final = 15.0
"""A wake that finds no accelerator waits for this long before another service sleeps for it. Until then the pods
of idle services are read directly."""
SURGE_DELAYS: Final = 4.0
"""After requests waited too long, the replicas that this required are kept for so many scale-down delays:
bursts return, and a replica takes minutes to start."""
HANDOVER_S: Final = 60.0
"""A replica that is removed for another service drains for about this long. That service must lack a replica for
this long and a cold start: a shorter surge is over before the help comes."""
BATCH_UP_FACTOR: Final = 1.25
"""Replicas are added for a backlog if its required rate times this is more than they give: the tokens of
answers are estimates, and batch waits during surges."""
BATCH_DOWN_FACTOR: Final = 1.5
"""They are removed once the rest gives this much more than the required rate. It falls while more than
required is done, so a replica is not removed right after it was added."""
MAX_DEADLINE: Final = 253_402_300_799.0
"""A deadline after the year 9999 is garbage, and cannot be shown."""
COLD_START_S: Final = 180.0
"""Cold start until one is measured: tens of GB of weights from a warm disk."""
COLD_START_MAX_S: Final = 1800.0
"""Upper bound of a measured cold start."""
PENDING_COLD_STARTS: Final = 2.0
"""A pod that is pending for more cold starts than this does not count as supply."""
COLD_START_WEIGHT: Final = 0.3
"""Weight of a new measurement of the cold start."""
DEMAND_TICKS: Final = 60
"""Ticks of the mean arrival rate (five minutes): long enough that chance moves it by a few percent."""
SIGMAS: Final = 2.0
"""Standard deviations beyond which a change of the arrival rate, or a missed objective, is no chance."""
RECOMMENDATION_SLOTS: Final = 20
"""The recommendations of the stabilization window are kept as the maxima of this many slots."""

# Load breaker
PRESSURE_KV_RATIO: Final = 0.95
"""KV cache usage that counts as full in the pressure."""
BATCH_OPEN: Final = 0.9
"""Pressure above which batch opens: just before an objective is missed."""
BATCH_OPEN_TICKS: Final = 2
"""Ticks in a row above it that open batch."""
STANDARD_OPEN: Final = 3.0
"""Pressure above which a share of the standard requests is shed."""
STANDARD_OPEN_TICKS: Final = 3
"""Ticks in a row above it that open standard."""
SERVED_FACTOR: Final = 0.9
"""Admitted rate as a share of the served rate: the queue must shrink."""
REJECT_MAX: Final = 0.95
"""Never shed everything: the last twentieth shows whether the overload is over."""
REJECT_STEP: Final = 0.3
"""The admitted share falls by at most this per tick ..."""
ADMIT_STEP: Final = 0.1
"""... and rises by at most this."""
CLIENT_WAIT_S: Final = 30.0
"""Longest time that a client waits. Realtime requests are shed only if the oldest one has waited longer, and
the queue of a tier that is shed must drain in this time."""
CLEAN: Final = 0.7
"""Pressure below which a tick is clean."""
CLEAN_TICKS: Final = 3
"""Clean ticks in a row that close a half-open tier."""
HALF_OPEN_RATIO: Final = 0.1
"""Share admitted first when half-open, doubled with each clean tick."""
LOAD_OPEN_S: Final = (30.0, 300.0)
"""Shortest and longest time that a tier stays open before it is half-open (doubling). Batch must have been
open for the shortest before standard opens: that may be enough."""

# Control breaker
LOST_TICKS: Final = 3
"""Ticks without signals that open the breaker: 15 s, as long as a sample is fresh."""
FAILURES: Final = 3
"""Failed writes or PUTs within FAILURES_S that open the breaker."""
FAILURES_S: Final = 300.0
"""Span in which failures are counted."""
NOT_IN_EFFECT_S: Final = 120.0
"""Limits that a busy scheduler has not applied for this long (one lease) open the breaker, as does a
Deployment without the allocated replicas."""
DIRECTION_CHANGES: Final = 4
"""Changes of direction (up, down, up ...) by more than two notches within DIRECTION_S that open the
breaker for oscillation."""
DIRECTION_S: Final = 900.0
"""Span in which changes of direction are counted."""
WORSE_POINTS: Final = 0.05
"""SLO attainment 5 points lower in the two windows after a raise opens the breaker."""
GOOD_S: Final = 600.0
"""Limits under which the objectives were attained for this long are the last known good ones."""
CONTROL_OPEN_S: Final = (120.0, 1800.0)
"""Shortest and longest time open (doubling). A breaker that was closed for the longest time
opens for the shortest again."""
COMPARE_TICKS: Final = 3
"""Half-open: ticks in which decisions are computed but not applied."""
GOOD_TICKS: Final = 5
"""Half-open: good ticks with one notch on one pod that close the breaker."""

# Remedies
REMEDY_STEPS: Final = 4
"""Steps of the out-of-memory remedy: if the model still does not fit, a person has to act."""
REMEDY_CAP_STEP: Final = 5
"""Points subtracted from the memory cap once sequences are no longer halved."""
REMEDY_MIN_CAP: Final = 10
"""The lowest memory cap that the API allows, in percent."""
HUNG_EVERY_S: Final = 120.0
"""Minimum time between two replacements of hung engines."""
FRAGMENTED_RATIO: Final = 0.3
"""Unused share of the allocator's memory above which an ordinary prefill may find no large enough block."""
FRAGMENTED_S: Final = 600.0
"""In every sample for this long: memory left by one burst is reused or freed within minutes."""
FRAGMENTED_EVERY_S: Final = 3600.0
"""Minimum time between two restarts for fragmentation: if it returns sooner, restarts do not help."""
DECISIONS_KEPT: Final = 10
"""Decisions kept in the status."""
