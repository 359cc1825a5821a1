"""What a trained model predicts of alignments: the mode --contacts, and what --fold shares with it
(docs/contacts.md)."""
import contextlib
import json
import os
import shlex
import statistics
import sys
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec

import numpy as np

from fusion_lab.measuring.plotting import spared
from fusion_lab.training import errors
from fusion_lab.training.checkpoints import understanding
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import UserError
from fusion_lab.training.files import finite, read_json, set_aside, write_atomically, write_json, write_text
from fusion_lab.training.machine import GIGABYTE, amp_dtype, choose_device, free_memory, process_settings
from fusion_lab.training.models import read_model
from fusion_lab.training.options import flag
from fusion_lab.training.reporting import print_result
from fusion_lab.training.words import counted, printable
from tiny_openfold.models import completed
from tiny_openfold.proteins import files, maps
from tiny_openfold.proteins.batches import MOST_EXTRA, assemble, require_coordinates
from tiny_openfold.proteins.coevolution import FEATURES, mean_field_dca
from tiny_openfold.proteins.confidence import line_of
from tiny_openfold.proteins.contacts import (
    CONTACT_DISTANCE,
    LONG_RANGE,
    OUTPUTS,
    SEPARATION,
    Prediction,
    contact_precision,
    half_length,
    run_model,
)
from tiny_openfold.proteins.containers import called
from tiny_openfold.proteins.options import MODEL, OF_PREDICTIONS
from tiny_openfold.proteins.relatives import (
    Depth,
    cautions,
    in_tokens,
    kinship,
    relative,
    require_protein,
    some_rows,
    tested_on,
)

ROWS = 512                # of the alignment, without --eval-seqs
YARDSTICK_ROWS = 4000     # of mean-field DCA, since statistics need more of them
LONGEST_FOR_DCA = 400     # residues: 2 GB and half a minute
SEPARATIONS = (SEPARATION, LONG_RANGE)  # residues apart at least, in tables of precision
SHOWN = 10                # pairs on the screen
CPU_HOLES = 1.7           # memory taken on a CPU for each byte of tensors: what is freed is kept, in pieces
SUFFIXES = (".json", ".rr", ".tsv", ".npz", ".pdb", ".html", ".png")  # of the files of all modes
UNFINISHED = ".unfinished"  # of the list of files that stands there until all are whole
HEADLINE = ("mode", "name", "effective_rows", "plddt", "precision", "scores", "files")
STDIN = "-"               # as the path of an alignment


def contacts(program, settings):
    """The mode --contacts; returns the exit code. Raises UserError."""
    return predict(program, settings, "contacts", contacts_of)


def contacts_of(prediction, result):
    """Say which contacts a Prediction has; how predict() writes them down."""
    print_best(prediction, {*result["low_confidence"]})
    if prediction.known:
        result["precision"] = precisions(prediction)
        print_precisions(prediction, result["precision"])
    writers = {".npz": partial(write_arrays, prediction=prediction),
               ".tsv": partial(maps.write_table, m=prediction),
               ".rr": partial(write_rr, prediction=prediction, result=result)}
    return writers, partial(maps.write_picture, m=prediction, cautions=cautions(result))


# --- One alignment, or many ---------------------------------------------------------------------------------


def predict(program, settings, mode, work):
    """Run a mode for the alignments that it was given, and write the files of each; returns the exit code.
    work(Prediction, result) prints the outcome, adds it to the result, which becomes the JSON, and returns
    ({suffix: write(path)}, draw(path)). If one of several alignments fails, the others go on. Raises
    UserError."""
    training = settings.training
    paths = alignments(getattr(training, mode), training.structure)
    if len(paths) == 1:
        protein = read_protein(training, paths[0])  # what is wrong with it is told before a model is read
        headline, path = Predictor(program, settings, mode).write(protein, paths[0], work)
        print_result(headline, path, settings)
        return errors.OK
    predictor, told, started = Predictor(program, settings, mode), {}, time.monotonic()
    summary = os.path.join(predictor.directory, f"{mode}.jsonl")
    set_aside(summary)

    def one(path):
        print(f"\n[{len(told) + 1} of {len(paths)}] {printable(path)}")
        told[path], _ = predictor.write(read_protein(training, path), path, work)
        return errors.OK

    for number, path in enumerate(paths, 1):
        code, reason = errors.ending(one, path)
        if code > 128:  # interrupted, or nobody reads any more
            return code
        if code:
            told[path] = dict(mode=mode, name=name_of(path), error=reason)
            errors.say_why(program.name, reason)
        write_text(summary, "".join(f"{json.dumps(headline)}\n" for headline in told.values()))
        failed = [path for path, headline in told.items() if "error" in headline]
        seconds, good = time.monotonic() - started, number - len(failed)
        left = f"; the rest may take {seconds / good * (len(paths) - number):.0f} s" if good else ""
        print(f"{number} of {len(paths)} took {seconds:.0f} s{left * (number < len(paths))}", flush=True)
    if failed:
        print(f"{len(failed)} of {len(paths)} failed: {', '.join(map(printable, failed))}", file=sys.stderr)
    if means := means_of(told.values()):
        print(f"Means of all: {', '.join(f'{name} {value:.3f}' for name, value in means.items())}")
    print_result(dict(mode=mode, predicted=good, failures=len(failed), failed=failed, means=means), summary,
                 settings)
    return errors.FAILED if failed else errors.OK


def means_of(headlines):
    """{figure: its mean over the predictions that were compared with a structure}"""
    values = defaultdict(list)
    for headline in headlines:
        by_separation = headline.get("precision", {}).get("model", {})
        figures = {f"P(L/2) {separation}+": of["p_l2"] for separation, of in by_separation.items()}
        for name, value in {**figures, **(headline.get("scores") or {})}.items():
            if value is not None and name != "residues_compared":
                values[name].append(value)
    return {name: statistics.fmean(of) for name, of in values.items()}


def alignments(given, structure=None):
    """Paths of the alignments that were given: files, all in a directory, standard input. Raises
    UserError."""
    paths = [path for one in given for path in (files.alignments_in(one) if os.path.isdir(one) else [one])]
    if structure is not None and len(paths) > 1 and not os.path.isdir(structure):
        raise UserError(f"--structure {structure}: belongs to one alignment, here are {len(paths)}; name a "
                        "directory that holds a structure of each one's name")
    names = Counter(map(name_of, paths))
    if twice := [path for path in paths if names[name_of(path)] > 1]:
        raise UserError(f"{' and '.join(twice[:2])}: their results would have one name; rename one of them")
    return paths


def name_of(path):
    """By which the results of an alignment are called."""
    return "stdin" if path == STDIN else files.split_suffix(path)[0]


def read_protein(training, alignment):
    """The files.Protein of an alignment and what other flags name. Raises UserError."""
    if training.structure is None:
        protein = files.load_alignment(alignment, training.query)
        require_protein(protein.msa[0], called(alignment))
    else:
        protein = files.load_protein(alignment, *structure_of(training, alignment), training.query)
        require_coordinates([protein], training.min_coordinates)
    return replace(protein, name=name_of(alignment)) if alignment == STDIN else protein


def structure_of(training, alignment):
    """(path, chain or None) by --structure, which may name a directory. Raises UserError."""
    path, chain = files.split_structure_argument(training.structure)
    if not os.path.isdir(path):
        return path, chain
    there = [structure for structure in files.files_in(path, files.STRUCTURE_SUFFIXES)
             if files.split_suffix(structure)[0] == name_of(alignment)]
    if len(there) != 1:
        raise UserError(f"--structure {path}: it holds {', '.join(there) or 'no structure'} for "
                        f"{called(alignment)}, where one of the same name is needed")
    return there[0], chain


class Predictor:
    """A trained model, and the directory that its predictions go into, which it holds."""

    def __init__(self, program, settings, mode):
        """Raises UserError."""
        self.program, self.settings, self.mode = program, settings, mode
        training = settings.training
        self.device, self.path = choose_device(training.device), training.resume or MODEL
        process_settings(settings, self.device)
        if training.resume is None and not os.path.exists(MODEL):
            raise UserError(f"--{mode}: there is no {MODEL}; name a model file or a checkpoint by --resume")
        saved = read_model(self.path, program)
        with understanding("model", self.path):  # what the card says beside names, which somebody wrote
            self.card = completed(saved.card)
            line_of(self.card)
            self.tested = tested_on(self.card)
            if sequences := self.card.get("sequences"):
                in_tokens(sequences)
        self.config, self.dtype = saved.config, amp_dtype(training, self.device)
        self.directory = training.output or mode
        Directory(self.directory, flag="-o").claim(resumed=True)  # beside other predictions
        self.model = program.model(self.config, program.fusion_config())
        self.model.load_state_dict(saved.weights)
        self.model.to(self.device).eval()
        if self.tested is None:
            print(f"{printable(self.path)} does not say what this model was tested on, so no warning says "
                  "where it cannot be trusted")

    def write(self, protein, path, work):
        """Predict for one protein and write its files; returns (the headline of its result, the path of the
        whole result). Raises UserError."""
        stem = os.path.join(self.directory, protein.name)
        self.require_another_place(path, f"{stem}.pdb")
        training = self.settings.training
        batch = model_input(protein, self.config, training.eval_seqs or ROWS, training.seed)
        self.announce(protein, batch)
        rows = batch["msa_tokens"].shape[1]
        forewarn(replace(self.config, num_seqs=rows, seq_len=protein.length), self.device, self.dtype)
        result = self.judged(protein, path, batch)
        output, result["seconds"] = self.predicted(batch)
        return finish(stem, result, *work(Prediction(protein, output), result))

    def require_another_place(self, path, pdb):
        """Raise UserError where a fold would replace the structure that it is compared with."""
        structure = self.settings.training.structure and structure_of(self.settings.training, path)[0]
        if self.mode == "fold" and structure and os.path.realpath(structure) == os.path.realpath(pdb):
            raise UserError(f"-o {self.directory}: the fold would take the place of {structure}; name "
                            "another")

    def announce(self, protein, batch):
        """Say what is predicted, from what, by which model."""
        couplings = f" (couplings: {batch['extra_msa'].shape[1]})" if "extra_msa" in batch else ""
        print(f"{self.mode.capitalize()} of {printable(protein.name)}: {counted(protein.length, 'residue')}, "
              f"{batch['msa_tokens'].shape[1]} of {counted(len(protein.msa), 'row')}{couplings}, by "
              f"{printable(self.path)} ({sum(w.numel() for w in self.model.parameters()):,} parameters)")
        if protein.left_out:
            print(f"{counted(protein.left_out, 'column')} left out, where the query has a gap; positions are "
                  "those of its residues")
        for remark in protein.remarks:
            print(printable(remark))

    def judged(self, protein, path, batch):
        """What is known before the model runs, in the keys of the JSON; what concerns the user is said."""
        rows, extra = (batch[name].shape[1] if name in batch else 0 for name in ("msa_tokens", "extra_msa"))
        depth, untested, kin = judge(protein, batch, self.card, self.tested)
        return dict(
            mode=self.mode, name=protein.name, residues=protein.length, rows=len(protein.msa), rows_used=rows,
            extra_rows_used=extra, effective_rows=depth.effective, coverage=depth.coverage, untested=untested,
            columns_left_out=protein.left_out, remarks=[*protein.remarks],
            low_confidence=[residue + 1 for residue in depth.uncertain],
            trained_on=kin["trained"], relative=kin, model=self.path, command=self.command(path),
            model_config=asdict(replace(self.config, num_seqs=rows, seq_len=protein.length)),
            card={key: value for key, value in self.card.items() if key != "sequences"})

    def predicted(self, batch):
        """(output of run_model(), {"model": seconds}). Raises UserError where the output is not finite."""
        started = time.monotonic()
        output = run_model(self.model, batch, self.device, self.dtype, OUTPUTS)
        if not all(values.isfinite().all() for values in output.values()):
            raise UserError("the model's predictions are not finite: nothing is written"
                            + "; leave out --use-amp" * (self.dtype is not None), code=errors.FAILED)
        return output, dict(model=time.monotonic() - started)

    def command(self, path):
        """What to type to get the prediction for one alignment again."""
        name, plain = self.program.name, self.program.settings()
        words = [*["python"] * name.endswith(".py"), name, f"--{self.mode}", path]
        for name in OF_PREDICTIONS:
            if (value := self.settings.get(name)) != plain.get(name):
                words += [flag(name)] if value is True else [flag(name), str(value)]
        return shlex.join(words)


def judge(protein, batch, card, tested):
    """(Depth of the rows that the model reads, what of that it was not tested on in words, what its card
    knows of relatives); all are said."""
    depth = Depth.of(batch["extra_msa" if "extra_msa" in batch else "msa_tokens"][0].numpy())
    print(f"Alignment, as {'the couplings see' if 'extra_msa' in batch else 'the model sees'} it: {depth}")
    if uncertain := depth.uncertain:
        print(f"Low confidence, for want of rows, at residues {maps.stretches([i + 1 for i in uncertain])}")
    untested = depth.untested(tested)
    if untested:
        print(f"warning: {untested}: the map may be wrong throughout, however high its probabilities",
              file=sys.stderr)
    kin = relative(protein.msa, protein.name, card)
    if kin["trained"] is not False:
        print(kinship(kin))
    return depth, untested, kin


def model_input(protein, config, rows, seed):
    """What a model of this config sees of an alignment, a batch of one: the query and other rows, drawn by
    the seed as in the trainer's evaluation. The one place that makes it for --contacts and --fold."""
    msa, extra = (some_rows(protein.msa, most, (seed, 3)).astype(np.int64)[None]
                  for most in (rows, MOST_EXTRA))
    return assemble(None, msa, None, None, clean=True, extra=None if config.coevolution == "none" else extra)


# --- The model ------------------------------------------------------------------------------------------


def forewarn(config, device, dtype):
    """Say what memory the forward pass takes. Raises UserError if that is not there."""
    def taken(rows):
        return needs(replace(config, num_seqs=rows), dtype) * (CPU_HOLES if device.type == "cpu" else 1)

    memory, free = taken(config.num_seqs), free_memory(device)
    if free is not None and memory > free:
        way_out = "lower --eval-seqs" if taken(1) <= free else "predict parts of the chain, such as domains"
        raise UserError(f"{config.seq_len} residues and {counted(config.num_seqs, 'row')} need "
                        f"{memory / GIGABYTE:.1f} GB, {free / GIGABYTE:.1f} GB are free on {device}: "
                        f"{way_out}")
    print(f"It takes about {max(memory / GIGABYTE, 0.1):.1f} GB on {device}", flush=True)


def needs(config, dtype):
    """Bytes of the tensors of a forward pass, about: those of one block's outer product mean, however many
    blocks there are, or the couplings of all pairs while they are computed."""
    residues, pairs = config.seq_len, config.seq_len ** 2
    block = 6 * config.num_seqs * residues * config.msa_dim
    block += pairs * (11 * config.pair_dim + config.outer_product_dim ** 2)
    couplings = 4 * pairs * FEATURES if config.coevolution != "none" else 0
    return max(block * (4 if dtype is None else 2.4) + couplings,  # in low precision sums are float32
               6 * couplings)


# --- Files ----------------------------------------------------------------------------------------------


def finish(stem, result, writers, draw):
    """Write the files of a prediction: {suffix: write(path)}, the picture by draw(path), and last its result,
    which names them; returns its headline and its path. First set_aside_earlier()."""
    set_aside_earlier(stem, {*writers, ".png", ".json"})
    for suffix, write in writers.items():
        write(stem + suffix)
    result["files"] = [stem + suffix for suffix in writers]
    if find_spec("matplotlib") is None:
        print("No picture is drawn: that needs pip install matplotlib")
    else:
        with spared(f"picture {stem}.png"):
            draw(f"{stem}.png")
            result["files"].append(f"{stem}.png")
    result = finite(result)
    write_json(f"{stem}.json", result)
    os.unlink(stem + UNFINISHED)
    print(f"Written: {', '.join(map(printable, [*result['files'], f'{stem}.json']))}")
    return {key: result[key] for key in HEADLINE if key in result}, f"{stem}.json"


def set_aside_earlier(stem, suffixes):
    """Rename what an earlier prediction, in either mode, wrote under this name, its result first, and say so.
    Its result lists its files; if it was killed, the unfinished list does. Files with one of these suffixes,
    which are written now, are renamed too. All others are the user's, such as the true structure beside the
    alignment, and stay."""
    named = set()
    for path in (f"{stem}.json", stem + UNFINISHED):
        with contextlib.suppress(UserError, KeyError, TypeError):  # there is none, or it is not ours
            named.update(map(os.path.basename, read_json(path)["files"]))
    paths = [stem + suffix for suffix in SUFFIXES
             if suffix in suffixes or os.path.basename(stem + suffix) in named]
    write_json(stem + UNFINISHED, dict(files=paths))
    moved = [set_aside(path) for path in paths]
    if any(moved):
        print(f"Earlier files of this name are called {', '.join(map(printable, filter(None, moved)))} now")


def write_arrays(path, prediction):
    """For numpy.load: probability and distances (L, L), sequence, numbers (L,), name."""
    protein = prediction.protein
    write_atomically(path, lambda file: np.savez_compressed(
        file, probability=prediction.probability, distances=prediction.distances,
        sequence=protein.sequence, numbers=np.array(protein.numbers, str), name=protein.name))


def write_rr(path, prediction, result):
    """CASP's format RR: positions i < j from 1, the bounds of the distance in Å, probability; best first."""
    name, sequence = "_".join(printable(prediction.protein.name).split()), prediction.protein.sequence
    extra = result["extra_rows_used"]
    lines = ["PFRMAT RR", f"TARGET {name or 'unknown'}", "AUTHOR TinyOpenFold",
             *(f"REMARK {line}" for caution in cautions(result) for line in textwrap.wrap(caution, 70)),
             f"METHOD Evoformer, {counted(result['rows_used'], 'row')} of the alignment"
             + (f", couplings of {extra}" if extra else ""), "MODEL 1",
             *(sequence[start:start + 50] for start in range(0, len(sequence), 50)),
             *(f"{i} {j} 0 {CONTACT_DISTANCE:g} {chance:.5f}" for i, j, chance, _ in prediction.best()),
             "END", ""]
    write_text(path, "\n".join(lines))


# --- What is printed ------------------------------------------------------------------------------------


def print_best(prediction, low_confidence):
    """low_confidence: set of positions from 1."""
    sequence, numbers, pairs = prediction.protein.sequence, prediction.protein.numbers, prediction.best()
    if not pairs:
        print(f"No two residues are {SEPARATION} apart")
        return
    print(f"The most probable contacts (CB < {CONTACT_DISTANCE:g} Å, at least {SEPARATION} residues apart):")
    print("  position   residues        probability  distance")
    for i, j, probability, distance in pairs[:SHOWN]:
        residues = " ".join(f"{sequence[k - 1]}{numbers[k - 1] or '-'}" for k in (i, j))
        print(f"  {i:4d} {j:4d}  {residues:<15} {probability:11.3f} {distance:7.1f} Å"
              + "  low confidence" * (not low_confidence.isdisjoint((i, j))))


def precisions(prediction):
    """{method: {separation: contact_precision()}} of the model and of mean-field DCA, which reads up to
    YARDSTICK_ROWS rows."""
    scores, protein = dict(model=prediction.output["contact_probability"]), prediction.protein
    if protein.length <= LONGEST_FOR_DCA:
        scores["mean-field DCA"] = mean_field_dca(some_rows(protein.msa, YARDSTICK_ROWS))
    return {method: {str(separation): contact_precision(values, *prediction.coords, separation)
                     for separation in SEPARATIONS} for method, values in scores.items()}


def print_precisions(prediction, methods):
    mask, chain = prediction.coords[1], prediction.protein.chain or "(no name)"
    print(f"Precision against chain {chain}, {int(mask.sum())} residues with "
          f"coordinates, L/2 = {half_length(mask)}:")
    print(" " * 18 + "".join(f"{f'|i-j| >= {separation}':>16}" for separation in SEPARATIONS))
    print(" " * 18 + "  P(L/2)    P(L)" * len(SEPARATIONS))
    chance = {key: dict(p_l2=of["chance"], p_l=of["chance"]) for key, of in methods["model"].items()}
    for method, by_separation in (methods | dict(chance=chance)).items():
        values = [of[key] for of in by_separation.values() for key in ("p_l2", "p_l")]
        print(f"  {method:<16}" + "".join(f"{value:8.3f}" for value in values))
    if len(methods) == 1:
        print(f"  Mean-field DCA is left out above {LONGEST_FOR_DCA} residues")
