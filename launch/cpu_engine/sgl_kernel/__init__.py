"""Stand-in for SGLang's compiled kernels on a CPU that has none of them.

SGLang imports names from `sgl_kernel` when its modules load, and on a CPU without AMX computes with
its own torch code instead of calling them. The engine puts this folder before the installed
package on `sys.path` when the device is "cpu". Functional, not fast.

Must not know: ppo, sharding.
"""

import functools

import torch

__version__ = "0.4.10"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is a compiled kernel; the CPU engine has none")

    return kernel


# A CUDA build of torch names CUDA here even on a machine without a driver, and the engine then
# fails to synchronize it.
_get_device_module = torch.get_device_module


@functools.wraps(_get_device_module)  # torch.compile looks for what it wraps
def _device_module(device=None):
    return _get_device_module("cpu" if device is None else device)


torch.get_device_module = _device_module
