"""One thread per process, as a member has, and a Ray that neither reports usage nor asks for a token."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import torch

torch.set_num_threads(1)
