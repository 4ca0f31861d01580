"""Python's collector in the processes of a worker."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Leave what has been loaded to itself, and look rarely for cycles among what comes and goes.

    Jobs and frames are in none. As it comes the collector took a quarter of the parent's time for a job, and now and
    then held up a step of a model process for 0.4 s to look at all of torch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
