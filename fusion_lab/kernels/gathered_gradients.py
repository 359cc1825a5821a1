"""A pass of torch.compile: gradients of weights, products left^T right of few numbers each from many
positions, become one call of weight_gradients.py for a graph; sums of what programs of other kernels leave,
gradients of biases and norms, one call of sums.py. Whatever waits for them in the graph, its results, can
wait: so all stand at its end.

Products that read much are bound by memory, and the library's are as good: they stay where they are, and
what they read is freed behind them. What is to be added up lies in memory until then, so that much of it is
added up where it is.
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

from fusion_lab.kernels import sums, weight_gradients
from fusion_lab.kernels.triton_parts import NAMESPACE

aten = torch.ops.aten
# What may stand between a gradient and the graph's results.
HANDED_ON = {operator.getitem, aten.clone.default, aten.permute.default, aten.reshape.default,
             aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
             aten.t.default, aten.view.default, torch.ops.prims.convert_element_type.default}
# Products that are gathered: of what their widths are multiples, else loads are narrow; positions, fewer are
# not worth a wait; bytes that one reads, more are as fast in a launch of their own; numbers of its result.
ALIGNED, LEAST_POSITIONS, MOST_BYTES, MOST_NUMBERS = 16, 2048, 48 << 20, 1 << 20
MOST_TO_ADD_UP = 128 << 20  # bytes of all that is to be added up


@dataclass(frozen=True)
class GatheredGradients(CustomGraphPass):
    """The pass, for graphs on devices of this type: whether it gathers products and sums. Two are equal, so
    that models share compiled code."""
    products: bool
    sums: bool
    device: str = "cuda"

    def uuid(self):
        """What compiled code is found again by, beside its graph."""
        return get_hash_for_files((__file__, sums.__file__, weight_gradients.__file__), str(self))

    def __call__(self, graph):
        if self.products:
            self.gather_products(graph)
        for dtype, found in self.summed(graph).items() if self.sums else ():
            if len(found) > 1:
                gather(graph, found, sums.GATHERED_OP, [node.args[0] for node in found], dtype)
        make_known(graph)

    def gather_products(self, graph):
        groups = defaultdict(list)
        for product in graph.find_nodes(op="call_function", target=aten.mm.default):
            if (operands := self.operands(product)) and only_handed_on(product):
                groups[product.meta["val"].dtype].append((product, *operands))
        for found in groups.values():
            if len(found) > 1:
                found.sort(key=lambda each: -value(each[1]).shape[0])  # long ones first
                products, *operands = map(list, zip(*found, strict=True))
                gather(graph, products, weight_gradients.OP, *operands)

    def summed(self, graph):
        """{dtype: the sums that can be gathered}, long ones first; of all in the graph the smallest."""
        found, room = [], MOST_TO_ADD_UP
        for node in graph.find_nodes(op="call_function", target=sums.OP):
            parts = value(node.args[0])
            if (all(isinstance(n, int) for n in parts.shape) and parts.device.type == self.device
                    and only_handed_on(node)):
                found.append((parts.numel() * parts.element_size(), len(found), node))
        groups = defaultdict(list)
        for size, _, node in sorted(found):
            room -= size
            if room >= 0:
                groups[value(node).dtype].append(node)
        return {dtype: sorted(nodes, key=lambda node: -len(value(node.args[0])))
                for dtype, nodes in groups.items()}

    def operands(self, product):
        """left and right of a product that can be gathered, else None."""
        turned, right = product.args
        if turned.target not in (aten.permute.default, aten.t.default):
            return None
        left, tensors = turned.args[0], [value(node) for node in (turned.args[0], right)]
        positions, wide = tensors[0].shape[0], value(product).numel()
        numbers = [*(n for t in tensors for n in t.shape), *(t.stride(0) for t in tensors)]
        fits = (all(isinstance(n, int) for n in numbers)  # no symbolic sizes
                and value(turned).stride() == tensors[0].stride()[::-1]
                and all(t.device.type == self.device and t.dtype in weight_gradients.DTYPES
                        and t.stride(1) == 1 and t.stride(0) % ALIGNED == t.shape[1] % ALIGNED == 0
                        for t in tensors)
                and positions >= LEAST_POSITIONS and wide <= MOST_NUMBERS
                and sum(t.numel() * t.element_size() for t in tensors) <= MOST_BYTES)
        return (left, right) if fits else None


def make_known(graph):
    """Tell the compiler of our ops in the graph, as it does itself when it meets one. But up to torch 2.12 it
    then writes, for a log that nobody reads, the op's arguments, what these were made of, and so on: that
    takes minutes where backward makes again what forward did not keep."""
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


def gather(graph, found, op, *given):
    """Replace the nodes found by one call op(*given) at the end, with their results behind each other."""
    def call(target, *arguments):
        node = graph.call_function(target, arguments)
        node.meta["val"] = target(*map_arg(arguments, value))
        return node
    with graph.inserting_before(graph.output_node()):
        together, end = call(op, *given), 0
        for node in found:
            size = list(value(node).shape)
            begin, end = end, end + math.prod(size)
            part = call(aten.slice.Tensor, together, 0, begin, end)
            node.replace_all_uses_with(call(aten.view.default, part, size))
            graph.erase_node(node)
    stable_topological_sort(graph)
