"""The last slice of a batch: output and errors are made of the spool, as `millstream generate` makes them."""

from __future__ import annotations

from producer.batch.folder import Folder
from producer.bulk.output import publish
from producer.bulk.spool import Spool


def finalise(folder: Folder) -> tuple[int, int]:
    """Write the files; how many rows are answered, and how many failed. Again: the same files.

    Raises:
        MillstreamError: the disk did not take them.
    """
    places = folder.places()
    with Spool(places.spool) as spool:
        totals = publish(spool, places, folder.manifest()).totals
    return totals.answered, sum(totals.failed.values())
