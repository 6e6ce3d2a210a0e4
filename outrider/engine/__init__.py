"""Many requests at once: who may wait, who runs, who gives way. One thread steps the decoder; everything else asks it.

Imports everything below it; imported by `outrider.serve`. Its surface: `Engine`, `Job`, and what a job is told.
"""

from outrider.engine.engine import Engine, Stats
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.queue import EngineStopped, Job, QueueFull, Result, Update

__all__ = ["Engine", "EngineStopped", "Job", "PrefixCache", "QueueFull", "Result", "Stats", "Update"]
