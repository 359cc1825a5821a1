#!/bin/bash
# Training on two hosts by Slurm: sbatch docs/slurm.sh in the clone. Not tried on a cluster (docs/training.md).
# Paths of the environment, of data and of checkpoints must be the same on all hosts. TERM comes two minutes
# before the time ends, so that the run saves. No --gpus-per-task, which would hide GPUs from torchrun.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=01:00:00 --signal=TERM@120
source /shared/venv/bin/activate
export TRITON_CACHE_DIR=/tmp/triton-$USER   # on each host: a home may be shared or read-only
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d \
    --rdzv-endpoint "$host:29500" --rdzv-id "$SLURM_JOB_ID" \
    tiny_openfold_v2.py --save-checkpoint /shared/run.pt --save-every 500 --num-steps 100000
