"""Private names of other libraries that the package uses: each is listed, and is in the installed library."""

import ast
import re
from pathlib import Path
from pydoc import locate

import lightning as L
import pytest
import torch
import torchmetrics
from jsonargparse import ArgumentParser
from torch import nn

ROOT = Path(__file__).parents[2]
DOCUMENTED = {"_asdict", "_exit", "_replace"}  # of os and of named tuples
IMPORTED = {
    "atexit._run_exitfuncs": "experiments/studies/engines/local",
    "functools._lru_cache_wrapper": "clients/template",
    "jsonargparse._parameter_resolvers.UnknownDefault": "recorded",
    "jsonargparse._parameter_resolvers.get_signature_parameters": "recorded",
    "lightning.pytorch.core.optimizer._configure_optimizers": "clients/configured_optimizer",
    "lightning.pytorch.core.optimizer._configure_schedulers_automatic_opt": "clients/configured_optimizer",
    "lightning.pytorch.strategies.launchers.launcher._Launcher": "execution/fork",
    "torch._C._functorch.TransformType": "batch_norm/stacked",
    "torch._C._functorch.get_unwrapped": "clients/server_tensors",
    "torch._C._functorch.is_batchedtensor": "batch_norm/stacked client_data/batches clients/changes clients/copies clients/server_tensors round/first_steps",
    "torch._C._functorch.peek_interpreter_stack": "batch_norm/stacked clients/lightning_module",
    "torch._dynamo.config.patch": "execution/compiling",
    "torch._dynamo.exc.FailOnRecompileLimitHit": "execution/compiling",
    "torch._foreach_copy_": "cohort/round_cohort round/server_update",
    "torch._inductor.async_compile.AsyncCompile": "execution/compiling",
    "torch._inductor.config.patch": "execution/compiling",
    "torch._inductor.cpp_builder.get_cpp_compiler": "execution/compiling",
    "torch._subclasses.FakeTensorMode": "execution/compiling",
    "torch.distributed.distributed_c10d._get_default_store": "ranks",
    "torch.nn.modules.batchnorm._BatchNorm": "batch_norm/layers batch_norm/swapping experiments/run_directory/describe round/context verification/rules/local_steps",
    "torch.nn.modules.dropout._DropoutNd": "models/dropout",
    "torch.nn.modules.instancenorm._InstanceNorm": "experiments/run_directory/describe",
    "torch.nn.utils.parametrizations._SpectralNorm": "round/server_update",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "clients/template",
    "torch.utils._python_dispatch.TorchDispatchMode": "execution/compiling",
    "torch.utils._pytree.MappingKey": "verification/memory",
    "torch.utils._pytree.keystr": "ranks verification/differences verification/memory",
    "torch.utils._pytree.tree_flatten": "client_data/batches execution/graphs",
    "torch.utils._pytree.tree_flatten_with_path": "cohort/client_memory ranks verification/differences verification/memory",
    "torch.utils._pytree.tree_leaves": "client_data/batches client_data/federated client_data/loaders clients/changes clients/lightning_module clients/task execution/graphs execution/vectorized methods/own_data round/first_steps",
    "torch.utils._pytree.tree_map": "client_data/batches cohort/client_memory execution/per_sample execution/vectorized verification/memory",
    "torch.utils._pytree.tree_map_only": "clients/lightning_module clients/metrics round/against_copies",
    "torch.utils._pytree.tree_map_with_path": "verification/memory",
    "torch.utils._pytree.tree_unflatten": "client_data/batches execution/graphs",
}
OF_OBJECTS = {
    "torch.nn.Module": {
        "_backward_hooks": "round/first_steps verification/rules/local_steps",
        "_buffers": "clients/changes clients/lightning_module cohort/slots",
        "_call_impl": "execution/sequential",
        "_compiled_call_impl": "execution/compiling",
        "_forward_hooks": "execution/choice verification/rules/local_steps",
        "_forward_pre_hooks": "execution/choice round/server_update verification/rules/local_steps",
        "_modules": "clients/changes",
        "_non_persistent_buffers_set": "batch_norm/kinds clients/changes",
        "_parameters": "clients/changes cohort/slots",
    },
    "torch.nn.BatchNorm2d": {
        "_check_input_dim": "callbacks/fedtan",
    },
    "torch.nn.Conv2d": {
        "_conv_forward": "models/convolutions",
    },
    "torch.Tensor": {
        "_post_accumulate_grad_hooks": "round/first_steps",
        "_version": "cohort/skipped_steps execution/per_sample execution/vectorized",
    },
    "torch.UntypedStorage": {
        "_cdata": "batch_norm/stacked cohort/round_cohort",
    },
    "torch.optim.SGD": {
        "_optimizer_step_post_hooks": "clients/configured_optimizer",
        "_optimizer_step_pre_hooks": "clients/configured_optimizer",
    },
    "torchvision.transforms.v2.Transform": {
        "_call_kernel": "datamodules/streamed",
    },
    "torchmetrics.MeanMetric": {
        "_apply": "clients/metrics",
        "_computed": "clients/metric_states clients/metrics",
        "_reductions": "clients/metric_states clients/metrics",
        "_update_count": "clients/metric_states",
    },
    "Running of torchmetrics": {
        "_num_vals_seen": "clients/metric_states",
    },
    "lightning.LightningModule": {
        "_hparams_name": "clients/lightning_module",
        "_trainer": "round/module",
    },
    "lightning.Callback": {
        "_generate_state_key": "experiments/run_directory/checkpoints",
    },
    "lightning.Trainer": {
        "_accelerator_connector": "execution/strategy round/trainer_checks",
        "_checkpoint_connector": "experiments/run_directory/checkpoints",
    },
    "AcceleratorConnector": {
        "_layer_sync": "round/trainer_checks",
    },
    "lightning.pytorch.cli.LightningCLI": {
        "_parser": "cli/federated_cli",
    },
    "argparse.ArgumentParser": {
        "_actions": "cli/mistakes cli/parser cli/partition",
    },
    "Action of jsonargparse": {
        "_typehint": "cli/parser",
    },
    "submitit.core.core.InfoWatcher": {
        "_finished": "experiments/studies/engines/slurm",
        "_registered": "experiments/studies/engines/slurm",
    },
}


def is_private(name):
    return bool(re.match(r"_[a-zA-Z]", name)) and name not in DOCUMENTED


def defined(tree):
    """Names that a file gives to its functions, classes, attributes and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.keyword(arg=str()):  # as in vars(self).update(_seen=...)
                yield node.arg


def used(tree, own):
    """Dotted names of imported things, with a private part, and private attributes of objects."""
    roots, inner = {}, {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                roots |= {x.asname or x.name.partition(".")[0]: x.asname and x.name for x in node.names}
            case ast.ImportFrom() if not node.module.startswith("fl_lightning"):
                roots |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
    yield from (path for path in roots.values() if path and any(map(is_private, path.split("."))))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        first, *rest = ast.unparse(node).split(".")
        if first in roots and any(map(is_private, rest)) and "(" not in ast.unparse(node):
            if node not in inner:
                yield ".".join([roots[first] or first, *rest])
        elif is_private(node.attr) and node.attr not in own:
            yield node.attr


def names():
    """The files, without their ending, that use each private name."""
    files = [
        path for room in ("fl_lightning", "callbacks", "datamodules") for path in (ROOT / room).rglob("*.py")
    ]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = {name for tree in trees.values() for name in defined(tree)}
    places = {}
    for path, tree in trees.items():
        for name in used(tree, own):
            places.setdefault(name, set()).add(path.relative_to(ROOT).with_suffix("").as_posix())
    return {
        name: " ".join(sorted(x.removeprefix("fl_lightning/") for x in at)) for name, at in places.items()
    }


@pytest.mark.slow
def test_each_private_name_is_listed_with_its_files():
    assert names() == IMPORTED | {name: files for each in OF_OBJECTS.values() for name, files in each.items()}


def test_the_listed_names_are_in_the_installed_libraries():
    pytest.importorskip("submitit", reason="submitit is not installed")
    module = L.LightningModule()
    module.save_hyperparameters({"a": 1})
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    made = {
        "torch.Tensor": torch.ones(1),
        "torch.optim.SGD": torch.optim.SGD([nn.Parameter(torch.ones(1))]),
        "lightning.LightningModule": module,
        "lightning.Trainer": trainer,
        "AcceleratorConnector": trainer._accelerator_connector,
        "Running of torchmetrics": torchmetrics.wrappers.Running(torchmetrics.MeanMetric()),
        "Action of jsonargparse": ArgumentParser().add_argument("--a", type=list[int]),
    }
    for path in (
        "torch.nn.Module",
        "torchmetrics.MeanMetric",
        "argparse.ArgumentParser",
        "submitit.core.core.InfoWatcher",
    ):
        made[path] = locate(path)()
    missing = [path for path in IMPORTED if locate(path) is None]
    missing += [
        f"{at}.{x}"
        for at, each in OF_OBJECTS.items()
        for x in each
        if not hasattr(made.get(at, locate(at)), x)
    ]
    assert missing == []
