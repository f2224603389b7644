"""Tiny runs of TRL's trainers, plain and over a compiled model, from a model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import llama

NUM_SAMPLES, LR = 8, 1e-2
HW = "emulated-200k-16m"
WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 97)}}


def write_model(folder: Path) -> str:
    """A tiny Llama with a tokenizer of words, as ``from_pretrained`` finds them."""
    torch.manual_seed(0)
    llama(layers=1).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def text(seed: int, num_words: int) -> str:
    words = torch.randint(3, 97, (num_words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{word}" for word in words.tolist())


def run(kind: str, is_ours: bool, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses and values of adapters trained by SFT or DPO, and the trainer."""
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(kind, is_ours, folder, peft_config=lora)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: v.detach().clone() for name, v in trainer.model.state_dict().items()}, trainer


def make(kind: str, is_ours: bool, folder: Path, **changed: Any) -> Any:
    """A trainer over the model in ``folder / "model"``."""
    import datasets
    import trl

    from chunkc.integrations.trl import ChunkcDPOTrainer, ChunkcSFTTrainer

    samples = {"text": [text(i, 10) for i in range(NUM_SAMPLES)]}
    if kind == "dpo":
        columns = {"prompt": (0, 4), "chosen": (100, 6), "rejected": (200, 6)}
        samples = {name: [text(first + i, n) for i in range(NUM_SAMPLES)] for name, (first, n) in columns.items()}
    make_args = trl.SFTConfig if kind == "sft" else trl.DPOConfig
    args = make_args(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=LR, adam_epsilon=1e-4, max_grad_norm=0.1, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False, max_length=12,
        dataloader_pin_memory=False,
    )  # fmt: skip
    plain, ours = (trl.SFTTrainer, ChunkcSFTTrainer) if kind == "sft" else (trl.DPOTrainer, ChunkcDPOTrainer)
    options = changed | ({"hw": HW, "compile_options": {"backend": "eager"}} if is_ours else {})
    named = {"args": args, "train_dataset": datasets.Dataset.from_dict(samples), "model": str(folder / "model")}
    return (ours if is_ours else plain)(**(named | options))
