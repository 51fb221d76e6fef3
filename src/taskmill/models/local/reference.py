"""The same turn by the plain `generate` of transformers: what the batch is compared with.

Nothing but the choice of each token is shared with the batch: positions, masks, keys and values are those of the
library's own loop, and the row is alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from taskmill.models.local.loading import Loaded
from taskmill.models.local.row import Made, Row, Task
from taskmill.models.local.sampling import choose, log_probabilities, penalised


def generate(loaded: Loaded, task: Task) -> Made:
    """What `task` gives, made by `generate`."""
    ended: list[Made | BaseException] = []
    row = Row(task, ended.append, ends=loaded.ends, decode=loaded.decode)
    row.joins(0)
    prompt = torch.tensor([task.prompt], device=loaded.device)
    module = loaded.module
    # What is left open would come from the model card, and the row has said how it is sampled and when it ends.
    card, module.generation_config = module.generation_config, GenerationConfig()
    try:
        with torch.no_grad():
            module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=task.limit, pad_token_id=loaded.pad
                ),
                logits_processor=LogitsProcessorList([_Chooser(row)]),
                stopping_criteria=StoppingCriteriaList([_Ender(ended)]),
            )
    finally:
        module.generation_config = card
    (made,) = ended
    if isinstance(made, BaseException):
        raise made
    return made


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Takes the row's next token and leaves `generate` no other."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        row, rule = self.row, self.row.task.rule
        logits = scores.float()
        shaped = penalised(logits, [rule], [row.tokens])
        token = choose(shaped, [rule], [row.noise(logits.shape[-1])])[0].token
        logprob = log_probabilities(logits, [0], [token])[0] if row.task.logprobs else None
        row.accept(token, logprob)
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only


class _Ender(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, ended: list[Any]) -> None:
        self.ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([bool(self.ended)], device=input_ids.device)
