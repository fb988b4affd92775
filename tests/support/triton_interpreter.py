"""Makes Triton's interpreter work beside the numpy that is installed, and quicker; import it before launches.

Triton 3.6.0 keeps scalars as arrays of one element and converts them with `int()`, which numpy 2.4 refuses
(triton-lang/triton issue 9171, mended in 3.7). It also patches the whole language anew whenever one function
calls another, and computes every sum of integers twice, for overflows: together three quarters of the time of
a test. Does nothing where kernels are compiled for a GPU.
"""

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patched_modules: set[str] = set()


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    module = function.fn.__module__
    if (
        module not in _patched_modules
    ):  # it stays patched: nothing undoes what a call inside of a kernel patches
        interpreter._patch_lang(function.fn)
        _patched_modules.add(module)
    return function.rewrite()(*args, **kwargs)


object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)  # it is frozen
interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpretedFunction.__call__ = _call_device_function
