"""A pass of torch.compile that gathers small gradients into few launches at the end of a graph.

Gradients of weights are products left^T right: few numbers each, from many positions. All of a graph become
one call of weight_gradients.py. The sums of other kernels' partial sums, gradients of biases and norms,
become one call of sums.py. Only the graph's results wait for them, so both calls can stand at its end.

Products that read much are bound by memory, and the library's are as good. They stay where they are, and what
they read is freed after them. Partial sums lie in memory until they are added up. So only MOST_TO_ADD_UP
bytes of them are gathered, the smallest first.
"""
import math
import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch._inductor import lowering
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._library.utils import get_layout_constraint_tag
from torch.fx.node import map_arg

from evoformer_kernels.common import NAMESPACE
from evoformer_kernels.precision import HALF
from evoformer_kernels.reductions import sums, weight_gradients

aten = torch.ops.aten
# What may stand between a gradient and the graph's results.
HANDED_ON = {operator.getitem, aten.clone.default, aten.permute.default, aten.reshape.default,
             aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
             aten.t.default, aten.view.default, torch.ops.prims.convert_element_type.default}
# Which products are gathered:
ALIGNED = 16  # widths and strides are multiples of this, else loads are narrow
LEAST_POSITIONS = 2048  # fewer are not worth a wait
MOST_BYTES = 48 << 20  # that one reads; more are as fast in a launch of their own
MOST_NUMBERS = 1 << 20  # of its result
MOST_TO_ADD_UP = 128 << 20  # bytes of all partial sums that are gathered


@dataclass(frozen=True)
class GatheredGradients(CustomGraphPass):
    """The pass, for graphs on devices of this type. Two with the same fields are equal, so that models share
    compiled code."""
    gathers: bool  # products and sums; or the pass only makes our operators known to the compiler
    device: str = "cuda"

    def uuid(self):
        """By what compiled code is kept, beside its graph."""
        return get_hash_for_files((__file__, sums.__file__, weight_gradients.__file__), str(self))

    def __call__(self, graph):
        if self.gathers:
            self.gather_products(graph)
            self.gather_sums(graph)
        make_known(graph)

    def gather_products(self, graph):
        """Products, by the dtype of their results."""
        groups = defaultdict(list)
        for product in graph.find_nodes(op="call_function", target=aten.mm.default):
            if (operands := self.operands(product)) and only_handed_on(product):
                groups[product.meta["val"].dtype].append((product, *operands))
        for group in groups.values():
            if len(group) > 1:
                group.sort(key=lambda each: -value(each[1]).shape[0])  # long ones first
                products, *operands = map(list, zip(*group, strict=True))
                gather(graph, products, weight_gradients.OP.op, *operands)

    def gather_sums(self, graph):
        """Sums of partial sums, by the dtype of their results."""
        for dtype, nodes in self.summed(graph).items():
            if len(nodes) > 1:
                gather(graph, nodes, sums.GATHERED_OP.op, [node.args[0] for node in nodes], dtype)

    def summed(self, graph):
        """{dtype: the sums that can be gathered}, long ones first; of all in the graph the smallest."""
        by_size, bytes_left = [], MOST_TO_ADD_UP
        for node in graph.find_nodes(op="call_function", target=sums.OP.op):
            partial_sums = value(node.args[0])
            if (all(isinstance(n, int) for n in partial_sums.shape)
                    and partial_sums.device.type == self.device and only_handed_on(node)):
                size = partial_sums.numel() * partial_sums.element_size()
                by_size.append((size, len(by_size), node))
        groups = defaultdict(list)
        for size, _, node in sorted(by_size):
            bytes_left -= size
            if bytes_left >= 0:
                groups[value(node).dtype].append(node)
        return {dtype: sorted(nodes, key=lambda node: -len(value(node.args[0])))
                for dtype, nodes in groups.items()}

    def operands(self, product):
        """left and right of a product that can be gathered, else None."""
        transposed, right = product.args
        if transposed.target not in (aten.permute.default, aten.t.default):
            return None
        left, tensors = transposed.args[0], [value(node) for node in (transposed.args[0], right)]
        positions, numbers = tensors[0].shape[0], value(product).numel()
        sizes = [*(n for t in tensors for n in t.shape), *(t.stride(0) for t in tensors)]
        fits = (all(isinstance(n, int) for n in sizes)  # no symbolic sizes
                and value(transposed).stride() == tensors[0].stride()[::-1]
                and all(t.device.type == self.device and t.dtype in HALF
                        and t.stride(1) == 1 and t.stride(0) % ALIGNED == t.shape[1] % ALIGNED == 0
                        for t in tensors)
                and positions >= LEAST_POSITIONS and numbers <= MOST_NUMBERS
                and sum(t.numel() * t.element_size() for t in tensors) <= MOST_BYTES)
        return (left, right) if fits else None


def make_known(graph):
    """Tell the compiler of our operators in the graph, as it does itself when it meets one. But up to torch
    2.12 it then writes an operator's arguments, what these were made of, and so on, for a log that nobody
    reads. That takes minutes where backward recomputes what forward did not keep."""
    for op in {node.target for node in graph.nodes}:
        if getattr(op, "namespace", None) == NAMESPACE and op not in lowering.lowerings:
            layout = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            lowering.make_fallback(op, layout, warn=False)


def value(node):
    """The fake tensor of a node."""
    return node.meta["val"]


def only_handed_on(node):
    """Whether nothing but the graph's results waits for this node."""
    return all(user.op == "output" or user.target in HANDED_ON and only_handed_on(user)
               for user in node.users)


def gather(graph, nodes, op, *given):
    """Replace these nodes by one call op(*given) at the end, which has their results one after the other,
    flat; slices of it, in their shapes, take their places."""
    def call(target, *arguments):
        node = graph.call_function(target, arguments)
        node.meta["val"] = target(*map_arg(arguments, value))
        return node
    with graph.inserting_before(graph.output_node()):
        results, end = call(op, *given), 0
        for node in nodes:
            size = list(value(node).shape)
            begin, end = end, end + math.prod(size)
            flat = call(aten.slice.Tensor, results, 0, begin, end)
            node.replace_all_uses_with(call(aten.view.default, flat, size))
            graph.erase_node(node)
    stable_topological_sort(graph)
