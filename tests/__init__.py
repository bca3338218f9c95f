"""Tests. `python -m pytest tests` runs all, `python -m tests.test_kda` one file."""
