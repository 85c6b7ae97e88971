"""The Trainer of Lightning with FSDP2.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.lightning_trainer out/run
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import dmuon
from examples.trainers.tiny import dataset, demonstrate, make_model


class LitLM(lightning.LightningModule):
    """The tiny language model, sharded before the optimizer is made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT)

    # --8<-- [start:switch]
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Before: torch.optim.AdamW(self.parameters(), lr=3e-3).
        groups = dmuon.param_groups(self)
        return dmuon.Muon(groups, lr=3e-3, adjust_lr_fn="match_rms_adamw")

    # --8<-- [end:switch]


def train(folder: Path, *, resume: bool = False) -> nn.Module:
    """Train for two epochs and save after each, or go on from the first."""
    module = LitLM()
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # --8<-- [start:resume]
    trainer.fit(
        module,
        DataLoader(dataset(), batch_size=4),
        ckpt_path=folder / "epoch=0.ckpt" if resume else None,
    )
    # --8<-- [end:resume]
    return module.model


def main() -> None:
    """Train, and train the second half again."""
    demonstrate(train, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
