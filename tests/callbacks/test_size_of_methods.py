"""A method stays as short as its paragraph in the paper: lines of code, without blank lines, comments and docstrings."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {
    "FedBN": (["callbacks/fedbn.py"], 15),
    "SiloBN": (["callbacks/silobn.py"], 15),
    "FixBN": (["callbacks/fixbn.py"], 25),
    "FBN": (["callbacks/fbn.py"], 61),
    "MTFL": (["callbacks/mtfl.py"], 5),
    "FedPer": (["callbacks/fedper.py"], 10),
    "FedRep": (["callbacks/fedrep.py"], 25),
    "FedBABU": (["callbacks/fedbabu.py"], 25),
    "FedNova": (["callbacks/fednova.py"], 34),
    "FedDyn": (["callbacks/feddyn.py"], 40),
    "AdaBN": (["callbacks/adabn.py"], 20),
    "FedTAN": (["callbacks/fedtan.py", "fl_lightning/batch_norm/joint.py"], 150),
}
"""The files that exist for a method alone; ``joint`` steps are few lines in the module and the executors beside that."""
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def lines_of_code(source):
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(code - docstrings)


@pytest.mark.parametrize("method", LIMITS)
def test_a_method_is_short(method):
    files, limit = LIMITS[method]
    assert 0 < sum(lines_of_code((ROOT / file).read_text()) for file in files) <= limit


def test_only_code_is_counted():
    assert (
        lines_of_code(
            '"""Words."""\n\n# more\nx = (\n    1,\n)  # and\n\n\ndef f():\n    """Words."""\n    return 1\n'
        )
        == 5
    )
