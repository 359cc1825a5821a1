"""The content of a file that should hold an alignment or a structure: unpacked, or refused by its name.

People hand over what a program or a server wrote. So a file of another kind is named here, with what to do
about it, before a parser that expects something else can take it for what it is not.
"""
import importlib
import re
import sys

from fusion_lab.training.errors import MISSING, UserError

STRUCTURE = "a PDB or mmCIF file with atoms"
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma"}  # first bytes: module of Python
SUFFIXES = (".gz", ".bz2", ".xz")

# How a file begins, what it is, and what to do. The first that fits counts.
KINDS = [(re.compile(pattern), what, remedy) for pattern, what, remedy in (
    (rb"\x28\xb5\x2f\xfd", "a file packed by zstd", "unpack it first"),
    (rb"PK\x03\x04", "a zip archive", "unpack it first"),
    (rb"(?s).{257}ustar", "a tar archive", "unpack it first"),
    (rb"(?i)\s*<(!doctype html|html|head|body)", "a web page, perhaps the error of a server",
     "fetch the file again"),
    (rb"\s*<", "XML", ""),
    (rb"(?s)\s*\{.{0,400}?s_m_m2io", "a Maestro file", "export it as PDB"),
    (rb"(?s)\s*\{.*unpairedMsa", "a JSON input of AlphaFold 3",
     "save the text of its unpairedMsa, with real line ends, as an .a3m file"),
    (rb"(?s).{0,300}?(dataBlocks|mmtfVersion)", "a binary structure (BinaryCIF or MMTF)",
     "fetch the .cif file"),
    (rb"\s*[\[{]", "JSON", ""),
    (rb"(?i)\s*\"?(key\W+sequence|sequence\W+key)\b", "a Boltz CSV",
     "write each sequence below a line '>name' into an .a3m file"),
    (rb"\s*\"?>[^\n]*\\n[^\n]*\n?\Z", r"an alignment whose line ends are written out as \n",
     "replace each of them by a line end"),
    (rb"\s*>[A-Z][A-Z1-9];", "a PIR file", "convert it to aligned FASTA"),
    (rb"\s*#NEXUS", "a NEXUS file", "convert it to aligned FASTA"),
    (rb"\s*\d+[ \t]+\d+[ \t]*\n", "a PHYLIP file", "convert it to aligned FASTA"),
    (rb"!!|PileUp|\s*[^>\n]{0,80}\bMSF: ", "an MSF file", "convert it to aligned FASTA"),
    (rb"HMMER\d|HHsearch|HH[A-Z]* \d", "a profile", "take the alignment that it was made from"),
    (rb"(\s|#.*\n)*SEQUENCE:", "a silent file of Rosetta", "extract its PDB files by extract_pdbs"),
    (rb"(\s|#.*\n)*@<TRIPOS>", "a MOL2 file", "export it as PDB"),
    (rb"(\s|#.*\n)*(?i:data_)|(HEADER|TITLE|COMPND|CRYST1|REMARK|EXPDTA|MODEL|SEQRES|PARENT|ATOM|HETATM)\b"
     rb"[^\n]*\n", STRUCTURE, ""))]


def called(path):
    """A file's name in messages."""
    return "standard input" if path == "-" else path


def read(path, wanted):
    """Content of a file, "-" for standard input, unpacked if it is packed, with \\n line ends and no BOM.
    wanted: STRUCTURE, or alignments.ALIGNMENT. Raises UserError where the file cannot be read or is known to
    be something else."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"{called(path)}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    path = called(path)
    data = unpacked(path, data)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not data.strip(b"\0 \t\n\v\f"):
        raise UserError(f"{path}: the file is empty")
    what, remedy = next(((what, remedy) for pattern, what, remedy in KINDS
                         if pattern.match(data.lstrip(b"\0"))), (wanted, ""))
    if what != wanted:
        raise UserError(f"{path}: this is {what}; {remedy or f'{wanted} is needed'}")
    return data


def unpacked(path, data):
    for first, module in PACKED.items():
        if data.startswith(first):
            try:
                module = importlib.import_module(module)
            except ImportError:  # a Python that was built without the library
                raise UserError(f"{path}: this Python cannot unpack {module}; unpack the file first",
                                code=MISSING) from None
            try:
                return module.decompress(data)
            except Exception:  # gzip, bz2, lzma and zlib have no error in common
                raise UserError(f"{path}: truncated or damaged; fetch the file again") from None
    return data


def begins(data):
    """The first line of a file, for a message that says that it is none of what was expected."""
    line = data.lstrip(b"\0 \t\n").split(b"\n", 1)[0][:40].decode("utf-8", "replace").replace("\t", " ")
    return repr(line) if line.isprintable() and "\ufffd" not in line else "bytes that are no text"
