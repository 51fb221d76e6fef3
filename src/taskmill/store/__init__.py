"""What is on disk: the append log, atomic replacement, the lock, the ledger, the call journal, the run directory.

The room knows bytes, rows and rollout ids; it knows no tool, no model and no program. `files` is the only module
of the product that opens a file for writing.
"""
