"""A second implementation of the paper's equations, in NumPy with explicit loops, that the model must
reproduce.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtimes.contract.rule import MemoryRule
from tests.nightly import matrix
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel

L, D, H, K, FF, V, M = 2, 6, 2, 3, 5, 7, 3


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5) * weight + bias


def position_vector(distance: int) -> np.ndarray:
    angles = np.array([distance / 10000 ** (2 * i / D) for i in range(D // 2)])
    return np.concatenate([np.sin(angles), np.cos(angles)])


def paper_logits(
    weights: dict[str, np.ndarray], tokens: list[int], reach: list[int], *, zeros: bool
) -> np.ndarray:
    """Logits [N, V] of a whole stream at once (Dai et al. 2019, section 3.3), layer after layer, post-norm.

    reach[i]: how many tokens before itself token i sees. The per-layer memory of a segment is by definition
    the layer's input at those tokens, so a whole stream needs no memory at all. zeros: hidden states of zero
    lie before the first token; otherwise nothing does.
    """
    h = [weights["vocabulary.table.0"][token] * np.sqrt(D) for token in tokens]
    for n in range(L):
        pair = n % len(weights["positions.u"])  # one for all layers, or one for each
        u, v = weights["positions.u"][pair], weights["positions.v"][pair]
        W = {name.removeprefix(f"blocks.{n}."): weight for name, weight in weights.items()}
        after = []
        for i in range(len(tokens)):
            q = (W["query.weight"] @ h[i]).reshape(H, K)
            answers = []
            for head in range(H):
                scores, values = [], []
                for j in range(i - reach[i] if zeros else max(0, i - reach[i]), i + 1):
                    h_j = h[j] if j >= 0 else np.zeros(D)
                    k_content = (W["key.weight"] @ h_j).reshape(H, K)[head]
                    k_position = (weights[f"positions.project.{n}.weight"] @ position_vector(i - j)).reshape(
                        H, K
                    )[head]
                    a = q[head] @ k_content  # (a) content
                    b = q[head] @ k_position  # (b) content-dependent position
                    c = u[head] @ k_content  # (c) global content bias
                    d = v[head] @ k_position  # (d) global position bias
                    scores.append((a + b + c + d) / np.sqrt(K))
                    values.append((W["value.weight"] @ h_j).reshape(H, K)[head])
                exponentials = np.exp(np.array(scores) - max(scores))
                answers.append(
                    sum(p * x for p, x in zip(exponentials / exponentials.sum(), values, strict=True))
                )
            attended = W["out.weight"] @ np.concatenate(answers)
            o = layer_norm(h[i] + attended, W["attention_norm.weight"], W["attention_norm.bias"])
            hidden = np.maximum(W["expand.weight"] @ o + W["expand.bias"], 0)
            fed = W["contract.weight"] @ hidden + W["contract.bias"]
            after.append(layer_norm(o + fed, W["feed_forward_norm.weight"], W["feed_forward_norm.bias"]))
        h = after
    return np.stack([weights["vocabulary.table.0"] @ x + weights["vocabulary.output_bias.0"] for x in h])


@pytest.mark.parametrize(
    ("T", "tie_biases", "initial_memory", "mask"),
    matrix((1, 4, 5), (False, True), ("masked", "zeros"), ("same-length", "full")),
)
def test_the_model_reproduces_the_equations_of_the_paper(
    T: int, tie_biases: bool, initial_memory: str, mask: str
) -> None:
    torch.manual_seed(3)
    sizes = ModelConfig(
        layers=L, d_model=D, heads=H, head_dim=K, d_ff=FF, vocab_size=V, tie_biases=tie_biases
    )
    model = LanguageModel(sizes).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.6)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    tokens = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2, 6]
    rule = MemoryRule(mem_len=M, segment=T, mask=mask, initial_memory=initial_memory)
    reach = [M + (i % T if mask == "full" else 0) for i in range(len(tokens))]
    memory, logits = model.start(1, rule), []
    with torch.no_grad():
        for at in range(0, len(tokens), T):
            piece = torch.tensor([tokens[at : at + T]])
            answer, memory = model(piece, memory, torch.tensor([at]), rule)
            logits.append(answer[0].numpy())
    expected = paper_logits(weights, tokens, reach, zeros=initial_memory == "zeros")
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=1e-9, atol=1e-9)
