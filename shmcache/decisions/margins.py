"""How far is each answer from flipping?

    choice  probability of the answer minus that of the runner-up
    noul    |2p - 1|
    score   1 - 2 times the distance of the expected score from the level that it rounds to

0 is a coin toss, 1 is certain: review the answers with small margins. A cache keeps a wrong answer until
it expires, so borderline ones are worth a look before they are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmcache.decisions.legal import answers_of


def decision_margins(result: Mapping[str, Any]) -> dict[str, float]:
    """Margins from 0 to 1 by question; answers without probabilities have none and are left out."""
    margins: dict[str, float] = {}
    for name, answer in (answers_of(result) or {}).items():
        margin = _margin(answer) if isinstance(answer, Mapping) else None
        if margin is not None:
            margins[name] = min(1.0, max(0.0, margin))
    return margins


def _margin(answer: Mapping[str, Any]) -> float | None:
    match answer:
        case {"noul": bool()}:
            return None
        case {"noul": int() | float() as probability}:
            return abs(2 * probability - 1)
        case {"score": int() | float() as score}:
            return 1 - 2 * abs(score - round(score))
        case {"choice": _, "probabilities": Mapping() as probabilities} if probabilities:
            first, *others = sorted(probabilities.values(), reverse=True)
            return float(first - others[0]) if others else 1.0
    return None
