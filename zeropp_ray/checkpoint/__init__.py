"""Checkpoints: named by parameter, independent of the layout, in files that a public library reads."""
