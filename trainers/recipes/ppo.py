"""PPO of a small language model on the score of a classifier: SparseLLM-RL's main_ppo.py, with TRL 0.8.6's PPOTrainer.

    sparse-opt train ppo                          # GPT-2 medium on IMDB, with the options of the original
    sparse-opt train ppo --mask_density 0.025     # the same under a mask

One update samples a completion for each of `batch_size` beginnings of film reviews, and scores them by a classifier of
sentiment. Each token is penalised by its part of the divergence from the reference, and the last one gets the score
(https://arxiv.org/abs/1909.08593). `ppo_epochs` passes then train policy and value head
(https://arxiv.org/abs/1707.06347), with an optimizer step for every `mini_batch_size` completions. The loop is written
out here because TRL has no PPOTrainer any more.

Not as in the original: no dropout; an EOS is trained; a text that is too long for the classifier keeps its end. Under a
mask, the reference is the model with its base weights, and 16-bit active weights have fp32 master copies. Not
implemented: TRL's penalties other than `kl`, its `ratio_threshold`, `gradient_accumulation_steps`, scaling and clipping
of scores, and whitening of rewards; several devices.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from trl import ScriptArguments

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.files import write_safetensors
from sparse_opt.integrations.callback import DeltaLogCallback
from sparse_opt.integrations.checkpoints import write_manifest
from sparse_opt.integrations.rates import rate_factor
from sparse_opt.integrations.run_folder import RunFolder, last_checkpoint
from sparse_opt.integrations.trl.data import load_rows
from sparse_opt.integrations.trl.mask_arguments import MaskArguments
from sparse_opt.integrations.trl.row_file import RowFile
from sparse_opt.integrations.trl.update_statistics import UpdateStatisticsCallback
from sparse_opt.options import CommandParser
from sparse_opt.progress import hide_progress_bars, with_time_left
from sparse_opt.tensors import resolve_device

from ..batches import TokenBatch
from ..logprobs import selected_logprobs
from ..modes import dense_training, load_mask, sparse_training
from ..pretrained import load_causal_lm, load_pretrained, load_tokenizer_from, max_positions
from ..sampling import Sampling, sample, stop_ids

Pair = tuple[Tensor, Tensor]
# Options that a resumed run may change.
_CHANGEABLE = ("num_updates", "rank_log_every", "save_ckpt_every", "device", "resume", "output_dir")


def parser() -> CommandParser:
    """The parser of `sparse-opt train ppo`: names and defaults of the original and of TRL 0.8.6's PPOConfig."""
    made = CommandParser(
        prog="sparse-opt train ppo",
        usage="sparse-opt train ppo [--config FILE] [--key value ...] [key=value ...]",
        description="PPO of a language model on the score of a classifier: all of its weights, or those of a mask.",
        epilog="A run that was killed or interrupted goes on with --resume from its last checkpoint, to the same bits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, switch = made.add_argument, argparse.BooleanOptionalAction
    add("--policy_name", default="gpt2-medium", help="causal language model, hub name or local folder")
    add("--reward_model_name", default="lvwerra/distilbert-imdb", help="sequence classifier, hub name or local folder")
    add("--reward_label", default="POSITIVE", help="label whose logit is the score")
    add("--reward_label_against", default="NEGATIVE", help="label whose logit is subtracted, or none")
    add("--reward_of_completion", action=switch, default=True, help="score the completion without its prompt")
    add("--batch_score_norm", action=switch, default=True, help="normalise the scores of each batch")

    add("--dataset_name", default="stanfordnlp/imdb", help="texts: hub dataset, or a local file, with a column text")
    add("--max_samples", type=int, default=10000, help="use this many of the first texts")
    add("--target_sentiment", default="Positive review", help="a prompt begins with 'Sentiment: ... . '; or none")
    add("--prompt_prefix_words", type=int, default=8, help="words of a text in its prompt")
    add("--max_prompt_tokens", type=int, default=128, help="cut prompts to this many tokens")
    add("--max_new_tokens", type=int, default=64, help="longest completion in tokens")
    add("--min_new_tokens", type=int, default=12, help="shortest completion in tokens")
    add("--top_k", type=int, default=50, help="sample from this many of the likeliest tokens; 0 for all")
    add("--top_p", type=float, default=0.95, help="sample from the likeliest tokens with this share of the probability")
    add("--temperature", type=float, default=1.0, help="of sampling; log-probabilities are those at 1, as in TRL")

    add("--num_updates", type=int, default=600, help="updates: batches that are sampled and trained on")
    add("--batch_size", type=int, default=32, help="completions of an update")
    add("--mini_batch_size", type=int, default=8, help="completions of an optimizer step")
    add("--ppo_epochs", type=int, default=4, help="passes over the completions of an update")
    add("--learning_rate", type=float, help="of policy and head; 5e-6, and under a mask this times density^-0.75")
    add("--max_grad_norm", type=float, help="clip the norm of the gradient, that of the value head on its own")
    add("--cliprange", type=float, default=0.2, help="how far the ratio of a token may be from 1")
    add("--cliprange_value", type=float, default=0.2, help="how far a value may be from that before the update")
    add("--vf_coef", type=float, default=0.1, help="weight of the value loss")
    add("--gamma", type=float, default=1.0, help="discount of later rewards, per token")
    add("--lam", type=float, default=0.95, help="lambda of generalised advantage estimation")
    add("--init_kl_coef", type=float, default=0.2, help="weight of the divergence from the reference, at the start")
    add("--adap_kl_ctrl", action=switch, default=True, help="adapt that weight, so that the divergence is target")
    add("--target", type=float, default=6.0, help="divergence of a completion for adap_kl_ctrl")
    add("--horizon", type=float, default=10000.0, help="completions over which adap_kl_ctrl adapts")
    add("--early_stopping", action=switch, default=False, help="end the passes once policykl is above 1.5 target_kl")
    add("--target_kl", type=float, default=3.0, help="divergence from the policy before the update, per token")

    add("--mask", metavar="FILE", help="train the active elements of this mask only")
    add("--mask_density", type=float, help="share of active elements of a random mask, in place of --mask")
    patterns = ("element", "run16", "run32", "tile64", "tile128")
    add("--mask_pattern", choices=patterns, default="element", help="pattern of the random mask")
    add("--mask_seed", type=int, default=0, help="seed of the random mask")

    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda if there is a GPU")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights of policy and reference")
    add("--seed", type=int, default=0, help="of prompts, sampling, the value head and the order of mini-batches")
    add("--output_dir", help="folder of all outputs; ppo-POLICY-sentiment-final")
    add("--rank_log_every", type=int, default=20, help="updates between two measurements of the change of the weights")
    add("--tau", type=float, default=1e-6, help="a weight is updated if it moved by more than this")
    add("--save_ckpt_every", type=int, default=20, help="updates between checkpoints, of which the last is kept")
    add("--delta_log_dir", help="folder of a log of the weights")
    add("--delta_log_steps", default="every:20,last", help="updates to log, such as every:10,last or 10-40:10,100")
    add("--resume", action=switch, default=False, help="continue the run in output_dir from its checkpoint")
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options in the words after `sparse-opt train ppo`.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
    """
    options = parser().parse_words(argv)
    ranges = {
        (1, 1e9): "max_samples prompt_prefix_words max_prompt_tokens num_updates batch_size mini_batch_size ppo_epochs "
        "rank_log_every save_ckpt_every",
        (0, 1e9): "init_kl_coef vf_coef tau seed",
        (1e-9, 1e9): "temperature learning_rate max_grad_norm cliprange cliprange_value target horizon target_kl",
        (0, 1): "gamma lam",
    }
    for (low, high), names in ranges.items():
        for name in names.split():
            value = getattr(options, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"--{name} is {value}, expected {low:g} to {high:g}")
    options.output_dir = options.output_dir or f"ppo-{Path(options.policy_name).name}-sentiment-final"
    folder, has_run = options.output_dir, last_checkpoint(options.output_dir) is not None
    n, step = options.batch_size, options.mini_batch_size
    if n % step:
        raise ConfigError(f"--batch_size is {n}, expected a multiple of mini_batch_size, {step}")
    if options.resume and not has_run:
        raise ConfigError(f"--resume: {folder} has no checkpoint")
    if has_run and not options.resume:
        raise ConfigError(f"--output_dir {folder} holds a run: give --resume, or another folder")
    of_mask = {name: value for name, value in vars(options).items() if name in MaskArguments.__dataclass_fields__}
    MaskArguments(**of_mask).require_used()
    return options


# From scores to advantages. Tensors are [B, C] fp32, one row for each completion, unless a comment says otherwise;
# `mask` [B, C] bool is true at the tokens of the completions.


def adapted_kl_coef(coefficient: float, kl: float, n: int, target: float, horizon: float) -> float:
    """The coefficient after `n` completions of mean divergence `kl`: section 2.2 of https://arxiv.org/abs/1909.08593."""
    return coefficient * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * (logprob - ref_logprob) at each token, and the score [B] on the last one; 0 outside the mask."""
    rewards = (-kl_coef * (logprobs - ref_logprobs)).where(mask, 0.0)
    last = mask.long().cumsum(dim=1).argmax(dim=1, keepdim=True)  # the first of the largest counts
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def generalized_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Pair:
    """Advantages (https://arxiv.org/abs/1506.02438), not whitened yet, and returns = advantages + values.

    A_t = delta_t + gamma * lam * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t; after the last token A and V are 0.
    """
    values, rewards = values.where(mask, 0.0), rewards.where(mask, 0.0)
    advantages = values.new_zeros(values.shape)
    later_value, later = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        later = rewards[:, t] + gamma * later_value - values[:, t] + gamma * lam * later
        advantages[:, t], later_value = later, values[:, t]
    return advantages.where(mask, 0.0), (advantages + values).where(mask, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over all tokens, of the sample variance."""
    mean, variance = values[mask].mean(), values[mask].var()
    return ((values - mean) * (variance + 1e-8).rsqrt()).where(mask, 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens."""
    return values.where(mask, 0.0).sum() / mask.sum()


# The losses, with the share of tokens whose gradient is clipped to 0.


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float) -> Pair:
    """max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange)), ratio = exp(logprob - old): equation 7."""
    ratio = (logprobs - old_logprobs).where(mask, 0.0).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return masked_mean(unclipped.maximum(clipped), mask), masked_mean((clipped > unclipped).float(), mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float) -> Pair:
    """0.5 * max((V - return)^2, (V_clipped - return)^2), V_clipped within `cliprange_value` of the old value."""
    bounded = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped, clipped = (values - returns).square(), (bounded - returns).square()
    return 0.5 * masked_mean(unclipped.maximum(clipped), mask), masked_mean((clipped > unclipped).float(), mask)


class Policy:
    """The policy with its value head, their optimizers, and the reference: a copy, or under a mask the base weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        name, self.options, self.device = options.policy_name, options, resolve_device(options.device)
        self.sampling = Sampling(**{name: getattr(options, name) for name in Sampling.__dataclass_fields__})
        self.tokenizer = load_tokenizer_from(name)
        self.model = load_causal_lm(name, getattr(torch, options.dtype)).to(self.device).eval()  # without dropout
        eos_ids = stop_ids(self.model, self.tokenizer)
        self.ends: dict[str, Any] = {"pad_id": eos_ids[0], "eos_ids": eos_ids}  # for `sample`
        self.mask = load_mask(self.model, options.mask, options.mask_density, options.mask_pattern, options.mask_seed)
        self.rate = options.learning_rate or 5e-6 * (1 if self.mask is None else rate_factor(self.mask.density))
        if self.mask is None:
            self.trained = dense_training(self.model, self.rate, weight_decay=0.0)
        else:
            self.trained = sparse_training(self.model, self.mask, self.rate, weight_decay=0.0, master_weights=True)
        torch.manual_seed(options.seed)
        width = self.model.get_output_embeddings().weight.shape[1]
        self.head = torch.nn.Linear(width, 1, dtype=torch.float32, device="cpu").to(self.device)
        self.head_optimizer = torch.optim.AdamW(self.head.parameters(), lr=self.rate, weight_decay=0.0)
        self.parts = (self.model, self.head, self.trained.optimizer, self.head_optimizer)  # saved in checkpoints

    def forward(self, model: Any, batch: TokenBatch, rows: Tensor) -> Pair:
        """Log-probabilities of some completions' tokens, and the values of the states that they were chosen in."""
        ids, first = batch.input_ids[rows], batch.first_trained
        output = model(ids, attention_mask=batch.attention_mask[rows], use_cache=False, output_hidden_states=True)
        logprobs = selected_logprobs(output.logits[:, first - 1 : -1], ids[:, first:])
        values = self.head(output.hidden_states[-1][:, first - 1 : -1].float())[..., 0]
        mask = batch.completion_mask[rows, first:]
        return logprobs.where(mask, 0.0), values.where(mask, 0.0)

    def before_update(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and values of the policy, and log-probabilities of the reference, without gradients."""
        parts = torch.arange(len(batch.input_ids), device=self.device).split(self.options.mini_batch_size)
        logprobs, values = zip(*(self.forward(self.model, batch, rows) for rows in parts), strict=True)
        with self.trained.reference_weights():
            ref_logprobs = [self.forward(self.trained.reference, batch, rows)[0] for rows in parts]
        return torch.cat(logprobs), torch.cat(values), torch.cat(ref_logprobs)

    def clip(self, max_norm: float | None) -> None:
        """Clip the norm of the policy's gradient and that of the value head's; None clips neither."""
        if max_norm is not None:
            self.trained.clip(max_norm)
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), max_norm)

    def update(self, batch: TokenBatch, before: Sequence[Tensor]) -> dict[str, float]:
        """Train on the completions; returns means over the optimizer steps, under TRL's names.

        `before` has the log-probabilities, values, advantages and returns before the update.
        """
        options, statistics = self.options, []
        for _ in range(options.ppo_epochs):
            order = torch.randperm(options.batch_size, device="cpu").to(self.device)
            for rows in order.split(options.mini_batch_size):
                old_logprobs, old_values, advantages, returns = (tensor[rows] for tensor in before)
                mask = batch.completion_mask[rows, batch.first_trained :]
                logprobs, values = self.forward(self.model, batch, rows)
                for_policy, policy_clipped = policy_loss(logprobs, old_logprobs, advantages, mask, options.cliprange)
                for_values, value_clipped = value_loss(values, old_values, returns, mask, options.cliprange_value)
                loss = for_policy + options.vf_coef * for_values
                loss.backward()
                self.clip(options.max_grad_norm)
                for optimizer in (self.trained.optimizer, self.head_optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
                moved = (logprobs - old_logprobs).detach()
                found = {
                    "ppo/loss/total": loss,
                    "ppo/loss/policy": for_policy,
                    "ppo/loss/value": for_values,
                    "ppo/policy/approxkl": 0.5 * masked_mean(moved.square(), mask),
                    "ppo/policy/policykl": masked_mean(-moved, mask),
                    "ppo/policy/clipfrac": policy_clipped,
                    "ppo/val/clipfrac": value_clipped,
                }
                statistics.append({name: value.item() for name, value in found.items()})
            if options.early_stopping and statistics[-1]["ppo/policy/policykl"] > 1.5 * options.target_kl:
                break
        return {name: sum(row[name] for row in statistics) / len(statistics) for name in statistics[0]}


def load_classifier(options: argparse.Namespace, device: Any) -> Callable[[list[str]], Tensor]:
    """A function from texts to scores [n] fp32."""
    name = options.reward_model_name
    tokenizer = load_tokenizer_from(name)
    model = load_pretrained(AutoModelForSequenceClassification, name, "a reward model", dtype=torch.float32)
    model = model.to(device).eval()
    tokenizer.truncation_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # by which a causal classifier finds its last token
    limit = min(max_positions(model.config) or math.inf, tokenizer.model_max_length)
    cut = {"truncation": True, "max_length": limit} if limit < 1e9 else {}  # those without a limit report a huge one
    labels = {str(label).lower(): int(index) for index, label in model.config.id2label.items()}
    for option, known in (("reward_label", list(labels)), ("reward_label_against", [*labels, "none"])):
        if (label := getattr(options, option)).lower() not in known:
            raise ConfigError(f"--{option} is {label}, expected a label of {name}: {', '.join(known)}")
    label, against = options.reward_label.lower(), options.reward_label_against.lower()

    def score(texts: list[str]) -> Tensor:
        inputs = tokenizer(texts, return_tensors="pt", padding=True, **cut).to(device)
        logits: Tensor = model(**inputs).logits.float()
        return logits[:, labels[label]] - (0 if against == "none" else logits[:, labels[against]])

    return score


def load_prompts(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The prompts, as token ids."""
    name, sentiment = options.dataset_name, options.target_sentiment
    rows = load_rows(ScriptArguments(dataset_name=name), "sft")
    if "text" not in rows.column_names:
        raise DataError(f"{name}: expected a column text, found {', '.join(rows.column_names)}")
    texts = [text for text in rows["text"][: options.max_samples] if text.split()]
    if len(texts) < options.batch_size:
        raise DataError(f"{name}: has {len(texts)} texts, expected at least --batch_size {options.batch_size}")
    prefix = "" if sentiment.lower() == "none" else f"Sentiment: {sentiment}. "
    prompts = [prefix + " ".join(text.split()[: options.prompt_prefix_words]) for text in texts]
    return [list(ids[: options.max_prompt_tokens]) for ids in tokenizer(prompts)["input_ids"]]


def run(argv: Sequence[str]) -> int:
    """Train as the words after `sparse-opt train ppo` say, save the model, and return 0.

    metrics.jsonl has a row for each update, under the names of TRL 0.8.6.

    Raises:
        ConfigError, DataError: options and files do not fit each other, or cannot be used.
        SparseOptError: the loss is not finite.
        KeyboardInterrupt: Ctrl-C; the message says what was kept.
    """
    options = parse(argv)
    hide_progress_bars()
    policy = Policy(options)
    score, prompts = load_classifier(options, policy.device), load_prompts(options, policy.tokenizer)
    folder, decode = Path(options.output_dir), policy.tokenizer.batch_decode
    kl_coef = options.init_kl_coef
    kept = "no checkpoint was saved: a lower --save_ckpt_every saves the first earlier"
    fixed = {name: value for name, value in vars(options).items() if name not in _CHANGEABLE}

    # The callbacks are those of any transformers Trainer, and are called as a Trainer calls them.
    args = SimpleNamespace(output_dir=options.output_dir)
    state = SimpleNamespace(global_step=0, max_steps=options.num_updates, is_world_process_zero=True)
    model = {"model": policy.model, "optimizer": policy.trained.optimizer}
    callbacks: list[Any] = [UpdateStatisticsCallback(options.rank_log_every, tau=options.tau)]
    if options.delta_log_dir is not None:
        steps, more = options.delta_log_steps, {"method": "ppo"}
        callbacks.append(DeltaLogCallback(options.delta_log_dir, steps, mask=policy.mask, metadata=more))
    metrics, samples = RowFile(folder / "metrics.jsonl"), RowFile(folder / "samples.jsonl")
    lock = RunFolder(options.output_dir)
    newest = last_checkpoint(options.output_dir) if options.resume else None
    try:
        run_name = lock.begin(newest, newest=True, saves=True)
        if newest is not None:
            saved = torch.load(Path(newest, "state.pt"), map_location="cpu", weights_only=True)
            for name, was in saved["options"].items():
                if fixed[name] != was:
                    raise ConfigError(f"--resume: --{name} is {fixed[name]}, expected {was} as in the run before")
            state.global_step = saved["update"]
            kept = f"{newest} is kept: repeat the command with --resume"
        for file in (metrics, samples):
            file.cut(state.global_step)
        for callback in callbacks:  # while the model has its initial weights
            callback.on_train_begin(args, state, None, **model)
        if newest is not None:
            for part, content in zip(policy.parts, saved["parts"], strict=True):
                part.load_state_dict(content)
            kl_coef = saved["kl_coef"]
        what = "all weights" if policy.mask is None else f"{policy.mask.nnz:,} elements of a mask"
        print(f"ppo: {options.policy_name}, {what}, learning rate {policy.rate:.3g}", flush=True)
        updates = [[update] for update in range(state.global_step + 1, options.num_updates + 1)]
        for (update,) in with_time_left(updates, what="ppo", unit="updates", n_before=state.global_step):
            started, draw = time.monotonic(), random.Random(f"{options.seed}:{update}")
            torch.manual_seed(draw.getrandbits(63))  # updates do not depend on the random numbers of others
            with torch.no_grad():
                chosen = draw.sample(prompts, options.batch_size)
                sampled = sample(policy.model, chosen, policy.sampling, n_generations=1, **policy.ends)
                batch, mask, completions = sampled.batch, sampled.mask, sampled.completions
                whole = [sequence.ids for sequence in sampled.sequences]
                # Decoded alone, a completion can lose its leading space.
                texts = decode(completions if options.reward_of_completion else whole, skip_special_tokens=True)
                scores = score(texts)
                logprobs, values, ref_logprobs = policy.before_update(batch)
                centred = (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)
                normed = centred if options.batch_score_norm else scores
                rewards = token_rewards(normed, logprobs, ref_logprobs, mask, kl_coef)
                advantages, returns = generalized_advantages(rewards, values, mask, options.gamma, options.lam)
                kl = float((logprobs - ref_logprobs).sum(dim=1).mean())
                row = {
                    "reward": float(scores.mean()),
                    "reward_std": float(scores.std(correction=0)),
                    "objective/kl": kl,
                    "objective/kl_coef": kl_coef,
                    "objective/entropy": -float(masked_mean(logprobs, mask)),
                    "ppo/mean_non_score_reward": -kl_coef * float(masked_mean(logprobs - ref_logprobs, mask)),
                    "ppo/val/var_explained": 1 - float((values - returns)[mask].square().mean() / returns[mask].var()),
                    "tokens/responses_len_mean": float(mask.sum() / len(mask)),
                }
            row |= policy.update(batch, (logprobs, values, whiten(advantages, mask), returns))
            if not math.isfinite(row["ppo/loss/total"]):
                cause = f"the loss of update {update} is {row['ppo/loss/total']}"
                raise SparseOptError(f"{cause}: a lower --learning_rate or a --max_grad_norm may help; {kept}")
            if options.adap_kl_ctrl:
                kl_coef = adapted_kl_coef(kl_coef, kl, options.batch_size, options.target, options.horizon)
            state.global_step = update
            for callback in callbacks:
                callback.on_step_end(args, state, None, **model)
                callback.on_log(args, state, None, logs=row)
            metrics.write({"step": update, **row, "time/ppo/total": time.monotonic() - started})
            if update <= 3 or update % 5 == 0:  # as the original prints them
                prompt, text = decode([chosen[0], completions[0]])
                samples.write({"step": update, "prompt": prompt, "completion": text, "reward": float(scores[0])})
            if update % options.save_ckpt_every == 0 or update == options.num_updates:
                for callback in callbacks:
                    callback.on_save(args, state, None)
                saved = {"update": update, "options": fixed, "kl_coef": kl_coef}
                saved["parts"] = [part.state_dict() for part in policy.parts]
                checkpoint = folder / f"checkpoint-{update}"
                checkpoint.mkdir(exist_ok=True)
                torch.save(saved, checkpoint / "state.pt")
                write_manifest(checkpoint, run_name)
                for other in set(folder.glob("checkpoint-*")) - {checkpoint}:
                    shutil.rmtree(other)
                kept = f"{checkpoint} is kept: repeat the command with --resume"
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        head = {f"v_head.summary.{name}": tensor.cpu() for name, tensor in policy.head.state_dict().items()}
        write_safetensors(folder / "value_head.safetensors", head, {"format": "pt"})
        for callback in callbacks:
            callback.on_train_end(args, state, None)
    except KeyboardInterrupt:
        done = f"interrupted after update {state.global_step} of {options.num_updates}"
        raise KeyboardInterrupt(f"{done}; {kept}") from None
    finally:
        if options.delta_log_dir is not None:
            callbacks[-1].close()
        lock.end()
    print(f"trained to update {state.global_step}; the model is in {folder}")
    return 0
