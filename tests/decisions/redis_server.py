"""A real redis-server on a port of its own, which tests stop and start."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import Self

import redis


class RedisServer:
    """In memory only: a stopped one comes back empty. Context manager."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        program = shutil.which("redis-server")
        assert program is not None, "these tests need redis-server: apt-get install redis-server"
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.02)
                else:
                    return

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
