"""The work of a segment: sums of operators by kind and dtype."""

from chunkc.ir.schedule import Operator
from chunkc.ir.work import Kind, Work, work_of


def op(target: str, flops: int, nbytes: int, dtype: str = "bfloat16", num_kernels: int = 1) -> Operator:
    return Operator("op", target, (), (), flops, nbytes, 0, 0, dtype=dtype, num_kernels=num_kernels)


def test_operators_of_one_kind_and_dtype_are_added_up() -> None:
    found = work_of(
        [
            op("aten.mm.default", 100, 10),
            op("aten.view.default", 0, 0, num_kernels=0),
            op("aten._scaled_dot_product_flash_attention_for_cpu.default", 40, 4),
            op("aten.mm.default", 200, 20),
            op("aten.mm.default", 7, 1, dtype="float32"),
            op("aten.add.Tensor", 0, 30),
            op("aten.add.Tensor", 0, 2, dtype="float32", num_kernels=0),
        ]
    )
    assert found == (
        Work(Kind.ATTENTION, "bfloat16", 40, 4, 1),
        Work(Kind.MATMUL, "bfloat16", 300, 30, 2),
        Work(Kind.MATMUL, "float32", 7, 1, 1),
        Work(Kind.MEMORY, "", 0, 32, 1),
    )


def test_what_does_nothing_is_left_out() -> None:
    assert work_of([op("aten.view.default", 0, 0, num_kernels=0)]) == ()
    assert work_of([]) == ()
