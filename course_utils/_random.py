"""The global random numbers: of torch on the CPU and on GPUs, of NumPy, and of Python.

Those that are not in use are left alone. Generators of your own (``torch.Generator``,
``numpy.random.default_rng``) are not known here.
"""

import random
import sys
from typing import Any


def state() -> dict[str, Any]:
    """Where they stand, in plain types and tensors: a file that holds them can run no code."""
    import torch

    now = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        now["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy.random" in sys.modules:
        name, key, *rest = sys.modules["numpy.random"].get_state()
        now["numpy"] = (name, key.tolist(), *rest)
    return now


def restore(before: dict[str, Any]) -> None:
    """Let them go on from where they stood. There may be fewer GPUs than then."""
    import torch

    random.setstate(before["python"])
    torch.set_rng_state(before["torch"])
    if "numpy" in before:
        import numpy.random

        numpy.random.set_state(before["numpy"])
    if torch.cuda.is_initialized():
        for index, each in enumerate(before.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, index)
