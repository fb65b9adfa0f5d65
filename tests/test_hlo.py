"""Collectives, loops and products are read off HLO texts whose answers are known."""

import pytest

from fddp.jax_internals.hlo import Array, parse
from fddp.jax_internals.hlo_collectives import find_collectives, heavy_operations

HEAD = "HloModule f, is_scheduled=true\n"


def lines_of(text):
    return {line.name: (line, home) for line, home in next(parse(text).schedules()).lines}


def heavy(text, name):
    return heavy_operations(parse(text), lines_of(text)[name][0])


def entry(*lines):
    return (
        HEAD
        + "ENTRY %main (p: f32[]) -> f32[] {\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


### Reading


def test_a_line_has_a_name_a_result_operands_and_attributes():
    text = entry(
        "%a = bf16[2,3]{1,0:T(8,128)} parameter(0)",
        "ROOT %both.1 = (bf16[2,3]{1,0}, /*index=1*/s32[]) fusion(%a, %a), kind=kLoop, "
        "calls=%body.2, "
        'metadata={op_name="jit(f)/bucket3/psum" stack_frame_id=2}',
    )
    text = text.replace(
        "ENTRY", "%body.2 (p: bf16[2,3]) -> bf16[2,3] {\n  %p = bf16[2,3] parameter(0)\n}\n\nENTRY"
    )
    line, _ = lines_of(text)["both.1"]
    assert (line.opcode, line.operands, line.calls) == ("fusion", ("a", "a"), ("body.2",))
    assert line.result == (Array("bf16", (2, 3)), Array("s32", ()))
    assert [array.nbytes for array in line.result] == [12, 4]
    assert line.op_name == "jit(f)/bucket3/psum"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("f32", 40),
        ("bf16", 20),
        ("f8e4m3fn", 10),
        ("s4", 5),
        ("c64", 80),
        ("pred", 10),
        ("token", 0),
    ],
)
def test_an_array_takes_so_many_bytes(dtype, nbytes):
    assert Array(dtype, (10,)).nbytes == nbytes


def test_a_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("not HLO")


### Operations


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("f32[2,2] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 1),
        ("f32[2,2] convolution(%x, %x), dim_labels=bf_io->bf", 1),
        ('(f32[2,2], s8[64]) custom-call(%x, %x), custom_call_target="__cublas$gemm"', 1),
        ('(f32[2,2], u8[0]) custom-call(%x, %x), custom_call_target="__cudnn$convForward"', 1),
        ('f32[2,2] custom-call(%x, %x), custom_call_target="callback"', 0),
        ("f32[2,2] add(%x, %x)", 0),
    ],
)
def test_products_and_convolutions_are_heavy_also_as_library_calls(line, count):
    assert heavy(entry("%x = f32[2,2] parameter(0)", f"%line = {line}"), "line") == count


PRODUCT = """%product (a: f32[2,2], b: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  %b = f32[2,2] parameter(1)
  ROOT %dot = f32[2,2] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""


def with_product(*lines):
    return entry(*lines).replace("ENTRY", PRODUCT + "ENTRY")


def test_a_fusion_takes_what_is_in_it_and_a_loop_that_in_each_round():
    text = with_product(
        "%x = f32[2,2] parameter(0)",
        "%fusion = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
        "%while = f32[2,2] while(%x), condition=%product, body=%product, "
        'backend_config={"known_trip_count":{"n":"12"}}',
    )
    assert (heavy(text, "fusion"), heavy(text, "while")) == (1, 12)


### Flights

START = "all-reduce-start(%x), channel_id=1, to_apply=%add"


def flying(start="", between="", done="%done = f32[2,2] all-reduce-done(%start)"):
    return with_product(
        "%x = f32[2,2] parameter(0)",
        f"%start = f32[2,2] {START}{start}",
        between or "%other = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
        done,
        "%late = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
    )


def test_what_stands_between_start_and_done_runs_beside_an_all_reduce():
    (collective,) = find_collectives(parse(flying()))
    assert (collective.asynchronous, collective.heavy, collective.nbytes) == (True, 1, 16)
    (collective,) = find_collectives(parse(flying(between="%copy = f32[2,2] copy(%x)")))
    assert (collective.asynchronous, collective.heavy) == (True, 0)


def test_an_all_reduce_that_is_marked_synchronous_hides_nothing():
    marked = ', backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
    (collective,) = find_collectives(parse(flying(start=marked)))
    assert (collective.asynchronous, collective.heavy) == (False, 0)


def test_the_order_of_a_program_without_a_schedule_says_nothing():
    (collective,) = find_collectives(parse(flying().replace(", is_scheduled=true", "")))
    assert not collective.asynchronous


def test_merged_all_reduces_are_one_collective_of_several_arrays():
    text = entry(
        "%x = f32[8] parameter(0)",
        "%y = bf16[4] parameter(1)",
        "%both = (f32[8], bf16[4]) all-reduce(%x, %y), to_apply=%add",
    )
    (collective,) = find_collectives(parse(text))
    assert (len(collective.arrays), collective.nbytes, collective.asynchronous) == (
        2,
        32 + 8,
        False,
    )


def test_an_all_reduce_in_a_loop_or_a_general_async_pair_is_found():
    text = entry(
        "%x = f32[8] parameter(0)",
        "%begin = ((f32[8]), f32[8]) async-start(%x), calls=%wrapped",
        "%end = f32[8] async-done(%begin)",
        "%while = f32[8] while(%x), condition=%cond, body=%wrapped",
    ).replace(
        "ENTRY",
        "%wrapped (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        "  ROOT %sum = f32[8] all-reduce(%p), to_apply=%add\n}\n\nENTRY",
    )
    assert [
        (collective.asynchronous, collective.loops) for collective in find_collectives(parse(text))
    ] == [
        (True, 0),
        (False, 1),
    ]
