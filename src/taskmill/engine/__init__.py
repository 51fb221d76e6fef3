"""How many are done: what is planned, what is in flight, when to give up, and what it all came to."""
