"""How many tokens to draft: what a step costs here, how many draft tokens are accepted, and which budget pays.

cost_model   the cost model: seconds for every size of a step
expectation  expected tokens and speedups, from acceptance and costs; optimal trees
acceptance   running acceptance of draft tokens, by depth, rank and order
costs        the seconds that a controller counts with: learned from the steps, or calibrated
controllers  Fixed, and Adaptive, which drafts what pays and bounds its losses
per_drafter  PerDrafter: an Adaptive for each drafter, where sequences have different ones
"""

from __future__ import annotations

from outrider.control.controllers import Adaptive, Controller, Fixed
from outrider.control.cost_model import CostModel
from outrider.control.costs import Calibrated, Costs
from outrider.control.per_drafter import PerDrafter

__all__ = ["Adaptive", "Calibrated", "Controller", "CostModel", "Costs", "Fixed", "PerDrafter"]
