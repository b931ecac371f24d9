"""Time as a value that is passed in, so that schedulers can be driven by a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds; only differences mean anything."""

monotonic: Clock = time.monotonic
