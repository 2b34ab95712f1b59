"""Every constant of the control loop, with its unit and its reason. Nothing else holds numbers.

Seconds (`_S`), ratios of one (`_RATIO`), counts of ticks or windows where the name says so.
"""

from __future__ import annotations

from typing import Final

# Time
TICK_S: Final = 5.0
"""Time between two decisions; equal to the scrape interval, so that a tick sees one new sample."""
RATE_S: Final = 30.0
"""Rates are taken over this span: six scrapes, long enough to smooth, short enough to act in 15 s."""
WINDOW_S: Final = 10.0
"""Length of a judged window; windows are disjoint, so that two of them are two observations."""
WINDOWS_KEPT: Final = 6
"""Windows remembered: the longest rule looks at four."""
FRESH_S: Final = 15.0
"""A sample not older than three scrapes decides in both directions."""
AGEING_S: Final = 60.0
"""A sample not older than this may only raise; an older one is not known."""
OVERDUE_SCRAPES: Final = 1.4
"""A pod whose newest sample is older than this many of its own scrape intervals is overdue ..."""
OVERDUE_S: Final = 2.5
"""... plus half a tick of jitter; while one is, no replica goes."""
FUTURE_S: Final = 5.0
"""A sample may be this far ahead of our clock (skew between nodes); further ahead it is rejected."""
YOUNG_S: Final = 60.0
"""A pod's first minute (warm-up, graph capture, cold caches) tells nothing about its pace."""
RESET_S: Final = 60.0
"""After a counter went backwards (engine restarted) its pod is left out for as long as a young one."""
MIN_SPAN_S: Final = 4.0
"""Rates need samples at least this far apart: less than one scrape measures only its jitter."""

# Judgement
MIN_REQUESTS: Final = 20
"""A window with fewer requests is not judged: one late request of 19 is already 5 points."""
MIN_STEPS: Final = 100
"""A window with fewer steps is not judged."""
COVERAGE_RATIO: Final = 0.5
"""With fewer than half of the ready pods reporting, the service's signals are not known."""
REJECTIONS_STALE: Final = 3
"""Impossible samples in a row after which the pod counts as silent."""
MAX_COUNTER: Final = 2.0**53
"""Counters above this are no exact integers in a double: garbage."""
MAX_SUM: Final = 1e24
"""A window's sum of products above this is garbage (a million KV tokens squared over a day is 1e19)."""
MAX_KV_RATIO: Final = 1.05
"""More KV tokens than capacity by more than rounding is impossible."""
BATCH_TIME_OUTLIER: Final = 10.0
"""A mean step longer than ten times the slowest seen is rejected (a paused clock, garbage)."""
BATCH_TIME_BELIEVED_S: Final = 2.0
"""Means up to this are always believed: back at start-up limits a step of 8192 prefill tokens takes 0.5 s."""
REFERENCE_DECAY: Final = 0.98
"""Per window: the slowest step seen is forgotten by half in six minutes, so that a changed model is believed."""
TOKENS_EWMA_S: Final = 300.0
"""Tokens a request change with the users, over minutes."""
HANG_S: Final = 60.0
"""A pod that says for so long that it hangs was helped neither by its supervisor (at once) nor by its liveness
probe (three failures in 30 s, then 30 s of grace)."""

# Step-time model and targets
OBJECTIVE_RATIO: Final = 0.9
"""Targets aim at nine tenths of an objective: the mean must lie below what 95% keep."""
TOKEN_NOTCHES: Final = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Tokens of a step move along these: kernels are tuned for multiples of 256, and small moves do nothing."""
KV_CAPACITY_RATIO: Final = 0.9
"""Capacity of a replica leaves a tenth of the KV cache free: above it vLLM preempts."""
KV_SEQUENCES_RATIO: Final = 0.85
"""The guard rail on sequences aims lower, for it must hold for the worst minute, not the mean."""
KV_SPREAD: Final = 1.3
"""Standard deviations of a sequence's tokens kept in hand by the guard rail."""
KV_CV: Final = 0.5
"""Spread of a sequence's tokens over its mean where no square is exported (traces: 0.4 to 0.7)."""
SEQUENCES_OVER_CAPACITY: Final = 1.15
"""The guard rail on sequences stays a little above the capacity, so that capacity is reached."""
INNOVATION_GATE: Final = 7.4
"""Squared normalised innovation above which an update is refused (2.72 standard deviations)."""
GATE_REFUSALS: Final = 6
"""Refusals in a row after which the model, not the data, is doubted: its covariance is opened."""
FORGETTING: Final = 0.97
"""Per update and excited direction: half is forgotten after 23 windows, about 4 minutes."""
COVARIANCE_MAX: Final = 1e6
"""Upper bound of a coefficient's variance (milliseconds, scaled features): an uninformed prior."""
COVARIANCE_MIN: Final = 1e-4
"""Lower bound: a well-known coefficient can still follow a change."""
EXCITED_RATIO: Final = 1e-3
"""A direction whose share of the scatter is below this was not excited: it is not updated."""
MODEL_STEPS: Final = 200
"""Steps of a class before its fit is used at all."""
MODEL_ERROR_RATIO: Final = 0.2
"""Condition limit: the standard error of the predicted batch time, where it is used, over the prediction."""
MODEL_MOVE_RATIO: Final = 0.3
"""A refit that moves a term by more freezes tuning."""
MODEL_FREEZE_S: Final = 60.0
"""How long tuning waits after such a refit."""
MODEL_OFF_RATIO: Final = 0.5
"""The model is wrong when it misses the measured mean by more than half."""
MODEL_OFF_WINDOWS: Final = 5
"""Wrong for this many windows (ten ticks): the control breaker opens."""
MODEL_PROVEN_WINDOWS: Final = 5
"""Only a model that was right for this many windows is one whose misses say that something broke."""

# Batch limits
LOW_POINTS: Final = 0.02
"""Attainment below objective + 2 points (97% of 95%): one notch down, before the objective breaks."""
LOW_WINDOWS: Final = (2, 3)
"""In two of three windows: one bad window is noise."""
HIGH_POINTS: Final = 0.045
"""Attainment from objective + 4.5 points (99.5% of 95%): room for one notch up."""
HIGH_LIMIT: Final = 0.999
"""The latter never above 99.9%: it could not be reached."""
HIGH_WINDOWS: Final = 4
"""Windows that must show room."""
UP_EVERY_S: Final = 30.0
"""At most one change up in this time: its effect must be seen (two windows and a scrape)."""
DOWN_EVERY_S: Final = 10.0
"""At most one change down in this time."""
UP_FACTOR: Final = 1.1
"""A notch of sequences up."""
DOWN_FACTOR: Final = 0.9
"""A notch of sequences down where the model places us near the target."""
CUT_FACTOR: Final = 0.8
"""A notch of sequences down without a model (multiplicative decrease)."""
QUEUE_UP_FACTOR: Final = 1.25
"""Sequences up when requests wait, steps are short and memory is free: the batch is simply too small."""
QUEUE_UP_TICKS: Final = 2
"""Ticks after such a step in which no replica is asked for."""
USED_RATIO: Final = 0.5
"""Limits of which less than half is used are not raised."""
FULL_RATIO: Final = 0.9
"""Running sequences from this share of the limit: the limit is what holds requests back."""
PREEMPTIONS_PER_S: Final = 0.1
"""Preemptions a second and pod above which sequences are cut at once: each repeats a whole prefill."""
KV_HIGH_RATIO: Final = 0.92
"""KV cache above this is about to preempt."""
KV_LOW_RATIO: Final = 0.85
"""Below this a cut is taken back."""
KV_CUT_FACTOR: Final = 0.8
"""Sequences after a cut, of those that run."""
KV_BACK_FACTOR: Final = 1.05
"""Taken back by 5% in 30 s."""
FEED_FORWARD_RATIO: Final = 0.1
"""The target of sequences must move by a tenth before it is followed."""
MODEL_CUT_FACTOR: Final = 0.5
"""One move with the model leaves at least this part of the sequences."""
SHORT_STEP_RATIO: Final = 0.7
"""Steps are short, and a wider batch helps a queue, below this part of the objective."""
CANARY_PODS: Final = 3
"""With three pods or more a raise goes to one first."""
CANARY_POINTS: Final = 0.05
"""It is taken back when that pod's attainment falls 5 points below the others'."""
CANARY_WINDOWS: Final = 2
"""Windows of the canary that are judged."""
CANARY_S: Final = 60.0
"""A canary that could not be judged in this time is taken back: no evidence is no reason to go on."""
CANARY_REST_S: Final = 300.0
"""After a canary failed nothing is raised for this long."""
LEASE_S: Final = 120.0
"""A pod keeps ordered limits this long after the last order."""
ADMISSION_LEASE_RATIO: Final = 0.5
"""Leases are renewed at half-life."""
PUT_RETRY_S: Final = 10.0
"""A PUT that failed is tried again after this."""

# Replicas
RHO_REALTIME: Final = 0.75
"""Use of a replica's capacity that realtime traffic leaves room for (queue wait is short below it)."""
RHO_STANDARD: Final = 0.85
"""The same for standard traffic: it may wait half a second."""
RHO_BATCH: Final = 0.95
"""The same for batch traffic: it may wait for minutes."""
BETA_REALTIME: Final = 1.5
"""Square-root staffing: standard deviations of the load in hand (Halfin-Whitt) for realtime."""
BETA_STANDARD: Final = 0.75
"""The same for standard traffic."""
BURSTINESS: Final = (1.0, 10.0)
"""Bounds of the peakedness z = (IDC + Cs^2) / 2: below Poisson is not believed, above ten is a fault."""
SERVICE_CV2: Final = 1.0
"""Squared coefficient of variation of the service time where it is not measured (exponential)."""
ROUNDING: Final = 0.1
"""Taken off before rounding up: a hundredth of a replica too little is no reason for a GPU."""
BACKLOG_S: Final = 60.0
"""A backlog is to be worked off within a minute."""
BACKLOG_WAIT_RATIO: Final = 0.25
"""It counts from a quarter of the objective on."""
UP_STEP: Final = 2
"""Within a minute at most two more replicas, or twice as many."""
UP_SPAN_S: Final = 60.0
"""Span of that bound."""
DOWN_SHARE: Final = 0.1
"""One pod, or a tenth of the fleet, goes at a time."""
DOWN_EVERY_REPLICA_S: Final = 60.0
"""At most one such step a minute: the next must see what the last one did."""
ASKED_KEPT_S: Final = 120.0
"""Pods that were read directly for something to be taken away are read on for so long: longer than DIRECT_WHOLE_S, so that an objection that comes and goes does not start it anew."""
DIRECT_WHOLE_S: Final = 60.0
"""Without a Prometheus every pod must have been read for this long, or the scale-down delay, without a gap."""
CARRY_RATIO: Final = 0.85
"""Those who stay must carry all that runs with this share of their capacity."""
CARRY_KV_RATIO: Final = 0.8
"""And with this share of their KV cache."""
TOO_FEW_KEPT_S: Final = 1800.0
"""What a fleet served while requests waited bounds a step down for so long; then requests may have changed."""
COLD_START_S: Final = 180.0
"""Cold start before one was measured: weights of tens of GB from a warm disk."""
COLD_START_MAX_S: Final = 1800.0
"""A measured cold start is not believed beyond this."""
PENDING_COLD_STARTS: Final = 2.0
"""A pod that is pending for longer does not count as supply."""
COLD_START_WEIGHT: Final = 0.3
"""Weight of a new measurement of the cold start."""
FORECAST_LEVEL: Final = 0.2
"""Holt's smoothing of the level, per tick: about 25 s."""
FORECAST_TREND: Final = 0.05
"""Holt's smoothing of the trend, per tick: slow, for noise times the horizon is replicas."""
FORECAST_FACTOR: Final = 2.0
"""A forecast may at most double the present rate."""
WISH_SLOTS: Final = 20
"""The highest wish of the delay is kept in this many slots."""

# Load breaker
PRESSURE_KV_RATIO: Final = 0.95
"""KV share that counts as full in the pressure."""
BATCH_OPEN: Final = 0.9
"""Pressure above which batch work stops: just before the objective is broken."""
BATCH_OPEN_TICKS: Final = 2
"""Ticks in a row for that."""
BATCH_OPEN_PREEMPTIONS: Final = 1.0
"""Preemptions a second (all pods) that open batch at once."""
STANDARD_OPEN: Final = 1.5
"""Pressure above which standard requests are refused by probability."""
STANDARD_OPEN_TICKS: Final = 3
"""Ticks in a row for that."""
STANDARD_AFTER_BATCH_S: Final = 30.0
"""Batch must have been closed to new work this long first: that may be enough."""
SERVED_FACTOR: Final = 0.9
"""Admitted = this share of what is served: the queue must shrink."""
REJECT_MAX: Final = 0.95
"""Never everything: the last twentieth measures whether it is over."""
REJECT_STEP: Final = 0.1
"""Admission moves by at most this in a tick."""
CLIENT_WAIT_S: Final = 30.0
"""Realtime is refused only when its oldest request waits longer than a client does."""
CLEAN: Final = 0.7
"""Pressure below which a tick is clean."""
CLEAN_TICKS: Final = 3
"""Clean ticks that close a half-open tier."""
HALF_OPEN_RATIO: Final = 0.1
"""Share let in at first, doubled each clean tick."""
LOAD_OPEN_S: Final = (30.0, 300.0)
"""First and longest time that a tier stays open before it is tried again (doubling)."""

# Control breaker
LOST_TICKS: Final = 3
"""Ticks without signals that open it: 15 s, the span of a fresh sample."""
FAILURES: Final = 3
"""Failed writes or PUTs within FAILURES_S that open it."""
FAILURES_S: Final = 300.0
"""Span of the latter."""
NOT_IN_EFFECT_S: Final = 120.0
"""Limits ordered and not read by a busy scheduler for this long (one lease) are not in effect."""
REPLICAS_NOT_IN_EFFECT_S: Final = 120.0
"""The Deployment does not carry the ordered number for this long."""
DIRECTION_CHANGES: Final = 4
"""Changes of direction (up, down, up ...) within DIRECTION_S that open it: we oscillate."""
DIRECTION_S: Final = 900.0
"""Span of the latter."""
WORSE_POINTS: Final = 0.05
"""Attainment 5 points lower within two windows of a raise of ours."""
GOOD_S: Final = 600.0
"""Limits under which the objectives were attained for this long are the last known good."""
CONTROL_OPEN_S: Final = (120.0, 1800.0)
"""First and longest time open (doubling)."""
COMPARE_TICKS: Final = 3
"""Half-open: ticks in which decisions are computed and compared, not carried out."""
GOOD_TICKS: Final = 5
"""Half-open: good ticks with one notch on one pod that close it."""
CALM_S: Final = 1800.0
"""Closed for this long, the next opening starts with the short time again."""

# Remedies
REMEDY_STEPS: Final = 4
"""Steps of the out-of-memory remedy: a model that does not fit then needs a person."""
REMEDY_CAP_STEP: Final = 5
"""Points taken off the cap once sequences cannot be halved any more."""
REMEDY_MIN_CAP: Final = 10
"""The lowest cap the resource allows, in percent."""
HUNG_EVERY_S: Final = 120.0
"""Least time between two such replacements."""
FRAGMENTED_RATIO: Final = 0.3
"""Above this share of the allocator's memory unused, a prefill of ordinary size may find no whole piece."""
FRAGMENTED_S: Final = 600.0
"""In every sample for this long: what one burst leaves behind is used again or given back within minutes."""
FRAGMENTED_GAP_S: Final = FRESH_S
"""Samples further apart than three scrapes do not speak for the time between them: the 10 minutes begin anew."""
FRAGMENTED_EVERY_S: Final = 3600.0
"""Least time between two restarts for fragmentation: if it is back within the hour, restarts are no cure."""
FRAGMENTED_REPLICAS: Final = 2
"""With fewer replicas nobody would answer during the restart."""
OVER_CAP_FACTOR: Final = 0.8
"""Sequences after a measured peak above the cap."""
DECISIONS_KEPT: Final = 10
"""Decisions kept in the status."""
