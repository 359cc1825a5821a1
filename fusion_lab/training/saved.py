"""Files that torch.save() wrote. torch.load() looks at no checksum, and takes for a directory what one wrong
bit calls one: its tensors are memory that nobody wrote. So all that it read is checked here."""
import hashlib
import zipfile
import zlib
from functools import partial

import torch

from fusion_lab.training.files import UserError, printable, write_atomically
from fusion_lab.training.reading import open_regular

WRITTEN_FLAGS = 0x808  # of torch's zip entries: sizes follow the content, names are UTF-8


def write_saved(path, content):
    """Write a dict for read_saved(), with a digest of its tensors, whole or not at all."""
    write_atomically(path, partial(torch.save, {**content, "digest": digest(content)}))


def read_saved(path, name="checkpoint"):
    """What torch.save() wrote, tensors and plain values; UserError if the file cannot be read or is damaged.
    Messages call such a file by the name."""
    try:
        with open_regular(path) as file:
            entries = zipfile.ZipFile(file)
            damage = next(damaged_entries(entries), None)
            if damage is None:
                file.seek(0)
                saved = torch.load(file, map_location="cpu", weights_only=True)
                damage = next(unlike_its_file(saved, entries), None)
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror or error}") from None
    except Exception:  # a damaged file raises whatever its first bad byte leads to
        raise UserError(f"{name} {path}: damaged or not a {name}") from None
    if damage:
        raise UserError(f"{name} {path}: damaged: {damage}")
    return saved


def say_if_older(saved, path):
    """Say so, where what was read has no digest."""
    if "digest" not in saved:
        print(f"{printable(path)} has no digest, as older versions wrote it: only checksums were compared")


def damaged_entries(entries):
    """What is wrong in a zip file that torch.save() is said to have written, before anything is loaded."""
    for entry in entries.infolist():
        if entry.external_attr or entry.compress_type != zipfile.ZIP_STORED \
                or entry.compress_size != entry.file_size or entry.flag_bits & ~WRITTEN_FLAGS:
            yield f"its part {entry.filename} is not as torch.save writes one"
    if damaged := entries.testzip():
        yield f"the checksum of its part {damaged} is wrong"


def unlike_its_file(saved, entries):
    """What was loaded otherwise than it lies in the file, or than it was when the digest was made."""
    written = {(entry.file_size, entry.CRC) for entry in entries.infolist()}
    found = tensors_in(saved)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in found.values()
                if (tensor.device.type, tensor.layout) == ("cpu", torch.strided) and tensor.numel()}
    for storage in storages.values():
        if (storage.nbytes(), zlib.crc32(memory(storage))) not in written:
            yield "a tensor is not what lies in the file"
    if isinstance(saved, dict) and "digest" in saved and saved["digest"] != digest(saved):
        yield "its tensors are not those of its digest"


def memory(storage):
    """The bytes of a tensor's storage, as what hashes take."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def tensors_in(content):
    """{path: tensor} of all tensors in dicts and lists within each other. Each container is walked once: a
    pickle can hold one within itself."""
    found, seen, left = {}, set(), [("", content)]
    while left:
        at, part = left.pop()
        if isinstance(part, torch.Tensor):
            found[at] = part
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pairs = part.items() if isinstance(part, dict) else enumerate(part)
            left += [(f"{at}/{key}", inner) for key, inner in pairs]
    return found


def digest(content):
    """A hexadecimal digest of names, types, shapes and values of all tensors in dicts and lists."""
    whole = hashlib.sha256()
    for path, tensor in sorted(tensors_in(content).items()):
        whole.update(f"{path} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(memory(tensor.detach().cpu().contiguous().clone().untyped_storage()))
    return whole.hexdigest()
