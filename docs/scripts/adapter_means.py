"""Measure how far the product of averaged LoRA factors is from the averaged product, on the example of docs/adapters.md.

One run averages A and B, as a federated run does. A second run also adds mean(BA) - mean(B) mean(A) to the frozen weights
after each round, so that its server has the exact mean of the clients' networks.
"""

import re
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedCallback, FederatedModule, Run

PAGE = Path(__file__).parents[1] / "adapters.md"
ROUNDS = 20


class Products(FederatedCallback):
    """Product of means and mean of products of the LoRA factors, at each aggregation.

    Args:
        exact: Whether to add the difference to the frozen weights at the server.
    """

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.rows: list[tuple[int, float, float]] = []
        self.gaps: dict[str, Tensor] = {}

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Measure the difference of the products."""
        of_means, of_products, before = [], [], []
        for name in (name for name in cohort.params if "lora_A" in name):
            other = name.replace("lora_A", "lora_B")
            a, b = cohort.params[name], cohort.params[other]
            means, products = cohort.mean(b) @ cohort.mean(a), cohort.mean(b @ a)
            self.gaps[name.partition(".lora_A")[0]] = products - means
            of_means.append(means.flatten())
            of_products.append(products.flatten())
            before.append((cohort.server[other] @ cohort.server[name]).flatten())
        means, products, old = (torch.cat(x) for x in (of_means, of_products, before))
        gap = (products - means).norm()
        self.rows.append((cohort.round, float(gap / products.norm()), float(gap / (products - old).norm())))

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Add the difference to the frozen weights of the server."""
        for layer, gap in self.gaps.items() if self.exact else ():
            lora = pl_module.model.get_submodule(layer)
            lora.base_layer.weight.data += lora.scaling["default"] * gap


def main() -> None:
    """Train the example with averaged factors and with exact means, and print both."""
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    written: dict = {}
    exec(script.partition("torch.manual_seed(0)\n")[0], written)  # noqa: S102  # our own page
    for exact in (False, True):
        torch.manual_seed(0)
        data = written["Digits"](
            num_clients=3, partition=written["Shards"](class_fraction=0.5), val_fraction=0.2
        )
        products = Products(exact)
        module = FederatedModule(written["LitViT"](), local_steps=5)
        run = Run(
            module, data, name=f"adapters_{exact}", max_epochs=ROUNDS, accelerator="cpu", callbacks=[products]
        )
        run.fit()
        print("exact mean" if exact else "averaged factors")
        for number, whole, step in products.rows:
            print(f"round {number}: {whole:.2%} of the mean product, {step:.2%} of its change in the round")
        print({name: value for name, value in module.metrics.items() if name.startswith("val_")}, flush=True)


if __name__ == "__main__":
    main()
