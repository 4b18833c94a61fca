"""Run a long build and show its steps: `progress.py LOG COMMAND...`.

pip is silent while it compiles, and with -v it prints thousands of lines. This keeps all of them in LOG,
prints ninja's `[12/83]` steps and a sign of life when nothing happens, and the log's end if the build fails.
"""

from __future__ import annotations

import re
import selectors
import subprocess
import sys
import time
from pathlib import Path

STEP = re.compile(rb"\[(\d+)/(\d+)\]")
STEP_INTERVAL_S = 2.0  # the first steps are small and finish several a second
SILENCE_S = 15.0
LINES_ON_FAILURE = 40


def main() -> int:
    """Exit code of the command."""
    log_path, command = Path(sys.argv[1]), sys.argv[2:]
    started_s = shown_s = time.monotonic()
    where = "downloading and configuring"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as build,
        selectors.DefaultSelector() as selector,
    ):
        assert build.stdout is not None
        selector.register(build.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(SILENCE_S):
                chunk = build.stdout.read(1 << 16)
                if not chunk:
                    break
                log.write(chunk)
                # A step whose line is cut by the chunk's end is not shown; the next one is.
                steps = STEP.findall(chunk)
                if not steps or time.monotonic() - shown_s < STEP_INTERVAL_S:
                    continue
                where = "step {}/{}".format(*(number.decode() for number in steps[-1]))
            shown_s = time.monotonic()
            print(f"  llama-cpp-python: {where}, {shown_s - started_s:.0f} s", flush=True)
        code = build.wait()
    if code:
        tail = log_path.read_bytes().splitlines()[-LINES_ON_FAILURE:]
        print(b"\n".join(tail).decode(errors="replace"))
        print(f"setup: the build failed; all of it is in {log_path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
