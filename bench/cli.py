"""What every `python -m bench.<operator>` shares: flags, arm and preset names, progress, tables, the JSON file."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import device, families, harness, report, results
from bench.spec import MODE_TITLES, Arm, Case, UsageError
from bench.together import Together

FLAGS = flags.FLAGS
WIDTH = 120
ROOT = pathlib.Path(__file__).resolve().parent.parent


def define(*, impl: str, preset: str, mode: str = "fwd,fwdbwd") -> None:
    """The flags that all operators have, with the operator's defaults."""
    flags.DEFINE_list("impl", impl.split(",") if impl else [], "Arms and groups of arms to measure.")
    flags.DEFINE_list(
        "preset", preset.split(",") if preset else [], "Problem sizes by name; see the module's docstring."
    )
    flags.DEFINE_list("mode", mode.split(","), f"What to run: {', '.join(MODE_TITLES)}.")
    flags.DEFINE_integer("rounds", None, "Rounds (default 10 on a GPU, 3 without one).", lower_bound=1)
    flags.DEFINE_string("json", None, "File for the results, raw samples included.")
    flags.DEFINE_bool("resume", False, "Keep the cases that --json has already and measure the rest.")
    flags.DEFINE_float("budget", None, "Seconds after which what is left becomes NOT MEASURED.", lower_bound=1)
    flags.DEFINE_float("arm_limit", 120.0, "Seconds an arm may take to compile and first run one mode.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the inputs and of the order of the rounds.")
    flags.DEFINE_bool("cold", True, "Time with a flushed L2 (GPU).")
    flags.DEFINE_bool("warm", True, "Time with a warm L2 (GPU).")
    flags.DEFINE_integer(
        "repeats", 0, "Calls of each arm of ours and mode that must equal the first bit for bit.", lower_bound=0
    )
    flags.DEFINE_float(
        "together",
        None,
        "Compile all cases first, side by side, for at most these seconds, then time them: quick where they are many.",
        lower_bound=1,
    )
    flags.DEFINE_bool("kernels", False, "List every arm's kernels with their times.")
    flags.DEFINE_string("logs", None, "Folder that keeps the workers' logs.")


def guarded(main: Callable[[Sequence[str]], Any]) -> Callable[[Sequence[str]], Any]:
    """Turns UsageError into one line on stderr and exit 2, and Ctrl-C into exit 130."""

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> Any:
        try:
            return main(argv)
        except UsageError as error:
            print(f"{pathlib.Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run


def no_positional(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}; flags look like --name=value")


def choose(names: Sequence[str], known: Mapping[str, Any], flag: str) -> list[str]:
    """`names` without repeats, or UsageError for one that is not known."""
    out: list[str] = []
    for name in names:
        if name not in known:
            raise UsageError(f"{flag}: {name!r} is not known; choose from {', '.join(known)}")
        if name not in out:
            out.append(name)
    return out


def pick_arms(names: Sequence[str], known: Mapping[str, Arm], groups: Mapping[str, Sequence[str]]) -> list[Arm]:
    """Arms by name or group, `all` among them. An arm named twice runs twice (`pallas,pallas#2`), to see what a tie
    looks like."""
    groups = {"all": tuple(known)} | dict(groups)
    out: list[Arm] = []
    for name in names:
        if name not in known and name not in groups:
            raise UsageError(f"--impl: {name!r} is not known; arms: {', '.join(known)}; groups: {', '.join(groups)}")
        for member in groups.get(name, (name,)):
            arm = known[member]
            same = sum(other.name.partition("#")[0] == member for other in out)
            if same and name in groups:
                continue  # already there through another group
            if same:
                data = arm.to_json() | {"name": f"{member}#{same + 1}"}
                arm = Arm.from_json(data)
            out.append(arm)
    if not out:
        raise UsageError("--impl: names no arm")
    return out


def modes() -> tuple[str, ...]:
    return tuple(choose(FLAGS.mode, MODE_TITLES, "--mode"))


class Bar(harness.Progress):
    def __init__(self, console: Console):
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.task: Any = None

    def stage(self, text: str, total: int) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.title = text
        self.task = self.bar.add_task(text, total=total or None)

    def step(self, text: str) -> None:
        if self.task is not None:
            self.bar.update(self.task, advance=1, description=f"{self.title}  {text}"[:70])


def command_line(command: str) -> str:
    """What was typed, for the header of a result file."""
    return shlex.join(["python", "-m", command, *sys.argv[1:]])


def default_cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("BENCH_CACHE", ROOT / ".bench_cache"))


def measure(
    jobs: Sequence[tuple[Case, Sequence[Arm]]],
    command: str,
    *,
    path: pathlib.Path | None = None,
    resume: bool = False,
    run: Sequence[str] | None = None,
    default_rounds: int | None = None,
    case_modes: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Measures every case with its arms, prints a table for each, writes the result file after each.

    path: the result file; None takes --json. run: modes instead of --mode's; case_modes: by a case's key, modes instead
    of those. resume: cases whose rows are all in that file already are not run again; a file of another device is
    refused. Returns the exit status: 1 when an own arm is WRONG or any arm IMPOSSIBLE; absent peers and unmeasured arms
    do not fail the command.
    """
    console = Console(width=WIDTH, highlight=False)
    header = device.describe()
    gpu = header["gpu"]
    document: dict[str, Any] = {
        "schema": results.SCHEMA,
        "command": command_line(command),
        "device": header,
        "rooflines": None,
        "rows": [],
    }
    if path is None and FLAGS.json:
        path = pathlib.Path(FLAGS.json)
    general = modes() if run is None else tuple(run)
    wanted = {case.key: (case_modes or {}).get(case.key, general) for case, _ in jobs}
    todo = list(jobs)
    if (resume or FLAGS.resume) and path is not None and path.exists():
        document["rows"] = _done(results.load(path), header)
        have = {results.key(row) for row in document["rows"]}
        todo = [(case, arms) for case, arms in jobs if not _keys(case, arms, wanted[case.key]) <= have]
        again = {key for case, arms in todo for key in _keys(case, arms, wanted[case.key])}
        document["rows"] = [row for row in document["rows"] if results.key(row) not in again]
    options = harness.Options(
        modes=general,
        rounds=FLAGS.rounds or default_rounds or (10 if gpu else 3),
        arm_limit=FLAGS.arm_limit,
        budget=FLAGS.budget,
        gpu=gpu,
        seed=FLAGS.seed,
        cold=FLAGS.cold,
        warm=FLAGS.warm,
        repeats=FLAGS.repeats,
        cache=default_cache(),
        logs=pathlib.Path(FLAGS.logs) if FLAGS.logs else None,
    )
    report.print_header(console, document)
    if len(todo) < len(jobs):
        console.print(f"{path}: {len(jobs) - len(todo)} of {len(jobs)} cases are done", markup=False)
    interrupted, together = False, FLAGS.together
    batches = [todo] if together and todo else [[job] for job in todo]
    with Together(options) if together else harness.Session(options) as session:
        for batch in batches:
            bar = Bar(Console(stderr=True, width=WIDTH))
            session.progress = bar
            with bar.bar:
                try:
                    if isinstance(session, Together):
                        rows = session.measure_all([(case, arms, wanted[case.key]) for case, arms in batch], together)
                    else:
                        ((case, arms),) = batch
                        rows = session.measure(case, arms, wanted[case.key])
                except harness.Interrupted as stop:
                    rows, interrupted = stop.rows, True
            if document["rooflines"] is None and session.probed:
                document["rooflines"] = session.probed
                report.print_rooflines(console, document)
            for row in rows:  # a resumed file mixes runs
                row["measured"] = {"date": header["date"], "commit": header["commit"]}
            document["rows"] += rows
            document["device"]["state_after"] = device.state() if gpu else {}
            if path:
                results.save(path, document)
            if together:
                families.print_table(console, rows)
            else:
                report.print_tables(console, rows, gpu)
            if FLAGS.kernels:
                report.print_kernels(console, rows)
            if interrupted:
                break
    report.print_footer(console, document)
    if interrupted:
        raise KeyboardInterrupt
    bad = [r for r in document["rows"] if r["status"] == "IMPOSSIBLE" or (r["status"] == "WRONG" and r["ours"])]
    return 1 if bad else 0


def _keys(case: Case, arms: Sequence[Arm], wanted: Sequence[str]) -> set[tuple[str, ...]]:
    return {
        results.key({**case.to_json(), "case": case.name, "mode": mode, "arm": arm.name})
        for arm in arms
        for mode in wanted
    }


def _done(old: Mapping[str, Any], header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run on this device that need no second one: interrupted or cut-off ones do."""
    if old["device"]["kind"] != header["kind"]:
        raise UsageError(
            f"the results there are of {old['device']['kind']}, this is {header['kind']}: use another --out"
        )
    again = ("interrupted", "the time budget", "round ")
    return [row for row in old["rows"] if not (row["status"] == "NOT MEASURED" and row["reason"].startswith(again))]


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """`app.run` with bad flags as one line instead of absl's page of usage."""

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return FLAGS(argv)
        except flags.Error as error:
            print(f"{pathlib.Path(argv[0]).stem}: {str(error).splitlines()[0]}", file=sys.stderr)
            sys.exit(2)

    app.run(guarded(main), flags_parser=parse)


@contextlib.contextmanager
def flags_as(**values: Any) -> Iterator[None]:
    """Flags with these values for a while, defined if they are not: for calling a command's main from Python."""
    before = {}
    for name, value in values.items():
        if name not in FLAGS:
            flags.DEFINE_string(name, None, "set by flags_as")
        if not FLAGS.is_parsed():
            FLAGS.mark_as_parsed()
        before[name] = FLAGS[name].value
        FLAGS[name].value = value
    try:
        yield
    finally:
        for name, value in before.items():
            FLAGS[name].value = value
