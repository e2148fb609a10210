"""Built-in providers. Each module lists its kernels; a third party's plugin registers its own."""

from fusedconv.kernels import torch
from fusedconv.kernels.cpu import conv_gradients, conv_transpose, epilogue_gradients
from fusedconv.kernels.cpu import direct as cpu_direct
from fusedconv.kernels.cpu import group_norm as cpu_group_norm
from fusedconv.kernels.cpu import shifted as cpu_shifted
from fusedconv.kernels.cuda import (
    boxes_gradients,
    boxes_sm90,
    clusters_sm90,
    col2im_sm90,
    depthwise,
    direct,
    direct_gradients,
    few,
    few_gradients,
    gradients,
    group_norm,
    lines_sm90,
    phases_sm90,
    sm80,
    sm90,
    sm90_gradients,
    sm90_runs,
    streams_sm90,
    strips_sm90,
    taps,
    taps_sm90,
    ungrouped_gradients,
)
from fusedconv.plan import Kernel


def built_in() -> list[Kernel]:
    """Every kernel of the package, the reference first."""
    modules = (
        torch,
        cpu_group_norm,
        epilogue_gradients,
        conv_transpose,
        conv_gradients,
        cpu_direct,
        cpu_shifted,
        sm80,
        sm90,
        sm90_runs,
        taps,
        taps_sm90,
        boxes_sm90,
        clusters_sm90,
        col2im_sm90,
        lines_sm90,
        phases_sm90,
        streams_sm90,
        strips_sm90,
        direct,
        few,
        depthwise,
        sm90_gradients,
        boxes_gradients,
        direct_gradients,
        few_gradients,
        group_norm,
        gradients,
        ungrouped_gradients,
    )
    return [kernel for module in modules for kernel in module.kernels()]
