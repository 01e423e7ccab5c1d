#!/usr/bin/env bash
# Supervised training under a mask with verl's SFT trainer, on all GPUs of a host; docs/verl.md has the options.
#
#     bash examples/verl_sft.sh MODEL TRAIN.parquet MASK.safetensors [OPTION=VALUE ...]
#
# The rows of TRAIN.parquet have a column `messages`. Not run on GPUs yet.
set -euo pipefail
model=$1 data=$2 mask=$3
export VERL_USE_EXTERNAL_MODULES=sparse_opt.integrations.verl
torchrun --standalone --nproc_per_node="${GPUS:-gpu}" -m verl.trainer.sft_trainer \
  model.path="$model" data.train_files="$data" data.train_batch_size=128 data.max_token_len_per_gpu=8192 \
  engine._target_=sparse_opt.integrations.verl.SparseFSDPEngineConfig engine.strategy=sparse_fsdp2 \
  optim.lr=1e-5 +optim.override_optimizer_config.mask="$mask" \
  trainer.logger=[console] trainer.total_epochs=1 trainer.save_freq=100 "${@:4}"
