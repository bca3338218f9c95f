"""What `import dormouse_jax` does not do."""

import os
import subprocess
import sys

from absl.testing import absltest

_CHECK = """
import os, sys
import jax
before = dict(os.environ)
config = dict(jax.config.values)
import dormouse_jax
assert "torch" not in sys.modules, "torch was imported"
assert "flax" not in sys.modules, "Flax was imported"
assert "jax.experimental.pallas" not in sys.modules, "Pallas was imported"
assert dict(jax.config.values) == config, "JAX's configuration changed"
assert dict(os.environ) == before, "the environment changed"
# A backend that had started would refuse this.
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices("cpu")) == 3
print(*sorted(dormouse_jax.__all__), dormouse_jax.__version__)
"""


class ImportTest(absltest.TestCase):
    def test_layers_say_what_they_need(self):
        check = "import sys; sys.modules['flax'] = None; import dormouse_jax; import dormouse_jax.layers"
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, text=True)
        self.assertIn("ImportError: dormouse_jax.layers needs Flax; the extra 'train'", done.stderr)

    def test_imports_no_torch_and_no_flax_starts_no_backend_and_changes_no_global_state(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-W", "error", "-c", _CHECK], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        *names, version = done.stdout.split()
        public = [
            "__version__",
            "adapters",
            "attention",
            "context_parallel",
            "explain",
            "gdn2",
            "gemm",
            "interpret_kernels",
        ]
        public += ["kda", "kda_step", "rms_norm", "short_convolution"]
        self.assertEqual(names, public)
        self.assertRegex(version, r"^\d+\.\d+")


if __name__ == "__main__":
    absltest.main()
