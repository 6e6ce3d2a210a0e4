"""Checkpoints whose weights are quantised, as the hub has them: GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes and MXFP4."""
