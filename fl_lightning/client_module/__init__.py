"""LightningModules of the user's own, whose training steps clients take."""

from fl_lightning.client_module.client_module import ClientModule, client_module_of

__all__ = ["ClientModule", "client_module_of"]
