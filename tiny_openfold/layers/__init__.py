"""Operations in plain PyTorch: packed projections, the choice of attention, derivatives by hand."""
