"""The model comes back from a run as it was given."""

from torch import nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.verification.bench import Bench
from fl_lightning.verification.verdicts import Violated


def model_comes_back(bench: Bench) -> str:
    """After a run the model has the modules, shapes, types, flags and hooks that it came with."""
    run = bench.run()
    before, after = dict(run.before.named_modules()), dict(run.module.model.named_modules())
    if before.keys() != after.keys():
        raise Violated(f"modules {sorted(before.keys() ^ after.keys())} came or went")
    for name, module in after.items():
        if type(module) is not type(before[name]):
            raise Violated(
                f"module {name!r} is a {type(module).__name__}, not a {type(before[name]).__name__}"
            )
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Violated(f"module {name!r} keeps a hook")
    for name, layer in batch_norm_layers(run.module.model).items():
        for setting in ("training", "momentum", "eps", "track_running_stats"):
            if getattr(layer, setting) != getattr(before[name], setting):
                raise Violated(f"{setting} of BN layer {name!r} is {getattr(layer, setting)}, not as it came")
    if (kept := _form(run.module.model)) != (came := _form(run.before)):
        places = sorted(name for name in kept.keys() | came.keys() if kept.get(name) != came.get(name))
        raise Violated(f"{places[0]}: {kept.get(places[0], 'gone')}, not {came.get(places[0], 'there')}")
    return "same keys, shapes, types, modules"


def _form(model: nn.Module) -> dict[str, str]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    form = {f"{name} in state_dict": "yes" for name in model.state_dict()}
    return form | {
        name: f"{tuple(value.shape)} {value.dtype}{' trainable' if value.requires_grad else ''}"
        for name, value in tensors.items()
    }
