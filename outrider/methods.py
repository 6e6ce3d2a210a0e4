"""Who can guess, by name. Imports nothing: the command line lists them before anything heavy is loaded."""

from __future__ import annotations

METHODS = {  # who guesses, and when that pays
    "none": "plain decoding",
    "auto": "whatever is possible for this model here, chosen step by step; the place to start",
    "draft_model": "a smaller model of the same family; pays for any text if it is ten times smaller and guesses well",
    "quantized_self": "the model's own int8 or 4-bit copy; pays without a second model where memory bandwidth is the limit",
    "layer_skip": "part of the model's own layers; pays where a search found layers that are hardly missed (outrider layers)",
    "suffix": "text seen before, here, in other answers or in a corpus; pays for editing, agents, structured output",
    "ngram": "prompt lookup; pays where the answer quotes its prompt",
    "prediction": "a text you expect the answer to repeat; pays for edits of a file",
    "token_recycling": "likely successors of each token so far; pays a little for any text, needs no second model",
}
DEPTHS = {"suffix": 16, "prediction": 16, "ngram": 10, "auto": 16}  # guesses per step where a user names no number: 5
PLUGINS = "outrider.drafters"  # the entry point group where other packages name their drafters
