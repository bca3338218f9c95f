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

from bench import compile_gate, compile_races, compile_record
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
        # Whether it was searched for races may be recorded of one call alone.
        self.assertEqual(
            compile_record.programs({"kda": {"a": one}, "gdn2": {"a": one | {"products": 2}}, "gemm": {"a": one}}),
            {"1": one | {"products": 2, "recorded": True}},
        )
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


def _pipeline(places, ahead, pending):
    """A loop as Triton's pipeline makes it: copies some steps ahead into a ring, a product in flight of what it has."""
    tile, token = "!ttg.memdesc<32x64xbf16, #shared, #smem, mutable>", "!ttg.async.token"
    ring = tile.replace("<", f"<{places}x")
    copies = [
        f"""
    %{i}0 = "arith.constant"() <{{value = {i} : i32}}> : () -> i32
    %{i}1 = "ttg.memdesc_index"(%ring, %{i}0) : ({ring}, i32) -> {tile}
    %{i}2 = "ttg.async_copy_global_to_local"(%tiles, %{i}1) : (tensor<32x64x!tt.ptr<bf16>>, {tile}) -> {token}"""
        for i in range(ahead)
    ]
    return f"""
// -----// IR Dump Before SCFToControlFlowPass: convert-scf-to-cf //----- //
"builtin.module"() ({{
  "tt.func"() <{{sym_name = "kernel"}}> ({{
  ^bb0(%arg0: !tt.ptr<f32> [unknown], %arg1: !tt.ptr<bf16> [unknown]):
    %first = "arith.constant"() <{{value = -1 : i32}}> : () -> i32
    %zero = "arith.constant"() <{{value = 0 : i32}}> : () -> i32
    %one = "arith.constant"() <{{value = 1 : i32}}> : () -> i32
    %places = "arith.constant"() <{{value = {places} : i32}}> : () -> i32
    %before = "arith.constant"() <{{value = {ahead - 1} : i32}}> : () -> i32
    %sum = "arith.constant"() <{{value = dense<0.000000e+00> : tensor<64x64xf32>}}> : () -> tensor<64x64xf32>
    %tiles = "tt.splat"(%arg1) : (!tt.ptr<bf16>) -> tensor<32x64x!tt.ptr<bf16>>
    %ring = "ttg.local_alloc"() : () -> {ring} "load:"(#loc3){"".join(copies)}
    %loop:3 = "scf.for"(%zero, %places, %one, %first, %before, %sum) ({{
    ^bb0(%i: i32 "scan:"(#loc3), %taken: i32 [unknown], %filled: i32 [unknown], %total: tensor<64x64xf32> [unknown]):
      %next = "arith.addi"(%taken, %one) : (i32, i32) -> i32
      %around = "arith.cmpi"(%next, %places) <{{predicate = 5 : i64}}> : (i32, i32) -> i1
      %now = "arith.select"(%around, %zero, %next) : (i1, i32, i32) -> i32
      %tile = "ttg.memdesc_index"(%ring, %now) : ({ring}, i32) -> {tile}
      %turned = "ttg.memdesc_trans"(%tile) <{{order = array<i32: 1, 0>}}> : ({tile}) -> {tile}
      %product = "ttng.warp_group_dot"(%turned, %turned, %total) <{{isAsync = true}}> : ({tile}, {tile}) -> tensor<f32>
      %waited = "ttng.warp_group_dot_wait"(%product) <{{pendings = {pending} : i32}}> : (tensor<f32>) -> tensor<f32>
      %later = "arith.addi"(%filled, %one) : (i32, i32) -> i32
      %over = "arith.cmpi"(%later, %places) <{{predicate = 5 : i64}}> : (i32, i32) -> i1
      %free = "arith.select"(%over, %zero, %later) : (i1, i32, i32) -> i32
      %place = "ttg.memdesc_index"(%ring, %free) : ({ring}, i32) -> {tile}
      %copy = "ttg.async_copy_global_to_local"(%tiles, %place) : (tensor<32x64x!tt.ptr<bf16>>, {tile}) -> {token}
      "scf.yield"(%now, %free, %waited) : (i32, i32, tensor<64x64xf32>) -> ()
    }}) : (i32, i32, i32, i32, i32, tensor<64x64xf32>) -> (i32, i32, tensor<64x64xf32>)
    "tt.return"() : () -> ()
  }}) : () -> ()
}}) : () -> ()
#loc1 = /somewhere/pallas_kernels/backend_triton.py:104:11 to :26
#loc2 = /somewhere/pallas_kernels/adapters/low_rank.py:232:12 to :48
#loc3 = #loc1
 at #loc2
"""


class RaceTest(parameterized.TestCase):
    """Tiles that are overwritten while a product reads them, in what Triton makes of a loop."""

    @parameterized.parameters(
        (3, 2, 1),
        (2, 1, 1),
        (2, 2, 0),
        (4, 2, 2),
        (1, 1, 0),  # fmt: skip
    )
    def test_a_ring_with_places_for_what_is_copied_and_what_is_read_passes(self, places, ahead, pending):
        self.assertEqual(compile_races.scan(_pipeline(places, ahead, pending)), compile_races.Scan(1, ()))

    @parameterized.parameters((2, 2, 1), (1, 1, 1), (3, 3, 1), (3, 2, 2))
    def test_a_ring_of_too_few_places_is_named(self, places, ahead, pending):
        [race] = compile_races.scan(_pipeline(places, ahead, pending)).races
        tile = f"a tile 32x64xbf16 in a ring of {places} (adapters/low_rank.py:232) of argument 1"
        self.assertStartsWith(race, f"a product may read {tile} while the tile of another step is written there: make")

    def test_products_that_are_waited_for_at_once_are_not_followed(self):
        text = _pipeline(2, 2, 1).replace("isAsync = true", "isAsync = false")
        self.assertEqual(compile_races.scan(text), compile_races.Scan(0, ()))

    def test_what_it_does_not_know_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "SCFToControlFlow"):
            compile_races.scan("// -----// IR Dump Before CSEPass")
        with self.assertRaisesRegex(ValueError, "shared memory is not known: .*ttg.remote_copy"):
            compile_races.scan(_pipeline(3, 2, 1).replace("ttg.memdesc_trans", "ttg.remote_copy"))


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
        self.assertEqual(changed, {(self.TITLES[1], "kda_prepare")})

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
                    [now.get(key) for key in compile_record.FIELDS],
                    [old.get(key) for key in compile_record.FIELDS],
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

    def test_a_tile_that_is_loaded_over_while_a_product_reads_it_names_kernel_card_and_operand(self):
        title, kernel = "lora.rebuild bfloat16 16bit r=64", "adapter_low_rank_backward"
        # Where tiles of the gradient have 32 rows, dB's product takes them from registers, and dA's, in flight, reads
        # what the next one is copied to: on an H200 a third of repeats give another dA.
        for rows, products in ((32, None), (64, 2)):
            change = {"backward": {"rows": rows, "cols": 256, "warps": 8, "stages": 3}}
            found = compile_gate.compile_cases("h200", [title], threading.Event(), change=change)
            lines = compile_record.failures({"h200": found}, {}, _LIMITS)
            if products is None:
                [line] = lines
                self.assertStartsWith(line, f"h200: {title}: {kernel}: a product may read a tile 32x256xbf16 in a ring")
                self.assertRegex(line, "of argument 2 while the tile of another step is written there: make all")
            else:
                self.assertEmpty(lines)
                self.assertEqual(found[title][kernel]["products"], products)
                self.assertNotIn("products", found[title]["adapter_low_rank_forward"])


if __name__ == "__main__":
    absltest.main()
