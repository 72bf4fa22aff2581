"""The measuring process: builds, checks and times what it is asked, one JSON line in, one JSON line out.

Started by client.py as `python -m autofuse.search.worker LIFE_FD`. Requests come on fd 0. Answers go to a private copy
of fd 1, which itself is turned to fd 2 at once: prints and compiler dumps cannot disturb the protocol.

    setup    chain, recipes, sizes, device, limits, cache, seed, protocol [, plugins: modules that register kinds]
    build    nodes, kind, knobs                          build only
    ahead    nodes, kind, knobs (a list)                 build several side by side
    segment  nodes, kind, knobs, check, budget_s [, most_spills]
                                                         one segment alone, on inputs recorded from the eager chain
    config   plan, schedules, check, budget_s            the whole chain
    race     configs, budget_s                           several configs, interleaved

An answer's `status` is one of store.records.STATUSES. After "crashed" the process ends itself: the device is lost to
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
import threading
from typing import Any


def _watch(life: int) -> None:
    """End this process, and the compilers it started, when the parent is gone."""
    os.set_inheritable(life, False)
    if os.getpgrp() == os.getpid() and hasattr(os, "O_ASYNC"):
        # a compiler pass or a driver call that hangs may hold the GIL, so that no thread runs: the kernel's own signal,
        # whose default is to end the process, needs none
        with contextlib.suppress(OSError):
            fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        while True:
            try:
                if not os.read(life, 1):
                    break
            except OSError:
                break
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(3)

    threading.Thread(target=wait, daemon=True, name="life").start()


def _finite(value: Any) -> Any:
    """The value with what JSON cannot hold replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def main(argv: list[str]) -> None:
    """Serve requests until fd 0 ends."""
    answers = os.dup(1)
    os.dup2(2, 1)
    _watch(int(argv[1]))
    from .bench import Bench  # torch is imported only now, with the parent already watched
    from .outcome import failure

    bench = Bench()
    for line in sys.stdin:
        request = json.loads(line)
        with bench.turn(request):
            os.write(answers, b"\n")  # taken: whatever happens from here on is this request's doing
            try:
                answer = bench.handle(request)
            except BaseException as e:
                answer = failure(e)
        data = json.dumps(_finite(answer), default=str).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]
        if answer["status"] == "crashed":
            os._exit(4)


if __name__ == "__main__":
    main(sys.argv)
