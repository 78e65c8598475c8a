"""Results of studies, made from rows of their tables."""

from fl_lightning.experiments.studies.study_frame import CELL_COLUMNS, VALUE_COLUMNS, StudyFrame, labelled


def study_frame(rows, axes, metrics, **more):
    """Results of a study.

    A row has ``labels``, ``values`` of each seed by metric, perhaps ``runs`` with columns of the cells,
    and columns of all of its cells.
    """
    cells, values = [], []
    for row in rows:
        runs = [{"seed": seed, "phase": "done", "why": ""} for seed in next(iter(row["values"].values()), ())]
        for run in row.get("runs", runs):
            cells.append({"directory": "-".join([*row["labels"].values(), f"{run['seed']}"]), **row, **run})
        for metric, seeds in row["values"].items():
            entry = {"labels": row["labels"], "metric": metric}
            values += [{**entry, "seed": seed, "value": value} for seed, value in seeds.items()]
    frames = {"cells": labelled(cells, axes, CELL_COLUMNS), "values": labelled(values, axes, VALUE_COLUMNS)}
    settings = {"name": "t", "title": "A title", "known": axes, **more}
    return StudyFrame(axes=axes, metrics=metrics, **settings, **frames)
