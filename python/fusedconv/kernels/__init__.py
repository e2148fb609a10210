"""Built-in providers. Each module lists its kernels; a third party's plugin registers its own."""

from fusedconv.kernels import cpu, torch
from fusedconv.kernels.cuda import gradients, group_norm, sm80, sm90
from fusedconv.plan import Kernel


def built_in() -> list[Kernel]:
    """Every kernel of the package, the reference first."""
    modules = (torch, cpu, sm80, sm90, group_norm, gradients)
    return [kernel for module in modules for kernel in module.kernels()]
