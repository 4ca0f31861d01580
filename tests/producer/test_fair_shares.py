"""A tenant with one job beside a tenant with a hundred thousand."""

from __future__ import annotations

import pytest

from broker.calls import Lease
from millstream import Client, Job
from tests.broker.steps import Worker


@pytest.mark.long
def test_a_tenants_first_job_behind_100_000_of_another_one_starts_within_two_picks(url: str) -> None:
    with Client(url) as client:
        client.limits(max_entries=200_000)
        client.submit_many(Job(id=f"m{n}", prompt="p", tenant="m") for n in range(100_000))
        worker = Worker(client.queue)

        def two_picks() -> list[Lease]:
            return [worker.lease_one(), worker.lease_one()]

        for newcomer in "az":  # whether its name comes before or after
            client.submit("p", id=newcomer, tenant=newcomer)
            assert newcomer in [lease.id for lease in two_picks()]
            worker.lease(500)
        client.queue.client.flushall()
