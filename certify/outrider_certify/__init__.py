"""Is an inference engine's speculative decoding lossless? A certificate says what was tested, and what would have been found.

>>> from outrider_certify import certify
>>> certificate = certify(subject, budget=600)
>>> certificate.conclusion, certificate.sentence

A subject is an engine: derive from `Subject`, or take one of `outrider_certify.subjects`. Names are imported when they are first
used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider_certify._version import __version__

if TYPE_CHECKING:
    from outrider_certify.certificate import Certificate, compare
    from outrider_certify.run import TestSettings, certify
    from outrider_certify.subject import (
        GeneratedText,
        SamplingParams,
        SpeculationVariant,
        Subject,
        TextRequest,
        TokenDistribution,
        Unsupported,
    )

_HOME = {"Certificate": "certificate", "compare": "certificate", "TestSettings": "run", "certify": "run"}

__all__ = [
    "Certificate",
    "GeneratedText",
    "SamplingParams",
    "SpeculationVariant",
    "Subject",
    "TestSettings",
    "TextRequest",
    "TokenDistribution",
    "Unsupported",
    "__version__",
    "certify",
    "compare",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outrider_certify' has no attribute {name!r}")
    return getattr(importlib.import_module(f"outrider_certify.{_HOME.get(name, 'subject')}"), name)
