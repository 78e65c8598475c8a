"""TensorFloat-32 on NVIDIA GPUs: float32 products of numbers that are cut to 10 bits of mantissa, several times as fast."""

import torch


def allow_tf32(convolutions: bool, products: bool) -> tuple[bool, bool]:
    """Say whether CUDA may compute float32 convolutions and matrix products in TF32; torch allows the former by default.

    Args:
        convolutions: Whether cuDNN may.
        products: Whether cuBLAS may.

    Returns:
        What was allowed before, as arguments of this function.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
    return before
