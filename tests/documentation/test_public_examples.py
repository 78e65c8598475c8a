"""Each public class and each method has an example that runs."""

import doctest
import importlib
import inspect

import pytest

import fl_lightning
from fl_lightning import callbacks

PUBLIC = {
    **{name: getattr(fl_lightning, name) for name in fl_lightning.__all__},
    **{
        name: value
        for name, value in vars(callbacks).items()
        if inspect.isclass(value) and not value.__module__.startswith("fl_lightning.callbacks.observers")
    },
}


@pytest.mark.parametrize("name", sorted(name for name, value in PUBLIC.items() if inspect.isclass(value)))
def test_the_example_of_a_public_class_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = PUBLIC[name]
    module = importlib.import_module(value.__module__)
    tests = doctest.DocTestFinder(recurse=False).find(value, name, globs={**vars(module), name: value})
    assert any(test.examples for test in tests), f"{name} has no example"
    for test in tests:
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert not report, "".join(report)
