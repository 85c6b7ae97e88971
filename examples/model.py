"""A small Llama: RMSNorm, rotary attention, SwiGLU, an untied output head.

Shape suffixes: B batch, T tokens, H heads, D head dim, C model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; `hidden_dim` is the width of the SwiGLU."""

    vocab_size: int = 256
    dim: int = 256
    hidden_dim: int = 688
    num_layers: int = 4
    num_heads: int = 4
    rope_theta: float = 10_000.0


def rotate(x_BHTD: Tensor, theta: float) -> Tensor:
    """Turn each pair of head dims by an angle that grows with the token's position."""
    num_tokens, head_dim = x_BHTD.shape[-2:]
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=x_BHTD.device) / head_dim)
    angle = torch.outer(torch.arange(num_tokens, device=x_BHTD.device), frequency)
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    left, right = x_BHTD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and four separate projections."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.rope_theta = config.rope_theta
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        def heads(projected_BTC: Tensor) -> Tensor:
            return projected_BTC.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        query = rotate(heads(self.q_proj(x_BTC)), self.rope_theta)
        key = rotate(heads(self.k_proj(x_BTC)), self.rope_theta)
        value = heads(self.v_proj(x_BTC))
        mixed_BHTD = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed_BHTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class Llama(nn.Module):
    """Next-token model; called with targets it returns the mean cross-entropy."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.lm_head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
