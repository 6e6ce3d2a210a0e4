"""Which drafter drafts in a step, and how much: what pays on this machine for this text.

plan     what goes into a plan and comes out of it; Fixed: the same length in every step
costs    what steps take: measured once, corrected by every step
planner  Planner: a plan for each sequence of a step
"""

from __future__ import annotations

from outrider.control.costs import CostModel, Costs, DraftCost
from outrider.control.plan import Controller, Fixed
from outrider.control.planner import Planner

__all__ = ["Controller", "CostModel", "Costs", "DraftCost", "Fixed", "Planner"]
