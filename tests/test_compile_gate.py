"""Kernels compiled for cards that are not here, and what the compile gate makes of compilers' answers."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest, parameterized

from bench import compile_gate, compile_record
from bench.compile_cases import cases
from bench.compile_target import CARDS
from tests import helpers

_GOOD = {"registers": 128, "stores": 0, "loads": 0, "shared": 1000}
_LIMITS = {name: card.block_shared for name, card in CARDS.items()}


def _failures(now, recorded):
    found, before = ({"rtx4090": {"kda": {"kda_state": x}}} for x in (now, recorded))
    return compile_record.failures(found, before, _LIMITS)


class JudgementTest(parameterized.TestCase):
    def test_what_is_as_recorded_passes(self):
        spilling = _GOOD | {"stores": 100, "loads": 120}
        self.assertEmpty(_failures(_GOOD, _GOOD))
        self.assertEmpty(_failures(spilling, spilling))
        self.assertEmpty(_failures(_GOOD, spilling))

    def test_more_spilled_bytes_than_recorded_fail(self):
        [line] = _failures(_GOOD | {"stores": 400, "loads": 500}, _GOOD | {"stores": 100, "loads": 120})
        self.assertEqual(line, "rtx4090: kda: kda_state: spills 900 bytes, 220 are recorded")

    def test_spills_of_a_kernel_that_is_not_recorded_are_named(self):
        found = {"h200": {"kda new": {"kda_state": _GOOD | {"stores": 400, "loads": 500}}}}
        self.assertEmpty(compile_record.failures(found, {}, _LIMITS))
        [line] = compile_record.unrecorded(found, {})
        self.assertEqual(line, "h200: kda new: kda_state: spills 900 bytes, nothing is recorded")
        self.assertEmpty(compile_record.unrecorded(found, found))

    def test_too_much_shared_memory_fails(self):
        [line] = _failures(_GOOD | {"shared": 101377}, _GOOD | {"shared": 101377})
        self.assertEqual(line, "rtx4090: kda: kda_state: 101377 bytes of shared memory, the card has 101376")

    def test_what_a_compiler_refuses_fails_recorded_or_not(self):
        [line] = _failures({"error": "no such instruction"}, {"error": "no such instruction"})
        self.assertEqual(line, "rtx4090: kda: kda_state: no such instruction")

    def test_a_call_that_loses_its_kernel_fails(self):
        lost = {"h200": {"kda": {"": {"none": "not pallas_triton: too large"}}}}
        [line] = compile_record.failures(lost, {"h200": {"kda": {"kda_state": _GOOD}}}, _LIMITS)
        self.assertEqual(line, "h200: kda: no kernel serves this call: not pallas_triton: too large")
        self.assertEmpty(compile_record.failures(lost, lost, _LIMITS))

    def test_a_call_that_was_not_compiled_fails(self):
        self.assertEqual(compile_record.failures({"h200": {"kda": {}}}, {}, _LIMITS), ["h200: kda: not compiled"])


class RecordTest(absltest.TestCase):
    def test_kernels_are_known_by_their_programs_unless_records_of_one_differ(self):
        one, other = _GOOD | {"program": "1"}, _GOOD | {"program": "2"}
        recorded = {"kda": {"a": one, "b": other}, "gdn2": {"a": one, "b": other | {"shared": 1001}}}
        self.assertEqual(compile_record.programs(recorded), {"1": one | {"recorded": True}})
        # As is said of calls that no kernel serves, and of kernels from before there were hashes.
        self.assertEmpty(compile_record.programs({"kda": {"": {"none": "too large"}}, "gdn2": {"a": _GOOD}}))

    def test_the_summary_tells_compiled_from_recorded(self):
        new, old = _GOOD | {"program": "1"}, _GOOD | {"program": "2", "recorded": True}
        found = {"h200": {"kda": {"a": new, "b": old}, "gdn2": {"a": new}, "gemm": {"": {"none": "too large"}}}}
        self.assertEqual(
            compile_record.summary(found, 0),
            "compile gate: 3 kernels of 3 calls for 1 cards are 2 programs: 1 compiled, 1 as recorded; 0 failures",
        )

    def test_every_kernel_has_a_program(self):
        cards = compile_record.load()["cards"]
        kernels = [(card, t, k, x) for card in cards for t, ks in cards[card].items() for k, x in ks.items() if k]
        self.assertEmpty([(card, title, name) for card, title, name, x in kernels if not x.get("program")])
        known = {card: compile_record.programs(of_card) for card, of_card in cards.items()}
        self.assertEmpty([(card, title, name) for card, title, name, x in kernels if x["program"] not in known[card]])

    def test_it_is_read_as_it_was_written(self):
        document = compile_record.load()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "record.json"
            compile_record.save(document, path)
            self.assertEqual(compile_record.load(path), document)
            self.assertEqual(path.read_text(), compile_record.RECORD.read_text())

    def test_it_has_every_card_and_is_of_the_pinned_tools(self):
        document = compile_record.load()
        self.assertEqual(list(document["cards"]), list(CARDS))
        self.assertEqual(document["tools"], compile_gate.pins())

    def test_the_table_of_the_docs_is_made_from_it(self):
        compile_gate.write_docs(compile_record.load(), check=True)


class WorkerTest(absltest.TestCase):
    def test_a_compiler_that_ends_the_process_fails_its_kernel_only(self):
        worker = """
import json, os, sys
order = json.load(sys.stdin)
for title in order["titles"]:
    for kernel in ("first", "second"):
        if [title, kernel] not in order["done"]:
            print(json.dumps({"title": title, "begin": kernel}), flush=True)
            if (title, kernel) == ("b", "first"):
                os.abort()
            print(json.dumps({"title": title, "kernel": kernel, "registers": 1}), flush=True)
"""
        with mock.patch.object(compile_gate, "WORKER", [sys.executable, "-c", worker]):
            found = compile_gate.compile_cases("h200", ["a", "b"], threading.Event())
        self.assertEqual(found["a"], {"first": {"registers": 1}, "second": {"registers": 1}})
        self.assertIn("ended the compiling process with status -6", found["b"]["first"]["error"])
        self.assertEqual(found["b"]["second"], {"registers": 1})


# Hashes of kernels, from the JSON of an order on stdin, of the code in the current folder.
_HASHES = """
import json, sys, warnings
warnings.simplefilter("ignore")
from bench import compile_worker
from bench.compile_cases import cases
from bench.compile_target import CARDS
order = json.load(sys.stdin)
known = {case.title: case for case in cases(CARDS[order["card"]])}
print(json.dumps({title: compile_worker.programs(known[title], order["tools"], order["card"])
                  for title in order["titles"]}))
"""


class _CompilersTest(parameterized.TestCase):
    """A test with the compilers, which are not there on a GPU: there kernels run, and JAX cannot be shadowed."""

    def setUp(self):
        super().setUp()
        if helpers.on_gpu():
            self.skipTest("the kernels run here, on a GPU, and its JAX cannot be shadowed by another one")
        if not compile_gate.installed():
            self.fail("the compilers are not installed, which ./run test tries to do: ./run gate --install says why")


class ProgramTest(_CompilersTest):
    """What makes a kernel another one than the one that is recorded, and what does not."""

    TITLES = (
        "kda_step bfloat16 K=V=16",
        "kda equal heads bfloat16 16bit K=128 V=128 heads=256",
        "gemm mosaic NN bfloat16 16bit 1003x515x517",
    )

    def hashes(self, root, titles=TITLES, card="h200", first=(), **environment):
        order = {"card": card, "titles": titles, "tools": compile_gate.pins()}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (*first, compile_gate.TOOLS, root)))
        done = subprocess.run(
            [sys.executable, "-c", _HASHES],
            input=json.dumps(order),
            cwd=root,
            env=compile_gate.environment() | environment,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        return {(title, kernel): program for title, kernels in found.items() for kernel, program in kernels.items()}

    def folder(self):
        return pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def copied(self, edit):
        """A copy of the code elsewhere, every file of kernels edited."""
        root = self.folder()
        for folder in ("bench", "dormouse_jax", "pallas_kernels"):
            shutil.copytree(compile_gate.cli.ROOT / folder, root / folder, ignore=shutil.ignore_patterns("results"))
        for path in (root / "pallas_kernels").rglob("*.py"):
            path.write_text(edit(path.read_text()))
        return root

    def test_instructions_make_another_program_but_not_processes_files_lines_comments_and_what_came_before(self):
        here = self.hashes(compile_gate.cli.ROOT, PYTHONHASHSEED="1")
        self.assertGreater(len(here), 5)
        self.assertLen(set(here.values()), len(here))
        moved = self.copied(lambda text: f"# One line more.\n\n{text}")
        self.assertEqual(self.hashes(moved, self.TITLES[::-1], PYTHONHASHSEED="2"), here)

        instruction = "fma.rn.f32 {M[t, h, e]}"  # of a function that makes instructions, which no jaxpr shows
        self.assertIn(instruction, (compile_gate.cli.ROOT / "pallas_kernels" / "backend_mosaic.py").read_text())
        edited = self.copied(lambda text: text.replace(instruction, instruction.replace("rn", "rz")))
        changed = {name for name, program in self.hashes(edited).items() if program != here[name]}
        self.assertEqual(changed, {(self.TITLES[1], "kda_matrices")})

    def test_compilers_and_cards_make_another_program(self):
        [step] = titles = self.TITLES[:1]
        package = self.folder()
        (package / "jaxlib-99.dist-info").mkdir()
        (package / "jaxlib-99.dist-info" / "METADATA").write_text("Name: jaxlib\nVersion: 99\n")
        here, blackwell, newer = (
            self.hashes(compile_gate.cli.ROOT, titles, card, first)[step, "kda_step"]
            for card, first in (("h200", ()), ("b200", ()), ("h200", [package]))
        )
        self.assertLen({here, blackwell, newer}, 3)


class CompileTest(_CompilersTest):
    @parameterized.parameters(*CARDS)
    def test_fast_cases_compile_and_spill_no_more_than_recorded(self, card):
        recorded = compile_record.load()["cards"][card]
        wanted = [case for case in cases(CARDS[card]) if case.fast]
        # Compiled, recorded or not: one call of every kind of kernel that takes little time.
        anew = {next(c.title for c in wanted if c.operator == name) for name in ("kda_step", "gemm", "attention")}
        known = compile_record.programs(recorded)
        compiled = {x["program"] for title in anew for x in recorded.get(title, {}).values() if "program" in x}
        found = compile_gate.compile_cases(
            card,
            [case.title for case in wanted],
            threading.Event(),
            known={p: x for p, x in known.items() if p not in compiled},
        )
        self.assertEqual(compile_record.failures({card: found}, {card: recorded}, _LIMITS), [])
        for title in anew:
            for kernel, now in found[title].items():
                self.assertNotIn("recorded", now, f"{title}: {kernel}")
                # What has not changed since compiles to what is recorded, to the byte.
                old = known.get(now["program"], now)
                self.assertEqual(
                    [now[key] for key in compile_record.NUMBERS],
                    [old[key] for key in compile_record.NUMBERS],
                    f"{title}: {kernel}",
                )

    def test_a_configuration_too_large_for_a_card_names_kernel_card_and_bytes(self):
        title = next(c.title for c in cases(CARDS["rtx4090"]) if c.title.startswith("gemm triton NN bfloat16"))
        change = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 4}
        found = {"rtx4090": compile_gate.compile_cases("rtx4090", [title], threading.Event(), change=change)}
        lines = compile_record.failures(found, {}, _LIMITS)
        self.assertNotEmpty(lines)
        self.assertStartsWith(lines[0], f"rtx4090: {title}: gemm_triton: ")
        self.assertRegex(lines[0], r"[Ss]hared memory.*requested \d{6}, available: 101376")


if __name__ == "__main__":
    absltest.main()
