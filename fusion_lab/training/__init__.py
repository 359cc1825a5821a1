"""How a program is described, started and trained: Program, flags, files, checkpoints, several GPUs."""
