"""Alignments, structures and batches of proteins; predictions of contacts and folds."""
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"  # tokens 0..19
UNKNOWN, GAP, MASK = 20, 21, 22       # MASK is the trainer's; no file holds it
LETTERS = AMINO_ACIDS + "X-#"
TOKENS = len(LETTERS)
CONTACT_DISTANCE = 8.0                # Å, between CB atoms (CA for glycine)
