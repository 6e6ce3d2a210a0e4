"""Models run by transformers, with our own attention."""

from typing import TYPE_CHECKING

from outrider._deprecated import renamed

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
