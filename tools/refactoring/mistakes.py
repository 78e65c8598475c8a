"""A hundred mistakes of a user: the exit status of each, its lines on stderr, and how long a YAML's structure takes."""

import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import common
import yaml

Words = str
Changes = dict[str, Any]
TINY = {
    "seed_everything": 0,
    "threads": 1,
    "trainer": {"max_epochs": 2, "check_val_every_n_epoch": 1, "accelerator": "cpu"},
    "model": {
        "model": {"class_path": "LeNet"},
        "client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.05}},
        "local_steps": 2,
    },
    "data": {
        "class_path": "Digits",
        "init_args": {
            "num_clients": 3,
            "batch_size": 10,
            "partition": {"class_path": "Shards", "init_args": {"class_fraction": 0.4}},
            "val_fraction": 0.2,
            "max_examples": 300,
        },
    },
}
STUDY = "title: x\naxes: {method: {BN: {}}}\nscales: {quick: {base: tiny.yaml}}\n"
MODULES = {
    "broken.py": "import not_installed\n",
    "nameless.py": "import lightning as L\nclass Good(L.Callback): ...\nclass Bad(Nothing): ...\n",
    "untyped.py": "import lightning as L\nclass Untyped(L.Callback):\n    def __init__(self, a): ...\n",
    "misspelt.py": "from fl_lightning import FederatedCallback\n"
    "class A(FederatedCallback):\n    def on_rond_start(self): ...\n",
    "late.py": "from fl_lightning import FederatedCallback\nclass Raises(FederatedCallback):\n"
    "    def on_round_end(self, trainer, pl_module, cohort):\n        {}['x']\n",
    "schedules.py": "def nothing(round, rounds): return 1.0 if round == 1 else float('nan')\n",
}


def class_of(setting: str, name: str, **settings: Any) -> Changes:
    """Return a change of the YAML that sets a class."""
    return {setting: {"class_path": name, "init_args": settings}}


def callback(name: str, **settings: Any) -> Changes:
    """Return a change of the YAML that gives one callback."""
    return {"trainer.callbacks": [{"class_path": name, "init_args": settings}]}


ARGUMENTS = """
--model.local_step 3
--model.lr 0.1
--trainer.max_epoch 3
--seed 3
--colour 3
extra
--model.local_steps three
--model.local_steps 1.5
--model.local_steps 0
--model.local_epochs 1
--model.participation 0
--model.participation 1.5
--model.participation 9
--model.weighting size
--model.bn_momentum 2
--model.budget_epochs -1
--model.on_divergence ignore
--model.executor Vector
--model.executor.compile true
--model.aggregator Medium
--model.aggregator TrimmedMean --model.aggregator.fraction 0.7
--model.aggregator Krum --model.aggregator.f 2
--model.client_optimizer SDG
--model.client_optimizer.lr abc
--model.client_optimizer.lr -0.1
--model.client_optimizer.lr 1e30
--model.client_optimizer Adafactor
--model.client_optimizer LBFGS
--model.server_optimizer FedAdam --model.server_optimizer.tau 0
--model.server_optimizer SGD --model.server_optimizer.lr -1
--model.client_lr_schedule abc
--model.client_lr_schedule MultiStep
--model.client_lr_schedule schedules.nothing
--model.loss CrossEntropyLos
--model.model LeNett
--model.model nowhere.Net
--model.model Digits
--model.model.width 2
--model.model.norm layer
--model.model.norm gn --trainer.callbacks FixBN
--model.model.num_classes 5
--model.initial_weights nowhere.pt
--data Digit
--data.num_clients 5000
--data.batch_size 500
--data.val_fraction 1.5
--data.partition.alpha 1
--data.partition Dirichlet --data.partition.alpha 0
--data.partition Shards --data.partition.class_fraction 0.1
--data.partition FromFile --data.partition.path nowhere.json
--data CIFAR10
--data ImageFolder --data.data_dir nowhere --data.image_size 8
--trainer.callbacks FixBNN
--trainer.callbacks FixBN --trainer.callbacks.freeze all
--trainer.callbacks FixBN --trainer.callbacks+ FBN
--trainer.callbacks FedProx --trainer.callbacks.mu -1
--trainer.callbacks SlidingWindowFixBN
--trainer.callbacks MaintainedMomentum
--trainer.callbacks Byzantine --trainer.callbacks.attack SignFlip --trainer.callbacks.clients 3
--trainer.callbacks EarlyStopping --trainer.callbacks.monitor val/losss
--trainer.callbacks broken.Mine
--trainer.callbacks nameless.Good
--trainer.callbacks untyped.Untyped
--trainer.callbacks misspelt.A
--trainer.callbacks late.Raises
--trainer.max_steps 5
--trainer.devices 999
--trainer.accelerator gpuu
--trainer.check_val_every_n_epoch 0
--trainer.limit_train_batches 0.5
--checkpoint.every_n_rounds 0
--checkpoint.monitor test/loss
--wandb.mode sometimes
--threads 0
--seed_everything -1
--name ../x
--run_root tiny.yaml
--ckpt_path last
--ckpt_path none.ckpt
""".strip().splitlines()
CHANGES: list[Changes] = [
    {"trainer.max_epochs": None},
    {"model.local_steps": None},
    {"model.client_optimizer": None},
    {"model.seed": 5},
    {"model.metrics": {"f2": {"class_path": "torchmetrics.F2Score"}}},
    {"model.parameter_groups": {"bn": {"lr": 0.1}}},
    {"model.failures": {"class_path": "ClientFailures", "init_args": {"dropout": {"a": 0.5}}}},
    class_of("model.client_lr_schedule", "MultiStep", milestones=[1.5], gamma=0.1),
    class_of("model.client_optimizer", "SGD", lr=0.1, momentun=0.9),
    {"data.init_args.num_clients": "x"},
    {"trainer.callbacks": [{"class_path": 3}]},
    callback("FedProx", muu=1),
]
FILES = {  # of a YAML's structure: the content of the file
    "no such file": None,
    "a bracket that stays open": "a: [1\nb: }\n",
    "a tab": "model:\n\tlocal_steps: 1\n",
    "empty": "",
    "a list": "- a\n- b\n",
    "a key twice": "model:\n  local_steps: 3\n  local_steps: 4\n",
    "a section misspelt": "modell: {local_steps: 1}\n",
    "a setting misspelt": "model:\n  local_steps: 1\ntrainer: {max_epoch: 3}\n",
    "a section that is a number": "trainer: 3\n",
    "Latin-1": "name: Z\udcfcrich\n",
}
COMMANDS = [
    "fitt", "test --config tiny.yaml", "study", "study nowhere.yaml", "study good.yaml --scale large", "study bad.yaml",
    "study good.yaml --jobs 0", "report nowhere", "partition --threads 1", "list colours", "verify --callback FixBNN",
    "verify --callback FedProx --callback.mu x", "upload nowhere",
]  # fmt: skip
CHECKPOINTS = {  # what is done to the checkpoint of a run of two rounds: the arguments that go on with it
    "truncated": "--ckpt_path last --trainer.max_epochs 3",
    "empty": "--ckpt_path last --trainer.max_epochs 3",
    "of another model": "--ckpt_path KEPT --trainer.max_epochs 3 --model.model.norm gn",
    "of another optimizer": "--ckpt_path KEPT --trainer.max_epochs 3 --model.client_optimizer Adafactor",
    "of a longer run": "--ckpt_path KEPT --trainer.max_epochs 1",
    "that is a folder": "--ckpt_path runs --trainer.max_epochs 3",
}


def write_config(folder: Path, changes: Changes) -> None:
    """Write the tiny configuration with settings changed by dotted name; None removes a setting."""
    config: dict[str, Any] = deepcopy(TINY)
    for name, value in changes.items():
        *parents, key = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[key] = value
        if value is None:
            del node[key]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def mistakes() -> Iterator[tuple[str, list[str], Changes]]:
    """Yield the name of each mistake, the command's words, and the changes of the YAML."""
    fit = ["fit", "--config", "tiny.yaml"]
    for text in ARGUMENTS:
        yield text, [*fit, *text.split()], {}
    for changes in CHANGES:
        yield f"YAML {changes}", fit, changes
    for text in COMMANDS:
        yield text, text.split(), {}
    for name, text in CHECKPOINTS.items():
        yield f"checkpoint {name}", [*fit, *text.split()], {}
    for name in FILES:
        yield f"file: {name}", ["fit", "--config", "odd.yaml"], {}


def prepare(name: str, folder: Path, trained: Path) -> None:
    """Write the files that a mistake needs."""
    kind, _, what = name.partition(" ")
    content = FILES.get(what) if kind == "file:" else None
    if content is not None:
        (folder / "odd.yaml").write_bytes(content.encode(errors="surrogateescape"))
    if kind == "checkpoint":
        shutil.copytree(trained / "runs", folder / "runs")
        (path,) = folder.glob("runs/**/last.ckpt")
        shutil.copy(path, folder / "KEPT")
        if what in ("truncated", "empty"):
            path.write_bytes(path.read_bytes()[: 5000 if what == "truncated" else 0])
    for file, text in MODULES.items():
        (folder / file).write_text(text)
    (folder / "good.yaml").write_text(STUDY)
    (folder / "bad.yaml").write_text(STUDY.replace("axes", "axe"))


def told(text: str, folder: Path) -> list[str]:
    """Lines on stderr without what differs from run to run."""
    text = re.sub(r"[0-9a-f]{8}-s0", "HASH-s0", text.replace(str(folder), "FOLDER"))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def look(only: str, folder: Path) -> dict[str, Any]:
    """Make the mistakes whose name contains a text."""
    trained = folder / "trained"
    trained.mkdir()
    write_config(trained, {})
    assert common.command(["fit", "--config", "tiny.yaml"], trained).status == 0
    found = {}
    for number, (name, words, changes) in enumerate(mistakes()):
        if only not in name:
            continue
        own = folder / str(number)
        own.mkdir()
        write_config(own, changes)
        prepare(name, own, trained)
        of_its_own = name.startswith("file:")
        ended = (common.command_of_its_own if of_its_own else common.command)(words, own)
        found[name] = {"status": ended.status, "lines": told(ended.err, own)}
        if of_its_own:
            found[name]["seconds"] = ended.seconds
        if (own / "runs").exists() and not name.startswith("checkpoint"):
            found[name]["left"] = sorted({path.name for path in (own / "runs").rglob("*") if path.is_file()})
    return found


def show(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs side by side, and how many end in one line with a status that is not 0."""
    differing = 0
    nothing = {"status": "-", "lines": []}
    for name in {**before, **after}:
        first, second = (
            {k: v for k, v in x.get(name, nothing).items() if k != "seconds"} for x in (before, after)
        )
        if first != second:
            differing += 1
            print(
                f"{name}\n  before {first['status']}  "
                + "\n            ".join(first["lines"] + first.get("left", []))
            )
            print(
                f"  after  {second['status']}  "
                + "\n            ".join(second["lines"] + second.get("left", []))
            )
    for when, found in (("before", before), ("after", after)):
        one = [name for name, x in found.items() if len(x["lines"]) == 1 and x["status"] not in (0, "-")]
        seconds = sorted(x["seconds"] for x in found.values() if "seconds" in x)
        middle = (
            f"; YAML's structure: median {seconds[len(seconds) // 2]} s, max {seconds[-1]} s"
            if seconds
            else ""
        )
        print(f"{when}: {len(one)} of {len(found)} end in one line and a status that is not 0{middle}")
        print("  others:", *(name for name in found if name not in one), sep="\n    ")
    print(f"{differing} differ")
    return differing


if __name__ == "__main__":
    common.main(__doc__, look, show)
