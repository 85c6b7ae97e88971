"""The Trainer of Hugging Face transformers, with DDP or FSDP2.

torchrun --standalone --nproc-per-node 2 -m examples.trainers.transformers_trainer out/run
torchrun --standalone --nproc-per-node 2 -m examples.trainers.transformers_trainer out/run --fsdp
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dmuon
from examples.trainers.tiny import DIM, HIDDEN, VOCAB, dataset, demonstrate

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
        learning_rate=3e-3,
        fsdp=fsdp,
        fsdp_config={**FSDP2, "state_dict_type": "SHARDED_STATE_DICT"} if fsdp else None,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = make_llama()
    # --8<-- [start:switch]
    muon = {
        "params": dmuon.param_groups(model),
        "lr": arguments.learning_rate,
        "adjust_lr_fn": "match_rms_adamw",
    }
    if not fsdp:  # DDP
        muon["process_group"] = dist.group.WORLD
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in dataset()],
        optimizer_cls_and_kwargs=(dmuon.Muon, muon),  # without it: AdamW
    )
    # --8<-- [end:switch]
    return trainer


def train(folder: Path, *, resume: bool = False, fsdp: bool = False) -> nn.Module:
    """Train, or go on from the checkpoint of step 3."""
    trainer = make_trainer(folder, fsdp=fsdp)
    # --8<-- [start:resume]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    # --8<-- [end:resume]
    return trainer.model


def main() -> None:
    """Train, and train the second half again."""
    fsdp = "--fsdp" in sys.argv
    demonstrate(partial(train, fsdp=fsdp), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
