"""A block whose pair stack is OpenFold's up to the transition, which takes the MSA as it is."""
from torch import nn

from openfold.model.triangular_attention import TriangleAttention
from openfold.model.triangular_multiplicative_update import TriangleMultiplicativeUpdate


class EvoformerBlock(nn.Module):
    def __init__(self, c_m, c_z, c_hidden_pair_att, no_heads_pair, inf):
        super().__init__()
        self.msa_transition = nn.Linear(c_m, c_m)
        self.tri_mul_out = TriangleMultiplicativeUpdate(c_z, c_z)
        self.tri_mul_in = TriangleMultiplicativeUpdate(c_z, c_z, _outgoing=False)
        self.tri_att_start = TriangleAttention(c_z, c_hidden_pair_att, no_heads_pair)
        self.tri_att_end = TriangleAttention(c_z, c_hidden_pair_att, no_heads_pair)

    def forward(self, m, z, msa_mask, pair_mask, chunk_size=None):
        m = m + self.msa_transition(m)
        for multiplication in (self.tri_mul_out, self.tri_mul_in):
            z = z + multiplication(z, mask=pair_mask, inplace_safe=False, _add_with_inplace=True)
        z = z + self.tri_att_start(z, mask=pair_mask, chunk_size=chunk_size)
        z = z.transpose(-2, -3)
        z = z + self.tri_att_end(z, mask=pair_mask.transpose(-1, -2), chunk_size=chunk_size)
        return m, z.transpose(-2, -3)
