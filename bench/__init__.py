"""Benchmarks: `python -m bench.kda --impl=pallas,torch` and its sisters.

One harness serves every operator: `spec` says what an operator benchmark is made of, `worker` runs one arm in its
own process, `harness` drives the workers round by round, `stats` turns samples into intervals and verdicts, `results`
is the JSON on disk and `report` the tables.
"""
