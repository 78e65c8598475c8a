"""Mutants: small changes of the code, each of which some test should notice.

``draw FILE`` draws mutants of the commit that is checked out. ``reach FILE --copy FOLDER`` runs the tests once in a copy
of the checkout, and writes beside FILE which of them run a mutant's line. ``run FILE --copy FOLDER`` makes each mutant in
the copy, gives it to these tests, the shortest first, says which fails, and goes on where it was stopped.
``compare FILE AFTER --copy FOLDER`` makes the same mutants in the commit that is checked out now, wherever their line is,
and ends with 1 if one is no longer noticed. ``table FILE`` prints a table. ``reach`` needs the package ``coverage``.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

RANKS = ["fl_lightning/ranks.py", "fl_lightning/launched.py", *(f"fl_lightning/execution/{name}.py" for name in ("fork", "strategy"))]  # fmt: skip
ROOMS = {  # a file belongs to the first room that has it
    "ranks": RANKS,
    "execution": ["fl_lightning/execution"],
    "cohort": ["fl_lightning/cohort"],
    "round": ["fl_lightning/round"],
    "callbacks": ["callbacks", "fl_lightning/methods"],
    "aggregation": ["fl_lightning/aggregation"],
    "datamodules": ["datamodules"],
    "cli": ["fl_lightning/cli", "fl_lightning/__main__.py"],
    "client_data": ["fl_lightning/client_data"],
}
KINDS = 6
LIMIT = 150  # seconds on the wall of one test
ENOUGH = 100  # CPU seconds, when nothing was mutated, of the quick tests that one mutant is given to, and of the slow ones
STOPPED = (
    30  # seconds between two looks at a test run, after which this process must have been stopped meanwhile
)
HEAVY = "lightning.pytorch.cli matplotlib.pyplot pydantic pytest scipy.stats sklearn.datasets torchvision"
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}  # fmt: skip
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}  # fmt: skip
COMPUTED = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}  # fmt: skip
REACHED = """\
[run]
data_file = {folder}/data
parallel = true
include =
    {copy}/fl_lightning/*
    {copy}/callbacks/*
    {copy}/datamodules/*
patch = _exit, fork, execv
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, already-imported, dynamic-conflict, module-not-measured
"""
CHANGED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*"}


def functions(tree, place=""):
    """All functions by qualified name; one inside of another belongs to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{place}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{place}{node.name}.")
        else:
            yield from functions(node, place)


def changes(function):
    """Kind, first and last node of what is replaced, the text sought between them, and the new text."""
    names = []
    for node in computing(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign = COMPARED[type(node.ops[0])]
            yield "comparison", node.left, node.comparators[0], sign, FLIPPED[sign]
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not is_text(node):
            sign = COMPUTED[type(node.op)]
            yield "arithmetic", node.left, node.right, sign, CHANGED[sign]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, None, "", repr(value)
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


def computing(node):
    """What computes in a function, in the order of its text: no annotations, decorators, errors and texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                yield child
                yield from computing(child)


def is_text(node):
    """Whether an operator joins or fills texts, or repeats lists."""
    kinds = ast.JoinedStr | ast.List | ast.Tuple
    return any(
        isinstance(side, kinds) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def is_check(called):
    """Whether a call only checks or prints, or has no argument that can be left out."""
    name = ast.unparse(called)
    return name.split(".")[-1].startswith(("check", "require", "print", "warn")) or name in (
        "isinstance", "len", "super", "getattr", "hasattr", "type", "str", "repr",
    )  # fmt: skip


def mutants_of(file, text):
    """Every mutant of a file that changes one line."""
    lines = text.splitlines()
    for name, function in functions(ast.parse(text)):
        if name.split(".")[-1] in ("__repr__", "__str__", "extra_repr"):
            continue
        for kind, first, last, sought, new in changes(function):
            number, line = first.lineno, lines[first.lineno - 1].encode()
            begin, end = first.col_offset, (last or first).end_col_offset
            if (last or first).end_lineno != number:
                continue
            if last:
                begin, end = first.end_col_offset, last.col_offset
                gap = line[begin:end].decode()
                if gap.count(f" {sought} ") != 1:
                    continue
                new = gap.replace(f" {sought} ", f" {new} ")
            elif kind == "not":
                new = new.format(line[begin:end].decode())
            mutated = (line[:begin] + new.encode() + line[end:]).decode()
            own = [line.strip() for line in lines[function.lineno - 1 : number]]
            texts = {"number": number, "line": own[-1], "mutated": mutated.strip()}
            if texts["line"] != texts["mutated"]:
                yield {
                    "file": file,
                    "function": name,
                    "kind": kind,
                    **texts,
                    "occurrence": own.count(own[-1]),
                }


def is_code(code, mutant):
    """Whether Python can read a mutant."""
    lines = (code / mutant["file"]).read_text().splitlines()
    number = mutant["number"] - 1
    lines[number] = lines[number].replace(mutant["line"], mutant["mutated"])
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse("\n".join(lines)))
    return False


def draw(code, count, seed):
    """Draw mutants: at most one in a function, as many in each room, and in a room as many of each kind."""
    drawn, seen = [], set()
    for name, places in ROOMS.items():
        paths = [path for place in places for path in python_files(code / place) if path not in seen]
        seen.update(paths)
        every = [
            mutant for path in paths for mutant in mutants_of(str(path.relative_to(code)), path.read_text())
        ]
        random.Random(seed).shuffle(every)
        kinds, changed, here = Counter(), set(), -(-count // len(ROOMS))
        for most in (-(-here // KINDS), here):  # as many of each kind, then what there is
            for mutant in every:
                function = mutant["file"], mutant["function"]
                wanted = kinds.total() < here and kinds[mutant["kind"]] < most and function not in changed
                if wanted and is_code(code, mutant):
                    drawn.append({"room": name, **mutant})
                    kinds[mutant["kind"]] += 1
                    changed.add(function)
        print(f"{name}: {len(every)} mutants, {dict(kinds)} drawn of them")
    random.Random(seed).shuffle(drawn)
    return {f"{number:03}": mutant for number, mutant in enumerate(drawn, 1)}


def python_files(place):
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def place_of(mutant, copy):
    """Where a mutant's line is: in its function, in a function of that name elsewhere, else where it is alone."""
    every = {
        path.resolve()
        for folder in ("fl_lightning", "callbacks", "datamodules")
        for path in (copy / folder).rglob("*.py")
    }
    anywhere = []
    for path in sorted(every, key=lambda path: (path != copy / mutant["file"], path)):
        lines = [line.strip() for line in path.read_text().splitlines()]
        if mutant["line"] not in lines:
            continue
        for name, function in functions(ast.parse(path.read_text())):
            inside = range(function.lineno - 1, function.end_lineno)
            found = [number for number in inside if lines[number] == mutant["line"]]
            if found and name == mutant["function"]:
                return path, found[min(mutant["occurrence"], len(found)) - 1]
            anywhere += [(path, number) for number in found]
    return anywhere[0] if len(anywhere) == 1 else None


@contextlib.contextmanager
def made(name, mutant, path, number):
    """Have a mutant in a line of a file."""
    text, before = path.read_text(), path.stat()
    lines = text.splitlines(keepends=True)
    lines[number] = lines[number].replace(mutant["line"], mutant["mutated"])
    try:
        path.write_text("".join(lines))
        later = before.st_mtime + 1000 + int(name)
        os.utime(
            path, (later, later)
        )  # no other mutant's, by which Python would take its bytecode for this one's
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Reached(NamedTuple):
    """Tests by the lines that they run.

    Attributes:
        tests: Name, CPU seconds and rows (``quick``, ``slow``) of each test that passes, quick and short ones first.
        of_mutant: Positions in ``tests`` by the name of a mutant.
    """

    tests: list[tuple[str, float, str]]
    of_mutant: dict[str, list[int]]

    def rows(self, name, mutant, rows, there):
        """Tests for a mutant, of those that are there: what runs its line, then what else the files of these have.

        Of what runs the line, tests in the folder of its package come first, and of each test one row before the others.
        Tests that have come since count as slow.
        """
        room, rows_of = Path(mutant["file"]).parent.name, Counter()

        def order(position):
            test = self.tests[position][0].partition("[")[0]
            rows_of[test] += 1
            return room not in Path(test).parts, rows_of[test]

        line = sorted(self.of_mutant[name], key=order)
        files = {file_of(self.tests[position][0]) for position in line}
        whole = [n for n, (test, *_) in enumerate(self.tests) if file_of(test) in files]
        taken, found = 0.0, []
        for test, seconds, is_of in (self.tests[position] for position in dict.fromkeys([*line, *whole])):
            if is_of == rows and test in there and taken < ENOUGH:
                taken += seconds
                found.append(test)
        known = {test for test, *_ in self.tests}
        found += sorted(test for test in there - known if file_of(test) in files and rows == "slow")
        return found


def file_of(test):
    return test.partition("::")[0]


def reach(copy, mutants, folders, jobs):
    """Run tests once, and find which of them run the line of each mutant."""
    import coverage

    with TemporaryDirectory() as folder:
        settings, told = Path(folder, "settings"), Path(folder, "told.json")
        settings.write_text(REACHED.format(folder=folder, copy=copy))
        environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "REACHED_LINES": str(told)}
        environment.pop("PYTEST_CURRENT_TEST", None)  # of a test of this script
        words = [
            "-m",
            "pytest",
            "-p",
            "reached_lines",
            "-n",
            jobs,
            "-q",
            "--cpu",
            "--nightly",
            "all",
            *folders,
        ]
        subprocess.run([sys.executable, *words], cwd=copy, env=environment, check=False)
        tests = sorted(json.loads(told.read_text()), key=lambda test: (test[2], test[1]))
        whole = coverage.Coverage(config_file=str(settings))
        whole.combine()
        data, position = whole.get_data(), {test: number for number, (test, _, _) in enumerate(tests)}
        of_mutant = {}
        for name, mutant in mutants.items():
            path = str(copy / mutant["file"])
            contexts = data.contexts_by_lineno(path)
            lines = [mutant["number"], first_line(Path(path).read_text(), mutant["number"])]
            running = next((contexts[line] for line in lines if contexts.get(line)), [])
            running = {re.sub(r" \((setup|call|teardown)\)$", "", test) for test in running}
            of_mutant[name] = sorted(position[test] for test in running if test in position)
        return Reached(tests, of_mutant)


def first_line(text, number):
    """The first line of the statement that has a line."""
    statements = [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return max(line for line in statements if line <= number)


class FirstFailure:
    """A plugin of pytest that keeps the first test that fails."""

    node = ""

    def pytest_runtest_logreport(self, report):
        self.node = self.node or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def ended(copy, tests):
    """Run tests of the copy in a fork: the exit status, the first that fails, and CPU seconds of all processes."""
    with TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            status = 3
            try:
                os.setsid()
                os.chdir(copy)
                for number in (1, 2):
                    os.dup2(os.open(f"{folder}/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                plugin = FirstFailure()
                options = f"-x -q -p no:cacheprovider --nightly all --rootdir=. --timeout={LIMIT}".split()
                sys.path.insert(0, str(copy))  # as python -m pytest does
                temporary = f"--basetemp={folder}/tests"
                status = int(import_module("pytest").main([*options, temporary, *tests], plugins=[plugin]))
                Path(folder, "node").write_text(plugin.node)
            finally:
                os._exit(status)
        last = time.monotonic()
        end, stopped = last + 6 * ENOUGH, False
        while not (reaped := os.waitpid(child, os.WNOHANG))[0]:
            if last > end or stopped:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
            last, before_sleep = time.monotonic(), last
            stopped = stopped or last - before_sleep > STOPPED
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started
        if stopped:  # the limits of tests have gone on
            return ended(copy, tests)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        node = Path(folder, "node")
        return (
            os.waitstatus_to_exitcode(reaped[1]),
            node.read_text() if node.exists() else "",
            round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        )


class Judge:
    """Judges mutants in a copy of a checkout.

    Attributes:
        there: Tests of the copy that run in CI.
        sound: Tests that pass without mutants.
        broken: Tests that fail without mutants, which say nothing.
    """

    def __init__(self, copy, reached, broken):
        self.copy, self.reached, self.broken, self.sound = copy, reached, broken, set()
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header"]
        printed = subprocess.run(words, cwd=copy, capture_output=True, text=True, check=False).stdout
        self.there = {line for line in printed.splitlines() if "::" in line}

    def rows(self, name, mutant, place, rows):
        """Give a mutant to its quick or to its slow rows."""
        seconds = 0.0
        while True:
            tests = self.reached.rows(name, mutant, rows, self.there - set(self.broken))
            found = {"test": "", "rows": rows, "cpu_seconds": seconds, "outcome": "survived"}
            if not tests:
                return found
            with made(name, mutant, *place):
                status, node, took = ended(self.copy, tests)
            seconds = round(seconds + took, 1)
            found |= {"test": node, "cpu_seconds": seconds}
            if status == 0:
                return found
            if status == -signal.SIGKILL:
                return {**found, "outcome": "out of time"}
            if node in ("", *self.sound) or ended(self.copy, [node])[0] == 0:
                self.sound.add(node)
                return {**found, "outcome": "killed"}
            self.broken.append(node)
            print("fails without any mutant:", node, flush=True)

    def judge(self, name, mutant):
        """Whether the tests kill a mutant: the quick rows, then the slow ones."""
        if (place := place_of(mutant, self.copy)) is None:
            return {"outcome": "line gone"}
        found = self.rows(name, mutant, place, "quick")
        if found["outcome"] == "survived":
            found = self.rows(name, mutant, place, "slow")
        return {**found, "place": f"{place[0].relative_to(self.copy)}:{place[1] + 1}"}

    def judge_again(self, name, mutant, before):
        """Whether a mutant is killed in other code: by the test that killed it before, else by others."""
        place = place_of(mutant, self.copy)
        if place and before.get("test") in self.there:
            with made(name, mutant, *place):
                status, _, seconds = ended(self.copy, [before["test"]])
            if status:
                return {**before, "outcome": "killed", "cpu_seconds": seconds}
        return self.judge(name, mutant)


def git(folder, *words):
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def enter(code, copy, commit):
    """Go on in the Python of a copy of a commit, where fl_lightning is the copy's, also in what tests start."""
    home = copy / ".venv"
    if Path(sys.prefix) == home:
        os.environ["OMP_NUM_THREADS"] = "1"
        return
    if not copy.exists():
        git(code, "clone", "--quiet", "--shared", "--no-checkout", str(code), str(copy))
    elif not (home / "of_mutants").exists():
        sys.exit(f"{copy} is not a copy that this script has made")
    git(copy, "checkout", "--quiet", "--force", "--detach", commit)  # without a mutant that was left there
    if not (home / "of_mutants").exists():
        venv.create(home, symlinks=True)
        (site,) = home.glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
        # an editable installation: a path alone would not do, since tests clear PYTHONPATH and leave the folder
        build = f"import setuptools.build_meta as backend; backend.build_editable({str(home)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
        (wheel,) = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
        (site / "zz_coverage.pth").write_text(  # after the libraries: also in what tests start
            "import os; 'COVERAGE_PROCESS_START' in os.environ and __import__('coverage').process_startup()"
        )
        (home / "of_mutants").touch()
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    python = str(home / "bin" / "python")
    shown = [python, "-c", "import fl_lightning as package; print(package.__file__)"]
    taken = subprocess.run(shown, cwd=home, capture_output=True, text=True, check=True).stdout
    assert copy in Path(taken).parents, f"{taken} is not of {copy}"
    sys.stdout.flush()
    os.execv(python, [python, "-P", __file__, *sys.argv[1:]])


def write(path, record):
    """Write all or nothing: the run may be killed."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)


def table(mutants):
    """A table in Markdown by room: the mutants judged, and what became of them."""
    columns = {
        "killed by quick rows": lambda mutant: mutant["outcome"] == "killed" and mutant["rows"] == "quick",
        "by slow rows alone": lambda mutant: mutant["outcome"] == "killed" and mutant["rows"] == "slow",
        "out of time": lambda mutant: mutant["outcome"] == "out of time",
        "survived": lambda mutant: mutant["outcome"] == "survived",
        "line gone": lambda mutant: mutant["outcome"] == "line gone",
    }
    lines = [["room", "mutants", *columns], ["---"] + ["---:"] * (1 + len(columns))]
    judged = [mutant for mutant in mutants if "outcome" in mutant]
    for room in [*ROOMS, "all"]:
        here = [mutant for mutant in judged if room in (mutant["room"], "all")]
        lines.append([room, len(here), *(sum(map(is_it, here)) for is_it in columns.values())])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["draw", "reach", "run", "compare", "table"])
    parser.add_argument("file", type=Path, help="mutants and, later, what became of them")
    parser.add_argument("after", type=Path, nargs="?", help="where compare writes what it finds")
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="a checkout; default: this"
    )
    parser.add_argument(
        "--copy", type=Path, help="a folder for the copy that is changed; made if it is not there"
    )
    parser.add_argument("--tests", nargs="*", default=["tests"], help="folders and files that reach runs")
    parser.add_argument("--jobs", default="auto", help="workers of reach")
    parser.add_argument("--preload", default=HEAVY, help="libraries that are imported once for all mutants")
    parser.add_argument("--count", type=int, default=315)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    commit = git(given.code, "rev-parse", "HEAD")
    if given.command == "draw":
        drawn = draw(given.code.resolve(), given.count, given.seed)
        write(given.file, {"commit": commit, "seed": given.seed, "broken": [], "mutants": drawn})
        return
    before = json.loads(given.file.read_text())
    if given.command == "table":
        print(table(before["mutants"].values()))
        return
    if given.copy is None or (given.command == "compare" and given.after is None):
        parser.error("reach, run and compare need --copy, and compare two files")
    path, record = given.file, before
    if given.command == "compare":
        told = "outcome", "test", "rows", "cpu_seconds", "place"
        bare = {
            name: {key: value for key, value in mutant.items() if key not in told}
            for name, mutant in before["mutants"].items()
        }
        path, record = given.after, {"commit": commit, "seed": before["seed"], "broken": [], "mutants": bare}
        if path.exists():
            record = json.loads(path.read_text())
    copy = given.copy.resolve()
    enter(given.code.resolve(), copy, record["commit"])
    reached = given.file.with_suffix(".reached.json")
    if given.command == "reach":
        reached.write_text(json.dumps(reach(copy, record["mutants"], given.tests, given.jobs)._asdict()))
        return
    for name in given.preload.split():
        import_module(name)
    judge = Judge(copy, Reached(**json.loads(reached.read_text())), record["broken"])
    for name, mutant in record["mutants"].items():
        if "outcome" in mutant:
            continue
        if given.command == "run":
            mutant |= judge.judge(name, mutant)
        else:
            mutant |= judge.judge_again(name, mutant, before["mutants"][name])
        write(path, record)
        print(
            name, *(mutant.get(key) for key in ("outcome", "rows", "cpu_seconds", "file", "test")), flush=True
        )
    if given.command == "compare":
        lost = [
            mutant for name, mutant in record["mutants"].items()
            if before["mutants"][name].get("outcome") == "killed" != mutant["outcome"]
        ]  # fmt: skip
        for mutant in lost:
            print("no longer killed:", json.dumps(mutant, ensure_ascii=False, indent=1))
        sys.exit(bool(lost))


if __name__ == "__main__":
    main()
