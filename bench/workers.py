"""The parent's side of a worker process: start, ask with a time limit, find out how it ended, stop."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """The request failed; `dead` tells whether the process is gone with it."""

    def __init__(self, reason: str, dead: bool = False):
        super().__init__(reason)
        self.dead = dead


class Worker:
    """A `bench.worker` process. Requests may be sent to several workers and their answers collected later."""

    def __init__(self, name: str, env: Mapping[str, str], log: pathlib.Path):
        self.name, self.log = name, log
        self.waking: int | None = None  # ticket of the first request, until it is answered
        self.gone = False
        read, write = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        with open(log, "ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", str(write)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                pass_fds=(write,),
                env={**os.environ, "PYTHONPATH": path, **env},
                start_new_session=True,  # Ctrl-C goes to the parent alone, which decides what to keep
            )
        os.close(write)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._next, self._pending = 0, {}
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as replies:
            for line in replies:
                try:
                    self._answers.put(json.loads(line))
                except ValueError:
                    break
        self._answers.put(None)  # the worker is gone

    def send(self, do: str, limit: float, **args: Any) -> int:
        """Sends a request and returns its ticket; `limit` is in seconds from now."""
        self._next += 1
        self._pending[self._next] = (do, time.monotonic() + limit, limit)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write((json.dumps({"id": self._next, "do": do, "args": args}) + "\n").encode())
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # the wait finds out how it ended
        return self._next

    def wait(self, ticket: int) -> Any:
        """The answer to the oldest outstanding request, which must be `ticket`. Raises WorkerError."""
        do, deadline, limit = self._pending.pop(ticket)
        if self.gone:
            raise WorkerError("its worker is gone", dead=True)
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise WorkerError(f"no answer to {do!r} within {limit:.0f} s", dead=True) from None
            if answer is None:
                self.gone = True
                raise WorkerError(f"worker died during {do!r}: {self._post_mortem()}", dead=True)
            if answer["id"] != ticket:
                continue  # an answer to a request that was given up
            if "error" in answer:
                raise WorkerError(answer["error"])
            return answer["result"]

    def ask(self, do: str, limit: float, **args: Any) -> Any:
        return self.wait(self.send(do, limit, **args))

    def _post_mortem(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.stop()
            code = None
        if code is not None and code < 0:
            try:
                how = signal.Signals(-code).name
            except ValueError:
                how = f"signal {-code}"
        else:
            how = f"exit {code}"
        last = last_line(self.log)
        return f"{how}; {last}" if last else how

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends the process and everything it started."""
        self.gone = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except (BrokenPipeError, OSError):
                pass


def last_line(path: pathlib.Path, limit: int = 160) -> str:
    """The last line of a log that is not empty."""
    try:
        text = path.read_bytes()[-4096:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""
