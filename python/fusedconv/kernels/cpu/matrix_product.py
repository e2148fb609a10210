"""Transposed convolutions whose filter is as large as their stride, as one matrix product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.kernels.cpu.convolution import (
    Convolution,
    Form,
    computing_dtype,
    conversion_milliseconds,
    supports_form,
)
from fusedconv.layout import Layout, result_layout
from fusedconv.problem import ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support


def tiles_output(conv: ConvTransposeGeometry) -> Support:
    """Whether each input pixel has a tile of the output to itself, so that the convolution is one
    matrix product."""
    if conv.groups != 1:
        return Support.no(f"groups are {conv.groups}; one matrix product has none")
    if conv.stride != conv.kernel_size:
        return Support.no(
            f"stride {conv.stride} is not the kernel's extent {conv.kernel_size}: outputs of "
            "several pixels overlap or leave gaps"
        )
    if any(d != 1 and k != 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)):
        return Support.no(f"dilation is {conv.dilation}, only 1 is served")
    if any(conv.padding) or any(conv.output_padding):
        return Support.no("there is padding: tiles would be cut")
    return Support.yes()


def interleaved(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """One of the first, one of the second, and so on."""
    return [each for pair in zip(first, second, strict=True) for each in pair]


def tiles_last(tensor: Tensor, tile: Sequence[int]) -> Tensor:
    """[N, K, *spatial * tile] of channels last as a matrix [pixels, taps K], K fastest."""
    axes = len(tile)
    spatial = [size // step for size, step in zip(tensor.shape[2:], tile, strict=True)]
    pixels = tensor.permute(0, *range(2, axes + 2), 1)
    tiles = pixels.reshape(tensor.shape[0], *interleaved(spatial, tile), tensor.shape[1])
    order = (0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return tiles.permute(order).reshape(-1, math.prod(tile) * tensor.shape[1])


#: Rows or columns of a product below which libraries add its float32 sums up in one chain: over
#: thousands of values of one sign they were up to 16 times as far off as those of torch's
#: convolutions.
_FEW = 16
#: Values of a stretch, whose sums are added to each other: of sums of less than ``_LONG`` values,
#: and of longer ones.
_STRETCH, _LONG_STRETCH = 64, 256
_LONG = 8192

#: Channels from which on a library adds a bias before it has summed them all, so that a large bias
#: rounds the sums behind it.
_ONE_BLOCK = 128


def chains(problem: ForwardProblem, rows: int, columns: int, length: int) -> bool:
    """Whether a product for each of several samples adds its float32 sums of ``length`` values up
    in one chain: ``products`` cuts none of them, as it would have to copy them."""
    few = min(rows, columns) < _FEW and length > _STRETCH
    return problem.dtype == torch.float32 and problem.batch > 1 and few


def products(left: Tensor, right: Tensor) -> Tensor:
    """[N, A, B] of [N, L, A] and [N, L, B], summed over L."""
    if len(left) > 1:
        return torch.bmm(left.transpose(1, 2), right)
    # Libraries have more ways for two axes.
    return _product(left[0], right[0]).unsqueeze(0)


def _product(left: Tensor, right: Tensor) -> Tensor:
    length, rows = left.shape
    columns = right.shape[1]
    stretch = _STRETCH if length < _LONG else _LONG_STRETCH
    count = length // stretch
    if left.dtype != torch.float32 or min(rows, columns) >= _FEW or count < 2:
        return left.t() @ right
    whole = count * stretch
    cut = [each[:whole].unflatten(0, (count, stretch)) for each in (left, right)]
    found = torch.bmm(cut[0].transpose(1, 2), cut[1]).sum(0)
    return found if whole == length else found + _product(left[whole:], right[whole:])


def summed_over_positions(left: Tensor, right: Tensor) -> Tensor:
    """[A, B] of [N, positions, A] and [N, positions, B]: of samples too."""
    found = products(left, right)
    # Of one sample there is nothing to add up, and the weight's size not to copy.
    return found.sum(0) if len(found) > 1 else found[0]


class _MatrixProduct(Convolution):
    def __init__(self, problem: ForwardProblem, dtype: torch.dtype, layout: Layout) -> None:
        order = "channels last" if layout == "nhwc" else "channels first"
        super().__init__(problem, dtype, layout, f"torch matrix product, {order}")

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tile = self.conv.kernel_size
        axes, taps = len(tile), math.prod(tile)
        batch, channels, *spatial = input.shape
        outputs = self.conv.out_channels
        # In 16 bits adding it behind would round twice.
        early = channels < _ONE_BLOCK or input.dtype != torch.float32
        if self.input_layout == "nchw":
            # One tap: the result lies as it is to.
            matrix = weight.reshape(channels, outputs).expand(batch, -1, -1)
            flat = input.reshape(batch, channels, -1)
            if bias is not None and early:
                result = torch.baddbmm(bias[:, None], matrix.transpose(1, 2), flat)
            else:
                result = products(matrix, flat)
                if bias is not None:
                    result += bias[:, None]
            return result.view(batch, outputs, *spatial)
        pixels = input.permute(0, *range(2, axes + 2), 1).reshape(-1, channels)
        matrix = weight.permute(0, *range(2, axes + 2), 1).reshape(channels, taps * outputs)
        if bias is not None and early:
            result = torch.addmm(bias.repeat(taps), pixels, matrix)
        else:
            result = pixels @ matrix
            if bias is not None:
                result += bias.repeat(taps)
        tiles = result.view(batch, *spatial, *tile, outputs)
        order = interleaved(range(1, axes + 1), range(axes + 1, 2 * axes + 1))
        whole = [extent * step for extent, step in zip(spatial, tile, strict=True)]
        shuffled = tiles.permute(0, *order, 2 * axes + 1).reshape(batch, *whole, outputs)
        return shuffled.permute(0, axes + 1, *range(1, axes + 1))


class MatrixProduct(Form):
    """Input pixels times the filter, where each pixel has a tile of the output to itself; then the
    tiles are put in their places. With one tap channels first stay, else whole runs of channels
    are put."""

    name = "matrix_product"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        conv = problem.conv
        assert conv is not None
        support = supports_form(problem) and tiles_output(conv)
        sums = problem.output_channels, math.prod(problem.spatial), problem.channels
        if support and self._layout(problem) == "nchw" and chains(problem, *sums):
            return Support.no("its float32 sums of few channels are less exact than torch's")
        return support

    def _layout(self, problem: ForwardProblem) -> Layout:
        assert problem.conv is not None
        one_tap = math.prod(problem.conv.kernel_size) == 1
        return result_layout(problem.layout) if one_tap else "nhwc"

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        assert problem.conv is not None
        dtype = computing_dtype(problem, device)
        total = (
            conversion_milliseconds(problem, device, dtype, self._layout(problem))
            + onednn.matrix_milliseconds(problem, device, dtype)
            + device.copy_milliseconds(
                onednn.moved_bytes(problem, dtype)
                + onednn.weight_elements(problem) * dtype.itemsize
            )
            + 2 * onednn.CALL * device.launch_milliseconds
        )
        if math.prod(problem.conv.kernel_size) > 1:
            # The weight's taps are brought in front of its channels.
            if not onednn.weight_lies_last(problem):
                weight = onednn.weight_elements(problem)
                total += onednn.copy_milliseconds(device, weight, dtype, dtype)
            total += onednn.copy_milliseconds(device, problem.output_elements, dtype, dtype)
        return total

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _MatrixProduct(problem, computing_dtype(problem, device), self._layout(problem))
