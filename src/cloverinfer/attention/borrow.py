"""Memory of a GPU that somebody else owns, as a tensor."""

from __future__ import annotations

import torch


class _Memory:
    """Described as other libraries would."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def borrow_bytes(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[nbytes]`` there; it does not hold the memory."""
    return torch.as_tensor(_Memory(pointer, nbytes), device=device)
