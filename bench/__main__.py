"""`python -m bench` lists the commands."""

import ast
import pathlib

COMMANDS = (
    *("kda", "gemm", "attention", "adapters", "train_step", "quick", "run_all"),
    *("verdict", "gate", "plot", "readme", "tune", "options", "crosscheck", "compile_gate"),
)

for name in COMMANDS:
    text = ast.get_docstring(ast.parse((pathlib.Path(__file__).parent / f"{name}.py").read_text())) or ""
    print(f"python -m bench.{name:12}  {text.splitlines()[0]}")
print("--help after any of them lists its flags.")
