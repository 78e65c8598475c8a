"""What methods keep of clients: the same in memory and in files, and what a checkpoint has of it."""

import json
import os
import shutil
import zlib
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.callbacks import SCAFFOLD, FedBN, MaintainedMomentum, SlidingWindowFixBN, StatisticsSources
from fl_lightning.cohort import client_memory
from fl_lightning.cohort.client_memory import ClientMemory, contents, saved
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.ranks import Ranks, checksums
from tests.support.helpers import ClientStates, SaveRounds, blobs, distance, fit, small_cnn
from tests.support.in_ranks import in_ranks

METHODS = {
    "FedBN": FedBN,
    "SCAFFOLD": SCAFFOLD,
    "MaintainedMomentum": MaintainedMomentum,
    "SlidingWindowFixBN": partial(SlidingWindowFixBN, window=3, threshold=1e-9),
    "StatisticsSources": partial(StatisticsSources, ["silobn"]),
}
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture
def in_files(monkeypatch):
    monkeypatch.setattr(client_memory, "LIMIT", 0)


def train(method, root, rounds=6, ckpt_path=None, ranks=1):
    """The server's state after a run of 2 of 5 clients a round, its last evaluation, the method, and what clients start from."""
    module = FederatedModule(small_cnn(), client_optimizer=MOMENTUM, local_steps=2, participation=2)
    checkpoints = RoundCheckpoint(every_n_seconds=None, every_n_rounds=2, keep_rounds=[3])
    states, callback = ClientStates(), METHODS[method]()
    trainer = fit(
        module, blobs(5, (24, 40, 32)), rounds, [callback, states, checkpoints], ckpt_path,
        default_root_dir=root, plugins=[AtomicCheckpointIO()], limit_val_batches=1.0, check_val_every_n_epoch=6,
        devices=ranks, strategy="cohort",
    )  # fmt: skip
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items() if "time" not in name}
    return module.state_dict(), metrics, callback, states.start


def client_of(path):
    return int(path.stem.partition("-")[0])


def lists(folder):
    """The files that the last two versions of each checkpoint list, by the checkpoint's name."""
    noted = json.loads((folder / "checkpoints.json").read_text())
    return {Path(path).name: versions for path, versions in noted.items()}


def same(one, other):
    return checksums(contents(one.state_dict())) == checksums(contents(other.state_dict()))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_files_is_one_without_bit_for_bit_and_so_is_one_that_goes_on(
    method, tmp_path, monkeypatch
):
    state, metrics, callback, start = train(method, tmp_path / "memory")
    assert not (tmp_path / "memory" / "memory").exists()
    monkeypatch.setattr(client_memory, "LIMIT", 0)
    for name, source, ranks in (("whole", None, 2), ("parts", "whole/checkpoints/round_3.ckpt", 1)):
        again = train(method, tmp_path / name, ckpt_path=source and tmp_path / source, ranks=ranks)
        assert distance(again[0], state) == 0
        assert again[1] == metrics
        assert same(again[2], callback)
        assert all(distance(again[3][r][c], start[r][c]) == 0 for r in (4, 5, 6) for c in start[r])
        files = {client_of(path) for path in (tmp_path / name).rglob("*.pt")}
        assert files == {client for clients in start.values() for client in clients}


def test_a_checkpoint_that_was_written_without_files_goes_on_with_them(tmp_path, monkeypatch):
    state, *_ = train("FedBN", tmp_path / "one")
    monkeypatch.setattr(client_memory, "LIMIT", 0)
    again, *_ = train("FedBN", tmp_path / "two", ckpt_path=tmp_path / "one/checkpoints/round_3.ckpt")
    assert distance(again, state) == 0


@pytest.mark.usefixtures("in_files")
def test_each_checkpoint_has_the_files_that_belong_to_it_and_no_others_stay(tmp_path):
    train("SCAFFOLD", tmp_path, rounds=3)
    folder = tmp_path / "memory" / "SCAFFOLD.memory"
    before = {name: (folder / name).read_bytes() for name in lists(folder)["round_3.ckpt"][-1]}
    train("SCAFFOLD", tmp_path, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    files = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    assert {name: files[name] for name in before} == before
    listed = lists(folder)
    assert set(listed) == {"round_3.ckpt", "last.ckpt"}
    assert set(files) == {name for versions in listed.values() for names in versions for name in names}
    assert not set(listed["last.ckpt"][-1]) <= set(before)
    clients = [client_of(Path(name)) for name in listed["last.ckpt"][-1]]
    assert len(clients) == len(set(clients))


@pytest.mark.usefixtures("in_files")
def test_a_checkpoint_in_another_folder_keeps_its_files_as_long_as_it_exists(tmp_path):
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    module = FederatedModule(small_cnn(), client_optimizer=MOMENTUM, local_steps=2, participation=2)
    trainer = fit(
        module, blobs(5, (24, 40, 32)), 6, [FedBN(), SaveRounds(elsewhere), RoundCheckpoint(every_n_rounds=1)],
        default_root_dir=root, plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    state = torch.load(elsewhere / "1.ckpt", weights_only=True)["callbacks"]["FedBN"]["memory"]
    clients = [client for client in contents(ClientMemory(state)) if client >= 0]
    assert len(clients) == 2
    folder = root / "memory" / "FedBN.memory"
    before = {path.name for path in folder.glob("*.pt")}
    (elsewhere / "1.ckpt").unlink()
    trainer.save_checkpoint(root / "checkpoints" / "last.ckpt")
    now = {path.name for path in folder.glob("*.pt")}
    assert now < before
    assert {client_of(Path(name)) for name in before - now} <= set(clients)


@pytest.mark.usefixtures("in_files")
def test_a_run_that_was_moved_is_found_and_one_without_its_files_says_so(tmp_path):
    state, *_ = train("FedBN", tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    ckpt_path = tmp_path / "there/checkpoints/round_3.ckpt"
    assert distance(train("FedBN", tmp_path / "new", ckpt_path=ckpt_path)[0], state) == 0
    files = tmp_path / "there/memory/FedBN.memory"
    path = files / min(lists(files)["round_3.ckpt"][-1])
    client = client_of(path)
    whole = path.read_bytes()
    for damage in (whole[:-100], whole.replace(whole[700:702], b"\x07\x07", 1), b""):
        path.write_bytes(damage)
        with pytest.raises(
            ConfigurationError, match=rf"{path.stem}\.pt, the memory of client {client}, is missing"
        ):
            same(train("FedBN", tmp_path / "damaged", ckpt_path=ckpt_path)[2], FedBN())
    path.unlink()
    with pytest.raises(ConfigurationError, match=rf"the memory of client {client}, is missing"):
        train("FedBN", tmp_path / "damaged", ckpt_path=ckpt_path)
    shutil.rmtree(files)
    with pytest.raises(ConfigurationError, match=r"FedBN\.memory with the memory of \d clients is missing"):
        train("FedBN", tmp_path / "lost", ckpt_path=ckpt_path)


def test_a_method_of_another_run_is_refused(tmp_path):
    methods = [FedBN()]
    for refused in (False, True):
        module = FederatedModule(small_cnn(), client_optimizer=MOMENTUM, local_steps=1, participation=2)
        with (
            pytest.raises(ConfigurationError, match=r"FedBN holds the state of an earlier run")
            if refused
            else nullcontext()
        ):
            fit(module, blobs(5), 1, methods, default_root_dir=tmp_path)


@pytest.mark.usefixtures("in_files")
def test_a_checkpoint_of_lightnings_own_stays_whole(tmp_path):
    module = FederatedModule(small_cnn(), client_optimizer=MOMENTUM, local_steps=2, participation=2)
    fit(module, blobs(5), 3, [FedBN(), SaveRounds(tmp_path)], default_root_dir=tmp_path)
    again = FederatedModule(small_cnn(), client_optimizer=MOMENTUM, local_steps=2, participation=2)
    fit(again, blobs(5), 3, [FedBN()], tmp_path / "1.ckpt", default_root_dir=tmp_path / "two")
    assert distance(module.state_dict(), again.state_dict()) == 0


@pytest.mark.usefixtures("in_files")
def test_a_module_is_loaded_without_a_trainer_and_saved_after_an_evaluation(tmp_path):
    state, _, callback, _ = train("FedBN", tmp_path)
    ckpt_path = tmp_path / "checkpoints" / "last.ckpt"
    settings = {"client_optimizer": MOMENTUM, "local_steps": 2}
    module = FederatedModule.load_from_checkpoint(ckpt_path, model=small_cnn().double(), **settings)
    assert distance(module.state_dict(), state) == 0
    method = FedBN()
    trainer = L.Trainer(
        callbacks=[method], accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    evaluated = FederatedModule(small_cnn(), **settings)
    trainer.validate(evaluated, blobs(5), ckpt_path=ckpt_path, verbose=False)
    assert same(method, callback)
    trainer.save_checkpoint(tmp_path / "evaluated.ckpt")
    kept = torch.load(tmp_path / "evaluated.ckpt", weights_only=True)["callbacks"]["FedBN"]
    assert checksums(kept) == checksums(contents(callback.state_dict()))


def entry(client, round_number):
    return {"a": torch.full((3,), 10.0 * client + round_number), "b": torch.arange(2) + client}


def test_an_entry_is_replaced_as_a_whole_and_cannot_be_changed_in_place():
    memory = ClientMemory({2: entry(2, 0)})
    memory[3] = {}
    with pytest.raises(TypeError, match="does not support item assignment"):
        memory[3]["a"] = torch.ones(1)
    memory[3] = {**memory[3], "a": torch.ones(1)}
    assert memory[3]["a"] == 1
    del memory[2]
    assert list(memory) == [3]
    with pytest.raises(KeyError):
        memory[2]


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_a_client_once_and_read_each_others(size, tmp_path):
    work, meet = tmp_path / "run", tmp_path / "meet"
    meet.mkdir()

    def rounds(ranks):
        memory = ClientMemory()
        memory.open(work / "memory" / "method", ranks)
        for r in range(1, 4):
            for client in range(r, r + 4):
                memory[client] = {**memory.get(client, {}), **entry(client, r)}
            memory.flush()
            ranks.exchange(memory.checksum)
        written = [*(work / "memory/method").glob("*.pt")]
        sums = ranks.exchange(memory.checksum)
        record = saved({"memory": memory})["memory"]
        return len(written), sums, contents(ClientMemory(record))

    found = in_ranks(size, rounds, meet)
    alone = ClientMemory()
    alone.open(tmp_path / "alone" / "memory" / "method", Ranks())
    for r in range(1, 4):
        for client in range(r, r + 4):
            alone[client] = entry(client, r)
        alone.flush()
    for written, sums, read in found:
        assert written == 6
        assert sums == [alone.checksum()] * size
        assert checksums({"": read}) == checksums({"": contents(alone)})


@pytest.mark.usefixtures("in_files")
def test_a_round_reads_and_writes_its_own_clients_alone(tmp_path, monkeypatch):
    memory = ClientMemory({client: entry(client, 0) for client in range(100)})
    memory.open(tmp_path / "memory" / "method", Ranks())
    memory.flush()
    seen = []
    monkeypatch.setattr(os, "replace", lambda one, two, real=os.replace: (seen.append(two), real(one, two)))
    for round_number, clients in enumerate([(5, 7), (7, 9)], 1):
        for client in clients:
            memory[client] = entry(client, round_number)
        memory.flush()
        assert [client_of(path) for path in seen[-2:]] == list(clients)
        assert not memory._entries
    assert len(seen) == 4


@pytest.mark.usefixtures("in_files")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    memory = ClientMemory({0: entry(0, 0)})
    memory.open(tmp_path / "memory" / "method", Ranks())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigurationError, match=r"0-\d+\.pt cannot be written: No space left on device"):
        memory.flush()


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("content", [b"", b"half a file"])
def test_a_file_that_a_killed_run_left_incomplete_is_written_again(content, tmp_path):
    def written():
        memory = ClientMemory({0: entry(0, 0)})
        memory.open(tmp_path / "memory" / "method", Ranks())
        memory.flush()
        return memory

    written()
    (file,) = (tmp_path / "memory" / "method").glob("*.pt")
    whole = file.read_bytes()
    file.write_bytes(content)
    assert written()[0]["a"].equal(entry(0, 0)["a"])
    assert file.read_bytes() == whole
    before = file.stat().st_ino
    written()
    assert file.stat().st_ino == before  # a complete file is not written again


def test_setdefault_gives_the_stored_entry_which_cannot_be_changed():
    memory = ClientMemory()
    given = memory.setdefault(3, {"a": torch.zeros(1)})
    with pytest.raises(TypeError, match="does not support item assignment"):
        given["a"] = torch.ones(1)
    assert memory.setdefault(3, {})["a"] == 0
    assert memory.setdefault(4) == memory[4] == {}


def equal_in_32_bits():
    """Two numbers whose bytes have the same CRC-32."""
    known = {}
    for number in range(10**6):
        checksum = zlib.crc32(torch.tensor(number * 2_654_435_761 % 2**61).view(1).numpy().tobytes())
        if checksum in known:
            return [n * 2_654_435_761 % 2**61 for n in (known[checksum], number)]
        known[checksum] = number
    raise AssertionError("no pair")


def test_an_entry_replaces_another_with_an_equal_32_bit_checksum(in_files, tmp_path):
    memory = ClientMemory()
    memory.open(tmp_path, Ranks())
    for number in (pair := equal_in_32_bits()):
        memory[0] = {"number": torch.tensor([number])}
        memory.flush()
    assert memory[0]["number"].tolist() == pair[1:]


def test_a_copy_shares_with_a_copied_memory_what_its_original_shares():
    control = torch.zeros(2)
    memory, copied = deepcopy((ClientMemory({3: {"control": control}}), control))
    assert memory[3]["control"] is copied
    assert copied is not control
