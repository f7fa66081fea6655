"""Many clients at once: `python -m jobs.load --help`."""
