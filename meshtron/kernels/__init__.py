"""What runs once a token or once a weight, as Triton kernels; ``reference`` does the same in plain torch.

The Triton modules are imported only where a CUDA device runs them.
"""
