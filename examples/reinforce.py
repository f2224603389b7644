"""Reinforcement with generation: a policy writes tokens, and learns from a reward of what it wrote.

Writing calls the model without gradients, with inputs one longer each time: parameters are gathered operator by
operator, no graph is captured for each length. Learning is one forward of the planned length. The log-probabilities
come from that forward, as the reward does not depend on parameters.

    python examples/reinforce.py --steps 60
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from patterns import parse, report
from torch import nn

import chunkc

VOCABULARY, WIDTH, LENGTH, BATCH = 12, 48, 8, 32


class Policy(nn.Module):
    """A causal transformer: tokens ``[batch, length]`` to logits ``[batch, length, VOCABULARY]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.embed(tokens) + self.place.weight[:length]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


@torch.no_grad()
def written_by(policy: nn.Module, device: torch.device) -> torch.Tensor:
    """Sequences that begin with token 0, ``[BATCH, LENGTH + 1]``."""
    tokens = torch.zeros(BATCH, 1, dtype=torch.long, device=device)
    for _ in range(LENGTH):
        following = torch.multinomial(policy(tokens)[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def main(argv: Sequence[str] | None = None) -> int:
    args = parse("Train a policy by REINFORCE under a device budget.", argv, hw="emulated-2200k-64m", steps=60)
    policy = chunkc.compile(Policy(), args.hw, dtype=torch.float32, backend=args.backend)
    optimizer = chunkc.AdamW(policy.parameters(), lr=3e-3)
    device = next(policy.parameters()).device
    for step in range(args.steps):
        tokens = written_by(policy, device)
        reward = (tokens[:, 1:] > tokens[:, :-1]).float().mean(1)  # ascending tokens
        chosen = nn.functional.cross_entropy(policy(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = ((reward - reward.mean()) * chosen.sum(1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 5) == 0:
            report(step + 1, policy, reward=reward.mean().item())
    print(f"final_reward={reward.mean().item()!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
