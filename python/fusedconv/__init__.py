"""Transposed convolution, activation and GroupNorm in fused kernels, for PyTorch.

``ModelNew`` is the drop-in for ConvTranspose2d -> GELU -> GroupNorm; ``fusedconv.models`` has all
three systems, ``ConvTransposeActNorm{1,2,3}d`` and ``GroupNorm`` are the general modules,
``fusedconv.functional`` the functions, ``torch.ops.fusedconv`` the operators.
"""

from fusedconv import functional, models
from fusedconv._C import build
from fusedconv.errors import KernelError, NoKernelError, PluginError
from fusedconv.explaining import explain
from fusedconv.models.conv_transpose2d_gelu_group_norm import ModelNew
from fusedconv.modules import (
    ConvTransposeActNorm1d,
    ConvTransposeActNorm2d,
    ConvTransposeActNorm3d,
    GroupNorm,
)
from fusedconv.plan import Explanation, Outputs, Plan, clear_cache
from fusedconv.problem import ConvTransposeGeometry, NormGeometry, Problem
from fusedconv.recording import Composition
from fusedconv.registry import Candidate, Kernel, Registry, Support

__version__: str = build["version"]

__all__ = [
    "Candidate",
    "Composition",
    "ConvTransposeActNorm1d",
    "ConvTransposeActNorm2d",
    "ConvTransposeActNorm3d",
    "ConvTransposeGeometry",
    "Explanation",
    "GroupNorm",
    "Kernel",
    "KernelError",
    "ModelNew",
    "NoKernelError",
    "NormGeometry",
    "Outputs",
    "Plan",
    "PluginError",
    "Problem",
    "Registry",
    "Support",
    "build",
    "clear_cache",
    "explain",
    "functional",
    "models",
]
