"""Plain sums over a Prometheus text: what the load and live readings need beside acceptance, which `planner.acceptance.importers` reads."""

from __future__ import annotations

import math

from planner.errors import InputError


def totals(text: str, where: str) -> dict[str, float]:
    """Sample name -> sum over its series (engines, models). Histogram buckets and creation times are left out; `_sum` and `_count` stay."""
    from prometheus_client.parser import text_string_to_metric_families

    out: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for s in family.samples:
                if not s.name.endswith(("_created", "_bucket")) and math.isfinite(s.value):
                    out[s.name] = out.get(s.name, 0.0) + s.value
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError("the metrics cannot be read", where=where, hint=f"Is this a Prometheus text? ({str(error)[:80]})") from None
    return out


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """How much a counter grew; None where it is absent, or fell because the server restarted."""
    if name not in after:
        return None
    growth = after[name] - before.get(name, 0.0)
    return growth if growth >= 0 else None


def mean_of(before: dict[str, float], after: dict[str, float], histogram: str) -> float | None:
    """Mean of a histogram's observations between two scrapes; None without any."""
    total, count = grown(before, after, f"{histogram}_sum"), grown(before, after, f"{histogram}_count")
    return total / count if total is not None and count else None
