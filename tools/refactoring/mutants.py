"""Mutants of the core: small changes, each of which the tests of its room should notice.

``draw FILE`` draws them from the code, ``run FILE --copy FOLDER`` says which are killed and by which test, and
``compare FILE --copy FOLDER`` makes those that were killed again in other code, wherever their line is now.
"""

import argparse
import ast
import compileall
import json
import os
import py_compile
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common

TESTS = {  # folder of the code: folder of its tests
    "fl_lightning/round": "round",
    "fl_lightning/cohort": "cohort",
    "fl_lightning/execution": "executors",
    "fl_lightning/methods": "methods",
    "fl_lightning/batch_norm": "batch_norm",
    "fl_lightning/aggregation": "aggregation",
    "fl_lightning/optimizers": "optimizers",
    "callbacks": "methods",
}
CPU_SECONDS = 60
WALL_SECONDS = 1800
HEAVY = (
    "lightning.pytorch.cli matplotlib.pyplot pydantic pytest scipy.stats sklearn.datasets torchvision wandb"
)
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}  # fmt: skip
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}  # fmt: skip
COMPUTED = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}  # fmt: skip
CHANGED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Judge = Callable[[dict[str, Any], Path], dict[str, Any]]


def functions(tree: ast.AST, place: str = "") -> Iterator[tuple[str, Function]]:
    """Yield all functions by qualified name; one inside of another belongs to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{place}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{place}{node.name}.")
        else:
            yield from functions(node, place)


def changes(function: Function) -> Iterator[tuple[str, ast.expr, ast.expr | None, str, str]]:
    """Yield kind, first and last node of what is replaced, the text sought between them, and the new text."""
    names: list[str] = []
    for node in computing(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign = COMPARED[type(node.ops[0])]
            yield "comparison", node.left, node.comparators[0], sign, FLIPPED[sign]
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not is_text(node):
            sign = COMPUTED[type(node.op)]
            yield "arithmetic", node.left, node.right, sign, CHANGED[sign]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, None, ast.unparse(node), repr(value)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "not", node.test, None, "", "not ({})"
        elif isinstance(node, ast.Call) and (node.args or node.keywords) and not is_check(node.func):
            kept = ast.Call(node.func, node.args, node.keywords[:-1])
            if not node.keywords:
                kept = ast.Call(node.func, node.args[:-1], [])
            yield "argument", node, None, "", ast.unparse(kept)
        elif isinstance(node, ast.Return) and node.value is not None and names:
            others = [name for name in names if name != ast.unparse(node.value)]
            if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
                one, two, *rest = node.value.elts
                yield "return", node.value, None, "", ast.unparse(ast.Tuple([two, one, *rest]))
            elif others:
                yield "return", node.value, None, "", others[-1]
        names += [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
        names += [node.arg] if isinstance(node, ast.arg) and node.arg != "self" else []


def computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what computes in a function, in the order of its text: no annotations, decorators, errors and texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                yield child
                yield from computing(child)


def is_text(node: ast.BinOp) -> bool:
    """Whether an operator joins or fills texts, or repeats lists."""
    other = ast.JoinedStr | ast.List | ast.Tuple
    sides = (node.left, node.right)
    return any(
        isinstance(x, other) or (isinstance(x, ast.Constant) and isinstance(x.value, str)) for x in sides
    )


def is_check(called: ast.expr) -> bool:
    """Whether a call only checks or prints, or has no argument that can be left out."""
    name = ast.unparse(called)
    return name.split(".")[-1].startswith(("check", "require", "print", "warn")) or name in (
        "isinstance", "len", "super", "getattr", "hasattr", "type", "str", "repr",
    )  # fmt: skip


def mutants_of(file: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield every mutant of a file that changes one line."""
    lines = text.splitlines()
    for name, function in functions(ast.parse(text)):
        if name.split(".")[-1] in ("__repr__", "__str__", "extra_repr"):
            continue
        for kind, first, last, sought, new in changes(function):
            number, line = first.lineno, lines[first.lineno - 1].encode()
            begin, end = first.col_offset, (last or first).end_col_offset or 0
            if (last or first).end_lineno != number:
                continue
            if last:
                gap = line[first.end_col_offset : last.col_offset].decode()
                if gap.count(f" {sought} ") != 1:
                    continue
                begin, end = first.end_col_offset or 0, last.col_offset
                new = gap.replace(f" {sought} ", f" {new} ")
            else:
                new = new.format(line[begin:end].decode()) if kind == "not" else new
            mutated = (line[:begin] + new.encode() + line[end:]).decode()
            own = [x.strip() for x in lines[function.lineno - 1 : number]]
            texts = {"line": own[-1], "mutated": mutated.strip(), "occurrence": own.count(own[-1])}
            try:
                ast.parse("\n".join([*lines[: number - 1], mutated, *lines[number:]]))
            except SyntaxError:
                continue
            if texts["line"] != texts["mutated"]:
                yield {"file": file, "function": name, "kind": kind, **texts}


def draw(code: Path, count: int, seed: int) -> dict[str, Any]:
    """Draw mutants: at most one in a function, and as many of each kind."""
    every: list[dict[str, Any]] = []
    for folder in TESTS:
        for path in sorted((code / folder).glob("*.py")):
            every += mutants_of(str(path.relative_to(code)), path.read_text())
    random.Random(seed).shuffle(every)
    drawn: list[dict[str, Any]] = []
    kinds: Counter[str] = Counter()
    for mutant in every:
        function = mutant["file"], mutant["function"]
        if kinds[mutant["kind"]] * 6 < count and function not in {(x["file"], x["function"]) for x in drawn}:
            drawn.append(mutant)
            kinds[mutant["kind"]] += 1
    random.Random(seed).shuffle(drawn)
    print(f"{len(every)} mutants, {dict(kinds)} drawn of them")
    return {f"{number:02}": mutant for number, mutant in enumerate(drawn[:count], 1)}


def place_of(mutant: dict[str, Any], copy: Path) -> tuple[Path, int] | None:
    """Where a mutant's line is: in its function, in a function of that name elsewhere, else where it is alone."""
    every = [path for folder in ("fl_lightning", "callbacks") for path in (copy / folder).rglob("*.py")]
    anywhere = []
    for path in sorted({path.resolve() for path in every}, key=lambda path: path != copy / mutant["file"]):
        lines = path.read_text().splitlines()
        if mutant["line"] not in (line.strip() for line in lines):
            continue
        for name, function in functions(ast.parse(path.read_text())):
            inside = range(function.lineno - 1, function.end_lineno or 0)
            found = [number for number in inside if lines[number].strip() == mutant["line"]]
            if found and name == mutant["function"]:
                return path, found[min(mutant["occurrence"], len(found)) - 1]
            anywhere += [(path, number) for number in found]
    return anywhere[0] if len(anywhere) == 1 else None


@contextmanager
def made(mutant: dict[str, Any], path: Path, number: int) -> Iterator[None]:
    """Have a mutant in a line of a file."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    lines[number] = lines[number].replace(mutant["line"], mutant["mutated"])
    try:
        path.write_text("".join(lines))
        yield
    finally:
        path.write_text(text)


def tests_of(mutant: dict[str, Any], copy: Path) -> list[str]:
    """Return the test files of a mutant's room; those that name its class, function or file the most come first."""
    folder = copy / "tests" / TESTS[str(Path(mutant["file"]).parent)]
    file = Path(mutant["file"]).stem
    words = {file, mutant["function"].partition(".")[0], mutant["function"].rpartition(".")[2]}

    def order(path: Path) -> tuple[bool, int, str]:
        text = path.read_text()
        return path.stem != f"test_{file}", -sum(text.count(word) for word in words), path.name

    return [str(path) for path in sorted(folder.glob("test_*.py"), key=order)]


class FirstFailure:
    """A plugin of pytest that keeps the first test that fails."""

    node = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a failed test."""
        self.node = self.node or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def test(copy: Path, arguments: list[str]) -> dict[str, Any]:
    """Run tests of a checkout in a fork: whether one fails, which, and the CPU seconds."""

    def run() -> int:
        import pytest

        plugin = FirstFailure()
        options = f"-x -q -p no:cacheprovider --rootdir={copy} --basetemp={told.parent}/tests".split()
        status = int(pytest.main([*options, *arguments], plugins=[plugin]))
        told.write_text(plugin.node)
        return status

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))

    with TemporaryDirectory() as folder:
        told = Path(folder, "told")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = common.fork(run, copy, limit, WALL_SECONDS, Path(folder))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        node = told.read_text() if told.exists() else ""
    outcome = {0: "survived", 4: "no such test", 5: "no such test"}.get(ended.status, "killed")
    if ended.status < 0:
        outcome = "out of time"
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"outcome": outcome, "test": node, "cpu_seconds": round(seconds)}


def judge(mutant: dict[str, Any], copy: Path) -> dict[str, Any]:
    """Whether the tests of a mutant's room kill it, by a test that passes without the mutant."""
    place = place_of(mutant, copy)
    assert place, mutant
    with made(mutant, *place):
        found = test(copy, ["-m", "not slow", *tests_of(mutant, copy)])
    if found["outcome"] == "killed":
        found["passes_without"] = test(copy, [found["test"]])["outcome"] == "survived"
    return found


def judge_again(mutant: dict[str, Any], copy: Path) -> dict[str, Any]:
    """Whether a mutant is killed in other code: by the test that killed it before, else by its room."""
    place = place_of(mutant, copy)
    if place is None:
        return {"outcome": "line gone"}
    with made(mutant, *place):
        found = test(copy, [mutant["test"]])
        if found["outcome"] != "killed":
            found = {**test(copy, ["-m", "not slow", *tests_of(mutant, copy)]), "before": found["outcome"]}
    return {**found, "place": f"{place[0].relative_to(copy.resolve())}:{place[1] + 1}"}


def each(mutants: dict[str, Any], judge: Judge, copy: Path, file: Path) -> dict[str, Any]:
    """Judge mutants that have no outcome in a file yet, and write the file after each of them."""
    done = json.loads(file.read_text())["values"] if file.exists() else {}
    for name, mutant in mutants.items():
        if "outcome" in done.get(name, {}):
            continue
        done[name] = {**mutant, **judge(mutant, copy)}
        common.write(file, common.machine(copy), done)
        print(name, done[name]["outcome"], done[name].get("test"), done[name].get("cpu_seconds"), flush=True)
    return done


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["draw", "run", "compare"])
    parser.add_argument("file", type=Path, help="the record of the mutants before")
    parser.add_argument("after", type=Path, nargs="?", help="where compare writes what it finds")
    parser.add_argument(
        "--code", type=Path, default=common.REPOSITORY, help="a checkout; this one if left out"
    )
    parser.add_argument("--copy", type=Path, help="a checkout for the mutants alone; made if it is not there")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.command == "draw":
        common.write(given.file, common.machine(given.code), draw(given.code, given.count, given.seed))
        return
    mutants = json.loads(given.file.read_text())["values"]
    copy = checkout(given.code, given.copy.resolve())
    for name in HEAVY.split():
        import_module(name)
    if given.command == "run":
        each(mutants, judge, copy, given.file)
        return
    killed = {name: mutant for name, mutant in mutants.items() if mutant.pop("outcome", "") == "killed"}
    found = each(killed, judge_again, copy, given.after or Path("mutants_after.json"))
    print(dict(Counter(mutant["outcome"] for mutant in found.values())), "of those killed before")
    for name, mutant in found.items():
        if mutant["outcome"] != "killed":
            print(
                name,
                mutant["outcome"],
                mutant["file"],
                mutant["function"],
                mutant["line"],
                mutant["mutated"],
                sep="\n    ",
            )
    sys.exit(int(any(mutant["outcome"] != "killed" for mutant in found.values())))


def checkout(code: Path, copy: Path) -> Path:
    """Make a copy of a checkout's commit if there is none, and take fl_lightning from it."""

    def git(folder: Path, *words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    commit = git(code, "rev-parse", "HEAD")
    if not copy.exists():
        git(code, "worktree", "add", "--detach", str(copy), commit)
    if git(copy, "rev-parse", "HEAD") != commit or git(copy, "status", "--porcelain"):
        sys.exit(f"{copy} is not at {commit}, or has changes; remove it")
    common.use(copy)
    for folder in ("fl_lightning", "callbacks", "datamodules"):
        # by content, since a mutant's file may have the size and the second of another's
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / folder, quiet=1, invalidation_mode=mode)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return copy


if __name__ == "__main__":
    main()
