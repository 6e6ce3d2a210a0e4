"""How many tokens to draft: what a step costs here, what was accepted, and which budget pays.

cost_model   the cost model: seconds for every size of a step
expectation  expected tokens and speedups, from acceptance and costs
acceptance   running acceptance, and seconds by size
costs        where a controller's seconds come from: the steps themselves, or a calibrated model
controllers  Fixed, and Adaptive, which takes what pays and never costs more than it states
"""

from __future__ import annotations

from outrider.control.controllers import Adaptive, Controller, Fixed
from outrider.control.cost_model import CostModel
from outrider.control.costs import Calibrated, Costs

__all__ = ["Adaptive", "Calibrated", "Controller", "CostModel", "Costs", "Fixed"]
