"""Which drafter drafts in a step, and how much: what pays on this machine for this text.

price    what a draft is worth at a price of a second; pure functions
beliefs  what lookups and models bring, and how long answers are
costs    what steps take: measured once, corrected by every step
planner  Planner: a plan for each sequence of a step; Fixed: the same length in every step
shapes   trees that are fixed before anything is drawn, and expected speedups
"""

from __future__ import annotations

from outrider.control.costs import CostModel, Costs, DraftCost
from outrider.control.planner import Controller, Fixed, Planner

__all__ = ["Controller", "CostModel", "Costs", "DraftCost", "Fixed", "Planner"]
