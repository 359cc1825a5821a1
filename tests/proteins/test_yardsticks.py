"""How many rows of an alignment count, and which are drawn."""
import numpy as np
import pytest

from tiny_openfold.proteins import files
from tiny_openfold.proteins.yardsticks import sequence_weights, some_rows


def test_near_copies_share_their_weight():
    rows = np.array([[files.LETTERS.index(letter) for letter in row]
                     for row in ("AAAAA", "AAAA-", "CCCCC", "AAA--", "CCCCA")], np.uint8)
    expected = [1 / 2, 1 / 3, 1 / 2, 1 / 2, 1 / 2]  # 4 of 5 columns are enough, 3 are not
    assert sequence_weights(rows) == pytest.approx(expected)


def test_rows_are_drawn_with_the_query_first():
    msa = np.arange(50, dtype=np.uint8)[:, None]
    drawn = some_rows(msa, 10)
    assert drawn[0] == 0 and len(np.unique(drawn)) == 10 and np.array_equal(drawn, some_rows(msa, 10))
    assert not np.array_equal(drawn, some_rows(msa, 10, seed=1)) and some_rows(msa, 50) is msa
