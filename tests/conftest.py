"""Shared set-up: tests find their helpers beside them, and small tensors stay on one thread."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
