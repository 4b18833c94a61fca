"""The server as gunicorn runs it: one master, N workers that each load the models after the fork.

    master   board and line exist ── fork ──► worker: engine starts, models load, requests come
             a worker is gone: its slot is vacated, the next one takes it

Owner: the master process.
Invariants
    I1  The master loads no model and attaches no cache.
    I2  Where a key file cannot be read at a reload, the keys from before go on.
Leans on: anonymous memory and sockets that are made before a fork are shared by it.
    TCP_USER_TIMEOUT of a listening socket is that of the connections it accepts: the kernel ends one whose
    client takes nothing for so long, so that it cannot keep an answer, or a stopping worker, for ever.
Leaves out: what a worker does (app, engine).
"""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from starlette.applications import Starlette
from uvicorn_worker import UvicornWorker

from shmcache.errors import ConfigError
from shmcache.workers import gunicorn_hooks
from shmcache.workers.serve.board import Board, Slot
from shmcache.workers.serve.keys import ApiKeys
from shmcache.workers.serve.line import Line
from shmcache.workers.serve.settings import Settings

log = logging.getLogger(__name__)

SHUTDOWN_SAVE_S = 40.0  # a `shutdown` save may take 30 s
STUCK_CLIENT_MS = 60_000
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeWorker(UvicornWorker):  # type: ignore[misc]  # gunicorn and uvicorn_worker have no types
    """uvicorn in a gunicorn worker; the app's start-up is what loads the models."""

    CONFIG_KWARGS = {"loop": "asyncio", "http": "auto", "lifespan": "on", "access_log": False}  # noqa: RUF012


class _Master(Arbiter):  # type: ignore[misc]
    def reap_workers(self) -> None:
        """A second worker that did not boot, while the first ends the server, changes nothing."""
        try:
            super().reap_workers()
        except HaltServer:
            if self.LISTENERS:
                raise


class Server(BaseApplication):  # type: ignore[misc]
    """One server."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError for a key file that cannot be used."""
        self._settings = settings
        self._board = Board()
        self._line = Line()
        self._keys = self._read_keys()
        self._slots: dict[Any, Slot] = {}
        self._own_slot: Slot | None = None
        super().__init__()

    def _read_keys(self) -> ApiKeys | None:
        path = self._settings.api_keys
        return ApiKeys.read(Path(path)) if path is not None else None

    def load_config(self) -> None:
        """gunicorn's settings."""
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        values = {
            "bind": f"{host}:{settings.port}",
            "workers": settings.workers,
            "worker_class": ServeWorker,
            "proc_name": "shmcache-serve",
            # A worker loads for as long as its models take, and its loop never computes.
            "timeout": 0,
            "graceful_timeout": int(settings.stop_s + SHUTDOWN_SAVE_S),
            "control_socket_disable": True,
            "loglevel": settings.log_level,
            "when_ready": self._when_ready,
            "pre_fork": self._pre_fork,
            "post_fork": self._post_fork,
            "child_exit": self._child_exit,
        }
        for name, value in values.items():
            if name in self.cfg.settings:  # the control socket came with gunicorn 25
                self.cfg.set(name, value)

    def reload(self) -> None:
        """At SIGHUP: new keys, new workers."""
        try:
            self._keys = self._read_keys()
        except ConfigError as error:
            log.error("%s: the keys from before go on", error)  # noqa: TRY400  the message says it all
        super().reload()

    def run(self) -> None:
        """Serve until a signal, or workers that do not boot, end it."""
        logging.basicConfig(
            level=self._settings.log_level.upper(),
            format="[%(asctime)s] [%(process)d] [%(levelname)s] %(name)s: %(message)s",
        )
        _Master(self).run()

    def load(self) -> Starlette:
        """In a worker: its application."""
        # llama.cpp and numpy, which the master does not need.
        from shmcache.workers.serve.app import App, make_app  # noqa: PLC0415
        from shmcache.workers.serve.desk import Desk  # noqa: PLC0415
        from shmcache.workers.serve.engine import Engine  # noqa: PLC0415
        from shmcache.workers.serve.metrics import exposition  # noqa: PLC0415
        from shmcache.workers.serve.models import Models, check_options  # noqa: PLC0415

        settings, slot = self._settings, self._own_slot
        assert slot is not None, "load() belongs into a worker"
        try:
            check_options(settings)
        except ConfigError as error:
            log.critical("%s", error)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
        engine = Engine(
            self._line, slot, settings.parallel, lambda: Models(settings, gunicorn_hooks.worker_threads())
        )
        desk = Desk(self._line, self._board, slot, settings.waiting, settings.parallel)
        app = App(
            settings,
            desk,
            self._keys,
            engine,
            lambda: exposition(self._board, settings.namespace),
        )
        return make_app(app, engine, desk, settings.stop_s)

    def _when_ready(self, server: Any) -> None:
        if self._keys is None and self._settings.host not in LOOPBACK:
            log.warning("whoever reaches %s can use the models: --api-keys", self._settings.host)
        for listener in server.LISTENERS:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_MS)
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            print(f"shmcache serves at {url} as soon as its models are loaded", flush=True)

    def _pre_fork(self, server: Any, worker: Any) -> None:
        gunicorn_hooks.pre_fork(server, worker)
        self._own_slot = self._slots[worker] = self._board.take_slot()

    def _post_fork(self, server: Any, worker: Any) -> None:
        gunicorn_hooks.post_fork(server, worker)

    def _child_exit(self, server: Any, worker: Any) -> None:
        self._board.vacate(self._slots.pop(worker))
        gunicorn_hooks.child_exit(server, worker)
