"""Alignments, structures and batches of proteins; predictions of contacts and folds."""
