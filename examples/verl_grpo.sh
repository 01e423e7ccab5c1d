#!/usr/bin/env bash
# GRPO under a mask with verl, Ray and vLLM, on the GPUs of a host; docs/verl.md has the options.
#
#     bash examples/verl_grpo.sh MODEL TRAIN.parquet TEST.parquet MASK.safetensors [OPTION=VALUE ...]
#
# The files are those of verl's recipes, as its examples/data_preprocess/gsm8k.py writes them. Not run yet: it needs GPUs.
# The reference is the model before training, which the actor evaluates itself (lora_rank and merge; no adapter is made).
set -euo pipefail
model=$1 train=$2 test=$3 mask=$4
export VERL_USE_EXTERNAL_MODULES=sparse_opt.integrations.verl
python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo data.train_files="$train" data.val_files="$test" \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.lora_rank=1 actor_rollout_ref.model.lora.merge=True \
  actor_rollout_ref.actor.strategy=sparse_fsdp2 \
  +actor_rollout_ref.actor.optim.override_optimizer_config.mask="$mask" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  trainer.logger=[console] trainer.n_gpus_per_node="${GPUS:-8}" trainer.total_epochs=1 trainer.save_freq=20 "${@:5}"
