"""What every test starts from: fixed seeds, and no settings from the caller's environment."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("CLOVER_")]:
        monkeypatch.delenv(variable)
    random.seed(0)
    np.random.seed(0)
    # Most tests never load torch, and should not pay for it here.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
