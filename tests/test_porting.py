"""docs/porting-from-fla.md: its tables name every argument of both sides, and the order that it promises holds."""

import importlib.util
import inspect
import re

from absl.testing import absltest

import dormouse_jax
from tests import helpers

# The arguments of fla-core 0.6.0 in order, with their defaults; then those that it takes out of **kwargs.
CHUNK = {
    "q": None, "k": None, "v": None, "g": None, "beta": None, "scale": None, "initial_state": None,
    "output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "safe_gate": False, "lower_bound": None,
    "disable_recompute": False, "return_intermediate_states": False, "state_v_first": False, "cu_seqlens": None,
    "cu_seqlens_cpu": None, "cp_context": None, "use_graph": False, "max_num_seqs": None,
}  # fmt: skip
CHUNK_KWARGS = ("A_log", "dt_bias", "chunk_size", "transpose_state_layout")
RECURRENT = {
    "q": None, "k": None, "v": None, "g": None, "beta": None, "A_log": None, "dt_bias": None, "scale": None,
    "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "lower_bound": None, "state_v_first": False,
    "cu_seqlens": None,
}  # fmt: skip
IN_ORDER = 14  # arguments that `kda` shares with chunk_kda, in name, order and default


def table(title):
    """Names in the first and in the second column of the table under a title."""
    text = (helpers.ROOT / "docs" / "porting-from-fla.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ") and "| FLA |" not in line]
    theirs, ours = ([name for row in rows for name in re.findall(r"`([\w.]+)`", row[i])] for i in (0, 1))
    for row in rows:
        kind, names = row[2].strip(), [re.findall(r"`([\w.]+)`", cell) for cell in row[:2]]
        assert kind in ("same", "differs", "renamed", "left out", "added"), row
        assert kind != "same" or names[0] == names[1], row
    return theirs, ours


def given(function):
    return {
        name: None if p.default is inspect.Parameter.empty else p.default
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    }


class PortingTest(absltest.TestCase):
    def test_the_table_of_chunk_kda_has_every_argument_of_both_sides(self):
        theirs, ours = table("chunk_kda and kda")
        self.assertCountEqual(theirs, [*CHUNK, *CHUNK_KWARGS])
        self.assertCountEqual(set(ours), {*given(dormouse_jax.kda), "context_parallel.kda"})

    def test_the_table_of_fused_recurrent_kda_has_every_argument_of_both_sides(self):
        theirs, ours = table("fused_recurrent_kda and kda_step")
        self.assertCountEqual(theirs, RECURRENT)
        self.assertCountEqual(ours, given(dormouse_jax.kda_step))

    def test_the_first_arguments_are_the_same_by_position(self):
        self.assertEqual(list(given(dormouse_jax.kda).items())[:IN_ORDER], list(CHUNK.items())[:IN_ORDER])
        others = list(inspect.signature(dormouse_jax.kda).parameters.values())[IN_ORDER:]
        self.assertEqual({p.kind for p in others}, {inspect.Parameter.KEYWORD_ONLY})

    def test_flash_linear_attention_is_what_the_tables_say(self):
        if importlib.util.find_spec("fla") is None or not helpers.on_gpu():
            self.skipTest("flash-linear-attention is not installed here, or finds no GPU")
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        self.assertEqual(given(chunk_kda), CHUNK)
        self.assertEqual(given(fused_recurrent_kda), RECURRENT)


if __name__ == "__main__":
    absltest.main()
