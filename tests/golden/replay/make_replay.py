"""Makes replay.safetensors: verify groups of KDA against the whole history, recomputed from nothing, in float64.

Nothing of the product is imported and no state is carried: for every group the committed tokens are run through from
zero, one by one with plain loops, then every prefix of the group. Run: python make_replay.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float64]
HEADS, DIM, WIDTH, CONV = 3, 6, 5, 4
PROMPT = 9
# per case: group widths, then accepted drafts of each group
CASES = {
    "full": ((5, 5, 5, 5), (4, 4, 4, 4)),
    "none": ((5, 5, 5, 5), (0, 0, 0, 0)),
    "mixed": ((5, 5, 5, 5, 5, 5), (2, 0, 4, 1, 3, 0)),
    "narrow": ((5, 1, 3, 1, 1, 5), (3, 0, 2, 0, 0, 4)),
    "plain": ((1, 1, 1, 1), (0, 0, 0, 0)),
}


def state_after(k: Array, v: Array, g: Array, beta: Array) -> Array:
    """State [H, V, K] after all tokens of the sequence, from zero."""
    state = np.zeros((HEADS, DIM, DIM))
    for t in range(len(k)):
        for h in range(HEADS):
            for j in range(DIM):
                state[h, :, j] *= np.exp(g[t, h, j])
            seen = np.zeros(DIM)
            for i in range(DIM):
                seen[i] = sum(state[h, i, j] * k[t, h, j] for j in range(DIM))
            for i in range(DIM):
                for j in range(DIM):
                    state[h, i, j] += beta[t, h] * (v[t, h, i] - seen[i]) * k[t, h, j]
    return state


def convolved(inputs: Array, weight: Array) -> Array:
    """SiLU of the causal convolution at the last token; inputs [T, H, 3, D], zeros before the first."""
    y = np.zeros((HEADS, 3, DIM))
    for back in range(CONV):
        if back < len(inputs):
            y += weight[..., CONV - 1 - back] * inputs[len(inputs) - 1 - back]
    return y / (1 + np.exp(-y))


def normalised(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def main() -> None:
    rng = np.random.default_rng(20261129)
    table: dict[str, NDArray[Any]] = {}
    for name, (widths, accepted) in CASES.items():
        n = sum(widths)
        weight = rng.standard_normal((HEADS, 3, DIM, CONV))
        prompt = draw(rng, PROMPT)
        table[f"{name}.widths"] = np.array(widths)
        table[f"{name}.accepted"] = np.array(accepted)
        table[f"{name}.conv_weight"] = weight
        table[f"{name}.start_state"] = state_after(*prompt[1:5])
        table[f"{name}.start_window"] = np.moveaxis(prompt[5][-(CONV - 1) :], 0, -1)
        tokens = draw(rng, n)
        for part, value in zip(("q", "k", "v", "g", "beta", "u"), tokens, strict=True):
            table[f"{name}.{part}"] = value
        outputs, states, convs = [], [], []
        kept, at = prompt, 0
        for width, a in zip(widths, accepted, strict=True):
            group = [x[at : at + width] for x in tokens]
            for t in range(width):
                seen = [np.concatenate((x, y[: t + 1])) for x, y in zip(kept, group, strict=True)]
                state = state_after(*seen[1:5])
                outputs.append(np.einsum("hvk,hk->hv", state, group[0][t]))
                states.append(state)
                convs.append(convolved(seen[5], weight))
            kept = [np.concatenate((x, y[: a + 1])) for x, y in zip(kept, group, strict=True)]
            at += width
        table[f"{name}.o"] = np.stack(outputs)
        table[f"{name}.state_after"] = np.stack(states)
        table[f"{name}.y"] = np.stack(convs)
    table = {name: np.ascontiguousarray(value) for name, value in table.items()}
    save_file(table, Path(__file__).with_name("replay.safetensors"))


def draw(rng: np.random.Generator, n: int) -> list[Array]:
    """q, k, v, g, beta and convolution inputs of n tokens."""
    q, k, v, raw = (rng.standard_normal((n, HEADS, DIM)) for _ in range(4))
    beta = 1 / (1 + np.exp(-rng.standard_normal((n, HEADS))))
    u = rng.standard_normal((n, HEADS, 3, DIM))
    return [normalised(q), normalised(k), v, -np.abs(raw), beta, u]


if __name__ == "__main__":
    main()
