"""Many cases at once, where time on a device is scarce: all are compiled first, side by side, then all are timed.

A worker of JAX holds all cases of its arm and compiles several at a time. PyTorch compiles under one lock: the cases
are dealt out to several workers, each with all of PyTorch's arms. Arms that time candidates while they compile do so
beside the others here. The workers hold what they compute to the reference themselves. The rounds go through all cases,
the arms of a case one after the other in random order. There are no wall times on a device: what one of hundreds of
functions in a process costs to call is not what it costs alone.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any

from bench import harness, stats
from bench.harness import Session
from bench.spec import Arm, Case, missing_packages, operator, save_arrays
from bench.workers import WorkerError

Job = tuple[Case, Sequence[Arm], Sequence[str]]
_GRACE_S = 40.0  # for what was begun before the limit
_WRITERS = 4  # threads that make inputs


class Together(Session):
    """`measure_all` instead of `measure`."""

    most_calls = 5

    def measure_all(self, jobs: Sequence[Job], seconds: float) -> list[dict[str, Any]]:
        """All rows of all cases with their arms and modes. What has not begun to compile after `seconds` is NOT
        MEASURED; the first cases come first. Raises `harness.Interrupted` with all rows on Ctrl-C."""
        # Three of eight cores: the rest is for references, inputs and the compilers' own threads.
        side = max(1, min(6, (os.cpu_count() or 2) * 3 // 8))
        cases, groups = [case for case, _, _ in jobs], []
        for index, (case, arms, modes) in enumerate(jobs):
            share = f"torch_{index % side}"
            groups.append(
                [
                    self._run(arm, mode, share if arm.framework == "torch" else arm.name, f"{case.key} {arm.name}")
                    for arm in arms
                    for mode in modes
                ]
            )
        interrupted = False
        try:
            self._hold(cases, groups, side, time.time() + seconds)
            self._probe()  # from here on one process at a time uses the device
            self._rounds(f"{len(cases)} cases", [[run for run in group if run.open] for group in groups])
        except KeyboardInterrupt:
            interrupted = True
            for run in (run for group in groups for run in group):
                if run.open and not self._enough(run):
                    run.reason = "interrupted"
        rows = []
        for case, group in zip(cases, groups, strict=True):
            found = [self._row(operator(case.op), case, run) for run in group]
            stats.judge(found)
            rows += found
        if interrupted:
            raise harness.Interrupted(rows)
        return rows

    def _hold(self, cases: list[Case], groups: list[list[harness._Run]], side: int, until: float) -> None:
        """Has the workers prepare and check all runs, and waits for them. until: seconds of the epoch."""
        self.progress.stage(f"{len(cases)} cases: compile, check", 0)
        open_runs = [(case, run) for case, group in zip(cases, groups, strict=True) for run in group if run.open]
        limit = until - time.time() + _GRACE_S
        with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
            written = [pool.submit(self._write, case) for case in cases]
            self.spawn("oracle", "torch" if self.options.gpu and not missing_packages(["torch"]) else "numpy", None)
            arms = {run.worker: run.arm for _, run in open_runs}
            for name, arm in arms.items():
                self.spawn(name, arm.framework, Arm(name, arm.framework, "", env=self._compilers(name, arm)))
            self.spawn("roofline", self._probe_kind(), None)
            tickets = {}
            for name, arm in arms.items():
                jobs: dict[str, dict[str, Any]] = {}
                for case, run in open_runs:
                    if run.worker == name:
                        job = {"key": run.key, "case": case.to_json(), "arm": run.arm.to_json(), "modes": []}
                        job |= {"inputs": str(self.folder / case.key), "reference": str(self._reference(case))}
                        jobs.setdefault(run.key, job)["modes"].append(run.mode)
                shape = {"threads": side, "nice": 5 if arm.exclusive else 0} if arm.framework == "jax" else {}
                tickets[name] = self.workers[name].send("hold", limit, jobs=list(jobs.values()), until=until, **shape)
            asked = []
            for case, done in zip(cases, written, strict=True):
                done.result()
                folders = {"inputs": str(self.folder / case.key), "folder": str(self._reference(case))}
                asked.append(self.workers["oracle"].send("oracle", limit, case=case.to_json(), **folders))
        for case, ticket in zip(cases, asked, strict=True):
            try:
                self.workers["oracle"].wait(ticket)
            except WorkerError as error:
                self._reference(case).mkdir(parents=True, exist_ok=True)
                (self._reference(case) / "failed").write_text(str(error))  # for those who wait for it
        self.workers["oracle"].stop()
        self.progress.stage(f"{len(cases)} cases: compile, check", len(tickets))
        for name, ticket in tickets.items():
            mine = [run for _, run in open_runs if run.worker == name]
            try:
                found = self.worker(name).wait(ticket)
            except WorkerError as error:
                self.workers[name].stop()
                for run in mine:
                    run.reason = str(error)
            else:
                for run in mine:
                    for attribute, value in found[run.key][run.mode].items():
                        setattr(run, attribute, value)
                    run.info.pop("wall_s", None)  # of a call beside compilers: no measure of how many to time
            self.progress.step(name)
        self._wake_probe()
        for case in cases:
            shutil.rmtree(self.folder / case.key, ignore_errors=True)
            shutil.rmtree(self._reference(case), ignore_errors=True)

    def _compilers(self, name: str, arm: Arm) -> dict[str, str]:
        """PyTorch's: each process one thread, and caches of its own, so that nothing compiled earlier is found."""
        if arm.framework != "torch":
            return dict(arm.env)
        threads = dict.fromkeys(("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        caches = {f"{of}_CACHE_DIR": str(self.folder / f"{of}_{name}") for of in ("TORCHINDUCTOR", "TRITON")}
        return {**threads, **caches, **arm.env}

    def _reference(self, case: Case) -> pathlib.Path:
        return self.folder / "oracle" / case.key

    def _write(self, case: Case) -> None:
        save_arrays(self.folder / case.key, operator(case.op).inputs(case))

    def _clocks(self, run: harness._Run) -> list[str]:
        clocks = super()._clocks(run)
        return [clock for clock in clocks if clock != "wall"] if self.options.gpu else clocks
