"""Methods that add layers with trainable parameters to the model: factors of channels, low-rank adapters."""

import torch
from torch import nn

from fl_lightning import FederatedCallback, LocalState
from fl_lightning.batch_norm.layers import batch_norm_layers


class Gate(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.factor = norm, nn.Parameter(torch.ones(norm.num_features))

    def forward(self, inputs):
        return self.norm(inputs) * self.factor.view(-1, 1, 1)


class LowRank(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(inputs))


def gated(model):
    for name, layer in batch_norm_layers(model).items():
        model.set_submodule(name, Gate(layer))
    return model


class Gates(FederatedCallback):
    def extend_model(self, model):
        gated(model)


class OwnGates(LocalState):
    def extend_model(self, model):
        gated(model)

    def configure_batch_norm(self, pl_module):
        layers = pl_module.model.named_modules()
        self.kinds = tuple(f"{name}.factor" for name, layer in layers if isinstance(layer, Gate))
        super().configure_batch_norm(pl_module)


class Adapters(FederatedCallback):
    def extend_model(self, model):
        model.requires_grad_(False)
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear):
                model.set_submodule(name, LowRank(layer))
