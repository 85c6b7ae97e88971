"""The Trainer of Hugging Face transformers, with DDP or FSDP2.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.transformers_trainer
torchrun --standalone --nproc-per-node 2 -m examples.trainers.transformers_trainer --fsdp
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dmuon
from examples.trainers.tiny import DIM, HIDDEN, VOCAB, dataset

FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}


def make_llama() -> LlamaForCausalLM:
    """A tiny Llama with the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_trainer(folder: Path, *, fsdp: bool) -> Trainer:
    """Six steps, with a checkpoint after the third."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        fsdp=fsdp,
        fsdp_config={**FSDP2, "state_dict_type": "SHARDED_STATE_DICT"} if fsdp else None,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = make_llama()
    # --8<-- [start:switch]
    muon = {"params": dmuon.param_groups(model), "lr": arguments.learning_rate}
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in dataset()],
        optimizer_cls_and_kwargs=(dmuon.Muon, muon),  # the line to add
    )
    # --8<-- [end:switch]
    if not fsdp:
        # --8<-- [start:ddp]
        muon["process_group"] = dist.group.WORLD  # DDP: one rank orthogonalizes each matrix
        # --8<-- [end:ddp]
    return trainer


def train(folder: Path, *, fsdp: bool, resume: bool = False) -> nn.Module:
    """Train, or go on from the checkpoint of step 3."""
    trainer = make_trainer(folder, fsdp=fsdp)
    # --8<-- [start:resume]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    # --8<-- [end:resume]
    return trainer.model


def main() -> None:
    """Train, then train the second half again."""
    folder = Path(tempfile.gettempdir()) / "transformers-trainer"
    fsdp = "--fsdp" in sys.argv
    train(folder, fsdp=fsdp)
    train(folder, fsdp=fsdp, resume=True)


if __name__ == "__main__":
    main()
