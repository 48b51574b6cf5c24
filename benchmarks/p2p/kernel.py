"""The copy kernel of `copy=sm`, compiled when it is needed."""

from typing import Any

from cuda.bindings import driver, nvrtc

from trainers.cuda_memory import checked

KERNEL = """
extern "C" __global__ void copy(int4* target, const int4* source, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x)
        target[i] = source[i];
}
"""


def compiled(architecture: str) -> bytes:
    """The copy kernel for an architecture such as sm_90. Raises RuntimeError with the compiler's log."""
    program = checked("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(KERNEL.encode(), b"copy.cu", 0, [], []))
    answer = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    if int(answer[0]) != 0:
        log = b" " * checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
        checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip(" \n\0")
        checked(f"nvrtcCompileProgram for {architecture} ({said})", answer)
    binary: bytes = b" " * checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
    checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def loaded(name: str, architecture: str) -> Any:
    """The copy kernel in the current context."""
    module = checked(f"cuModuleLoadData on {name}", driver.cuModuleLoadData(compiled(architecture)))
    return checked(f"cuModuleGetFunction on {name}", driver.cuModuleGetFunction(module, b"copy"))
