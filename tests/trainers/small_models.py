"""Small causal models, batches, the plain computation of their log-probabilities and gradients; and runs of loops."""

import json
from pathlib import Path

import torch
from tiny_llama import make_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparse_opt.trainers.batches import TokenBatch, TokenSequence
from sparse_opt.trainers.logprobs.chunked import selected_logprobs

EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-7}


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return make_llama(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.1,  # larger than the default, so that log-probabilities differ between tokens
        attention_dropout=0.1,  # the loops must switch it off
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_sequences(n: int, vocabulary: int, seed: int = 0) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(n):
        length = int(torch.randint(6, 30, (), generator=generator))
        prompt = int(torch.randint(0, length - 1, (), generator=generator))
        sequences.append(TokenSequence(torch.randint(vocabulary, (length,), generator=generator).tolist(), prompt))
    return sequences


def plain_logprobs(model, batch: TokenBatch, temperature: float = 1.0) -> torch.Tensor:
    """`token_logprobs`, computed from all logits at once."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    table = (logits[:, batch.first_trained - 1 : -1].float() / temperature).log_softmax(-1)
    selected = table.gather(-1, batch.input_ids[:, batch.first_trained :, None])[..., 0]
    return torch.where(batch.completion_mask[:, batch.first_trained :], selected, 0.0)


def grads_of(model, logprobs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def small(config_class, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if config_class not in (GPT2Config, GPTJConfig):
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2}
    config = config_class(**sizes | changes, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def assert_same_gradients(ours, theirs):
    for name, grad in theirs.items():
        # Sums over some 100 positions and 211 words, accumulated in different orders.
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=200 * 2**-23 * grad.abs().max().item(), msg=name)


def with_lora(model):
    """The model in peft's wrapper, with an adapter that changes what it writes."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return wrapped


@torch.no_grad()
def plain_table(model, ids, temperature=1.0):
    """log_softmax(logits / temperature) at each position of one sequence, without padding or cache: [T, V] fp32."""
    return (
        model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].float() / temperature
    ).log_softmax(-1)


class Head:
    """Hidden states, a weight and labels with their exact log-probabilities and gradients, in fp64."""

    def __init__(self, dtype: torch.dtype, temperature: float, n_words: int = 300, n_confident: int = 5):
        torch.manual_seed(0)
        self.weight = torch.randn(n_words, 24).to(dtype)
        self.labels = torch.randint(n_words, (4, 7))
        self.hidden = torch.randn(4, 7, 24)
        # A policy is often nearly certain: hidden states along a word's own weight make its probability 1 - 1e-6 or so.
        words = self.labels.view(-1)[:n_confident]
        self.hidden.view(-1, 24)[:n_confident] = temperature * 1.2 * self.weight[words].float()
        self.hidden = self.hidden.to(dtype)
        self.upstream = torch.randn(4, 7)
        exact = [tensor.double().requires_grad_() for tensor in (self.hidden, self.weight)]
        table = (exact[0] @ exact[1].T / temperature).log_softmax(-1)
        self.selected = table.gather(-1, self.labels[..., None])[..., 0]
        self.grads = torch.autograd.grad((self.selected * self.upstream).sum(), exact)
        self.temperature = temperature

    def run(self, logprobs) -> list[torch.Tensor]:
        """[log-probabilities, d hidden, d weight] of `logprobs(hidden, weight, labels, temperature)`."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.hidden, self.weight)]
        found = logprobs(*leaves, self.labels, self.temperature)
        return [found, *torch.autograd.grad((found * self.upstream).sum(), leaves)]

    def assert_exact(self, logprobs) -> None:
        """Of fp32: logits are up to 60, and sums of 24 products, each rounded."""
        found, grad_hidden, grad_weight = self.run(logprobs)
        atol = 24 * 60 / self.temperature * EPS[torch.float32]
        torch.testing.assert_close(found.double(), self.selected, rtol=0, atol=atol)
        # A probability's relative error is its exponent's error; sums of 300 and 28 of them times values of about 4.
        torch.testing.assert_close(grad_hidden.double(), self.grads[0], rtol=0, atol=4 * atol)
        torch.testing.assert_close(grad_weight.double(), self.grads[1], rtol=0, atol=28 * atol)

    def assert_as_good_as_all_logits(self, logprobs) -> None:
        """Of bf16: both round the logits, and then probabilities once, before or after the gradient is applied."""
        for ours, theirs, true in zip(
            self.run(logprobs), self.run(_with_logits), (self.selected, *self.grads), strict=True
        ):
            assert ours.dtype == theirs.dtype
            assert (ours.cpu() - true).norm() <= 2 * (theirs.cpu() - true).norm()


def _with_logits(hidden, weight, labels, temperature):
    return selected_logprobs(hidden @ weight.T, labels, temperature)


def run(main, folder: Path, name: str, data: str, model: str = "start/model", **options) -> list[dict[str, float]]:
    """Run a loop by its command line; return the rows of its metrics."""
    words = {"model": folder / model, "data": folder / "data" / f"{data}.jsonl", "output_dir": folder / name}
    words |= {"dtype": "fp32", "device": "cpu", "batch_size": 32, **options}
    assert main([word for option, value in words.items() for word in (f"--{option}", str(value))]) == 0
    return rows_of(folder / name / "metrics.jsonl")


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
