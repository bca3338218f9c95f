"""Compiles every kernel for cards that need not be there, and fails where one does not fit or spills more than it did.

    python -m bench.compile_gate [--card=h200,rtx4090] [--match=kda] [--fast] [--anew] [--record] [--docs]
    python -m bench.compile_gate --card=rtx4090 --match='kda raw' --try='{"v_tile": 32, "grads_warps": 8}'

For each card, every kernel in every configuration that the dispatch can choose there is compiled to machine code, by
the version of JAX and the ptxas that the extra `gate` of pyproject.toml names. They are installed into .gate, where
they shadow those of the environment for the gate only. No GPU is needed, nor a driver.

A program that compile_gate.json has is not compiled again, the numbers there are judged: every kernel is lowered, and
known by a hash of what compilers would be given, of their versions and of the card. --anew compiles all of them.

It fails on whatever the compiler refuses, shared memory over the card's limit included; on a call that finds no kernel
where it did; on more spilled bytes than compile_gate.json has for that kernel, by a tenth or 64; and on a race that
Triton makes of a kernel for Hopper (`bench.compile_races`). What it does not have yet is named. --record brings that
file up to date, --docs the table of docs/cards.md from it. --try replaces fields of every configuration: what would it
cost, on each card?
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from bench import cli, compile_record
from bench.compile_record import NUMBERS, RECORD, Found
from bench.spec import UsageError

DOCS = cli.ROOT / "docs" / "cards.md"
TOOLS = cli.ROOT / ".gate"
BEGIN, END = "<!-- cards:begin -->", "<!-- cards:end -->"
WORKER = [sys.executable, "-m", "bench.compile_worker"]
_OPTIONS = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "LIBNVPTXCOMPILER_")
_ATTEMPTS = 20  # processes that may end before the gate gives up on what they compile


# Tools


def pins() -> list[str]:
    """The requirements of the extra `gate`: one version each."""
    project = tomllib.loads((cli.ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]["gate"]


def _stamp() -> tuple[pathlib.Path, str]:
    """A file that is written last, and what it has to say."""
    return TOOLS / "stamp", f"{sys.version_info[:2]} {pins()}"


def installed() -> bool:
    """Whether the tools are in .gate."""
    stamp, wanted = _stamp()
    return stamp.exists() and stamp.read_text() == wanted


def install() -> None:
    """Installs the tools into .gate unless they are there. Raises UsageError where pip cannot."""
    if installed():
        return
    print(f"installing {', '.join(pins())} into {TOOLS} (about 330 MB to download)", flush=True)
    shutil.rmtree(TOOLS, ignore_errors=True)
    # Without dependencies: what else JAX needs is in the environment.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--only-binary=:all:", "--target", str(TOOLS), *pins()]
    done = subprocess.run(command, env=os.environ | {"PIP_USER": "0"}, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"pip could not install {', '.join(pins())}: {reason}")
    stamp, wanted = _stamp()
    stamp.write_text(wanted)


def environment() -> dict[str, str]:
    """Of a process that compiles: the tools come first, compilers say what they do, and they are given no options."""
    path = [str(TOOLS), str(cli.ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {name: text for name, text in os.environ.items() if not name.startswith(_OPTIONS)} | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": f"{TOOLS / 'nvidia' / 'cuda_nvcc' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=3,xtile_compiler=2",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "LLVM_DISABLE_SYMBOLIZATION": "1",  # else a kernel whose passes are dumped takes seconds more
    }


# Compiling


def compile_cases(
    card: str,
    titles: Sequence[str],
    stopped: threading.Event,
    change: Mapping[str, Any] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Found:
    """Compiles cases for a card, in a process that is started anew where a compiler ends it. `change` has fields to
    replace in configurations; programs that are `known`, from `compile_record.programs`, are not compiled."""
    found: Found = {title: {} for title in titles}
    left = list(titles)
    order = {"card": card, "tools": pins(), "change": dict(change or {}), "known": dict(known or {})}
    for _ in range(_ATTEMPTS):
        done = [(title, kernel) for title in left for kernel in found[title] if kernel]
        process = subprocess.Popen(
            WORKER,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stderr: list[str] = []

        def read(lines: Iterable[str] = process.stderr, kept: list[str] = stderr) -> None:
            for line in lines:
                kept.append(line)
                if line.endswith("\n") and " s " in line[:10]:
                    print(f"{card:8} {line}", end="", file=sys.stderr, flush=True)

        drain = threading.Thread(target=read)
        drain.start()
        json.dump(order | {"titles": left, "done": done}, process.stdin)
        process.stdin.close()
        begun = None
        for text in process.stdout:
            line = json.loads(text)
            title = line.pop("title")
            if "begin" in line:
                begun = title, line["begin"]
            elif "done" in line:
                left.remove(title)
            elif "none" in line:
                found[title] = {"": line}
            else:
                found[title][line.pop("kernel")] = line
                begun = None
            if stopped.is_set():
                process.terminate()
        status = process.wait()
        drain.join()
        if status == 0 or stopped.is_set():
            return found
        tail = " ".join("".join(stderr[-5:]).split())[-300:]
        if begun is None:
            raise RuntimeError(f"{card}: the compiling process ended with status {status}: {tail}")
        how = "took too long" if status == -14 else f"ended the compiling process with status {status}: {tail}"
        found[begun[0]][begun[1]] = {"error": how}
    raise RuntimeError(f"{card}: compilers ended {_ATTEMPTS} processes")


def compile_all(
    plan: Mapping[str, Sequence[Any]], change: Mapping[str, Any], jobs: int, recorded: Mapping[str, Found]
) -> dict[str, Found]:
    """Compiles every card's cases, so many processes at a time; results in the order of the plan."""
    stopped = threading.Event()
    found: dict[str, Found] = {card: {case.title: {} for case in cases} for card, cases in plan.items()}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {}
        # KDA, which takes longest, comes first for all cards: at the end it would leave cores without work.
        # Operators that share kernels are compiled by one process; there are few, since each takes seconds to start.
        tasks: dict[tuple[bool, str], list[str]] = {}
        for card, case in ((card, case) for card, cases in plan.items() for case in cases):
            tasks.setdefault((case.operator not in ("kda", "gdn2"), card), []).append(case.title)
        for (_, card), titles in sorted(tasks.items(), key=lambda task: (task[0][0], -len(task[1]))):
            known = compile_record.programs(recorded.get(card, {}))
            running[pool.submit(compile_cases, card, titles, stopped, change, known)] = card
        try:
            for future in concurrent.futures.as_completed(running):
                found[running[future]] |= future.result()
                print(f"{running[future]}: {len(future.result())} calls done", file=sys.stderr, flush=True)
        finally:
            stopped.set()
    return found


def print_table(console: Console, card: Any, found: Found) -> None:
    """Every kernel of a card once: the first call of those that are alike in name and numbers."""
    table = Table(
        "call (the first of those that compile to the same)", "kernel", "registers", "spilled", "shared", "numbers",
        title=f"{card.kind}, {card.architecture}, {card.block_shared} bytes of shared memory a block",
    )  # fmt: skip
    shown = set()
    for title, kernels in found.items():
        for name, x in kernels.items():
            if "registers" not in x:
                table.add_row(title, name or "-", (x.get("error") or x.get("none", ""))[:60], "", "", "")
                continue
            row = (title.split()[0], name.split("#")[0], *(x[key] for key in NUMBERS))
            if row not in shown:
                shown.add(row)
                spilled, origin = x["stores"] + x["loads"], "recorded" if "recorded" in x else "compiled"
                table.add_row(title, name, str(x["registers"]), str(spilled), str(x["shared"]), origin)
    console.print(table, markup=False)


# The command


def write_docs(document: Mapping[str, Any], check: bool) -> None:
    """Fills docs/cards.md between its markers; with `check`, only says whether that would change it."""
    text = DOCS.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"{DOCS}: needs one {BEGIN} before one {END}")
    filled = f"{text[: text.index(BEGIN)]}{BEGIN}\n{compile_record.markdown(document)}\n{text[text.index(END) :]}"
    if not check:
        DOCS.write_text(filled)
    elif filled != text:
        raise UsageError(f"{DOCS}: not up to date with {RECORD}; run python -m bench.compile_gate --docs")


def _change(text: str | None) -> dict[str, Any]:
    try:
        change = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--try: {error}") from None
    if not isinstance(change, dict):
        raise UsageError("--try: expected a JSON object, such as '{\"v_tile\": 32}'")
    return change


def _plan(cards: Iterable[str], match: str | None, fast: bool) -> dict[str, list[Any]]:
    from bench.compile_cases import cases
    from bench.compile_target import CARDS

    try:
        re.compile(match or "")
    except re.error as error:
        raise UsageError(f"--match: {error}") from None
    plan = {
        name: [c for c in cases(CARDS[name]) if re.search(match or "", c.title) and (c.fast or not fast)]
        for name in cli.choose(list(cards), CARDS, "--card")
    }
    if not any(plan.values()):
        raise UsageError(f"--match: {match!r} is found in no call's title")
    return plan


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    document = compile_record.load()
    if F.check_docs or (F.docs and not F.record):
        write_docs(document, check=F.check_docs)
        return 0
    install()
    if F.install:
        return 0
    change = _change(F["try"].value)
    if F.record and (change or F.fast):
        raise UsageError("--record: takes neither --try nor --fast")
    if F.record and (F.match or F.card) and document["tools"] not in ([], pins()):
        raise UsageError(
            "--record: the record is of other tools: all of it has to be recorded, without --match and --card"
        )
    if not F.record and document["tools"] not in ([], pins()):
        raise UsageError(f"{RECORD} was recorded with {document['tools']}, this is {pins()}: run it with --record")

    from bench.compile_cases import cases as all_cases
    from bench.compile_target import CARDS

    plan = _plan(F.card or list(CARDS), F.match, F.fast)
    found = compile_all(plan, change, F.jobs or os.cpu_count() or 1, {} if F.anew else document["cards"])
    console = Console(width=170 if not sys.stdout.isatty() else None, highlight=False)
    for card, of_card in found.items():
        print_table(console, CARDS[card], of_card)
    if F.record:
        document = compile_record.load()  # another process may have recorded other cards meanwhile
        document["tools"] = pins()
        for card, of_card in found.items():
            kept = {} if not F.match else document["cards"].get(card, {})
            known = {case.title: case for case in all_cases(CARDS[card])}
            merged = kept | of_card
            document["cards"][card] = {title: merged[title] for title in known if title in merged}
        document["cards"] = {card: document["cards"][card] for card in CARDS if card in document["cards"]}
    recorded = document["cards"]
    lines = compile_record.failures(found, recorded, {name: card.block_shared for name, card in CARDS.items()})
    for line in compile_record.unrecorded(found, recorded):
        print(f"NEW {line}")
    for line in lines:
        print(f"FAILED {line}")
    if F.record:
        compile_record.save(document)
        print(RECORD)
        if F.docs:
            write_docs(document, check=False)
    elif not (F.anew or change) and compile_record.compiled(found):
        print("for the next run to be quick, record what was compiled: ./run gate --record --docs")
    print(compile_record.summary(found, len(lines)))
    return 1 if lines else 0


if __name__ == "__main__":
    flags.DEFINE_list("card", [], "Cards to compile for; all by default.")
    flags.DEFINE_string("match", None, "A regular expression: only calls in whose title it is found.")
    flags.DEFINE_bool("fast", False, "Only the subset that every run of the tests compiles.")
    flags.DEFINE_integer("jobs", None, "Processes at a time; one a core by default.", lower_bound=1)
    flags.DEFINE_string("try", None, "A JSON object: fields to replace in every configuration that has them.")
    flags.DEFINE_bool("anew", False, "Compile what compile_gate.json has, too.")
    flags.DEFINE_bool("record", False, "Bring compile_gate.json up to date with what is found.")
    flags.DEFINE_bool("docs", False, "Write the table of docs/cards.md from compile_gate.json; alone, compile nothing.")
    flags.DEFINE_bool("check_docs", False, "Only say whether that table is up to date.")
    flags.DEFINE_bool("install", False, "Only install the tools.")
    cli.run(main)
