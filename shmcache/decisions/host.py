"""What does the caller's context say about a call: what its answer depends on, and may a hook wait in it?

    Facts   fingerprint, checkpoint, route, budget, scan: the parts of the key beside the request itself
    waits   whether this hook may wait for another request (rule 2 of flights)

The context is laya's PredictContext or anything with its fields (states, questions, results, agent,
router, decision, model, max_len, head_max_len, error, skip()).

    fingerprint  pinned, or of the model: its own `decision_fingerprint`; or model id, revision,
                 temperatures, configured token budget and its package's version
    not in it    device, precision, backend: a mixed fleet shares one set of decisions

A scan of a long document is another request than one window of the same state. A context does not say
which of them it is, and laya's Router clears its own note of it before hooks run; so we look at the
call itself: `predict` of laya.router keeps the scan in a local variable beside its context.

Leaves out: how the parts are spelled (key).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Hashable, Iterator
from types import FrameType
from typing import Any

from shmcache.decisions.key import Facts

_HELPER_THREAD = "laya-hook-timeout"
_ROUTER_MODULE = "laya.router"
_FRAMES = 24


class StandsAside(Exception):
    """This call cannot be cached; `reason` is what is counted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def facts_of(context: Any, pinned: str | None) -> Facts:
    """The parts of the key that the context of a hook gives. Raises StandsAside."""
    agent, router = context.agent, context.router
    max_len, head_max_len = context.max_len, context.head_max_len
    by_language = bool(getattr(agent, "lang_temperatures", None))
    if by_language and router is None:
        # A hook does not see the language of an Agent's call, and the answer depends on it.
        raise StandsAside("per_language_temperatures")
    return Facts(
        fingerprint=pinned if pinned is not None else fingerprint_of(agent, router),
        checkpoint=context.model if router is not None else None,
        route=_route(context.decision) if by_language else None,
        budget=None if max_len is None and head_max_len is None else [max_len, head_max_len],
        scan=_scan(context) if router is not None or len(context.states) > 1 else None,
    )


def fingerprint_of(model: Any, router: Any = None) -> Any:
    """What identifies a model across processes: text as it is, or the parts of an object."""
    if isinstance(model, str):
        return model
    own = getattr(model, "decision_fingerprint", None)
    if own is not None:
        return own
    settings = getattr(model, "cfg", None)
    if not isinstance(settings, dict):
        settings = {}
    return [
        getattr(model, "model_id", None),
        getattr(model, "revision", None),
        getattr(model, "temperature", None),
        getattr(model, "temperature_by_options", None),
        getattr(model, "lang_temperatures", None),
        getattr(model, "binning_map", None),
        [settings.get("max_len"), settings.get("head_max_len")],
        _package_version((model if router is None else router).__class__),
    ]


def may_wait(context: Any) -> bool:
    """False where hooks are serialised (the end hook needs the lock that a waiter holds) or limited."""
    for host in (context.router, context.agent):
        if host is None:
            continue
        if not getattr(host, "hooks_concurrent", True) or getattr(host, "hooks_timeout", None) is not None:
            return False
    # A limit may also come with the call: then the hook runs on a thread of its own.
    return threading.current_thread().name != _HELPER_THREAD


@functools.cache
def _package_version(kind: Hashable) -> str | None:
    """Of the package that defines a class."""
    package = sys.modules.get(str(kind.__module__).partition(".")[0])
    version = getattr(package, "__version__", None)
    return version if isinstance(version, str) else None


def _route(decision: Any) -> Any:
    """What chose the language, where temperatures depend on it. Raises StandsAside."""
    reason, detection = decision.get("reason"), decision.get("detection")
    if detection is None and not str(reason).startswith("explicit lang="):
        # An explicit model may come with a language that no field of the decision shows.
        raise StandsAside("route")
    return [reason, detection.get("language") if detection is not None else None]


def _scan(context: Any) -> Any:
    """How a long document is scanned by this very call; None for one window. Raises StandsAside."""
    frames = _frames(sys._getframe())
    if context.router is None:
        if any(_is(frame, "predict_batch") and _is_called_by_scan(frame) for frame in frames):
            # Its states are windows of a document, and a replay of all of them is not what it expects.
            raise StandsAside("scan")
        return None
    if type(context.router).__module__ != _ROUTER_MODULE:
        return None
    call = next((frame for frame in frames if _is_router_call(frame)), None) or _call_elsewhere(context)
    if call is None:
        raise StandsAside("scan")
    if not _is_called_by_scan(call):
        return None
    scan = call.f_locals.get("scan")
    return [getattr(scan, name, None) for name in ("window", "stride", "aggregate")]


def _call_elsewhere(context: Any) -> FrameType | None:
    """The router's call that waits for us in a thread of its own, because its hooks have a time limit."""
    for top in sys._current_frames().values():
        for frame in _frames(top):
            if _is_router_call(frame) and frame.f_locals.get("ctx") is context:
                return frame
    return None


def _is_router_call(frame: FrameType) -> bool:
    return (_is(frame, "predict") or _is(frame, "predict_batch")) and (
        frame.f_globals.get("__name__") == _ROUTER_MODULE
    )


def _is_called_by_scan(frame: FrameType) -> bool:
    return frame.f_back is not None and _is(frame.f_back, "predict_long")


def _is(frame: FrameType, name: str) -> bool:
    return frame.f_code.co_name == name


def _frames(top: FrameType) -> Iterator[FrameType]:
    """A frame and those below it, as far as hooks are called from: a server's stack may be deep."""
    frame: FrameType | None = top
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
