import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.lightning_module.lit_digits import DigitsData, LitDigits

L.seed_everything(0)
module = LitDigits(lr=0.1)
data = DigitsData()
best = ModelCheckpoint(monitor="val_acc", mode="max")
trainer = L.Trainer(max_epochs=10, callbacks=[best], accelerator="cpu", log_every_n_steps=10)
trainer.fit(module, datamodule=data)
trainer.test(module, datamodule=data)
print(LitDigits.load_from_checkpoint(best.best_model_path).hparams)
