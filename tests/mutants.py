"""Mutants: small changes of the code, each of which some test should notice.

``draw FILE`` draws mutants of the commit that is checked out. ``run FILE --copy FOLDER`` makes each of them in a copy of
the checkout, says which test fails first, and goes on where it was stopped; ``--slow`` gives those that the quick rows
do not notice to the slow ones. ``compare FILE AFTER --copy FOLDER`` makes the same mutants in the commit that is
checked out now, wherever their line is, and ends with 1 if one is no longer noticed. ``table FILE`` prints a table.
"""

import argparse
import ast
import contextlib
import json
import os
import random
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


class Room(NamedTuple):
    """Files and folders of code, and of the tests that should notice its mutants."""

    code: list[str]
    tests: list[str]


RANKS = ["fl_lightning/ranks.py", "fl_lightning/launched.py", *(f"fl_lightning/execution/{name}.py" for name in ("fork", "strategy"))]  # fmt: skip
ROOMS = {  # a file belongs to the first room that has it
    "ranks": Room(RANKS, ["tests/ranks", "tests/executors", "tests/run_directory/test_ranks.py"]),
    "execution": Room(["fl_lightning/execution"], ["tests/executors"]),
    "cohort": Room(["fl_lightning/cohort"], ["tests/cohort"]),
    "round": Room(["fl_lightning/round"], ["tests/round"]),
    "callbacks": Room(
        ["callbacks", "fl_lightning/methods"], ["tests/methods", "tests/mechanisms", "tests/diagnostics"]
    ),
    "aggregation": Room(["fl_lightning/aggregation"], ["tests/aggregation"]),
    "datamodules": Room(["datamodules"], ["tests/datasets"]),
    "cli": Room(
        ["fl_lightning/cli", "fl_lightning/__main__.py"],
        ["tests/cli", "tests/verification", "tests/studies/test_study_command.py", "tests/run_directory/test_trained_model.py"],
    ),
    "client_data": Room(["fl_lightning/client_data"], ["tests/client_data"]),
}  # fmt: skip
KINDS = 6
# seconds on the wall of a test, and of all of them
LIMITS = {"quick": (150, 1800), "slow": (600, 7200)}
STOPPED = (
    30  # seconds between two looks at a test run, after which this process must have been stopped meanwhile
)
HEAVY = "lightning.pytorch.cli matplotlib.pyplot pydantic pytest scipy.stats sklearn.datasets torchvision"
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}  # fmt: skip
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}  # fmt: skip
COMPUTED = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}  # fmt: skip
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
    for name, room in ROOMS.items():
        paths = [path for place in room.code for path in python_files(code / place) if path not in seen]
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


def tests_of(mutant, copy):
    """Test files for a mutant: named as its file, those of its room that name it the most, others that import it."""
    file = Path(mutant["file"])
    module = ".".join(file.with_suffix("").parts)
    words = {file.stem, mutant["function"].partition(".")[0], mutant["function"].rpartition(".")[2]}
    room = {
        path for place in ROOMS[mutant["room"]].tests for path in python_files(copy / place) if "test_" in path.name
    }  # fmt: skip

    def order(path):
        text, name = path.read_text(), path.stem.removeprefix("test_")
        alike = name in file.stem or file.stem in name
        return path not in room, not alike, -sum(text.count(word) for word in words), path

    others = {path for path in (copy / "tests").rglob("test_*.py") if module in path.read_text()}
    return [str(path.relative_to(copy)) for path in sorted(room | others, key=order)]


class FirstFailure:
    """A plugin of pytest that keeps the first test that fails."""

    node = ""

    def pytest_runtest_logreport(self, report):
        self.node = self.node or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def ended(copy, arguments, rows="slow"):
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
                limit, _ = LIMITS[rows]
                options = (
                    f"--timeout={limit}",
                    "-x",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "--rootdir=.",
                    f"--basetemp={folder}/tests",
                )
                sys.path.insert(0, str(copy))  # as python -m pytest does
                status = int(import_module("pytest").main([*options, *arguments], plugins=[plugin]))
                Path(folder, "node").write_text(plugin.node)
            finally:
                os._exit(status)
        last = time.monotonic()
        end, stopped = last + LIMITS[rows][1], False
        while not (reaped := os.waitpid(child, os.WNOHANG))[0]:
            if last > end or stopped:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
            last, before_sleep = time.monotonic(), last
            stopped = stopped or last - before_sleep > STOPPED
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started
        if stopped:  # the limits of tests have gone on
            return ended(copy, arguments, rows)
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
        sound: Tests that pass without mutants.
        broken: Tests that fail without mutants, which say nothing.
    """

    def __init__(self, copy, broken):
        self.copy, self.broken, self.sound = copy, broken, set()

    def rows(self, mutant, path, number, rows):
        """Give a mutant to the quick or the slow rows of its tests."""
        while True:
            marked = "not slow" if rows == "quick" else "slow"
            leave_out = [f"--deselect={test}" for test in self.broken]
            with made(*mutant, path, number):
                arguments = ["-m", marked, *leave_out, *tests_of(mutant[1], self.copy)]
                status, node, seconds = ended(self.copy, arguments, rows)
            found = {"test": node, "rows": rows, "cpu_seconds": seconds}
            if status in (0, 5):  # all pass, or there are none
                return {**found, "outcome": "survived"}
            if status == -signal.SIGKILL:
                return {**found, "outcome": "out of time"}
            if node in ("", *self.sound) or ended(self.copy, [node])[0] == 0:
                self.sound.add(node)
                return {**found, "outcome": "killed"}
            self.broken.append(node)
            print("fails without any mutant:", node, flush=True)

    def judge(self, name, mutant, slow):
        """Whether the tests kill a mutant: the quick rows, then the slow ones if they are asked."""
        if (place := place_of(mutant, self.copy)) is None:
            return {"outcome": "line gone"}
        found = mutant
        if mutant.get("rows") != "quick":
            found = self.rows((name, mutant), *place, "quick")
        if slow and found["outcome"] == "survived":
            found = self.rows((name, mutant), *place, "slow")
        return {**found, "place": f"{place[0].relative_to(self.copy)}:{place[1] + 1}"}

    def judge_again(self, name, mutant, before):
        """Whether a mutant is killed in other code: by the test that killed it before, else by quick and slow rows."""
        place = place_of(mutant, self.copy)
        if place and before.get("test"):
            with made(name, mutant, *place):
                status, _, seconds = ended(self.copy, [before["test"]])
            if status not in (0, 4, 5):  # 4: there is no such test
                return {**before, "outcome": "killed", "cpu_seconds": seconds}
        return self.judge(name, mutant, slow=True)


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
    parser.add_argument("command", choices=["draw", "run", "compare", "table"])
    parser.add_argument("file", type=Path, help="mutants and, later, what became of them")
    parser.add_argument("after", type=Path, nargs="?", help="where compare writes what it finds")
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="a checkout; default: this"
    )
    parser.add_argument(
        "--copy", type=Path, help="a folder for the copy that is changed; made if it is not there"
    )
    parser.add_argument("--slow", action="store_true", help="slow rows for those that survive the quick ones")
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
        parser.error("run and compare need --copy, and compare two files")
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
    for name in given.preload.split():
        import_module(name)
    judge = Judge(copy, record["broken"])
    for name, mutant in record["mutants"].items():
        again = given.slow and mutant.get("outcome") == "survived" and mutant["rows"] == "quick"
        if "outcome" in mutant and not again:
            continue
        if given.command == "run":
            mutant |= judge.judge(name, mutant, given.slow)
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
