"""The Kimi Delta Attention layer in plain PyTorch, with the weight names of flash-linear-attention's layer.

    q, k = silu(conv(W_q x)), silu(conv(W_k x)), L2-normalised per head      v = silu(conv(W_v x))
    g    = -exp(A_log) softplus(W_f x + dt_bias), or lower_bound sigmoid(exp(A_log) (W_f x + dt_bias))
    beta = sigmoid(W_b x), or twice that
    y    = W_o (RMSNorm(kda(q, k, v, g, beta)) * sigmoid(W_g x + b_g)),      W_f and W_g of low rank

Source: Kimi Linear, arXiv:2510.26692, section 4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_ref.kda import chunk_kda


class KimiDeltaAttention(nn.Module):
    """Computes in the dtype of its weights; [B, T, hidden_size] to [B, T, hidden_size]."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_v_heads: int,
        head_v_dim: int,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        self.head_dim, self.head_v_dim, self.conv_size = head_dim, head_v_dim, conv_size
        self.allow_neg_eigval, self.lower_bound, self.norm_eps = allow_neg_eigval, lower_bound, norm_eps
        key_dim, value_dim = num_heads * head_dim, num_v_heads * head_v_dim

        def conv(channels: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, conv_size, groups=channels, bias=conv_bias)

        def low_rank(columns: int, bias: bool) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(hidden_size, head_v_dim, bias=False), nn.Linear(head_v_dim, columns, bias=bias)
            )

        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(key_dim), conv(key_dim), conv(value_dim)
        self.f_proj = low_rank(num_v_heads * head_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.empty(num_v_heads).uniform_(1, 16)))
        self.dt_bias = nn.Parameter(torch.randn(num_v_heads * head_dim))
        self.g_proj = low_rank(value_dim, bias=True)
        self.o_norm = nn.RMSNorm(head_v_dim, eps=norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def convolved(conv: nn.Conv1d, x: Tensor) -> Tensor:
            return F.silu(conv(F.pad(x.mT, (self.conv_size - 1, 0))).mT)

        def heads(x: Tensor, dim: int) -> Tensor:
            return x.unflatten(-1, (-1, dim))

        q, k = (
            heads(convolved(conv, projection(x)), self.head_dim)
            for conv, projection in ((self.q_conv1d, self.q_proj), (self.k_conv1d, self.k_proj))
        )
        q, k = (a * torch.rsqrt(a.square().sum(-1, keepdim=True) + 1e-6) for a in (q, k))
        v = heads(convolved(self.v_conv1d, self.v_proj(x)), self.head_v_dim)
        g = heads(self.f_proj(x) + self.dt_bias, self.head_dim)
        rate = self.A_log.exp()[:, None]
        g = -rate * F.softplus(g) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * g)
        beta = torch.sigmoid(self.b_proj(x)) * (2 if self.allow_neg_eigval else 1)
        o, _ = chunk_kda(q, k, v, g, beta, chunk_size=16)[:2]
        o = self.o_norm(o) * torch.sigmoid(heads(self.g_proj(x), self.head_v_dim))
        return self.o_proj(o.flatten(-2))
