"""What belongs to the model of tiny_openfold_v2.py: its proteins and its trained weights."""
