"""Triton's interpreter, as tests need it."""
import torch
import triton.language as tl


def mend():
    """In Triton 3.6 to 3.9 the interpreter's products multiply the bit patterns of bfloat16
    (triton-lang/triton#11584), and its casts to bfloat16 cut off what GPUs round. Before 3.9 it cannot make a
    constant of bfloat16."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    product, cast = builder.create_dot, builder.cast_impl

    def wide(tensor):
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        bits = tensor.data.view("uint16").astype("uint32") << 16
        return handle(bits.view("float32"), tl.float32)

    def cast_rounded(self, tensor, dtype):
        if (tensor.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, tensor, dtype)
        rounded = torch.tensor(tensor.data.copy()).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view("uint16"), tl.bfloat16)
    builder.create_dot = lambda self, a, b, *r: product(self, wide(a), wide(b), *r)
    builder.cast_impl = cast_rounded
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)
