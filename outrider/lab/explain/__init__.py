"""The explainer: a run as one interactive page that needs no network.

data      what a page shows, as records; a page holds them as JSON
facts     fills them from a trace, and from the model if it is at hand
page      records -> HTML
record    makes the built-in run, `builtin.json`

The numbers of the page are computed by the ES modules in `assets/`. Tests compare them with Python (tests/browser).
"""

from __future__ import annotations

from outrider.lab.explain.facts import explained, with_model
from outrider.pages.explained import CostCurve, ExplainedRequest, ExplainedRun, ExplainedStep, ModelSize
from outrider.pages.page import builtin, render

__all__ = [
    "CostCurve",
    "ExplainedRequest",
    "ExplainedRun",
    "ExplainedStep",
    "ModelSize",
    "builtin",
    "explained",
    "render",
    "with_model",
]
