"""The fixtures of `tests/support/chromium.py`."""

from chromium import browser, javascript, modules, visit

__all__ = ["browser", "javascript", "modules", "visit"]
