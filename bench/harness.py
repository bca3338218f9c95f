"""Drives the workers: set-up in parallel, accuracy first, then rounds in random order, one worker timing at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench import roofline, stats
from bench.spec import Arm, Case, Operator, Traffic, load_arrays, missing_packages, operator, save_arrays
from bench.workers import Worker, WorkerError

_ROOT = pathlib.Path(__file__).resolve().parent.parent
START_LIMIT_S = 180.0  # importing a framework and waking a device up
SLOW_S = 0.25  # a call longer than this gets fewer rounds, cold and wall only
SLOW_ROUNDS = 3
TOO_LATE = "the time budget was spent before its turn"
TUNER_LIMIT_S = 600.0  # set-up of an arm that tunes itself on first call


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure. arm_limit, budget: seconds (None: no budget); rounds: samples an arm, mode and clock."""

    modes: tuple[str, ...] = ("fwd", "fwdbwd")
    rounds: int = 10
    arm_limit: float = 120.0
    budget: float | None = None
    gpu: bool = False
    seed: int = 0
    cold: bool = True
    warm: bool = True
    min_rounds: int = 3
    repeats: int = 0
    cache: pathlib.Path | None = None
    logs: pathlib.Path | None = None


class Progress:
    """What the harness tells while it works; the command's own draws a bar, the tests' draws nothing."""

    def stage(self, text: str, total: int) -> None: ...

    def step(self, text: str) -> None: ...

    def done(self) -> None: ...


@dataclasses.dataclass
class _Run:
    """One arm in one mode on one case while it is measured."""

    arm: Arm
    mode: str
    worker: str  # the name of the one that runs it
    key: str = ""  # of its runtime in a worker that holds many
    reason: str = ""  # why it was not measured, once that is known
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    wrong: str = ""
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    repeats: dict[str, int] | None = None
    off: set[str] = dataclasses.field(default_factory=set)  # clocks that turned out not to work here

    @property
    def open(self) -> bool:
        return not self.reason and not self.wrong


class Session:
    """Workers that live through all cases of one command. Use as a context manager: leaving it ends every process."""

    most_calls = 10  # of a sample, which is their median

    def __init__(self, options: Options, progress: Progress | None = None):
        self.options = options
        self.progress = progress or Progress()
        self.start = time.monotonic()
        self.workers: dict[str, Worker] = {}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_", dir=_scratch()))
        self.logs = options.logs or self.folder / "logs"
        self.probed: dict[str, Any] | None = None
        self.random = random.Random(options.seed)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in list(self.workers.values()):
            worker.stop()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- processes ----

    def _env(self, arm: Arm | None, host_only: bool = False) -> dict[str, str]:
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
        if host_only or not self.options.gpu:
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return env | dict(arm.env if arm else {})

    def spawn(self, name: str, framework: str, arm: Arm | None, host_only: bool = False) -> None:
        """Starts the worker of that name unless it lives, and has it import its framework. Only in the main thread: a
        worker dies with the thread that started it (Linux ties the parent-death signal to the thread)."""
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            log = self.logs / f"{name.replace('#', '_')}.log"
            worker = self.workers[name] = Worker(name, self._env(arm, host_only), log)
            gpu = self.options.gpu and not host_only
            worker.waking = worker.send("init", START_LIMIT_S, framework=framework, gpu=gpu)

    def worker(self, name: str) -> Worker:
        """The worker of that name, once it is awake. Raises WorkerError when it could not wake up."""
        worker = self.workers[name]
        if worker.waking is not None:
            ticket, worker.waking = worker.waking, None
            worker.wait(ticket)
        return worker

    def left(self) -> float:
        """Seconds of the budget that are left."""
        if self.options.budget is None:
            return float("inf")
        return self.options.budget - (time.monotonic() - self.start)

    # ---- one case ----

    def measure(self, case: Case, arms: Sequence[Arm], modes: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All rows of one case, in these modes instead of the options'. Whatever an arm does, there is a row for it;
        Ctrl-C keeps what has enough rounds."""
        op = operator(case.op)
        runs = [self._run(arm, mode, arm.name) for arm in arms for mode in modes or self.options.modes]
        interrupted = False
        try:
            if any(run.open for run in runs):
                self._measure(op, case, runs)
        except WorkerError as error:  # of the oracle: the arms' own failures are rows already
            for run in runs:
                run.reason = run.reason or f"no reference: {error}"
        except KeyboardInterrupt:
            interrupted = True
            for run in runs:
                if run.open and not self._enough(run):
                    run.reason = "interrupted"
        rows = [self._row(op, case, run) for run in runs]
        stats.judge(rows)
        if interrupted:
            raise Interrupted(rows)
        return rows

    def _run(self, arm: Arm, mode: str, worker: str, key: str = "") -> _Run:
        run = _Run(arm, mode, worker, key)
        absent = missing_packages(arm.requires)
        if absent:
            run.reason = f"not installed: {', '.join(absent)}"
        elif mode not in arm.modes:
            run.reason = f"this arm has no {mode}"
        elif self.left() <= 0:
            run.reason = TOO_LATE
        return run

    def _measure(self, op: Operator, case: Case, runs: list[_Run]) -> None:
        self.progress.stage(f"{case.op} {case.name}: inputs", 0)
        names = list(dict.fromkeys(run.arm.name for run in runs if run.open))
        arms = [next(run.arm for run in runs if run.arm.name == name) for name in names]
        for arm in arms:  # they import their frameworks while the inputs are made
            self.spawn(arm.name, arm.framework, arm)
        if self.probed is None:
            self.spawn("roofline", self._probe_kind(), None)
        folder = self.folder / case.key
        if not (folder / "index.json").exists():
            save_arrays(folder, op.inputs(case))
        together = [arm for arm in arms if not arm.exclusive]
        alone = [arm for arm in arms if arm.exclusive]
        self.progress.stage(f"{case.op} {case.name}: compile, check", len(arms) + 2)
        lanes = max(2, (os.cpu_count() or 2) // 2)
        reference_folder = self._oracle_folder(op, case, folder)
        if not (reference_folder / "done").exists():
            self.spawn("oracle", "numpy", None, host_only=True)
        with concurrent.futures.ThreadPoolExecutor(lanes + 2) as pool:
            try:
                oracle = pool.submit(self._oracle, op, case, folder, reference_folder)
                woken = pool.submit(self._wake_probe)
                setups = _lanes(pool, lanes, [lambda a=arm: self._setup(case, a, folder, runs) for arm in together])
                for _ in concurrent.futures.as_completed(setups):
                    pass
                for setup in setups:
                    setup.result()
                reference = oracle.result()
                self.progress.step("oracle")
                woken.result()
                self._probe()  # from here on one process at a time uses the device
                self.progress.step("roofline")
                for arm in alone:
                    self._setup(case, arm, folder, runs)
                self._revive(case, folder, runs)
            except BaseException:
                for worker in self.workers.values():
                    worker.stop()  # frees the threads that wait for them
                raise
        for run in runs:
            if run.open:
                self._check(op, case, run, reference)
        self._rounds(f"{case.op} {case.name}", [[run for run in runs if run.open]])
        self._repeat(case, [run for run in runs if run.open])
        for worker in self.workers.values():
            if worker.alive:
                worker.send("release", 60)  # answered before whatever is asked next
        shutil.rmtree(folder, ignore_errors=True)

    def _setup(self, case: Case, arm: Arm, inputs: pathlib.Path, runs: list[_Run]) -> None:
        mine = [run for run in runs if run.arm is arm and run.open]
        limit = min(TUNER_LIMIT_S if arm.exclusive else self.options.arm_limit, max(1.0, self.left()))
        try:
            if self.left() <= 0:
                raise WorkerError(TOO_LATE)
            worker = self.worker(arm.name)
            info = worker.ask("case", limit, case=case.to_json(), arm=arm.to_json(), inputs=str(inputs))
        except WorkerError as error:
            for run in mine:
                run.reason = str(error)
            self.progress.step(arm.name)
            return
        for run in mine:
            try:
                if self.left() <= 0:
                    raise WorkerError(TOO_LATE)
                if not worker.alive:
                    break  # what is still open gets a fresh worker
                run.info = {**info, **worker.ask("prepare", limit, mode=run.mode)}
                worker.ask("dump", limit, mode=run.mode, folder=str(self._dumped(case, run)))
            except WorkerError as error:
                run.reason = str(error)
        self.progress.step(arm.name)

    def _revive(self, case: Case, inputs: pathlib.Path, runs: list[_Run]) -> None:
        """A mode that killed its worker must not take the arm's other modes with it: those get a fresh one."""
        for _ in self.options.modes:
            for arm in {run.arm.name: run.arm for run in runs if run.open}.values():
                if not self.workers[arm.name].alive:
                    self.spawn(arm.name, arm.framework, arm)
                    self._setup(case, arm, inputs, runs)
        for run in runs:
            if run.open and not self.workers[run.arm.name].alive:
                run.reason = "its worker died again and again in other modes"

    def _dumped(self, case: Case, run: _Run) -> pathlib.Path:
        return self.folder / f"{case.key}-out" / f"{run.arm.name}-{run.mode}"

    def _oracle_folder(self, op: Operator, case: Case, inputs: pathlib.Path) -> pathlib.Path:
        """Where the reference of these inputs is, or will be: in the cache when there is one."""
        if not op.keeps_oracle:
            return self.folder / "oracle" / case.key
        return (self.options.cache or self.folder / "oracle") / _fingerprint(op, case, inputs)

    def _oracle(
        self, op: Operator, case: Case, inputs: pathlib.Path, folder: pathlib.Path
    ) -> list[dict[str, np.ndarray]]:
        """The fp64 reference of each part. Raises WorkerError: without a reference there is nothing to measure."""
        if not (folder / "done").exists():
            worker = self.worker("oracle")
            worker.ask("oracle", 900, case=case.to_json(), inputs=str(inputs), folder=str(folder))
        return [load_arrays(folder / f"part{index}") for index in range(len(op.subset(case)))]

    def _probe_kind(self) -> str:
        if not self.options.gpu:
            return "numpy"
        return "jax" if not missing_packages(["jax"]) else "torch" if not missing_packages(["torch"]) else "numpy"

    def _wake_probe(self) -> None:
        if self.probed is None:
            try:
                self.worker("roofline")
            except WorkerError:
                pass  # `_probe` reports it

    def _probe(self) -> None:
        """Rooflines, once a session."""
        if self.probed is not None:
            return
        try:
            worker = self.worker("roofline")
            self.probed = worker.ask("probe", 180, kind=self._probe_kind())
            worker.stop()
        except WorkerError as error:
            self.probed = {"bandwidth": float("inf"), "flops": {}, "how": f"NOT MEASURED: {error}"}

    def _check(self, op: Operator, case: Case, run: _Run, reference: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Errors against the oracle; `run.wrong` says what is off."""
        dumped = self._dumped(case, run)

        def parts(name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for index, want in enumerate(reference):
                yield load_arrays(dumped / f"part{index}", [name])[name], want[name]

        run.errors, run.wrong = accuracy(op, case, run.arm, run.mode, parts)
        shutil.rmtree(dumped, ignore_errors=True)

    # ---- timing ----

    def _clocks(self, run: _Run) -> list[str]:
        if not self.options.gpu or run.arm.framework == "numpy":
            return ["wall"]
        clocks = ["device_cold"] if self.options.cold else []
        if self.options.warm and (run.info.get("wall_s", 0) < SLOW_S or not clocks):
            clocks.append("device_warm")
        return [clock for clock in (*clocks, "wall") if clock not in run.off]

    def _wanted(self, run: _Run) -> int:
        return min(self.options.rounds, SLOW_ROUNDS) if run.info.get("wall_s", 0) > SLOW_S else self.options.rounds

    def _enough(self, run: _Run) -> bool:
        enough = min(self._wanted(run), self.options.min_rounds)
        return any(len(x) >= enough for x in run.samples.values())

    def _rounds(self, title: str, groups: Sequence[list[_Run]]) -> None:
        """Round by round, group by group: the arms and modes of a group one after the other in random order."""
        runs = [run for group in groups for run in group]
        for run in runs:
            if run.info.get("cold_error"):
                run.off.add("device_cold")
                run.notes.append(f"no cold time: {run.info['cold_error']}")
        total = sum(self._wanted(run) for run in runs)
        self.progress.stage(f"{title}: rounds", total)
        for index in range(self.options.rounds):
            for group in groups:
                order = [run for run in group if run.open and index < self._wanted(run)]
                self.random.shuffle(order)
                for run in order:
                    if not run.open:  # its worker died in this very round
                        continue
                    if self.left() <= 0:
                        if not self._enough(run):
                            run.reason = f"the time budget was spent after {index} of {self._wanted(run)} rounds"
                        continue
                    self._sample(run, index, runs)
                    self.progress.step(f"{run.arm.name} {run.mode}")

    def _repeat(self, case: Case, runs: list[_Run]) -> None:
        """Same inputs, same bits: an arm of ours that differs from itself is WRONG. Others make no such promise."""
        n, runs = self.options.repeats, [run for run in runs if run.arm.ours]
        if not n:
            return
        self.progress.stage(f"{case.op} {case.name}: {n} repeats", len(runs))
        for run in runs:
            try:
                limit = 60 + 20 * n * run.info.get("wall_s", 0.0)
                found = self.workers[run.arm.name].ask("repeat", limit, mode=run.mode, n=n)
            except WorkerError as error:
                run.notes.append(f"repeats not compared: {error}")
            else:
                run.repeats, text = found, f"{found['different']} of {n} repeats differ in some bit"
                if found["different"]:
                    run.wrong = text
                else:
                    run.notes.append(text)
            self.progress.step(f"{run.arm.name} {run.mode}")

    def _sample(self, run: _Run, index: int, runs: list[_Run]) -> None:
        worker = self.workers[run.worker]
        wall = max(run.info.get("wall_s", 0.0), 1e-6)
        n = min(self.most_calls, max(1, int(0.02 / wall)))
        for clock in self._clocks(run):
            try:
                got = worker.ask("sample", 60 + 20 * n * wall, mode=run.mode, what=clock, n=n, key=run.key)
            except WorkerError as error:
                if error.dead:
                    for other in runs:
                        if other.worker == run.worker and other.open:
                            other.reason = f"round {index + 1}: {error}"
                    return
                run.off.add(clock)
                run.notes.append(f"no {clock.replace('_', ' ')}: {error}")
                continue
            run.samples.setdefault(clock, []).append(float(np.median(got["ms"])))
            if got["kernels"] and not run.kernels:
                run.kernels = got["kernels"]
        if not self._clocks(run):
            run.reason = "; ".join(run.notes) or "no clock works"

    # ---- rows ----

    def _row(self, op: Operator, case: Case, run: _Run) -> dict[str, Any]:
        traffic = op.traffic(case, run.mode)
        names = [kernel["name"] for kernel in run.kernels] or run.info.get("traced", [])
        if run.open and run.samples:
            unproved = [p for p in run.arm.proof if not any(name.startswith(p) for name in names)]
            if unproved:
                run.reason = f"its kernels {', '.join(unproved)} are not among those launched: {', '.join(names[:6])}"
        if run.open and not run.samples:
            run.reason = "; ".join(run.notes) or "no sample"
        row: dict[str, Any] = {
            "op": case.op,
            "case": case.name,
            "params": dict(case.params),
            "title": op.describe(case),
            "mode": run.mode,
            "arm": run.arm.name,
            "framework": run.arm.framework,
            "precision": run.arm.precision,
            "ours": run.arm.ours,
            "status": "NOT MEASURED" if run.reason else "WRONG" if run.wrong else "OK",
            "reason": run.reason or run.wrong,
            "errors": run.errors,
            "times": {},
            "memory_bytes": run.info.get("memory_bytes"),
            "allocations": run.info.get("allocations"),
            "compile_s": run.info.get("compile_s"),
            "tune_s": run.info.get("tune_s"),
            "kernels": run.kernels,
            "traced": run.info.get("traced", []),
            "explain": run.info.get("explain", []),
            "graphs": run.info.get("graphs"),
            "launches": sum(kernel["count"] for kernel in run.kernels) if run.kernels else None,
            "repeats": run.repeats,
            "note": "; ".join(filter(None, [run.info.get("note", ""), *run.notes])),
            "reads": traffic.reads,
            "writes": traffic.writes,
            "flops": traffic.flops,
        }
        if row["status"] == "OK":
            row["times"] = {clock: stats.summary(x) for clock, x in run.samples.items() if x}
        self._against_floor(row, traffic)
        return row

    def _against_floor(self, row: dict[str, Any], traffic: Traffic) -> None:
        probed = self.probed or {"bandwidth": float("inf"), "flops": {}}
        l2 = probed.get("l2_bytes")
        row["floor_ms"] = roofline.floor_ms(traffic, probed)
        row["fits_l2"] = bool(l2) and traffic.reads + traffic.writes <= l2
        clock = stats.primary(row)
        if clock is None or row["floor_ms"] <= 0:
            return
        time_ms = row["times"][clock]["median"]
        row["floor_share"] = row["floor_ms"] / time_ms
        least = roofline.impossible_ms(traffic, probed, l2)
        on_device = clock.startswith("device")
        if clock == "device_warm" and row["fits_l2"]:
            return  # warm caches may well beat the memory's bandwidth
        if time_ms < least * (stats.POSSIBLE_GPU if on_device else stats.POSSIBLE_CPU):
            row["status"] = "IMPOSSIBLE"
            row["reason"] = f"{time_ms:.4g} ms, but its bytes alone take {least:.4g} ms"


class Interrupted(Exception):
    """Ctrl-C during a case; carries the rows that have enough rounds, and NOT MEASURED ones for the rest."""

    def __init__(self, rows: list[dict[str, Any]]):
        super().__init__("interrupted")
        self.rows = rows


def accuracy(
    op: Operator,
    case: Case,
    arm: Arm,
    mode: str,
    parts: Callable[[str], Iterable[tuple[np.ndarray, np.ndarray]]],
) -> tuple[dict[str, dict[str, float]], str]:
    """Errors of every tensor of a mode, and what is wrong with them, or "".

    parts: by a tensor's name, what the arm gave and the reference, part by part.
    """
    errors, failures = {}, []
    for name in op.tensors(mode):
        error = stats.Error()
        try:
            for got, want in parts(name):
                error.add(got, want)
        except (KeyError, ValueError, OSError) as problem:
            return errors, f"{name}: {problem}"
        bar = op.bar(case, arm, name) * (1.0 if arm.ours else stats.PEER_SLACK)
        found = errors[name] = {**error.result(op.tensor_dtype(case, name)), "bar": bar}
        if not found["rms"] <= bar:
            text = f"{found['nonfinite']} not finite" if found["nonfinite"] else f"{found['rms']:.1e} > {bar:.0e}"
            failures.append(f"{name} {text}")
    return errors, ", ".join(failures)


def _lanes(
    pool: concurrent.futures.Executor, lanes: int, jobs: Sequence[Callable[[], None]]
) -> list[concurrent.futures.Future[None]]:
    """Submits the jobs over `lanes` threads of the pool, each thread taking the next job when it is free."""
    queue: Iterator[Callable[[], None]] = iter(jobs)
    import threading

    lock = threading.Lock()

    def lane() -> None:
        while True:
            with lock:
                job = next(queue, None)
            if job is None:
                return
            job()

    return [pool.submit(lane) for _ in range(min(lanes, len(jobs)))]


def _scratch() -> str | None:
    """Where inputs are shared: memory if it is roomy, else the default temporary folder."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return None
    return "/dev/shm" if free > 16e9 else None


def _fingerprint(op: Operator, case: Case, inputs: pathlib.Path) -> str:
    """Names the oracle's result: the operator's reference code, the parts and the bytes of the inputs."""
    digest = hashlib.sha256()
    digest.update(repr((case.op, list(op.subset(case)), case.params.get("scale"))).encode())
    for source in sorted((_ROOT / "torch_ref").glob("oracle*.py")):
        digest.update(source.read_bytes())
    arrays = load_arrays(inputs)
    for index, part in enumerate(op.subset(case)):
        for name in sorted(arrays):
            taken = np.ascontiguousarray(op.take(case, name, arrays[name], part))
            digest.update(f"{index}{name}{taken.dtype}{taken.shape}".encode())
            digest.update(taken.view(np.uint8).data)
    return f"{case.op}-{case.name}-{digest.hexdigest()[:20]}"
