"""Many requests at once: which sequences wait, run and give way. One thread steps the decoder; everything else asks it."""

from outrider.engine.engine import Engine, Stats
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.queue import EngineStopped, QueueFull
from outrider.engine.scheduler import Scheduler

__all__ = ["Engine", "EngineStopped", "PrefixCache", "QueueFull", "Scheduler", "Stats"]
