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
implemented: TRL's penalties other than `kl`, its `ratio_threshold` and `gradient_accumulation_steps`; several devices.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.options import CommandParser

if TYPE_CHECKING:  # torch is imported once the options are read
    from torch import Tensor

    Pair = tuple[Tensor, Tensor]

STATE_FILE = "state.pt"  # of a checkpoint
VALUE_HEAD_FILE = "value_head.safetensors"
_SAMPLING = ("top_k", "top_p", "temperature", "min_new_tokens", "max_new_tokens")
SAMPLE_EVERY = 5  # updates between two rows of samples.jsonl, as the original prints them
# Options that a resumed run may change.
_CHANGEABLE = ("num_updates", "rank_log_every", "save_ckpt_every", "device", "resume", "output_dir")


# Options


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
    add("--reward_label", default="POSITIVE", help="label whose logit is the score, by name or number")
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
    add("--use_score_scaling", action=switch, default=False, help="divide by the deviation of all scores so far")
    add("--use_score_norm", action=switch, default=False, help="with use_score_scaling: subtract their mean before")
    add("--score_clip", type=float, help="clip scores to this absolute value")
    add("--whiten_rewards", action=switch, default=False, help="divide the tokens' rewards by their deviation")

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
    """The options in the words after `sparse-opt train ppo`; torch is not imported.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
        DataError: a local file or folder does not exist.
    """
    options = parser().parse_words(argv)
    ranges = {
        (1, 1e9): "max_samples prompt_prefix_words max_prompt_tokens max_new_tokens num_updates batch_size "
        "mini_batch_size ppo_epochs rank_log_every save_ckpt_every",
        (0, 1e9): "min_new_tokens top_k init_kl_coef vf_coef tau seed",
        (1e-9, 1e9): "temperature learning_rate max_grad_norm cliprange cliprange_value target horizon target_kl "
        "score_clip",
        (0, 1): "gamma lam",
        (1e-9, 1): "top_p mask_density",
    }
    for (low, high), names in ranges.items():
        for name in names.split():
            value = getattr(options, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"--{name} is {value}, expected {low:g} to {high:g}")
    for name in ("reward_label_against", "target_sentiment"):
        if getattr(options, name) == "none":
            setattr(options, name, None)
    options.output_dir = options.output_dir or f"ppo-{Path(options.policy_name).name}-sentiment-final"
    folder, has_run = options.output_dir, any(Path(options.output_dir).glob("checkpoint-*/*manifest.json"))
    n, step, most = options.batch_size, options.mini_batch_size, options.max_new_tokens
    scaled, normed, is_drawn = options.use_score_scaling, options.use_score_norm, options.mask_density is not None
    of_drawn = (options.mask_pattern, options.mask_seed) != ("element", 0)
    refused = {
        f"--batch_size is {n}, expected a multiple of mini_batch_size, {step}": n % step,
        f"--min_new_tokens is {options.min_new_tokens}, expected at most {most}": options.min_new_tokens > most,
        "--use_score_norm needs use_score_scaling: set both, or neither": normed and not scaled,
        "--use_score_scaling excludes batch_score_norm: set that to false": scaled and options.batch_score_norm,
        "--mask and --mask_density exclude each other: give one": options.mask and is_drawn,
        "--mask_pattern and --mask_seed need --mask_density: give it, or leave them out": of_drawn and not is_drawn,
        f"--resume: {folder} has no checkpoint": options.resume and not has_run,
        f"--output_dir {folder} holds a run: give --resume, or another folder": has_run and not options.resume,
    }
    for message, is_wrong in refused.items():
        if is_wrong:
            raise ConfigError(message)
    for name in ("mask", "policy_name", "reward_model_name", "dataset_name"):
        value = getattr(options, name) or "."
        on_hub = name != "mask" and value[0] not in "./~" and value.count("/") <= 1 and not value.endswith(".jsonl")
        if not on_hub and not Path(value).expanduser().exists():
            raise DataError(f"--{name} {value}: no such file or folder")
    return options


def run(argv: Sequence[str]) -> int:
    """Train as the words after `sparse-opt train ppo` say, and return 0; errors are those of `parse` and `train`."""
    train(parse(argv))
    return 0


# From scores to advantages. Tensors are [B, C] fp32, one row for each completion, unless a comment says otherwise;
# `mask` [B, C] bool is true at the tokens of the completions.


class Scores:
    """Normalises, scales and clips scores; keeps the moments of all scores so far, in fp64, for `use_score_scaling`.

    Moments are combined batch by batch (http://infolab.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf).
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.mean, self.squares, self.count = 0.0, 0.0, 0  # squares: the sum of squared deviations from the mean

    def __call__(self, scores: Tensor) -> Tensor:
        """[B] -> [B]."""
        if self.options.batch_score_norm:
            scores = (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)
        if self.options.use_score_scaling:
            n, mean = len(scores), float(scores.double().mean())
            delta, total = mean - self.mean, self.count + n
            self.squares += float((scores.double() - mean).square().sum()) + delta**2 * self.count * n / total
            self.mean, self.count = self.mean + delta * n / total, total
            deviation = (self.squares / max(total - 1, 1)) ** 0.5
            scores = (scores - self.mean if self.options.use_score_norm else scores) / (deviation + 2**-23)
        clip = self.options.score_clip
        return scores if clip is None else scores.clamp(-clip, clip)


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


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over all tokens, of the sample variance; or with the mean added back."""
    mean, variance = values[mask].mean(), values[mask].var()
    whitened = (values - mean) * (variance + 1e-8).rsqrt()
    return (whitened if shift_mean else whitened + mean).where(mask, 0.0)


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


# The models


@dataclass
class Batch:
    """Sampled completions. Prompts are padded on the left, so that all completions begin at one column."""

    input_ids: Tensor  # [B, P + C]
    attention_mask: Tensor  # [B, P + C]
    mask: Tensor  # [B, C] bool, the tokens of the completions, with an EOS that ends them


class Policy:
    """The policy with its value head, their optimizers, and the reference: a copy, or under a mask the base weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from sparse_opt import MaskSet, SparseAdamW
        from sparse_opt.integrations.rates import rate_factor

        from ..pretrained import load_causal_lm, load_tokenizer_from

        name, found = options.policy_name, torch.cuda.is_available()
        if options.device == "cuda" and not found:
            raise ConfigError(f"--device is cuda, expected cpu or auto: torch {torch.__version__} finds no GPU here")
        self.options, self.device = options, torch.device("cuda" if found and options.device != "cpu" else "cpu")
        self.tokenizer = load_tokenizer_from(name)
        self.model = load_causal_lm(name, getattr(torch, options.dtype)).to(self.device).eval()  # without dropout
        self.takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        eos = self.model.generation_config.eos_token_id
        eos = self.tokenizer.eos_token_id if eos is None else eos
        self.eos_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.mask: MaskSet | None = None
        if options.mask is not None:
            self.mask = MaskSet.load(Path(options.mask).expanduser(), self.model)
        elif (density := options.mask_density) is not None:
            pattern, seed = options.mask_pattern, options.mask_seed
            self.mask = MaskSet.random(self.model, density=density, pattern=pattern, seed=seed)
        if self.mask is not None and not self.mask.nnz:
            raise ConfigError("the mask has no active element: choose a larger --mask_density, or another mask")
        self.rate = options.learning_rate
        if self.rate is None:
            self.rate = 5e-6 * (1 if self.mask is None else rate_factor(self.mask.density))
        torch.manual_seed(options.seed)
        width = self.model.get_output_embeddings().weight.shape[1]
        self.head = torch.nn.Linear(width, 1, dtype=torch.float32, device="cpu").to(self.device)
        self.head_optimizer = torch.optim.AdamW(self.head.parameters(), lr=self.rate, weight_decay=0.0)
        self.optimizer: Any
        if self.mask is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, weight_decay=0.0)
        else:
            self.reference = self.model
            more: dict[str, Any] = {"max_grad_norm": options.max_grad_norm, "master_weights": True}
            self.optimizer = SparseAdamW(self.model, self.mask, lr=self.rate, weight_decay=0.0, **more)
        self.parts = (self.model, self.head, self.optimizer, self.head_optimizer)  # whose state a checkpoint has

    def sample(self, prompts: Sequence[Sequence[int]]) -> Batch:
        """Sample a completion of each prompt, which are token ids."""
        import torch

        options, width = self.options, max(map(len, prompts))
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and width + options.max_new_tokens > limit:
            raise ConfigError(
                f"a prompt of {width} tokens with max_new_tokens {options.max_new_tokens} exceeds the model's {limit} "
                "positions: lower max_prompt_tokens or max_new_tokens"
            )
        pad_id = next(token for token in (self.tokenizer.pad_token_id, *self.eos_ids, 0) if token is not None)
        padded = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts], device=self.device)
        attended = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self.device)
        ids = self.model.generate(
            padded,
            attention_mask=attended,
            do_sample=True,
            pad_token_id=pad_id,
            eos_token_id=self.eos_ids or None,
            **{name: getattr(options, name) for name in _SAMPLING},
        )
        ends = torch.isin(ids[:, width:], torch.tensor(self.eos_ids, dtype=ids.dtype, device=self.device)).long()
        mask = ends.cumsum(1) - ends == 0
        return Batch(ids, torch.cat([attended, mask.long()], 1), mask)

    def forward(self, model: Any, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of some completions' tokens, and the values of the states that they were chosen in."""
        ids, attention_mask, mask = batch.input_ids[rows], batch.attention_mask[rows], batch.mask[rows]
        first = ids.shape[1] - mask.shape[1]
        more = {"position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0)} if self.takes_positions else {}
        output = model(ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=True, **more)
        table = output.logits[:, first - 1 : -1].float().log_softmax(-1)
        logprobs = table.gather(-1, ids[:, first:, None])[..., 0]
        values = self.head(output.hidden_states[-1][:, first - 1 : -1].float())[..., 0]
        return logprobs.where(mask, 0.0), values.where(mask, 0.0)

    def before_update(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and values of the policy, and log-probabilities of the reference, without gradients."""
        import torch

        parts = torch.arange(len(batch.mask), device=self.device).split(self.options.mini_batch_size)
        found = [self.forward(self.model, batch, rows) for rows in parts]
        with nullcontext() if self.mask is None else self.optimizer.base_weights():
            ref_logprobs = torch.cat([self.forward(self.reference, batch, rows)[0] for rows in parts])
        return torch.cat([logprobs for logprobs, _ in found]), torch.cat([values for _, values in found]), ref_logprobs

    def update(self, batch: Batch, before: Sequence[Tensor]) -> dict[str, float]:
        """Train on the completions; returns means over the optimizer steps, under TRL's names.

        Args:
            before: log-probabilities, values, advantages and returns before the update.
        """
        import torch

        options, statistics = self.options, []
        for _ in range(options.ppo_epochs):
            order = torch.randperm(options.batch_size, device="cpu").to(self.device)
            for rows in order.split(options.mini_batch_size):
                statistics.append(self._backward(batch, rows, [tensor[rows] for tensor in before]))
                if options.max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self.head.parameters(), options.max_grad_norm)
                    if self.mask is None:
                        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
                for optimizer in (self.optimizer, self.head_optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
            if options.early_stopping and statistics[-1]["ppo/policy/policykl"] > 1.5 * options.target_kl:
                break
        return {name: sum(row[name] for row in statistics) / len(statistics) for name in statistics[0]}

    def _backward(self, batch: Batch, rows: Tensor, before: Sequence[Tensor]) -> dict[str, float]:
        options, mask = self.options, batch.mask[rows]
        old_logprobs, old_values, advantages, returns = before
        logprobs, values = self.forward(self.model, batch, rows)
        for_policy, policy_clipped = policy_loss(logprobs, old_logprobs, advantages, mask, options.cliprange)
        for_values, value_clipped = value_loss(values, old_values, returns, mask, options.cliprange_value)
        loss = for_policy + options.vf_coef * for_values
        loss.backward()
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
        return {name: value.item() for name, value in found.items()}


def load_classifier(options: argparse.Namespace, device: Any) -> Callable[[list[str]], Tensor]:
    """A function from texts to scores [n] fp32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from ..pretrained import load_pretrained, load_tokenizer_from, max_positions

    name = options.reward_model_name
    tokenizer = load_tokenizer_from(name)
    model = load_pretrained(AutoModelForSequenceClassification, name, "a reward model", dtype=torch.float32)
    model = model.to(device).eval().requires_grad_(False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # by which a causal classifier finds its last token
    tokenizer.truncation_side = "left"
    limit = min(max_positions(model.config) or math.inf, tokenizer.model_max_length)
    cut = {"truncation": True, "max_length": limit} if limit < 1e9 else {}  # those without a limit report a huge one
    labels = {str(text).lower(): int(index) for index, text in model.config.id2label.items()}
    labels |= {str(index): index for index in labels.values()}
    for option in ("reward_label", "reward_label_against"):
        label = getattr(options, option)
        if label is not None and label.lower() not in labels:
            raise ConfigError(f"--{option} is {label}, expected a label of {name}: {', '.join(labels)}")
    label, against = options.reward_label.lower(), options.reward_label_against

    def score(texts: list[str]) -> Tensor:
        inputs = tokenizer(texts, return_tensors="pt", padding=True, **cut).to(device)
        logits: Tensor = model(**inputs).logits.float()
        return logits[:, labels[label]] - (0 if against is None else logits[:, labels[against.lower()]])

    return score


# The run


def load_prompts(options: argparse.Namespace, tokenizer: Any) -> Callable[[int], list[list[int]]]:
    """A function from the number of an update to its prompts, as token ids; they do not depend on other updates."""
    from trl import ScriptArguments

    from sparse_opt.integrations.trl.data import load_rows

    name, sentiment = options.dataset_name, options.target_sentiment
    rows = load_rows(ScriptArguments(dataset_name=name), "sft")
    if "text" not in rows.column_names:
        raise DataError(f"{name}: expected a column text, found {', '.join(rows.column_names)}")
    texts = [text for text in rows["text"][: options.max_samples] if text.split()]
    if len(texts) < options.batch_size:
        raise DataError(f"{name}: has {len(texts)} texts, expected at least --batch_size {options.batch_size}")
    prefix = "" if sentiment is None else f"Sentiment: {sentiment}. "

    def prompts_of(update: int) -> list[list[int]]:
        chosen = random.Random(f"{options.seed}:{update}").sample(texts, options.batch_size)
        prompts = [prefix + " ".join(text.split()[: options.prompt_prefix_words]) for text in chosen]
        return [list(ids[: options.max_prompt_tokens]) for ids in tokenizer(prompts)["input_ids"]]

    return prompts_of


def train(options: argparse.Namespace) -> None:
    """Train, and save the model; metrics.jsonl has a row for each update, under the names of TRL 0.8.6.

    Raises:
        ConfigError, DataError: options and files do not fit each other, or cannot be used.
        SparseOptError: the loss is not finite.
        KeyboardInterrupt: Ctrl-C; the message says what was kept.
    """
    import torch

    from sparse_opt.files import write_safetensors
    from sparse_opt.integrations.callback import DeltaLogCallback
    from sparse_opt.integrations.checkpoints import MANIFEST, write_manifest
    from sparse_opt.integrations.run_folder import RunFolder
    from sparse_opt.integrations.trl.progress import ProgressLines
    from sparse_opt.integrations.trl.row_file import RowFile
    from sparse_opt.integrations.trl.update_statistics import UpdateStatisticsCallback
    from sparse_opt.progress import hide_progress_bars, progress_bar

    hide_progress_bars()
    policy, scores_of = Policy(options), Scores(options)
    score, prompts_of = load_classifier(options, policy.device), load_prompts(options, policy.tokenizer)
    folder, decode = Path(options.output_dir), policy.tokenizer.batch_decode
    kl_coef = options.init_kl_coef
    kept = "no checkpoint was saved: a lower --save_ckpt_every saves the first earlier"
    fixed = {name: value for name, value in vars(options).items() if name not in _CHANGEABLE}

    # The callbacks are those of any transformers Trainer, and are called as a Trainer calls them.
    args = SimpleNamespace(output_dir=options.output_dir)
    state = SimpleNamespace(global_step=0, max_steps=options.num_updates, is_world_process_zero=True)
    model = {"model": policy.model, "optimizer": policy.optimizer}
    callbacks: list[Any] = [UpdateStatisticsCallback(options.rank_log_every, tau=options.tau)]
    if not sys.stderr.isatty():
        callbacks.append(ProgressLines())
    if options.delta_log_dir is not None:
        steps, more = options.delta_log_steps, {"method": "ppo"}
        callbacks.append(DeltaLogCallback(options.delta_log_dir, steps, mask=policy.mask, metadata=more))
    metrics, samples = RowFile(folder / "metrics.jsonl"), RowFile(folder / "samples.jsonl")
    lock = RunFolder(options.output_dir)
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{MANIFEST}")]
    checkpoint = max(complete, key=lambda path: int(path.name.rpartition("-")[2])) if options.resume else None
    try:
        run_name = lock.begin(None if checkpoint is None else str(checkpoint), newest=True, saves=True)
        if checkpoint is not None:
            saved = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
            for name, was in saved["options"].items():
                if fixed[name] != was:
                    raise ConfigError(f"--resume: --{name} is {fixed[name]}, expected {was} as in the run before")
            state.global_step = saved["update"]
            kept = f"{checkpoint} is kept: repeat the command with --resume"
        for file in (metrics, samples):
            file.cut(state.global_step)
        for callback in callbacks:  # while the model has its initial weights
            callback.on_train_begin(args, state, None, **model)
        if checkpoint is not None:
            for part, content in zip(policy.parts, saved["parts"], strict=True):
                part.load_state_dict(content)
            scores_of.mean, scores_of.squares, scores_of.count = saved["scores"]
            kl_coef = saved["kl_coef"]
            torch.set_rng_state(saved["rng"][0])
            torch.cuda.set_rng_state_all(saved["rng"][1])
        what = "all weights" if policy.mask is None else f"{policy.mask.nnz:,} elements of a mask"
        print(f"ppo: {options.policy_name}, {what}, learning rate {policy.rate:.3g}", flush=True)
        updates = range(state.global_step + 1, options.num_updates + 1)
        for update in progress_bar(updates, what="ppo", unit="update"):
            started, prompts = time.monotonic(), prompts_of(update)
            with torch.no_grad():
                batch = policy.sample(prompts)
                new = batch.input_ids[:, -batch.mask.shape[1] :]
                completions = [tokens[sampled].tolist() for tokens, sampled in zip(new, batch.mask, strict=True)]
                whole = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
                # Decoded alone, a completion can lose its leading space.
                texts = decode(completions if options.reward_of_completion else whole, skip_special_tokens=True)
                scores = score(texts)
                logprobs, values, ref_logprobs = policy.before_update(batch)
                mask = batch.mask
                rewards = token_rewards(scores_of(scores), logprobs, ref_logprobs, mask, kl_coef)
                if options.whiten_rewards:
                    rewards = whiten(rewards, mask, shift_mean=False)
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
                loss = f"the loss of update {update} is {row['ppo/loss/total']}"
                raise SparseOptError(f"{loss}: a lower --learning_rate or a --max_grad_norm may help; {kept}")
            if options.adap_kl_ctrl:
                kl_coef = adapted_kl_coef(kl_coef, kl, options.batch_size, options.target, options.horizon)
            state.global_step = update
            for callback in callbacks:
                callback.on_step_end(args, state, None, **model)
                callback.on_log(args, state, None, logs=row)
            metrics.write({"step": update, **row, "time/ppo/total": time.monotonic() - started})
            if update <= 3 or update % SAMPLE_EVERY == 0:
                (prompt,), text = decode(prompts[:1]), decode(completions[:1])[0]
                samples.write({"step": update, "prompt": prompt, "completion": text, "reward": float(scores[0])})
            if update % options.save_ckpt_every == 0 or update == options.num_updates:
                for callback in callbacks:
                    callback.on_save(args, state, None)
                saved = {
                    "update": update,
                    "options": fixed,
                    "parts": [part.state_dict() for part in policy.parts],
                    "scores": (scores_of.mean, scores_of.squares, scores_of.count),
                    "kl_coef": kl_coef,
                    "rng": (torch.get_rng_state(), torch.cuda.get_rng_state_all()),
                }
                checkpoint = folder / f"checkpoint-{update}"
                checkpoint.mkdir(exist_ok=True)
                torch.save(saved, checkpoint / STATE_FILE)
                write_manifest(checkpoint, run_name)
                for other in set(folder.glob("checkpoint-*")) - {checkpoint}:
                    shutil.rmtree(other)
                kept = f"{checkpoint} is kept: repeat the command with --resume"
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        head = {f"v_head.summary.{name}": tensor.cpu() for name, tensor in policy.head.state_dict().items()}
        write_safetensors(folder / VALUE_HEAD_FILE, head, {"format": "pt"})
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
