import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.lightning_module.lit_digits import DigitsData, LitDigits
from fl_lightning import FederatedDataModule, FederatedModule, Run
from fl_lightning.callbacks import FixBN

L.seed_everything(0)
module = FederatedModule(LitDigits(lr=0.1), local_steps=5)
sites = {"north": DigitsData([0, 1, 2]), "east": DigitsData([3, 4, 5, 6]), "south": DigitsData([7, 8, 9])}
data = FederatedDataModule(sites, server=DigitsData())
best = ModelCheckpoint(monitor="val_acc", mode="max")
run = Run(module, data, name="three_sites", max_epochs=40, callbacks=[FixBN(), best], accelerator="cpu")
run.fit()
print(LitDigits.load_from_checkpoint(best.best_model_path).hparams)
