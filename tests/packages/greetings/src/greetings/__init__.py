"""Greetings, in more than one language."""
