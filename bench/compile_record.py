"""What the compile gate found, on disk (compile_gate.json), judged, and as the table of docs/cards.md."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from bench import cli
from bench.compile_target import CARDS

RECORD = cli.ROOT / "bench" / "compile_gate.json"
NUMBERS = ("registers", "stores", "loads", "shared")
FIELDS = (*NUMBERS, "program", "products")
# Any edit moves a few registers: so much more may be spilled than is recorded.
SLACK, SLACK_BYTES = 0.1, 64

Found = dict[str, dict[str, dict[str, Any]]]  # title -> kernel -> numbers, or {"error": …}; {"": {"none": …}}


def failures(found: Mapping[str, Found], recorded: Mapping[str, Found], limits: Mapping[str, int]) -> list[str]:
    """What is worse than it may be, a line each that names the card, the call and the kernel."""
    lines = []
    for card, of_card in found.items():
        for title, kernels in of_card.items():
            before = recorded.get(card, {}).get(title, {})
            for kernel, now in kernels.items():
                where = f"{card}: {title}: {kernel}"
                if "none" in now:
                    if before and "" not in before:
                        lines.append(f"{card}: {title}: no kernel serves this call: {now['none']}")
                elif "error" in now:
                    lines.append(f"{where}: {now['error']}")
                else:
                    old = before.get(kernel, now)
                    if now["shared"] > limits[card]:
                        lines.append(f"{where}: {now['shared']} bytes of shared memory, the card has {limits[card]}")
                    spilt, allowed = (x["stores"] + x["loads"] for x in (now, old))
                    if spilt > allowed + max(SLACK_BYTES, SLACK * allowed):
                        lines.append(f"{where}: spills {spilt} bytes, {allowed} are recorded")
            if not kernels:
                lines.append(f"{card}: {title}: not compiled")
    return lines


def compiled(found: Mapping[str, Found]) -> set[tuple[str, str]]:
    """Cards and hashes of what was compiled, rather than taken from the record."""
    kernels = [(card, x) for card, of_card in found.items() for ks in of_card.values() for x in ks.values()]
    return {(card, x["program"]) for card, x in kernels if "program" in x and "recorded" not in x}


def summary(found: Mapping[str, Found], failed: int) -> str:
    """A line: how many kernels there are, how many of them were compiled, how many have failed."""
    calls = [(card, ks) for card, of_card in found.items() for ks in of_card.values()]
    launches = sum("none" not in x for _, ks in calls for x in ks.values())
    programs = {(card, x["program"]) for card, ks in calls for x in ks.values() if "program" in x}
    new = len(compiled(found))
    return (
        f"compile gate: {launches} kernels of {len(calls)} calls for {len(found)} cards are {len(programs)} programs: "
        f"{new} compiled, {len(programs) - new} as recorded; {failed} failures"
    )


def unrecorded(found: Mapping[str, Found], recorded: Mapping[str, Found]) -> list[str]:
    """Kernels that spill and that the record does not know yet, a line each: nothing can be said against them."""
    return [
        f"{card}: {title}: {kernel}: spills {now['stores'] + now['loads']} bytes, nothing is recorded"
        for card, of_card in found.items()
        for title, kernels in of_card.items()
        for kernel, now in kernels.items()
        if now.get("stores") and kernel not in recorded.get(card, {}).get(title, {})
    ]


def load(path: pathlib.Path = RECORD) -> dict[str, Any]:
    """The record, with numbers by name."""
    if not path.exists():
        return {"tools": [], "ran": {}, "cards": {}}
    document = json.loads(path.read_text())
    for of_card in document["cards"].values():
        for title, kernels in of_card.items():
            of_card[title] = {
                name: x if isinstance(x, dict) else dict(zip(FIELDS, x, strict=False)) for name, x in kernels.items()
            }
    return document


def programs(recorded: Found) -> dict[str, dict[str, Any]]:
    """The kernels of a card by the hash of what was compiled, marked as recorded; without any whose records differ.
    What one call's record of a program has and another's lacks is known of it."""
    found: dict[str, dict[str, Any]] = {}
    differing = set()
    for x in (x for kernels in recorded.values() for x in kernels.values() if "program" in x):
        found[x["program"]] = known = x | found.get(x["program"], {})
        if any(known[key] != x[key] for key in x):
            differing.add(x["program"])
    return {program: x | {"recorded": True} for program, x in found.items() if program not in differing}


def save(document: Mapping[str, Any], path: pathlib.Path = RECORD) -> None:
    """Writes the record, a call a line: registers, bytes spilled by stores and by loads, shared memory and a hash of
    what was compiled, of each kernel that compiles; and where it was searched for races, how many of its products run
    beside the program."""
    lines = [
        "{",
        f' "tools": {json.dumps(document["tools"])},',
        f' "ran": {json.dumps(document["ran"])},',
        ' "cards": {',
    ]
    cards = list(document["cards"].items())
    for n, (card, of_card) in enumerate(cards):
        lines.append(f'  "{card}": {{')
        rows = [
            f"   {json.dumps(title)}: "
            + json.dumps(
                {
                    name: [x[key] for key in FIELDS if key in x] if name else x
                    for name, x in kernels.items()
                    if "error" not in x
                }
            )
            for title, kernels in of_card.items()
        ]
        lines += [row + "," for row in rows[:-1]] + rows[-1:]
        lines.append("  }" + ("," if n + 1 < len(cards) else ""))
    lines += [" }", "}"]
    path.write_text("\n".join(lines) + "\n")


def markdown(document: Mapping[str, Any]) -> str:
    """Operator x dtype x card from the record: compiled, or compiled and run, with the kernels that spill."""
    cards = [card for card in CARDS if card in document["cards"]]
    rows: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for card in cards:
        for title, kernels in document["cards"][card].items():
            words = title.split()
            dtype = next(word for word in words if word in ("bfloat16", "float16", "float32"))
            rows.setdefault((words[0], dtype), {}).setdefault(card, []).extend(kernels.values())
    names = [f"{CARDS[card].kind.removeprefix('NVIDIA ')}, {CARDS[card].architecture}" for card in cards]
    lines = ["| operator | inputs | " + " | ".join(names) + " |", "|---" * (2 + len(cards)) + "|"]
    for (operator, dtype), by_card in sorted(rows.items()):
        cells = []
        for card in cards:
            kernels = by_card.get(card, [])
            compiled = [x for x in kernels if "registers" in x]
            verb = "run" if dtype in document["ran"].get(card, {}).get(operator, ()) else "compiled"
            if not kernels:
                cells.append("not recorded")
            elif not compiled:
                cells.append("no kernel")
            else:
                cells.append(verb + (", some calls by XLA" if len(compiled) < len(kernels) else ""))
        lines.append(f"| {operator} | {dtype} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| card | kernels compiled | largest spill, bytes | most shared memory, bytes | a block may have |",
        "|---|---|---|---|---|",
    ]
    for card in cards:
        kernels = [
            (name, title, x)
            for title, ks in document["cards"][card].items()
            for name, x in ks.items()
            if "registers" in x
        ]
        name, title, worst = max(kernels, key=lambda k: k[2]["stores"] + k[2]["loads"])
        spill = f"{worst['stores'] + worst['loads']}: {name} of {title}" if worst["stores"] else "0"
        distinct = {(name, *(x[key] for key in NUMBERS)) for name, _, x in kernels}
        most = max(x["shared"] for *_, x in kernels)
        lines.append(f"| {CARDS[card].kind} | {len(distinct)} | {spill} | {most} | {CARDS[card].block_shared} |")
    return "\n".join([*lines, "", f"Compiled by {', '.join(document['tools'])}."])
