"""A discrete-event simulator that executes a plan: the independent judge of the analytic cost model.

Nothing here uses `plans.cost` (an import contract holds that): service times are derived anew from FLOPs, bytes and
links, and everything that an aggregation formula would approximate (stragglers of a batch, pipeline bubbles, shared
links, barriers, staleness) happens event by event.

* `plans.simulate.settings` - what to simulate: lengths, efficiencies, faults.
* `plans.simulate.physics` - service times of single operations on single GPUs.
* `plans.simulate.network` - links as queues.
* `plans.simulate.generation` - continuous batching of one replica.
* `plans.simulate.pipeline` - one-forward-one-backward micro-batch pipelines.
* `plans.simulate.weights` - moving new weights from training to generation GPUs.
* `plans.simulate.iterations` - iterations, synchronous and asynchronous.
* `plans.simulate.result` - times, utilisation, staleness, intervals for a Gantt picture.
"""

from plans.simulate.iterations import simulate
from plans.simulate.result import SimulationResult
from plans.simulate.settings import Efficiency, SimulationSettings

__all__ = ["Efficiency", "SimulationResult", "SimulationSettings", "simulate"]
