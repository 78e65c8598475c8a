"""``verify``: what it finds in the shipped methods, in broken ones and in one's own, and what a user sees of it."""

import importlib
import sys

import pytest
import torch

from fl_lightning import FederatedCallback, callbacks
from fl_lightning.__main__ import main
from fl_lightning.errors import ConfigurationError
from fl_lightning.verification import battery, certify
from fl_lightning.verification.differences import NotApplicable, Violated
from fl_lightning.verification.equalities import EQUALITIES
from fl_lightning.verification.memory import entries
from fl_lightning.verification.own_model import own_model
from fl_lightning.verification.rules import RULES
from fl_lightning.verification.trials import Trials
from tests.support.broken_callbacks import FAILS, RIGHT, ranks
from tests.support.readme_code import METHOD_BLOCKS, hide


def verify(*arguments):
    """Run the command in this process; returns its exit status."""
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    return stop.value.code


def write_methods(text, name="methods"):
    with open(f"{name}.py", "w") as file:
        file.write(text)


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """The working directory is where one's own modules are found, as with ``python -m``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "methods", raising=False)
    yield
    hide()


@pytest.mark.slow
@pytest.mark.parametrize("broken", FAILS, ids=lambda cls: cls.__name__)
def test_a_broken_callback_fails_on_its_lines(broken, tmp_path):
    trials = Trials(broken, tmp_path)
    for line in FAILS[broken]:
        # what fails is what is wrong with it: no other error
        with pytest.raises(Violated, match=r"\w"):
            battery._equals(line, trials) if line in EQUALITIES else RULES[line](trials)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        # if such a rule fails, the others are not tried: these certificates stay in CI
        pytest.param(cls, marks=() if lines <= {*battery.NEEDED} else pytest.mark.nightly, id=cls.__name__)
        for cls, lines in FAILS.items()
    ],
)
def test_a_broken_callback_fails_on_no_other_line(broken):
    certificate = certify(broken, references=False)
    assert {finding.line for finding in certificate.failed} == FAILS[broken]
    assert not [finding for finding in certificate.failed if finding.detail.startswith("a run raises ")]


@pytest.mark.parametrize("right", RIGHT, ids=lambda cls: cls.__name__)
def test_what_forgets_other_ranks_passes_in_its_right_form(right, tmp_path):
    RULES["ranks"](Trials(right, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("right", RIGHT, ids=lambda cls: cls.__name__)
def test_a_right_form_passes_every_rule(right):
    assert certify(right, references=False).failed == []


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (ranks.CountsItsRows, r"two ranks must equal one: \['server'\]\['0\.weight'\] differs after round 1; local steps may change only "),
        (ranks.SumOnSelf, r"a run must not stop on two ranks: round 1: rank 1 has another SumOnSelf\.mean than rank 0; .* In local steps, hooks may change rows only"),
        (ranks.NamesTheProcess, r"a run must not stop on two ranks: round 1: rank 1 has another NamesTheProcess\.process than rank 0; .*no process"),
        (ranks.RowsOfTheWholeCohort, r"a run must not stop on two ranks: The size .* RowsOfTheWholeCohort\.on_after_local_backward, round 1.*; local"),
    ],
)  # fmt: skip
def test_what_forgets_other_ranks_is_told_the_place_the_round_and_the_rule(broken, told, tmp_path):
    with pytest.raises(Violated, match=f"^{told}"):
        RULES["ranks"](Trials(broken, tmp_path))


def test_where_processes_cannot_be_copied_ranks_do_not_apply(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(NotApplicable, match=r"^processes cannot be copied on darwin$"):
        RULES["ranks"](Trials(FederatedCallback, tmp_path))


def test_a_mean_over_the_clients_in_a_local_step_stops_an_ordinary_run():
    class Averages(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            cohort.mean(cohort.losses)

    with pytest.raises(
        ConfigurationError, match=r"^Averages cannot be .*in on_local_step_end.*cohort\.mean: in a local step"
    ):
        certify(Averages)


def test_every_line_rejects_some_broken_callback():
    assert {line for lines in FAILS.values() for line in lines} >= {*RULES, *EQUALITIES}


@pytest.mark.slow
def test_the_shipped_methods_with_equalities_pass_and_say_what_was_measured():
    certificate = certify(callbacks.FBN)
    assert not certificate.failed
    equalities = {finding.line: finding for finding in certificate.equalities}
    assert equalities.keys() == {"own_twin", "union_statistics"}
    assert all(one.status == "PASSED" and one.detail.startswith("equal") for one in equalities.values())
    assert certificate.equals["centralised_bn"].startswith("differs by")


@pytest.mark.slow
def test_properties_that_say_nothing_about_a_method_are_listed_as_such():
    rules = {finding.line: finding for finding in certify(callbacks.FixBN, references=False).rules}
    assert rules["frozen state"].status == "PASSED"
    for line, reason in {
        "local state": "no state is local",
        "absent clients": "the method has no memory by client",
    }.items():
        assert (rules[line].status, rules[line].detail) == ("does not apply", reason)


def test_every_shipped_equality_is_one_that_is_known():
    promised = {equality for name in callbacks.__all__ for equality in getattr(callbacks, name).equalities}
    assert promised == EQUALITIES.keys()


def test_an_unknown_equality_is_refused():
    class Boasts(callbacks.FixBN):
        equalities = ("own_twins",)

    with pytest.raises(
        ConfigurationError, match=r"Boasts\.equalities: 'own_twins' must be one of own_twin, "
    ):
        certify(Boasts)


def test_a_method_of_ones_own_passes_from_a_file_in_the_working_directory(own_code, capsys):
    write_methods(METHOD_BLOCKS["FedProx"])
    assert verify("--callback", "methods.FedProx", "--callback.mu", "1e-1") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("FedProx(mu=0.1)\n")
    assert " 0 failed" in printed
    assert [line.partition("  ")[0] for line in printed.splitlines()[1 : len(RULES) + 1]] == [*RULES]
    assert "Measured" not in printed
    assert verify("--callback", "methods.FedProx", "--verbose") == 0
    assert "Measured: equalities that the method does not promise\nown_twin" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failure_is_printed_with_its_place_and_makes_the_status_1(own_code, capsys):
    write_methods(
        "from fl_lightning.callbacks import MaintainedMomentum\n"
        "class Mine(MaintainedMomentum):\n"
        "    def state_dict(self):\n"
        "        return {}\n"
    )
    assert verify("--callback", "methods.Mine") == 1
    failing = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failing) == 1
    assert failing[0].startswith("resume ")
    assert "a run resumed after round 1 must equal the uninterrupted one: model" in failing[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--callback", "FixBNN"], "callback: there is no class 'FixBNN'; did you mean FixBN"),
        (["--callback", "methods.Fedprox"], "class 'methods.Fedprox' cannot be imported: module 'methods' has no attribute 'Fedprox'"),
        (["--callback", "nowhere.Mine"], "class 'nowhere.Mine' cannot be imported: No module named 'nowhere'"),
        (["--callback", "methods.number"], "methods.number is no FederatedCallback"),
        (["--callback", "SlidingWindowFixBN", "--callback.window", "3"], "SlidingWindowFixBN: the following arguments are required: threshold"),
        (["--callback", "FixBN", "--callback.freeze_rounds", "3"], "FixBN: there is no setting 'freeze_rounds' among freeze_round, "),
        (["--callback", "FixBN", "--callback.freeze_round", "soon"], "FixBN.freeze_round: soon is not valid; it takes int, float"),
        (["--callback", "FixBN", "--callback.init_args.freeze_round", "-1"], "FixBN.freeze_round: -1"),
        (["--callback", "FBN", "--callback.wire", "rum"], "FBN.wire: rum is not valid; it takes ['run', 'batch']"),
        (["--all", "--callback", "FBN"], "verify: give one of --callback and --all"),
        ([], "verify: give one of --callback and --all"),
        (["--callback", "methods.Raises"], "Raises cannot be verified, an ordinary run raises ZeroDivisionError in on_round_end, methods.py line 6: "),
        (["--callback", "methods.Refuses"], "Refuses cannot be verified, an ordinary run raises ConfigurationError in configure_batch_norm, methods.py line 9: "),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line_and_makes_the_status_2(arguments, told, own_code, capsys):
    write_methods(
        "from fl_lightning import FederatedCallback\n"
        "number = 1\n"
        "class FedProx(FederatedCallback): pass\n"
        "class Raises(FederatedCallback):\n"
        "    def on_round_end(self, trainer, pl_module, cohort):\n"
        "        1 / 0\n"
        "class Refuses(FederatedCallback):\n"
        "    def configure_batch_norm(self, pl_module):\n"
        "        raise __import__('fl_lightning').ConfigurationError('no such layer')\n"
    )
    assert verify(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("INFO")]
    assert len(lines) == 1
    assert told in lines[0]


MODELS = """
import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
class Net(nn.Sequential):
    def __init__(self, classes: int = 4):
        super().__init__(
            nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(5, classes)
        )
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    def training_step(self, batch, index):
        return cross_entropy(self(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))
    def forward(self, inputs):
        return self.net(inputs)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
class Odd(Net):
    example_input_array = torch.zeros(1, 2, 8)
class Regression(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
"""


def test_rules_run_on_a_model_of_ones_own_which_is_described(own_code, capsys):
    write_methods(MODELS)
    assert verify("--callback", "FixBN", "--model", "methods.Net", "--model.classes", "5") == 0
    printed = capsys.readouterr().out
    told = "Net  BN layers: 1, shape of an input: [3, 8]; equalities are checked on the model of verify"
    assert printed.startswith(f"{told}\n\nFixBN()")
    rules = {line[:20].strip(): line for line in printed.splitlines()}
    assert "constant bit for bit in 2 rounds" in rules["frozen state"]
    assert "PASSED" in rules["client numbers"]  # its dropout would differ
    assert "PASSED" in rules["own_twin_when_frozen"]
    for arguments, told in (
        (
            ["methods.Regression"],
            "model: Regression gives no class scores [batch, classes >= 2] for inputs [[4]]; ",
        ),
        (["methods.Odd"], "model: Odd gives no class scores [batch, classes >= 2] for inputs [[2, 8]]; "),
        (["methods.Nett"], "module 'methods' has no attribute 'Nett'"),
    ):
        assert verify("--callback", "FixBN", "--model", *arguments) == 2
        assert told in capsys.readouterr().err


def test_rules_train_a_lightning_module_and_find_faults_in_it(own_code, tmp_path, capsys):
    write_methods(MODELS)
    module = importlib.import_module("methods")
    settings = own_model(module.Lit())
    assert capsys.readouterr().out.startswith("Lit  BN layers: 2, shape of an input: [7]; ")
    right, broken = (Trials(kind, tmp_path / kind.__name__, settings) for kind in (callbacks.FixBN, Thaws))
    for name in ("trains", "server state", "frozen state", "model comes back", "executors"):
        RULES[name](right)
    memory = {"net.1.weight": torch.ones(3)}
    assert entries(memory)[1] == {}  # a tensor of the model, not of client 1
    with pytest.raises(
        Violated, match=r"frozen state must not change: net\.1\.running_mean of the server did"
    ):
        RULES["frozen state"](broken)


class Thaws(callbacks.FixBN):
    """Changes what it has frozen."""

    def on_round_end(self, trainer, pl_module, cohort):
        pl_module.model.net[1].running_mean += 0.5


class ByLayers(FederatedCallback):
    """Freezes the first BN layer in round 2, and the others in round 3."""

    def policy(self, round_number, total_rounds):
        return {part: "frozen" for part, first in (("1", 2), ("4", 3), ("6", 3)) if round_number >= first}


def test_layers_that_freeze_one_by_one_are_frozen_for_the_equality_too(tmp_path):
    trials = Trials(ByLayers, tmp_path)
    assert RULES["frozen state"](trials) == "constant bit for bit in 3 rounds"
    assert EQUALITIES["own_twin_when_frozen"](trials)[0] < 1e-10
    with pytest.raises(
        NotApplicable, match="in no round of this run are the statistics of all layers frozen"
    ):
        EQUALITIES["own_twin_when_frozen"](Trials(callbacks.FedBN, tmp_path / "other"))


@pytest.mark.slow
def test_all_are_the_shipped_methods_with_their_examples(own_code, monkeypatch, capsys):
    class Unfit(callbacks.FedBN):
        def on_round_end(self, trainer, pl_module, cohort):
            raise ValueError("out of order")

    monkeypatch.setattr(callbacks, "Unfit", Unfit, raising=False)
    monkeypatch.setattr(
        callbacks, "__all__", ["FBN", "Unfit"]
    )  # the contract tests have certificates of the others
    assert verify("--all") == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:4]] == ["FBN()", "FBN(wire=batch,", "Unfit({})"]
    assert [" 0 failed" in line for line in printed[1:4]] == [True, True, False]
    assert printed[-1].startswith("runs  FAILED  Unfit cannot be verified, an ordinary run raises ValueError")


class Remembers(FederatedCallback):
    """Keeps numbers of its own at the server, which look like clients' and are not."""

    def __init__(self):
        self.memory = {}

    def state_dict(self):
        return {"memory": self.memory}

    def load_state_dict(self, state):
        self.memory = state["memory"]


class ByLayer(Remembers):
    def on_round_end(self, trainer, pl_module, cohort):
        names = [name for name, kind in cohort.buffer_kinds.items() if kind == "mean"]
        self.memory = {index: cohort.server_buffers[name].mean() for index, name in enumerate(names)}


class ByName(Remembers):
    def on_round_end(self, trainer, pl_module, cohort):
        self.memory = {f"mean of layer {index}": cohort.losses.max() for index in (0, 2, 3)}


class ByRound(Remembers):
    def on_round_end(self, trainer, pl_module, cohort):
        self.memory[cohort.round - 1] = float(cohort.mean(cohort.losses))


class Ring(Remembers):
    """As many losses as the federation has clients."""

    def on_round_end(self, trainer, pl_module, cohort):
        before = self.memory.get("losses", torch.zeros(5, dtype=torch.float64))
        self.memory = {"losses": torch.cat([before[1:], cohort.mean(cohort.losses).double().view(1)])}


@pytest.mark.slow
@pytest.mark.parametrize("method", [ByLayer, ByName, ByRound, Ring])
def test_numbers_that_are_not_clients_are_not_taken_for_theirs(method):
    assert certify(method, references=False).failed == []


class NoisyHead(callbacks.FedPer):
    """FedPer with noise in the gradients of each local step."""

    equalities = ()

    def __init__(self):
        super().__init__(head="8")

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for block, gradients in cohort.grads.blocks.items():
            generators = cohort.generators(f"noise {block}")
            draws = [torch.randn(gradients.shape[1], generator=g, dtype=gradients.dtype) for g in generators]
            if draws:
                gradients += 0.01 * torch.stack(draws)


class LayerDropout(FederatedCallback):
    """Each client trains a random nine tenths of the tensors of a round; the others keep the server's state."""

    def on_round_start(self, trainer, pl_module, cohort):
        draws = [torch.rand(len(cohort.params), generator=g) for g in cohort.generators("layers")]
        cohort.extra["trains"] = torch.stack(draws) < 0.9

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for place, gradients in enumerate(cohort.grads.values()):
            gradients *= cohort.extra["trains"][:, place].view(-1, *[1] * (gradients.dim() - 1))

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for place, (name, rows) in enumerate(cohort.params.items()):
            left_out = ~cohort.extra["trains"][:, place]
            rows[left_out] = cohort.server[name].to(rows.dtype)


@pytest.mark.slow
def test_masks_drawn_once_a_round_are_no_noise():
    assert certify(LayerDropout, references=False).failed == []


@pytest.mark.slow
def test_a_part_of_the_model_may_get_noise():
    certificate = certify(NoisyHead, references=False)
    assert certificate.failed == []
    rules = {finding.line: finding for finding in certificate.rules}
    assert rules["fresh noise"].status == "PASSED"
    assert rules["learning rate 0"].status == "PASSED"  # noise in gradients moves nothing there


def test_an_error_of_a_rules_run_stands_once_with_the_rules_anchor():
    class DividesByTheRate(FederatedCallback):
        def on_after_aggregate(self, trainer, pl_module, cohort):
            1 / cohort.optimizer.param_groups[0]["lr"]

    (failed,) = certify(DividesByTheRate, references=False).failed
    assert failed.line == "learning rate 0"
    assert failed.detail.startswith(
        "a run raises ZeroDivisionError in on_after_aggregate, test_verify.py line"
    )
    assert failed.detail.endswith("(docs/verify-rules.md#learning-rate-0)")


@pytest.mark.slow
def test_an_error_is_a_finding_of_the_equality_before_other_equalities():
    class FailsAtOneStep(FederatedCallback):
        equalities = ("centralised_bn",)

        def on_before_aggregate(self, trainer, pl_module, cohort):
            if {*cohort.local_steps} == {1}:
                raise ValueError("one step")

    assert "centralised_bn" in [finding.line for finding in certify(FailsAtOneStep).failed]
