"""muP: learning rate and initial scale found at one width hold at every other (Yang et al., 2022).

With ``m = hidden_size / base width``, after table 3 of "Tensor Programs V" for Adam:

    weight                      initial std    learning rate
    embedding, norms, biases    1              1
    matrices of a layer         1 / sqrt(m)    1 / m
    head                        1 / m          1 / m

relative to the values at the base width, where all factors are 1. Attention keeps its 1 / sqrt(head_dim): widths are
meant to differ in the number of heads, not in ``head_dim``.
"""


def init_factor(name: str, m: float) -> float:
    """Factor on the initial standard deviation of a Llama parameter at ``m`` times the base width."""
    if name.startswith("lm_head."):
        return 1 / m
    return m**-0.5 if name.endswith("_proj.weight") else 1.0


def lr_factor(name: str, m: float) -> float:
    """Factor on the learning rate of a Llama parameter at ``m`` times the base width."""
    return 1 / m if name.startswith("lm_head.") or name.endswith("_proj.weight") else 1.0
