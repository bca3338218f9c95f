"""`python -m bench` lists the commands."""

print(
    "python -m bench.kda | bench.train_step | bench.quick | bench.run_all --out DIR | bench.verdict DIR | "
    "bench.gate DIR --baseline FILE | bench.plot DIR | bench.readme | bench.tune | bench.options | bench.crosscheck | "
    "bench.compile_gate"
)
