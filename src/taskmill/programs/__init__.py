"""How one rollout is done: the agent's loop, and its record in the forms people read it in.

`agent` holds the conversation; `sharegpt` and `chat` turn what was said into text and back; `row` makes the
line of a shard. A program knows models and tools, and no file.
"""
