"""Real proteins: a multiple sequence alignment and an experimental structure, read into arrays.

    protein = load_protein("1a3a_A.a3m", "1a3a.pdb", chain="A")   # protein.msa, protein.coords
    proteins, alone = load_families("families/")                  # every NAME.a3m with its NAME.pdb

alignments.py knows the formats of alignments; containers.py unpacks files and names foreign ones. It needs
numpy, and gemmi for structures. Whatever is wrong with a file ends in a UserError of one line. Reading order:
tokens, alignments, structures, mapping one to the other, families. Letters in shapes: R alignment rows, L
query residues, C residues of a chain.
"""
import contextlib
import itertools
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fusion_lab.training.errors import MISSING, UserError
from tiny_openfold.proteins import (  # noqa: F401  for those who read files
    AMINO_ACIDS,
    GAP,
    LETTERS,
    MASK,
    TOKENS,
    UNKNOWN,
    containers,
)
from tiny_openfold.proteins.alignments import FORMATS, SYMBOLS, first_word, parse_alignment, split_suffix
from tiny_openfold.proteins.matching import align

# --- Tokens ---------------------------------------------------------------------------------------------

TOKEN_OF = np.full(256, 255, np.uint8)  # byte of an alignment -> token
TOKEN_OF[[*SYMBOLS.lower().encode()]] = TOKEN_OF[[*SYMBOLS.encode()]] = (
    [*range(20)] + 5 * [UNKNOWN] + 3 * [GAP] + [AMINO_ACIDS.index(letter) for letter in "DEC"])


def _tokens(letters):
    return TOKEN_OF[np.frombuffer(letters, np.uint8)]


def _letters(tokens):
    return "".join(LETTERS[token] for token in tokens)


@dataclass
class Protein:
    """One protein as the trainer wants it: row 0 of `msa` is the query, columns are its residues."""
    name: str
    msa: np.ndarray     # (R, L) uint8 tokens
    coords: np.ndarray  # (L, 3) float32, CB (CA for glycine), Å; NaN where the structure has none
    chain: str = ""     # the chain of the structure that was used
    numbers: tuple = ()  # (L,) residue numbers as in the structure file ("52A"), "" where it has no residue;
    # without a structure they count from 1
    backbone: np.ndarray | None = None  # (L, 4, 3) N, CA, C, O, Å; NaN where the structure has none
    left_out: int = 0   # columns of the alignment in which the query has a gap
    remarks: tuple = ()  # what else a user should know of the files, a sentence each

    def __post_init__(self):
        self.numbers = self.numbers or tuple(map(str, range(1, self.length + 1)))

    @property
    def length(self):
        return self.msa.shape[1]

    @property
    def sequence(self):
        return _letters(self.msa[0])


# --- Alignments -----------------------------------------------------------------------------------------

def _query_columns(path, names, rows, number):
    """Rows as bytes -> (R, L) tokens: row `number` moved to the front, the columns of its residues kept."""
    msa = _tokens(b"".join(rows)).reshape(len(rows), -1)
    residues = msa[number] != GAP
    if not residues.any():
        raise UserError(f"{path}: the query, row {number + 1} ({names[number][:60]!r}), has no residues")
    return msa[np.r_[number, 0:number, number + 1:len(rows)]][:, residues]


# --- Structures -----------------------------------------------------------------------------------------

BROKEN = 4.5        # Å between successive CA atoms; 3.8 in a trans, 2.9 in a cis peptide
ONE_PLACE = 2.0     # Å between CA atoms of one residue, at most; those of neighbours are 2.9 apart
# What a structure says of an experiment, what those say that a program predicted, and words that may mean it.
EXPERIMENT = re.compile(rb"(?mi)^(EXPDTA\b(?! *THEOR)|_exptl\.method\b(?! +.?THEOR)"
                        rb"|REMARK   2 RESOLUTION\. +\d|_refine\.|_em_\w+\.|_reflns\.)")
PREDICTION = re.compile(rb"(?mi)^(PARENT +N/A|data_AF-|_ma_(model|qa)_\w+\.|EXPDTA|_exptl\.method)")
HINTS = re.compile(rb"(?mi)^(HEADER|TITLE|REMARK|COMPND) .*(predicted|alphafold|esmfold|model created with)")
MIN_IDENTITY = 0.9  # of two sequences said to be one: point mutants pass, homologues do not


@dataclass
class Chain:
    """A protein chain: its sequence (SEQRES or mmCIF entity where the file has one) and what was observed."""
    name: str
    sequence: np.ndarray  # (C,) uint8 tokens
    coords: np.ndarray    # (C, 3) float32, CB (CA for glycine), Å; NaN where there is none
    seen: np.ndarray      # (C,) bool, residue is in the model, perhaps without its CB
    breaks: np.ndarray    # (seen residues + 1,) bool, the chain is open before this one; the ends are too
    numbers: np.ndarray   # (C,) str, the file's residue numbers with insertion codes; "" where not seen
    backbone: np.ndarray  # (C, 4, 3) float32, N, CA, C, O, Å; NaN where there is none
    predicted: str = ""  # "is" or "may be": the file holds a prediction, not an experiment
    twice: str = ""      # a residue number that two residues have, so that one of them is lost


def split_structure_argument(argument):
    """'FILE:CHAIN' -> (FILE, CHAIN); 'FILE' -> (FILE, None). A file that has this very name is that file."""
    path, colon, chain = str(argument).rpartition(":")
    if not path or os.path.exists(argument) or "/" in chain or "." in chain:
        return str(argument), None
    return path, chain or None


def _parse_structure(path):
    """PDB or mmCIF, told apart by content -> (gemmi.Structure with entities and label_seq set, Chain's
    `predicted`)."""
    try:
        import gemmi
    except ImportError:
        raise UserError("reading structures needs gemmi: pip install gemmi", code=MISSING) from None
    data = containers.read(path, containers.STRUCTURE)
    text = re.sub(rb"[^\n\r\t -~]", b"?", data)  # PDB columns stay
    try:
        if re.match(rb"(\s|#.*\n)*data_", text, re.IGNORECASE):
            blocks = list(gemmi.cif.read_string(text.decode()))
            atoms = [block for block in blocks if block.find_values("_atom_site.Cartn_x")]
            structure = gemmi.make_structure_from_block((atoms or blocks)[0])
        else:
            structure = _read_pdb(gemmi, text)
        structure.merge_chain_parts()
        structure.setup_entities()
        structure.assign_label_seq_id()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # what gemmi raises on damaged files
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not a readable PDB or mmCIF file: {reason}") from None
    if not len(structure) or not structure[0].count_atom_sites():
        if any(known.fits(data) for known in FORMATS):
            raise UserError(f"{path}: this is an alignment; {containers.STRUCTURE} is needed")
        raise UserError(f"{path}: not {containers.STRUCTURE}; it begins with {containers.begins(data)}")
    return structure, _predicted(data, structure)


def _read_pdb(gemmi, text):
    """gemmi.Structure. Where its last columns are no elements and charges, as in old files that number lines
    there, they do not count."""
    with contextlib.suppress(RuntimeError):
        return gemmi.read_pdb_string(text)
    return gemmi.read_pdb_string(text, max_line_length=72)


def _predicted(data, structure):
    """Chain's `predicted`: "is" where the file says so, "may be" where it hints at it, or all atoms of a
    residue have one B-factor of 0 to 100, other residues another one, as pLDDT is written. What only
    experiments find weighs more than such a guess: a crystal, waters, atoms that are there in part."""
    if EXPERIMENT.search(data) or PREDICTION.search(data):
        return "" if EXPERIMENT.search(data) else "is"
    residues = [residue for chain in structure[0] for residue in chain]
    atoms = [atom for residue in residues for atom in residue]
    if structure.cell.is_crystal() or any(residue.is_water() for residue in residues) or any(
            atom.has_altloc() or 0 < atom.occ < 1 or not 0 <= atom.b_iso <= 100 for atom in atoms):
        return ""
    factors = [{atom.b_iso for atom in residue} for residue in residues if len(residue) > 1]
    like_plddt = all(len(of_one) == 1 for of_one in factors) and len(set().union(*factors)) > 1
    return "may be" if like_plddt or HINTS.search(data) else ""


def read_structure(path, chain=None):
    """PDB or mmCIF file, also packed -> list of Chain: the protein chains of its first model, in its order.

    `chain` (auth_asym name in mmCIF) keeps that one. Ligands, nucleic acids and waters are left out; modified
    residues count as what they were made from. Of alternate locations, and alternate residues in one place,
    the highest occupancy is taken. A residue without CB has no coordinates; only glycine has CA instead.
    Raises UserError: unreadable, no protein, no such chain, no gemmi.
    """
    structure, predicted = _parse_structure(path)
    chains = [_read_chain(structure, model_chain) for model_chain in structure[0]]
    chains = [replace(candidate, predicted=predicted) for candidate in chains if candidate is not None]
    if not chains:
        raise UserError(f"{path}: none of its {len(structure[0])} chains is a protein")
    chosen = [candidate for candidate in chains if chain in (None, candidate.name)]
    if not chosen:
        listed = ", ".join(f"{c.name or '(no name)'} ({c.seen.sum()} residues)" for c in chains[:12])
        raise UserError(f"{path}: no protein chain {chain!r}; it has {listed}{', ...' * (len(chains) > 12)}")
    for candidate in chosen:
        if candidate.twice:
            raise UserError(f"{path}: chain {candidate.name!r} has two residues {candidate.twice}: its "
                            "numbers begin again; renumber them, or give the second part another chain name")
    return chosen


def _read_chain(structure, model_chain):
    """gemmi chain -> Chain, or None where it is not a protein."""
    import gemmi
    peptide = (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD)
    polymer = model_chain.get_polymer()
    if not len(polymer):
        return None
    entity = structure.get_entity_of(polymer)
    stated = entity.polymer_type if entity else gemmi.PolymerType.Unknown
    if (polymer.check_polymer_type() if stated == gemmi.PolymerType.Unknown else stated) not in peptide:
        return None
    parents = {modified.res_id.name: modified.parent_comp_id for modified in structure.mod_residues}

    def tokens(names):
        codes = ((gemmi.find_tabulated_residue(name).one_letter_code,
                  gemmi.find_tabulated_residue(parents.get(name, "")).one_letter_code) for name in names)
        return _tokens("".join(next(filter(str.isalpha, pair), "X") for pair in codes).encode())

    sites = []  # residues of which a molecule has one or the other
    for residue in polymer:
        if sites and residue.seqid == sites[-1][0].seqid and not _apart([residue, sites[-1][0]]):
            sites[-1].append(residue)
        else:
            sites.append([residue])
    residues = [max(site, key=lambda r: max((atom.occ for atom in r), default=0)) for site in sites]
    twice = next((str(residue.seqid) for residue in polymer if _apart([residue])), "")
    observed = tokens([residue.name for residue in residues])
    full = tokens([gemmi.Entity.first_mon(name) for name in (entity.full_sequence if entity else [])])
    labels = np.array([residue.label_seq or 0 for residue in residues]) - 1
    valid = len(full) and labels.min() >= 0 and labels.max() < len(full) and (np.diff(labels) > 0).all()
    if not valid or (full[labels] == observed).mean() < MIN_IDENTITY:  # no SEQRES, or not of this chain
        full, labels = observed.copy(), np.arange(len(observed))
    full[labels] = observed

    alpha = np.stack([_position(residue, "CA") for residue in residues])
    beta = np.stack([_position(residue, "CB") for residue in residues])
    coords = np.full((len(full), 3), np.nan, np.float32)
    coords[labels] = np.where((observed == AMINO_ACIDS.index("G"))[:, None], alpha, beta)
    close = np.linalg.norm(np.diff(alpha, axis=0), axis=1) < BROKEN  # False where a CA is missing
    seen = np.isin(np.arange(len(full)), labels)
    numbers, backbone = np.full(len(full), "", "<U12"), np.full((len(full), 4, 3), np.nan, np.float32)
    numbers[labels] = [str(residue.seqid) for residue in residues]
    backbone[labels] = [[_position(residue, name) for name in ("N", "CA", "C", "O")] for residue in residues]
    breaks = np.r_[True, ~close, True]
    return Chain(model_chain.name, full, coords, seen, breaks, numbers, backbone, twice=twice)


def _apart(residues):
    """Whether CA atoms of residues lie too far apart to be of one, which only alternate locations may."""
    atoms = [atom for residue in residues for atom in residue if atom.name == "CA"]
    return any(a.altloc == b.altloc and a.pos.dist(b.pos) > ONE_PLACE
               for a, b in itertools.combinations(atoms, 2))


def _position(residue, atom_name):
    """(3,) position of the atom's alternate location with the highest occupancy, NaN if there is none."""
    atoms = [atom for atom in residue if atom.name == atom_name]
    position = max(atoms, key=lambda atom: atom.occ).pos.tolist() if atoms else [np.nan]
    return np.array(position if np.isfinite(position).all() else [np.nan] * 3)


# --- Which residue has which coordinates ----------------------------------------------------------------

MIN_COVERAGE = 0.5  # of the shorter of query and chain, so that a few residues by chance do not pass


def map_query(query, chain):
    """Query tokens (L,) and a Chain -> (index, identical, different).

    index (L,): position in chain.sequence of the observed residue, -1 where there is none; identical and
    different count the mapped residues known on both sides. The query may be all of SEQRES, which then says
    where missing residues go, or the observed residues only: both are tried, SEQRES wins a tie.
    """
    observed = np.flatnonzero(chain.seen)
    attempts = [(observed, chain.breaks)]
    if len(observed) < len(chain.sequence):
        whole = np.arange(len(chain.sequence) + 1)
        attempts.insert(0, (whole[:-1], np.isin(whole, (0, whole[-1]))))
    results = []
    for positions, breaks in attempts:
        aligned = align(query, chain.sequence[positions], breaks, UNKNOWN)
        index = np.where((aligned >= 0) & chain.seen[positions[aligned]], positions[aligned], -1)
        known = (index >= 0) & (query < UNKNOWN) & (chain.sequence[index] < UNKNOWN)
        identical = int((query == chain.sequence[index])[known].sum())
        results.append((index, identical, int(known.sum()) - identical))
    return max(results, key=_agreement)


def _agreement(mapping):
    return mapping[1] - mapping[2]  # so that a short exact chain goes before a long homologue


def _best_chain(query, chains):
    """(chain, its map_query) of the chain that agrees best with the query; the first of equals."""
    return max(((chain, map_query(query, chain)) for chain in chains), key=lambda pair: _agreement(pair[1]))


def _matches(query, chain, mapping, identity=MIN_IDENTITY):
    _, identical, different = mapping
    enough = max(1, MIN_COVERAGE * min(len(query), chain.seen.sum()))
    return identical >= max(enough, identity * (identical + different))


def _row_that_matches(names, rows, chains):
    """Name of an alignment row that is the sequence of one of the chains (95% identical), or None.
    Shared words of four letters pick the rows worth aligning: 16,000 alignments would take minutes."""
    def words(text):
        return {text[i:i + 4] for i in range(len(text) - 3)}

    wanted = set().union(*(words(_letters(chain.sequence)) for chain in chains))
    residues = [_letters(_tokens(row.translate(None, b"-.~"))) for row in rows]
    shared = [len(words(text) & wanted) if name else 0 for name, text in zip(names, residues, strict=True)]
    for number in sorted(range(len(rows)), key=shared.__getitem__, reverse=True)[:3]:
        tokens = _tokens(residues[number].encode())
        if shared[number] and _matches(tokens, *_best_chain(tokens, chains), identity=0.95):
            word = first_word(names[number])
            return word if [first_word(name) for name in names].count(word) == 1 else names[number]
    return None


def _remarks(name, structure="", predicted=""):
    """Of a query of this name and a structure's path and Chain's `predicted`."""
    remarks = []
    if first_word(name).endswith("_consensus"):  # HH-suite's first row of a cluster
        remarks.append(f"The query, {first_word(name)}, is the consensus of a cluster and no protein: choose "
                     "another row by --query")
    if predicted:
        remarks.append(f"{os.path.basename(structure)} {predicted} a predicted structure: agreement with one "
                     "is no measure of precision")
    return tuple(remarks)


def load_alignment(msa_path, query=None):
    """Alignment without a structure -> Protein without coordinates, its residues numbered from 1.

    Its format is one of alignments.FORMATS, packed or not. The query is the first sequence, or the row that
    `query` names; of several alignments in a file it names one, of a complex a chain. Columns where
    it has a gap are dropped, and so are insertions in A3M. Every sequence stays, the query twice as well.
    Raises UserError: file unreadable, not one alignment of one chain, rows of unequal length, unknown query.
    """
    names, rows, number = parse_alignment(msa_path, query)
    msa = _query_columns(containers.called(msa_path), names, rows, number)
    length = msa.shape[1]
    return Protein(split_suffix(msa_path)[0], msa, np.full((length, 3), np.nan, np.float32),
                   left_out=len(rows[0]) - length, remarks=_remarks(names[number]))


def load_protein(msa_path, structure_path, chain=None, query=None, name=None):
    """Alignment and structure -> Protein; the coordinates belong to the columns of the alignment.

    chain: its name in the structure; without it the chain that agrees best with the query, the first of
    equals. query: name of the query's row; without it row 0. name: without it the alignment file's own.
    Raises UserError, also if the query is not the structure's protein.
    """
    names, rows, number = parse_alignment(msa_path, query)
    msa = _query_columns(containers.called(msa_path), names, rows, number)
    chains = read_structure(structure_path, chain)
    best, mapping = _best_chain(msa[0], chains)
    if not _matches(msa[0], best, mapping):
        problem = (f"{containers.called(msa_path)}: the query ({msa.shape[1]} residues) does not match chain "
                   f"{best.name!r} of {structure_path} ({best.seen.sum()} residues): {mapping[1]} agree, "
                   f"{mapping[2]} differ")
        row = _row_that_matches(names, rows, chains)
        if row is not None:
            raise UserError(f"{problem}; row {row!r} of the alignment matches: use --query {row!r}")
        other, mapping = _best_chain(msa[0], read_structure(structure_path))
        if _matches(msa[0], other, mapping):
            raise UserError(f"{problem}; chain {other.name!r} does: use {structure_path}:{other.name}")
        raise UserError(f"{problem}, nor does any other row; are the two files of the same protein?")
    mapped = mapping[0] >= 0
    coords = np.where(mapped[:, None], best.coords[mapping[0]], np.float32(np.nan))
    located = int(np.isfinite(coords).all(1).sum())
    if located < 0.5 * mapped.sum():
        raise UserError(f"{structure_path}: only {located} of {mapped.sum()} residues of chain {best.name!r} "
                        "have a CB atom; a structure with side chains is needed")
    numbers = tuple(np.where(mapped, best.numbers[mapping[0]], "").tolist())
    backbone = np.where(mapped[:, None, None], best.backbone[mapping[0]], np.float32(np.nan))
    return Protein(name or split_suffix(msa_path)[0], msa, coords, best.name, numbers, backbone,
                   len(rows[0]) - msa.shape[1],
                   _remarks(names[number], structure_path, best.predicted))


# --- Families -------------------------------------------------------------------------------------------

ALIGNMENT_SUFFIXES = tuple(suffix for known in FORMATS for suffix in known.suffixes)
STRUCTURE_SUFFIXES = (".cif", ".mmcif", ".pdb", ".ent")


def files_in(directory, suffixes):
    """Sorted paths of the files in a directory with these suffixes, packed or not. Raises UserError."""
    try:
        names = [name for name in sorted(os.listdir(directory)) if split_suffix(name)[1] in suffixes]
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from None
    paths = [os.path.join(directory, name) for name in names if name[0] != "."]
    return [path for path in paths if not os.path.isdir(path)]


def alignments_in(directory):
    """Paths of the alignments in a directory. Raises UserError where there are none."""
    paths = files_in(directory, ALIGNMENT_SUFFIXES)
    if not paths:
        raise UserError(f"{directory}: no alignment in it is called NAME{' or '.join(ALIGNMENT_SUFFIXES)}")
    return paths


def load_families(directory):
    """Directory -> (list of Protein sorted by name, names of files without a partner): each alignment with
    the structure of its name beside it, packed or not. Other files are ignored. Raises UserError: no such
    directory, no pair in it, two files for one NAME."""
    kinds_of = {}  # NAME -> (alignments, structures)
    for path in map(Path, files_in(directory, ALIGNMENT_SUFFIXES + STRUCTURE_SUFFIXES)):
        stem, suffix = split_suffix(path)
        kinds_of.setdefault(stem, ([], []))[suffix in STRUCTURE_SUFFIXES].append(path)
    pairs = {stem: kinds for stem, kinds in sorted(kinds_of.items()) if all(kinds)}
    alone = sorted(path.name for kinds in kinds_of.values() if not all(kinds) for path in sum(kinds, []))
    if not pairs:
        wanted = " or ".join(ALIGNMENT_SUFFIXES), " or ".join(STRUCTURE_SUFFIXES)
        raise UserError(f"{directory}: no families; needed are alignments NAME{wanted[0]}, each beside a "
                        f"structure NAME{wanted[1]}" + (f"; {alone[0]} has none" if alone else ""))
    for paths in (paths for kinds in pairs.values() for paths in kinds if len(paths) > 1):
        raise UserError(f"{directory}: keep one of {' and '.join(path.name for path in paths)}")
    return [load_protein(*alignments, *structures, name=stem)
            for stem, (alignments, structures) in pairs.items()], alone
