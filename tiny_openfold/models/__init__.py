"""The trained model of --contacts and --fold, families.pt, which README.md describes; and what the card in
that file does not say."""
RECIPE = dict(recipe="folds", date="2026-11-25")  # tells that card from others, whatever its file is called
TESTED = dict(effective_rows=100, residues=(40, 409))  # alignments that models of this recipe were tested on
# Of pLDDT where there are next to no rows: 390 such residues of the families that its line was fitted to have
# a mean pLDDT of 46 and an lDDT-CA of 39.
UNCERTAIN_SHARE = 0.84


def completed(card):
    """A model's card; that of families.pt with TESTED and UNCERTAIN_SHARE."""
    if not RECIPE.items() <= card.items():
        return card
    return card | dict(tested=TESTED, plddt=card["plddt"] | dict(uncertain_share=UNCERTAIN_SHARE))
