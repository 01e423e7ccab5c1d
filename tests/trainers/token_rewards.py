"""A reward that a small model can learn in a few steps, as users write them."""


def even_tokens(completion_ids, **kwargs):
    """The share of a completion's tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
