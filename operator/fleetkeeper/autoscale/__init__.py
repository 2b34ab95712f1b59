"""The control loop as pure decisions: (inputs, memory, now) -> (decision, memory). Nothing here waits or acts.

A tick of one service, every 5 s (`tick.decide_service`):

1. `signals`: samples of the pods become rates over 30 s, and windows of 10 s in which attainment is judged.
2. `capacity`: the step-time model is refitted, and gives what one replica carries within both objectives.
3. `rules`: the breakers, then the batch limits, then the replicas. Limits act within seconds, replicas within
   minutes, so a missed objective first moves limits. The rules for replicas read three values: what is asked
   (`need.Need`), which pods serve (`supply.Supply`), and what forbids a removal (`scale_down.Gates`).
4. `arbitrate`: the recommendations of all services become allocations within the GPU budget. A replica that only
   waits for the next surge yields to a service that the budget limits.
5. `report`: what the status, the events and the metrics show.

Formulas, with B sequences, P prefill tokens and KV resident tokens in a step:

    step       t0 + max(w, g (P + B)) + b B + c KV + p [P > 0]             capacity/step_time_model.py
    capacity   C: most sequences whose mean step is within 0.9 of the batch time objective
    prompts    most sequences whose prompts wait for one another for at most 1.25 / z objectives
               (M/G/1; z: quantile of the attainment)                      capacity/targets.py
    carried    sequences / (generated tokens x mean step), at the smaller of the two (Little's law)
    needed     ceil(arrivals / carried)                                    capacity/demand.py

Worked example: a 70B model on four H100, prompts of 1,150 tokens and answers of 210, the default objectives
(0.5 s, 50 ms, 95%). At first a step may have 8,192 tokens:

>>> from fleetkeeper.autoscale.capacity.demand import needed_replicas
>>> from fleetkeeper.autoscale.capacity.step_time_model import StepTime
>>> from fleetkeeper.autoscale.capacity.targets import Shape, capacity_of, mean_step_s, notch_down
>>> from fleetkeeper.autoscale.capacity.targets import prefill_wait_s, promptly_served
>>> from fleetkeeper.autoscale.types import ControlSettings
>>> time = StepTime(t0_s=6.6e-3, w_s=10.9e-3, g_s=68e-6, b_s=13e-6, c_s=31e-9, p_s=15.6e-3)
>>> settings, kv_tokens = ControlSettings(), 420_000
>>> capacity = capacity_of(time, settings, Shape(1150, 210, 8192), kv_tokens)
>>> round(capacity)
59

The tokens of a step that leave 59 sequences within 45 ms, rounded down to a notch, are the target T*:

>>> room_s = 0.045 - time.t0_s - time.p_s - time.b_s * capacity - time.c_s * capacity * (1150 + 210 / 2)
>>> round(1e3 * room_s, 1), notch_down(room_s / time.g_s, settings)
(19.7, 256)

With steps of 256 tokens, 46 sequences would meet the batch time objective, but their prompts would wait for
one another: 20 are in balance with a mean wait of 0.37 s. A request then takes 6 s, so a replica carries 3.3
requests/s, and 13 requests/s need four:

>>> shape = Shape(1150, 210, 256)
>>> round(capacity_of(time, settings, shape, kv_tokens)), round(promptly_served(time, settings, shape))
(46, 20)
>>> sequences = promptly_served(time, settings, shape)
>>> round(prefill_wait_s(time, sequences, shape), 2)
0.37
>>> request_s = 210 * mean_step_s(time, sequences, shape)
>>> round(request_s, 1), round(sequences / request_s, 1)
(6.0, 3.3)
>>> needed_replicas(13.0, sequences / request_s)
4

Safety, which no formula overrides: unknown is no decision; Prometheus may add replicas, and only direct reads
of every pod may take one away; while measurements or actuators fail, limits are known good ones and nothing
is lowered (`rules/control_breaker.py`).
"""
