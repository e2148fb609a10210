"""What choosing a kernel depends on of a device: a record, which may be of one that is not here."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusedconv import _C
from fusedconv.precision import Precision


@dataclass(frozen=True)
class Device:
    """A device as ``supports`` and ``cost`` see it; they touch no device themselves.

    ``type`` is torch's ("cuda", "cpu", ...), ``index`` its ordinal; ``architecture`` is a CUDA
    device's compute capability times ten, 0 elsewhere. ``shared_bytes`` is what one block may have,
    ``clock_hertz`` the highest of the multiprocessors. Rates are per second: ``copy_bytes`` of a
    large copy, reads and writes together, ``dram_bytes`` what the memory's pins give,
    ``tf32_flops``, ``fp16_flops`` and ``bf16_flops`` of dense products on the tensor cores as the
    data sheet has them (of the vector units where there are none), ``fp32_flops`` of the vector
    units. A processor's are those of its library's convolutions, emulated where it has no
    instructions for 16 bits; ``product_flops`` those of its matrix products in float32, which are
    another library's; ``vector_bytes`` are of its vectors where they are known.
    ``launch_seconds`` is what one kernel costs where the device waits for the processor, a third of
    what a call of an operator costs.
    """

    type: str
    name: str
    index: int = 0
    architecture: int = 0
    multiprocessors: int = 0
    shared_bytes: int = 0
    l2_bytes: int = 0
    clock_hertz: float = 0.0
    dram_bytes: float = 0.0
    copy_bytes: float = 0.0
    fp32_flops: float = 0.0
    tf32_flops: float = 0.0
    fp16_flops: float = 0.0
    bf16_flops: float = 0.0
    launch_seconds: float = 0.0
    product_flops: float = 0.0
    vector_bytes: int = 0

    @property
    def compiled(self) -> _C.Device:
        """What the compiled kernels' configurations take."""
        return _C.Device(
            architecture=self.architecture,
            multiprocessors=self.multiprocessors,
            shared_bytes=self.shared_bytes,
            l2_bytes=self.l2_bytes,
            dram_bytes_per_second=self.dram_bytes,
        )

    def tensor_flops(self, precision: Precision) -> float:
        """Dense products a second in the data sheet's terms: three of TF32 make one of fp32."""
        if precision in ("fp16", "bf16"):
            return self.fp16_flops if precision == "fp16" else self.bf16_flops
        return self.tf32_flops if precision == "tf32" else self.tf32_flops / 3

    def copy_milliseconds(self, num_bytes: float) -> float:
        """A pass over memory that moves so many bytes, reads and writes together."""
        return num_bytes / self.copy_bytes * 1e3

    @property
    def launch_milliseconds(self) -> float:
        return self.launch_seconds * 1e3

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.architecture})" if self.architecture else self.name


#: Operations that a multiprocessor's tensor cores finish a clock, by compute capability: 16-bit
#: operands, sums in float32 (the architectures' white papers). TF32 takes twice as long.
_FLOPS_PER_CLOCK = {
    70: 1024,
    75: 1024,
    80: 2048,
    86: 512,
    87: 1024,
    89: 512,
    90: 4096,
    100: 8192,
    120: 512,
}
_NEWEST = 90

#: Of a kernel launch, and of an operator call that a processor prepares.
_LAUNCH_SECONDS = 4e-6

#: The share of the memory's pins that a large copy reaches; measured on an H200.
_COPY_SHARE = 0.895


def cuda_device(
    name: str,
    architecture: int,
    multiprocessors: int,
    *,
    clock_megahertz: float,
    dram_gigabytes: float,
    l2_megabytes: float,
    shared_kibibytes: int,
    index: int = 0,
) -> Device:
    """A CUDA device from what its data sheet says; rates follow from clock, width and memory."""
    clock = clock_megahertz * 1e6
    per_clock = _FLOPS_PER_CLOCK.get(architecture, _FLOPS_PER_CLOCK[_NEWEST])
    fp16 = per_clock * multiprocessors * clock
    fp32 = (128 if architecture >= 86 else 64) * 2.0
    return Device(
        type="cuda",
        name=name,
        index=index,
        architecture=architecture,
        multiprocessors=multiprocessors,
        shared_bytes=shared_kibibytes << 10,
        l2_bytes=int(l2_megabytes * (1 << 20)),
        clock_hertz=clock,
        dram_bytes=dram_gigabytes * 1e9,
        copy_bytes=dram_gigabytes * 1e9 * _COPY_SHARE,
        fp32_flops=fp32 * multiprocessors * clock,
        # Before 8.0 the vector units do what TF32 would.
        tf32_flops=fp16 / 2 if architecture >= 80 else fp32 * multiprocessors * clock,
        fp16_flops=fp16,
        bf16_flops=fp16,
        launch_seconds=_LAUNCH_SECONDS,
    )


#: A well-known device of each compute capability, for problems on devices that are not here.
KNOWN: dict[int, Device] = {
    device.architecture: device
    for device in (
        cuda_device("V100", 70, 80, clock_megahertz=1530, dram_gigabytes=900, l2_megabytes=6,
                    shared_kibibytes=96),
        cuda_device("T4", 75, 40, clock_megahertz=1590, dram_gigabytes=320, l2_megabytes=4,
                    shared_kibibytes=64),
        cuda_device("A100", 80, 108, clock_megahertz=1410, dram_gigabytes=2039, l2_megabytes=40,
                    shared_kibibytes=163),
        cuda_device("RTX 3090", 86, 82, clock_megahertz=1695, dram_gigabytes=936, l2_megabytes=6,
                    shared_kibibytes=99),
        cuda_device("RTX 4090", 89, 128, clock_megahertz=2520, dram_gigabytes=1008,
                    l2_megabytes=72, shared_kibibytes=99),
        cuda_device("H200", 90, 132, clock_megahertz=1830, dram_gigabytes=4800, l2_megabytes=60,
                    shared_kibibytes=227),
        cuda_device("B200", 100, 148, clock_megahertz=1965, dram_gigabytes=8000, l2_megabytes=126,
                    shared_kibibytes=227),
        cuda_device("RTX 5090", 120, 170, clock_megahertz=2407, dram_gigabytes=1792,
                    l2_megabytes=96, shared_kibibytes=99),
    )
}  # fmt: skip

#: What oneDNN asks for together, in the names of ``torch.cpu.get_capabilities``, and the bytes of
#: its vectors.
AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
AVX512_BYTES = 64
#: A processor's rates are orders of magnitude: only their ratios decide, among what runs there.
_PROCESSOR_FLOPS = 1e11
#: The rate of 16 bits over that of float32, by what the processor has for them: tiles, vectors of
#: pairs, or neither. fp16 then runs in scalar loops; both were measured with AVX-512.
_TILES, _PAIRS = 8.0, 2.0
_EMULATED_FP16, _EMULATED_BF16 = 1 / 50, 1 / 7
#: The rate of MKL's float32 products over that of oneDNN's convolutions on AMD's processors with
#: AVX-512, for which it takes generic code (says MKL_VERBOSE): 212 and 480 GFLOP/s were measured on
#: two cores of an EPYC.
_FOREIGN_PRODUCTS = 0.44


def processor(capabilities: Mapping[str, object]) -> Device:
    """A processor with the instructions that ``capabilities`` marks as true, and the "cpu_name",
    under the names that ``torch.cpu.get_capabilities`` has for them."""

    def rate(tiles: str, pairs: str, emulated: float) -> float:
        if capabilities.get("amx_tile") and capabilities.get(tiles):
            return _TILES * _PROCESSOR_FLOPS
        return (_PAIRS if capabilities.get(pairs) else emulated) * _PROCESSOR_FLOPS

    wide = all(map(capabilities.get, AVX512))
    foreign = wide and str(capabilities.get("cpu_name", "")).startswith("AMD")
    mkl = torch.backends.mkl.is_available()
    return Device(
        type="cpu",
        name="processor",
        copy_bytes=1e10,
        fp32_flops=_PROCESSOR_FLOPS,
        product_flops=(_FOREIGN_PRODUCTS if foreign and mkl else 1.0) * _PROCESSOR_FLOPS,
        tf32_flops=_PROCESSOR_FLOPS,
        fp16_flops=rate("amx_fp16", "avx512_fp16", _EMULATED_FP16),
        bf16_flops=rate("amx_bf16", "avx512_bf16", _EMULATED_BF16),
        launch_seconds=1e-6,
        vector_bytes=AVX512_BYTES if wide else 0,
    )


@functools.cache
def processor_name() -> str:
    """This machine's, as its maker calls it."""
    # Linux tells platform.processor() the architecture, or nothing. Of many processors the file
    # takes long to be read as a whole.
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _capabilities() -> Mapping[str, object]:
    query = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        known: Mapping[str, object] = query()
    else:
        # Not every version of torch has the query; without it 16 bits count as emulated.
        known = dict.fromkeys(AVX512, torch.backends.cpu.get_cpu_capability() == "AVX512")
    return {"cpu_name": processor_name(), **known}


#: This machine's.
PROCESSOR = processor(_capabilities())


def instruction_set() -> str:
    """That of the processor's kernels. Raises ValueError where FUSEDCONV_INSTRUCTION_SET names
    none that there is."""
    name: str = _C.cpu.instruction_set()
    return name


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    architecture = properties.major * 10 + properties.minor
    likely = KNOWN.get(architecture, KNOWN[_NEWEST])
    known = cuda_device(
        properties.name,
        architecture,
        properties.multi_processor_count,
        clock_megahertz=likely.clock_hertz / 1e6,
        dram_gigabytes=likely.dram_bytes / 1e9,
        l2_megabytes=properties.L2_cache_size / (1 << 20),
        shared_kibibytes=likely.shared_bytes >> 10,
        index=index,
    )
    if not _C.build["cuda"]:
        return known
    queried = _C.query_device(index)
    return replace(
        known,
        shared_bytes=queried.shared_bytes,
        l2_bytes=queried.l2_bytes,
        dram_bytes=queried.dram_bytes_per_second,
        copy_bytes=queried.dram_bytes_per_second * _COPY_SHARE,
    )


@functools.lru_cache(maxsize=64)
def device_record(device: torch.device) -> Device:
    """The record of one of torch's devices."""
    if device.type == "cuda":
        return _cuda_device(device.index or 0)
    if device.type == "cpu":
        return PROCESSOR
    return replace(PROCESSOR, type=device.type, name=device.type, index=device.index or 0)
