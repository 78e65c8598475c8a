"""Where the offline runs of W&B are, and what they hold, read back from their record logs."""

import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace

from fl_lightning.experiments.run_directory.metrics_log import read_metrics

_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path):
    """The records of a ``.wandb`` file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = Path(path).read_bytes()
    assert data[:4] == b":W&B"
    position, pending = 7, b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        if len(data) - position < 7:
            return  # W&B is still writing
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if len(data) - position - 7 < length:
            return
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(pending)
            pending = b""
        else:
            assert kind in (_FIRST, _MIDDLE)


def read_run(folder):
    """A finished offline run: ``run``, ``config``, ``metrics``, ``history``, ``summary``, ``artifacts``, ``preempting``, ``exit_code``."""
    deadline = time.monotonic() + 10  # W&B's process may still be writing when finish() returns
    while (found := _read(folder)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _read(folder):
    found = SimpleNamespace(config={}, metrics={}, history=[], summary={}, artifacts=[], exit_code=None)
    found.preempting = False
    for record in (record for path in Path(folder).glob("*.wandb") for record in records(path)):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run = record.run
            found.config |= _items(record.run.config.update)
        elif kind == "config":
            found.config |= _items(record.config.update)
        elif kind == "metric":
            found.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "history":
            found.history.append(_items(record.history.item))
        elif kind == "summary":
            found.summary |= _items(record.summary.update)
        elif kind == "artifact":
            found.artifacts.append(record.artifact)
        elif kind == "preempting":
            found.preempting = True
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _items(items):
    """Values by name; nested names are joined by dots."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(attempt):
    """The folders of a run's offline parts."""
    return sorted(attempt.path.glob("wandb/offline-run-*"))


def run_id(folder):
    """The id of the run that a folder of W&B's holds."""
    return folder.name.rpartition("-")[2]


def metrics(history, attempt):
    """Rows of a history and of metrics.jsonl, both with the names that metrics.jsonl has."""
    written = read_metrics(attempt.metrics)
    return [
        {name: row.get(name) for name in known} for row, known in zip(history, written, strict=True)
    ], written
