"""The README's Python runs as it stands, and what it names exists."""

import pathlib
import re

import jax
from absl.testing import absltest

import dormouse_jax

_README = (pathlib.Path(__file__).resolve().parent.parent / "README.md").read_text()


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", _README, re.DOTALL | re.MULTILINE)


class ReadmeTest(absltest.TestCase):
    def test_python_blocks_run_in_order(self):
        blocks = _blocks()
        self.assertNotEmpty(blocks)
        scope = {}
        for i, block in enumerate(blocks):
            exec(compile(block, f"README.md, Python block {i + 1}", "exec"), scope)  # noqa: S102
        self.assertEqual(scope["o"].shape, scope["v"].shape)
        self.assertEqual(scope["state"].shape, (scope["B"], scope["H"], scope["K"], scope["V"]))
        for name, grad in zip(("q", "k", "v", "g", "beta"), scope["grads"], strict=True):
            self.assertEqual(grad.shape, scope[name].shape)
            self.assertTrue(bool(jax.numpy.isfinite(grad).all()), f"d{name} has a non-finite element")

    def test_first_use_takes_about_ten_lines(self):
        lines = [line for line in _blocks()[0].splitlines() if line and not line.startswith("import")]
        self.assertLessEqual(len(lines), 12)

    def test_functions_of_the_table_are_exported(self):
        table = _README.split("## What there is")[1].split("\n\n")[1]
        names = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
        self.assertNotEmpty(names)
        for name in names:
            self.assertIn(name, dormouse_jax.__all__)

    def test_results_are_between_their_markers(self):
        self.assertRegex(_README, r"(?s)<!-- results:begin -->\n.*\n<!-- results:end -->\n")


if __name__ == "__main__":
    absltest.main()
