"""Batches: bulk runs that go on without their caller. RQ jobs work on them, a slice after the other."""
