"""Results of studies, made from rows of their tables."""

from fl_lightning.experiments.studies.study_frame import CELL_COLUMNS, VALUE_COLUMNS, StudyFrame, labelled


def study_frame(rows, axes, metrics, **more):
    """Results of a study.

    A row has ``labels``, ``values`` of each seed by metric, perhaps ``runs`` with columns of the cells,
    and columns of all of its cells.
    """
    cells, values = [], []
    for row in rows:
        columns = {name: x for name, x in row.items() if name not in ("values", "runs")}
        seeds = {seed: {} for of_metric in row["values"].values() for seed in of_metric}
        runs = row.get("runs") or [{"seed": seed, "phase": "done", "why": ""} for seed in seeds]
        place = "-".join(row["labels"].values())
        cells += [{"directory": f"{place}-{run['seed']}", **columns, **run} for run in runs]
        values += [
            {"labels": row["labels"], "seed": seed, "metric": metric, "value": value}
            for metric, of_metric in row["values"].items()
            for seed, value in of_metric.items()
        ]
    frames = {"cells": labelled(cells, axes, CELL_COLUMNS), "values": labelled(values, axes, VALUE_COLUMNS)}
    return StudyFrame(
        **{"name": "t", "title": "A title", "known": axes, **more}, axes=axes, metrics=metrics, **frames
    )
