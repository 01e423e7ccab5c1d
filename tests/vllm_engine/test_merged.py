"""A model that was trained over a quantised base, as vLLM loads it."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import quantised_models
import torch
from torch.nn import functional as F
from vllm import SamplingParams
from vllm_lab import engine, make_model
from vllm_updates import PROMPTS, save

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.optim import save_merged


@torch.no_grad()
def logprobs(model, ids):
    """Of the tokens of one sequence after the first."""
    found = F.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_vllm_loads_what_save_merged_writes(tmp_path):
    folder = save(tmp_path, make_model("Llama", tie_word_embeddings=False, max_position_embeddings=512))
    model = quantised_models.load(folder, "fp8", torch.device("cpu"))
    ids = PROMPTS[1]
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, seed=1), lr=1e-2)
    before = logprobs(model, ids)
    for _ in range(3):
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logprobs(model, ids)
    save_merged(model, folder)  # the tokenizer stays
    with engine(folder) as llm:
        (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=0))
    served = torch.tensor([entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)])
    assert (served - trained).abs().max() < 0.2 * (trained - before).abs().mean()
