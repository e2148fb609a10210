"""Transposed convolution, activation and GroupNorm in fused kernels, for PyTorch.

``ModelNew`` is the drop-in for ConvTranspose2d -> GELU -> GroupNorm; ``fusedconv.models`` has all
three systems, ``ConvTransposeActNorm{1,2,3}d`` and ``GroupNorm`` are the general modules,
``fusedconv.functional`` the functions, ``torch.ops.fusedconv`` the operators.
"""

from fusedconv import functional, models
from fusedconv._C import build
from fusedconv.conversion import Conversion, compile_backend, compile_pass, convert, revert
from fusedconv.device import Device
from fusedconv.errors import KernelError, NoKernelError, PluginError
from fusedconv.explaining import Explanation, explain
from fusedconv.models.conv_transpose2d_gelu_group_norm import ModelNew
from fusedconv.modules import (
    ConvTransposeActNorm1d,
    ConvTransposeActNorm2d,
    ConvTransposeActNorm3d,
    GroupNorm,
)
from fusedconv.norms import Norm
from fusedconv.ops import decompositions
from fusedconv.plan import (
    BackwardKernel,
    BackwardPlan,
    BackwardTensors,
    Candidate,
    ForwardKernel,
    ForwardPlan,
    Gradients,
    Outputs,
)
from fusedconv.problem import (
    Activation,
    BackwardProblem,
    Bias,
    ConvTransposeGeometry,
    ForwardProblem,
    Residual,
)
from fusedconv.recording import Composition, record_problems
from fusedconv.registry import Registry
from fusedconv.selection import clear_cache
from fusedconv.support import Support
from fusedconv.tuning import autotune

__version__: str = build["version"]

__all__ = [
    "Activation",
    "BackwardKernel",
    "BackwardPlan",
    "BackwardProblem",
    "BackwardTensors",
    "Bias",
    "Candidate",
    "Composition",
    "ConvTransposeActNorm1d",
    "ConvTransposeActNorm2d",
    "ConvTransposeActNorm3d",
    "ConvTransposeGeometry",
    "Conversion",
    "Device",
    "Explanation",
    "ForwardKernel",
    "ForwardPlan",
    "ForwardProblem",
    "Gradients",
    "GroupNorm",
    "KernelError",
    "ModelNew",
    "NoKernelError",
    "Norm",
    "Outputs",
    "PluginError",
    "Registry",
    "Residual",
    "Support",
    "autotune",
    "build",
    "clear_cache",
    "compile_backend",
    "compile_pass",
    "convert",
    "decompositions",
    "explain",
    "functional",
    "models",
    "record_problems",
    "revert",
]
