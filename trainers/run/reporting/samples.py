"""Sample completions of the policy during training, to compare with those of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data.encoding import TokenSequence
from ...policy.pretrained import max_positions
from ...rollouts import Sampling, make_engine
from ..training_run import TrainingRun

# Few prompts, so that sampling takes little time.
N_SAMPLES = 4
LONGEST = 128  # tokens; less if the data's completions are less than half as long


def sample_completions(run: TrainingRun, sequences: Sequence[TokenSequence]) -> list[dict[str, Any]]:
    """Greedy completions of the first few prompts: rows with the prompt, the completion and that of the data.

    Sequences without a prompt, and prompts that use up the model's positions, are skipped. Only rank 0 samples;
    of a sharded model all ranks sample the same.

    Raises:
        ConfigError: neither the tokenizer nor the model has an EOS token.
    """
    if not (run.ranks.is_main or run.ranks.sharded):
        return []
    limit = max_positions(run.model.config)
    fitting = [
        sequence
        for sequence in sequences
        if sequence.prompt_length and (limit is None or sequence.prompt_length < limit)
    ][:N_SAMPLES]
    if not fitting:
        return []
    prompts = [sequence.ids[: sequence.prompt_length] for sequence in fitting]
    longest = min(LONGEST, 2 * max(len(sequence.ids) - sequence.prompt_length for sequence in fitting))
    if limit is not None:
        longest = min(longest, limit - max(map(len, prompts)))
    engine = make_engine("generate", run.model, run.tokenizer, gather=run.config.gather_for_generation)
    completions = engine.generate(prompts, 1, Sampling(max_new_tokens=longest, temperature=0.0)).ids
    decode = run.tokenizer.decode
    return [
        {
            "prompt": decode(prompt),
            "completion": decode(completion),
            "data": decode(sequence.ids[sequence.prompt_length :]),
        }
        for sequence, prompt, completion in zip(fitting, prompts, completions, strict=True)
    ]
