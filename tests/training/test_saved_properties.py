"""Files of tensors: what is written is read; whatever bits are wrong, the same is read or it is refused."""
import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_lab.training import saved
from fusion_lab.training.files import UserError
from fusion_lab.training.saved import read_saved, write_saved
from tests.properties import cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool)


@st.composite
def tensors(draw):
    """Also views of others, transposed ones and such without elements."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(DTYPES))
    whole = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    kind = draw(st.sampled_from(["whole", "part", "turned", "spread"]))
    if kind == "whole" or not shape:
        return whole
    return dict(part=whole[1:], turned=whole.transpose(0, -1), spread=whole[None].expand(3, *shape))[kind]


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2 ** 60, 2 ** 60), st.text(max_size=5),
                   st.floats(allow_nan=False), tensors())
CONTENTS = st.dictionaries(st.text(max_size=5), st.recursive(VALUES, lambda part: st.one_of(
    st.lists(part, max_size=3), st.dictionaries(st.text(max_size=5), part, max_size=3)), max_leaves=6),
    max_size=4).filter(lambda content: "digest" not in content)


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@cases(60)
@given(CONTENTS)
def test_properties_of_what_is_written(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "written.pt"
    write_saved(path, content)
    found = read_saved(path)
    assert found.pop("digest") == saved.digest(content) and same(found, content)


def a_file():
    generator = torch.Generator().manual_seed(0)
    content = dict(format="x", step=3, names=["a", "b"], model={
        name: torch.randn(3, 5, generator=generator) for name in ("one", "two")})
    content["digest"] = saved.digest(content)
    file = io.BytesIO()
    torch.save(content, file)
    return content, file.getvalue()


CONTENT, WHOLE = a_file()
STRUCTURE = [at for at in range(len(WHOLE)) if any(WHOLE[at:at + 40].find(mark) >= 0 or WHOLE[
    max(0, at - 60):at + 4].find(mark) >= 0 for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6"))]
PICKLE = range(WHOLE.index(b"data.pkl"), WHOLE.index(b"PK\3\4", 4))  # plain values, and which tensor is which
PLACES = st.one_of(st.sampled_from(STRUCTURE), st.sampled_from(PICKLE), st.integers(0, len(WHOLE) - 1))
CHANGES = st.lists(st.tuples(PLACES, st.integers(1, 255)), min_size=1, max_size=3)


@cases(200)
@given(CHANGES, st.one_of(st.none(), st.integers(0, len(WHOLE))), st.integers(-1, 1))
def test_properties_of_what_is_damaged(tmp_path_factory, changes, end, more):
    path, damaged = tmp_path_factory.getbasetemp() / "damaged.pt", bytearray(WHOLE)
    for at, bits in changes:
        damaged[at] ^= bits
    path.write_bytes(damaged[:end] + max(0, more) * b"\0")
    try:
        found = read_saved(path)
    except UserError as error:
        assert str(error).startswith(f"checkpoint {path}: ") and str(error).isprintable()
    else:
        assert same(found, CONTENT)
