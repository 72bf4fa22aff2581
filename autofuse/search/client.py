"""The parent's side of the measuring process: start it, ask it, kill it when it hangs, start it again.

A candidate that hangs, crashes or eats the memory costs one worker, never the search. The worker runs by `python -m`,
so that scripts without a main guard, notebooks and the command all can use it. It is a session of its own, so that
Ctrl-C reaches the parent alone, and it holds the read end of a pipe whose other end only the parent has: however the
parent ends, the worker and the compilers that it started end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import WorkerError

ROOT = Path(__file__).resolve().parents[2]
_LINE_LIMIT = 2**24
TURN_S = 600.0  # how long a request may wait for other processes that measure on the same device


class Worker:
    """A measuring process for one workload on one device. `setup` is the worker's first request; see worker.py.

    It starts with the first request and again after each crash; WorkerError says that it cannot. A context manager.
    """

    def __init__(self, setup: Mapping[str, Any], *, timeout_s: float = 120.0) -> None:
        self.setup, self.timeout_s = {**setup, "op": "setup"}, timeout_s
        self.starts = 0
        self.waited_s = 0.0  # for other processes that measured
        self._process: subprocess.Popen[bytes] | None = None
        self._life = -1
        self._log: IO[bytes] | None = None
        self._pending = b""
        self._taken = False  # whether the worker has read the request that is being answered
        self._owner = os.getpid()

    # ---- life

    @property
    def pid(self) -> int | None:
        """The process's id, or None where none runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs. Raises WorkerError where it cannot start or refuses the setup."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._spawn()
        answer = self._ask(self.setup, self.timeout_s)
        if answer.get("status") != "ok":
            self._end()
            what = answer.get("message") or answer.get("status")
            raise WorkerError(f"the measuring process could not be started: {what}")

    def prepare(self, setup: Mapping[str, Any]) -> None:
        """Start the process, or turn the running one to another workload. Raises WorkerError where it refuses."""
        self.setup = {**setup, "op": "setup"}
        if self._process is None or self._process.poll() is not None:
            self.start()
            return
        answer = self._ask(self.setup, self.timeout_s)
        if answer.get("status") != "ok":
            self._end()
            self.start()

    def _spawn(self) -> None:
        # glibc raises its mmap threshold as a process goes on, which makes a large output cheap in one process and a
        # run of page faults in the next: fixed at its greatest, times of a CPU kernel are its own
        # and a thread that waits for one without a core must give up its own, else both wait for the scheduler's 8 ms
        env = {
            "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824", "GOMP_SPINCOUNT": "20000", **os.environ,
        }  # fmt: skip
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        self._log = tempfile.TemporaryFile("a+b", prefix="autofuse-worker-")  # noqa: SIM115 (closed in _end)
        theirs, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: a file in the current folder must not stand in for a module of the worker
                [sys.executable, "-P", "-m", "autofuse.search.worker", str(theirs)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                pass_fds=(theirs,), env=env, start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as e:
            self._end()
            raise WorkerError(f"{sys.executable} could not be started: {e}") from e
        finally:
            os.close(theirs)
        self.starts += 1
        self._pending = b""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _end(self) -> None:
        """Kill the process and everything it started; give back every descriptor."""
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._owner:  # a forked child has only copies of the descriptors
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        if self._log is not None:
            self._log.close()
            self._log = None

    def clock(self) -> float:
        """Seconds of a clock that stands while other processes measure on the device."""
        return time.monotonic() - self.waited_s

    def close(self) -> None:
        """End the process. A later request would start a new one."""
        self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    # ---- requests

    def request(self, request: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """The worker's answer: a dictionary with a `status` in every case, "timeout" and "crashed" included.

        Raises WorkerError only where no worker can be started.
        """
        self.start()
        limit = self.timeout_s if timeout_s is None else timeout_s
        answer = self._ask(request, limit)
        if answer["status"] == "crashed" and not self._taken:  # it died before this request: no fault of the candidate
            self.start()
            answer = self._ask(request, limit)
        if answer["status"] == "crashed":
            self._end()  # a device that has met an illegal access answers nothing sensible any more
        return answer

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._log is not None
        self._taken = False
        try:
            line = self._exchange(json.dumps(request).encode() + b"\n", timeout_s)
        except TimeoutError:
            self._end()
            if not self._taken:
                raise WorkerError(
                    f"the measuring process did not begin within {TURN_S:g} s: another process measures on the device, or hangs"
                ) from None
            return {"status": "timeout", "message": f"no answer within {timeout_s:g} s"}
        except (EOFError, OSError):
            return self._lost()
        except BaseException:
            self._end()  # Ctrl-C while it measures: its late answer must not meet the next request
            raise
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("status"), str):
            self._end()
            return {"status": "crashed", "message": f"the measuring process answered nonsense: {line[:80]!r}"}
        with contextlib.suppress(OSError):
            # only once it has answered: what it wrote while it started, or died before a request, is why it ended
            os.ftruncate(self._log.fileno(), 0)
        return answer

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Send a line, read a line. The time runs from when the worker takes the request; it may wait before that."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        to, back = self._process.stdin.fileno(), self._process.stdout.fileno()
        sent = time.monotonic()
        until = sent + timeout_s + TURN_S
        with selectors.DefaultSelector() as ready:
            ready.register(to, selectors.EVENT_WRITE)
            ready.register(back, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._pending.partition(b"\n")
                if newline:
                    self._pending = rest
                    if line:
                        return line
                    self._taken = True
                    now = time.monotonic()
                    self.waited_s += now - sent
                    until = now + timeout_s
                    continue
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in ready.select(left):
                    if key.fd == to:
                        data = data[os.write(to, data) :]
                        if not data:
                            ready.unregister(to)
                        continue
                    got = os.read(back, 2**16)
                    if not got or len(self._pending) > _LINE_LIMIT:
                        raise EOFError
                    self._pending += got

    def _lost(self) -> dict[str, Any]:
        """The answer of a process that has died."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        code = process.poll()
        how = "the measuring process closed its pipe" if code is None else f"the measuring process ended with code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-code).name}"
        last = self._last_line()
        self._end()
        return {"status": "crashed", "message": f"{how}: {last}" if last else how}

    def _last_line(self) -> str:
        """The last line of the log that says something."""
        if self._log is None:
            return ""
        try:
            size = os.fstat(self._log.fileno()).st_size
            text = os.pread(self._log.fileno(), 2**14, max(0, size - 2**14)).decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines()]
        return next((line for line in reversed(lines) if any(c.isalnum() for c in line)), "")[:500]
