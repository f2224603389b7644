"""Loss of AdamW8bit beside AdamW: a small Transformer over bytes of Python's standard library.

    OMP_WAIT_POLICY=passive python benchmarks/eight_bit_loss.py

Both train the same model from the same start on the same batches, once for each of ``--seeds`` seeds, on the emulated
device in fp32. Written under benchmarks/results/: the mean loss of the last fifth of the steps of each run. What counts
is the difference of the two optimizers beside that between seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import provenance
import torch
from torch import nn

import chunkc

RESULTS = Path(__file__).parent / "results" / "eight_bit_loss-2026-11-26.json"
CONTEXT, WIDTH, BATCH = 64, 96, 16
OPTIMIZERS: dict[str, Any] = {"AdamW": chunkc.AdamW, "AdamW8bit": chunkc.AdamW8bit}


class ByteModel(nn.Module):
    """Two Transformer layers that predict the next byte.

    Forward takes int64 [batch, context + 1], and returns the mean loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens[:, :-1]) + self.place.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def corpus() -> torch.Tensor:
    """The text of the standard library's modules, without packages, as uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def train(name: str, seed: int, num_steps: int, text: torch.Tensor) -> list[float]:
    torch.manual_seed(seed)
    model = chunkc.compile(ByteModel(), "emulated-64m-1g", dtype=torch.float32, backend="eager")
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1_000_000 * seed + step)
        firsts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        loss = model(torch.stack([text[first : first + CONTEXT + 1] for first in firsts]).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all and write what they reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    text, last = corpus(), max(1, args.steps // 5)
    found = {
        name: [statistics.fmean(train(name, seed, args.steps, text)[-last:]) for seed in range(args.seeds)]
        for name in OPTIMIZERS
    }
    numel = sum(p.numel() for p in ByteModel().parameters())
    result = {"num_params": numel, "steps": args.steps, "mean_loss_of_last_steps": found, **provenance.describe()}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, losses in found.items():
        print(f"{name:10} " + "  ".join(f"{loss:.5f}" for loss in losses))


if __name__ == "__main__":
    main()
