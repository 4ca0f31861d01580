"""Bulk runs: rows in, rows out. `run` has the loop; each other file is one thing that it uses."""
