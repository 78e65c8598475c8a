"""What a method sends, keeps, resets and freezes, read off a run."""

import re
from itertools import groupby
from typing import Any

import torch

from fl_lightning.batch_norm.kinds import KIND_LABELS, KINDS
from fl_lightning.verification.bench import Run
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import Round


def describe_state(run: Run) -> dict[str, str]:
    """Rows of a table: by kind of state what happens to it, then what is sent, kept and reset.

    Args:
        run: A run over its planned rounds; its model's floats are the ones that are counted.
    """
    rounds = run.rounds
    rows = {
        KIND_LABELS[kind]: _stages([seen.policy[kind] for seen in rounds])
        for kind in KINDS
        if kind in run.module.kinds.values()
    }
    rows["a client sends"] = _stages([_sent(run, seen) for seen in rounds])
    rows["beside that"] = _stages([_extra(seen) for seen in rounds])
    memory = entries(rounds[-1].memory)
    clients = [kept for owner, kept in memory.items() if owner is not None]
    rows["keeps by client"] = _names(clients[0]) if clients else "nothing"
    rows["keeps besides"] = _names(memory.get(None, {})) or "nothing"
    kept = [seen for seen in rounds[1:] if seen.optimizer_was_reset is False]
    rows["client optimizer"] = "state kept between rounds" if kept else "state reset each round"
    return rows


def _sent(run: Run, seen: Round) -> str:
    floats: dict[str, int] = {}
    for name, kind in run.module.kinds.items():
        value = seen.broadcast[name]
        if seen.policy[kind] in ("averaged", "pooled") and value.is_floating_point():
            floats[kind] = floats.get(kind, 0) + value.numel()
    parts = ", ".join(f"{KIND_LABELS[kind]} {count}" for kind, count in floats.items())
    return f"{sum(floats.values())} floats ({parts}), up and down"


def _extra(seen: Round) -> str:
    up, down = seen.payload
    exchanges = 1 + seen.exchanges
    return f"{up} floats up, {down} down; {exchanges} exchange{'s' if exchanges > 1 else ''} a round"


def _stages(texts: list[str]) -> str:
    parts, start = [], 1
    for text, group in groupby(texts):
        parts.append(text if start == 1 else f"{text} from round {start}")
        start += len(list(group))
    return "; ".join(parts)


def _names(kept: dict[str, Any]) -> str:
    floats = sum(
        value.numel() for value in kept.values() if torch.is_tensor(value) and value.is_floating_point()
    )
    names = ["/".join(re.findall(r"[^\[\]']+", place)) for place in kept]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{shown} ({floats} floats)" if names else ""
