"""torch.library operators, their fake implementations and gradients, and the way to a plan.

``fusedconv::conv_transpose_act_norm`` and ``fusedconv::group_norm`` are what torch.compile, tracing
and autograd see; ``fusedconv.functional`` calls the plan directly where none of them is involved.
"""

from fusedconv.ops import batch_norm, conv_transpose, flops, group_norm
from fusedconv.ops.batch_norm import fold_with_gradients
from fusedconv.ops.common import any_requires_grad, goes_direct
from fusedconv.ops.decomposing import decompositions
from fusedconv.ops.planning import (
    ConvCall,
    NormCall,
    conv_plan,
    followed,
    group_norm_plan,
)
from fusedconv.ops.seen import recall, remember
from fusedconv.ops.watching import is_watched

flops.register()

__all__ = [
    "ConvCall",
    "NormCall",
    "any_requires_grad",
    "batch_norm",
    "conv_plan",
    "conv_transpose",
    "decompositions",
    "flops",
    "fold_with_gradients",
    "followed",
    "goes_direct",
    "group_norm",
    "group_norm_plan",
    "is_watched",
    "recall",
    "remember",
]
